"""KTO: learning from single answers that are labeled desirable or not (Ethayarajh et al., 2024).

Shapes: B rows, K answers of a row.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from jingu.align.answers import AnswerBatch
from jingu.align.preference_learning import LocatedRows, PreferenceLearning, check_run, exceeds_rounding
from jingu.align.preference_losses import kto_losses
from jingu.align.reference import to_answer_device
from jingu.config.batch_plan import BatchPlan
from jingu.config.sections.data import PreferenceSettings
from jingu.data.batch import IGNORE_INDEX
from jingu.data.row_sources import RowArrays
from jingu.errors import JinguError
from jingu.parallel.mesh import data_rank
from jingu.parallel.pipeline import ParallelModel
from jingu.parallel.zero import eval_mode
from jingu.runtime.device import force_eager
from jingu.training.run import Run
from jingu.training.step import sum_over_ranks
from jingu.training.task import TaskFactory


class KtoLearning(PreferenceLearning):
    """The task of learning from labeled answers. The loss is a mean over answers.

    The KL divergence of policy and reference is estimated once per step, over the global batch: a mean over a
    micro-batch would depend on the layout, and would degenerate for a single row.
    """

    TERMS = ("loss", "accuracy", "kl", "margin")

    def __init__(self, run: Run, mesh: DeviceMesh, compile: bool) -> None:
        super().__init__(run, mesh, compile)
        if self.settings.loss == "bco":
            self.TERMS = ("loss", "accuracy", "threshold", "margin")  # type: ignore[misc]
        self._divergence = torch.zeros((), dtype=torch.float64, device=mesh.device_type)

    def begin_step(self, model: ParallelModel, plan: BatchPlan, step: int) -> None:
        """Estimate the divergence with mismatched answers of this step."""
        super().begin_step(model, plan, step)
        first = data_rank(self.mesh) * plan.rows_per_rank
        starts = range(first, first + plan.rows_per_rank, plan.micro_batch_size)
        self._estimate_divergence(model, [self.locate(step, start, plan.micro_batch_size) for start in starts])

    def begin_evaluation(self, model: ParallelModel, located: Sequence[LocatedRows]) -> None:
        self._estimate_divergence(model, located)

    def _estimate_divergence(self, model: ParallelModel, located: Sequence[LocatedRows]) -> None:
        """Set the divergence from a forward pass over the rows.

        KTO: the mean log ratio of mismatched prompt-answer pairs, at least 0 (equation 7). BCO: halfway between the
        mean log ratios of desirable and of undesirable answers.
        """
        is_bco = self.settings.loss == "bco"
        device = torch.device(self.mesh.device_type)
        # Columns of answers alternate between desirable and undesirable ones.
        sides = [slice(0, None, 2), slice(1, None, 2)] if is_bco else [slice(None)]
        # S sides: sums of log ratios, and numbers of answers.
        sums_S2 = torch.zeros(len(sides), 2, dtype=torch.float64, device=device)
        with eval_mode(model), force_eager():
            for datasets, rows, is_real in located:
                parts = [
                    dataset.read(rows[[index]]) if is_bco else dataset.read_mismatched(rows[[index]])
                    for index, dataset in enumerate(datasets)
                ]
                fields = zip(*[(part.tokens, part.labels, part.documents) for part in parts], strict=True)
                batch = self.run.source.trim(RowArrays(*map(np.concatenate, fields)).to_batch())
                batch.labels[~torch.from_numpy(is_real)] = IGNORE_INDEX
                attached_batch = self.attach(batch, datasets, rows, mismatched=not is_bco)
                answers = self.scorer.score(model, to_answer_device(attached_batch, device))
                exists_BK = answers.exists
                values_BK = answers.log_ratio.where(exists_BK, 0.0)
                sums_S2 += torch.stack(
                    [torch.stack([x[:, side].sum() for x in (values_BK, exists_BK)]) for side in sides]
                )
        total_S, count_S = sum_over_ranks(sums_S2).unbind(1)
        # BCO: without answers of one kind, the mean of the other.
        mean = (total_S / count_S.clamp_min(1)).sum() / (count_S > 0).sum().clamp_min(1)
        self._divergence = mean if is_bco else mean.clamp_min(0)

    def units_per_row(self, batch: AnswerBatch) -> Tensor:
        return (batch.answer_tokens > 0).sum(1)

    def _sum_terms(self, batch: AnswerBatch, hidden_BCD: Tensor, weight_VD: Tensor) -> Tensor:
        answers = self.scorer.compute(batch, hidden_BCD, weight_VD)
        # Answers with odd indices are undesirable.
        is_desirable_BK = torch.arange(batch.num_answers, device=hidden_BCD.device).remainder(2).eq(0)
        is_desirable_BK = is_desirable_BK.expand(answers.policy.shape)
        losses_BK = kto_losses(self.settings, answers, is_desirable_BK, self._divergence)
        with torch.no_grad():
            reward_BK = self.settings.beta * answers.log_ratio
            is_right_BK = exceeds_rounding(answers.log_ratio - self._divergence) == is_desirable_BK
            # The logged margin counts the reward of an undesirable answer as negative.
            signed_BK = reward_BK.where(is_desirable_BK, -reward_BK)
        terms = [losses_BK, is_right_BK, self._divergence.expand(losses_BK.shape), signed_BK]
        return torch.stack([term.to(losses_BK.dtype).where(answers.exists, 0.0).sum() for term in terms])


def _check_kto_run(run: Run) -> None:
    """Raise JinguError for a run that does not fit KTO, which needs one answer per sequence to mismatch them."""
    check_run(run)
    objective = run.config.data.objective
    if isinstance(objective, PreferenceSettings) and objective.packing == "packed":
        raise JinguError(
            "the task kto takes one answer per sequence.", where="data.objective.packing", fix="Set it to padded."
        )


KTO_LEARNING = TaskFactory(KtoLearning, check=_check_kto_run)
