"""Preference learning: the task of making chosen answers more probable than rejected ones.

Shapes: B rows, P pairs of a row, D hidden size, V vocab.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from jingu.align.answers import AnswerBatch, AnswerScorer, RewardHead
from jingu.align.preference_losses import kto_losses, reward_losses
from jingu.align.reference import References, load_references, to_answer_device
from jingu.config.batch_plan import BatchPlan
from jingu.config.sections.data import PreferenceSettings
from jingu.config.sections.pairs import AnswerLogProbs, DpoSettings
from jingu.config.sections.tasks import KtoSettings
from jingu.config.sections.tune import LoraSettings
from jingu.data.batch import IGNORE_INDEX, Batch
from jingu.data.batch_prefetch import BatchPrefetcher
from jingu.data.permutation import Int64Array
from jingu.data.preference_data import PreferenceDataset, split_answers
from jingu.data.row_sources import RowArrays
from jingu.errors import JinguError
from jingu.model.experts import RoutingStats, auxiliary_losses
from jingu.parallel.mesh import data_rank, num_data_ranks, num_row_replicas
from jingu.parallel.pipeline import ParallelModel
from jingu.parallel.zero import eval_mode
from jingu.runtime.device import force_eager
from jingu.training.batch_transforms import model_inputs, prepend_virtual_tokens
from jingu.training.evaluate import generate_samples
from jingu.training.run import Run
from jingu.training.step import sum_losses, sum_over_ranks
from jingu.training.task import Evaluation, Task, TaskFactory
from jingu.training.validation import ValidationRows

# Largest acceptable mean of |log(policy / reference)| per token before the first step, by precision. Rounding errors
# stay below it.
START_TOLERANCES = {"fp64": 1e-7, "fp32": 1e-3}
NARROW_START_TOLERANCE = 0.03


class LocatedRows(NamedTuple):
    """Where the rows of a batch are stored: data set and index of each row, and whether it is real or padding."""

    datasets: Sequence[PreferenceDataset]
    rows: Int64Array
    is_real: npt.NDArray[np.bool_]


class PreferenceLearning(Task):
    """The task of learning from pairs of answers. The loss is a mean over pairs."""

    # The first term is minimized; the others are only logged.
    TERMS: ClassVar[tuple[str, ...]] = ("loss", "accuracy", "margin", "chosen_reward", "rejected_reward")

    headline: tuple[str, ...] = ("loss", "accuracy")

    def __init__(self, run: Run, mesh: DeviceMesh, compile: bool) -> None:
        self.run = run
        self.mesh = mesh
        self.settings: Any = run.config.task
        tail_weight = self.settings.tail_weight if isinstance(self.settings, DpoSettings) else 1.0
        self.scorer = AnswerScorer(run.spec, mesh, compile=compile, tail_weight=tail_weight)
        self._references = References({})
        if isinstance(self.settings, DpoSettings | KtoSettings):
            self._references = load_references(run, mesh, self.scorer, self.settings.reference)
        # Batches depend on nothing but the step, so they can be prefetched.
        self._source = BatchPrefetcher(self._make_batch, mesh.device_type)

    def _make_batch(self, step: int, first: int, count: int) -> Batch:
        datasets, rows, _ = self.locate(step, first, count)
        return self.attach(self.run.source.batch(step, first, count), datasets, rows)

    def locate(self, step: int, first: int, count: int) -> LocatedRows:
        """Return where rows [first, first + count) of a step are stored."""
        source = self.run.source
        start = step * source.global_batch_size + first
        source_ids, _, rows = source.locate_samples(np.arange(start, start + count, dtype=np.int64))
        datasets = [cast(PreferenceDataset, source.sources[source_id]) for source_id in source_ids.tolist()]
        return LocatedRows(datasets, rows, np.ones(count, bool))

    def attach(
        self, batch: Batch, datasets: Sequence[PreferenceDataset], rows: Int64Array, *, is_mismatched: bool = False
    ) -> AnswerBatch:
        batch = self._references.attach(batch, datasets, rows, is_mismatched=is_mismatched)
        return _answers(prepend_virtual_tokens(batch, self.run.spec))

    def begin_step(self, model: ParallelModel, plan: BatchPlan, step: int) -> None:
        """Before the first step, check that the model equals its reference."""
        if step == 0 and self._references.tables:
            first = data_rank(self.mesh) * plan.rows_per_rank
            self._check_start(model, self.batch(0, first, plan.micro_batch_size))

    def _check_start(self, model: ParallelModel, batch: Batch) -> None:
        """Raise JinguError unless policy and reference give the answers equal log-probabilities.

        Before the first step, the loss of DPO must be log 2 and the divergence 0. Otherwise the reference is the wrong
        one: another checkpoint, a base model without its adapter, or another chat template.
        """
        device = torch.device(self.mesh.device_type)
        with eval_mode(model), force_eager():
            answers = self.scorer.score(model, to_answer_device(_answers(batch), device))
        sums_2 = torch.stack([answers.log_ratio.where(answers.exists, 0.0).abs().sum(), answers.tokens.sum()])
        difference, tokens = sum_over_ranks(sums_2).tolist()
        precision = self.run.config.precision.type
        tolerance = START_TOLERANCES.get(precision, NARROW_START_TOLERANCE)
        if not difference <= tolerance * tokens:
            raise JinguError(
                "the model does not start as its reference: their log-probabilities of answers differ by "
                f"{difference / max(tokens, 1):.3g} a token (at most {tolerance:g} is rounding), where the loss of DPO "
                "is log 2 = 0.693 and the divergence 0 if they are the same.",
                where="task.reference",
                fix="Name as reference what the run starts from: initialize.from, or, with tune.initial_adapter, the "
                "run that trained this adapter.",
            )

    def batch(self, step: int, first: int, count: int) -> Batch:
        return self._source.batch(step, first, count)

    def denominator(self, batch: Batch) -> float:
        return float(self.units_per_row(_answers(batch)).sum())

    def loss_terms(self, model: ParallelModel) -> dict[str, float]:
        return {**{name: float(name == "loss") for name in self.TERMS}, **model.router_terms}

    def loss(self, model: Any, batch: Batch) -> Tensor:
        answer_batch = _answers(batch)

        def head(hidden_BCD: Tensor, weight_VD: Tensor) -> Tensor:
            # The model calls this while the head's weight is gathered.
            return self._sum_terms(answer_batch, hidden_BCD, weight_VD) * self.scorer.share

        def auxiliary(routings: list[RoutingStats]) -> Tensor:
            assert model.spec.experts is not None
            return auxiliary_losses(routings, model.spec.experts, self.units_per_row(answer_batch))

        total: Tensor = model(model_inputs(batch), loss=head, auxiliary=auxiliary)
        return total

    def _sum_terms(self, batch: AnswerBatch, hidden_BCD: Tensor, weight_VD: Tensor) -> Tensor:
        """Return the sums over pairs of the loss and of the logged terms, in the order of TERMS."""
        answers = self.scorer.compute(batch, hidden_BCD, weight_VD)
        parts = (split_answers(values_BK) for values_BK in (answers.policy, answers.reference, answers.tokens))
        chosen, rejected = (AnswerLogProbs(*side) for side in zip(*parts, strict=True))
        losses_BP = self.settings.pair_losses(chosen, rejected)
        with torch.no_grad():
            chosen_BP = self.settings.rewards(chosen)
            rejected_BP = self.settings.rewards(rejected)
        return _sum_pairs(losses_BP, chosen_BP, rejected_BP, chosen.exists & rejected.exists)

    def evaluate(self, model: ParallelModel, micro_batch_size: int, *, final: bool) -> Evaluation:
        """Measure the terms of the loss on the validation split of each source."""
        limit = self.run.config.evaluation.limit(final=final)
        totals: dict[str, float] = {}
        shares = sum(rows.share for rows in self.run.validation)
        for rows in self.run.validation:
            num_rows = rows.count(limit)
            for name, value in self._evaluate_rows(model, rows, num_rows, micro_batch_size).items():
                totals[name] = totals.get(name, 0.0) + value * rows.share / shares
        samples = [] if self.run.spec.score_head else generate_samples(self.run, model)
        return Evaluation(dict(totals), samples)

    def _evaluate_rows(
        self, model: ParallelModel, rows: ValidationRows, num_rows: int, micro_batch_size: int
    ) -> dict[str, float]:
        device = torch.device(self.mesh.device_type)
        total_n = torch.zeros(len(self.TERMS), dtype=torch.float64, device=device)
        units = torch.zeros((), dtype=torch.float64, device=device)
        dataset = rows.supervised_rows
        assert isinstance(dataset, PreferenceDataset)
        # Every rank takes part in every forward pass, because it gathers sharded parameters: a rank without rows left
        # runs on padding.
        located_rows = []
        for start in range(0, num_rows, micro_batch_size * num_data_ranks(self.mesh)):
            first = start + data_rank(self.mesh) * micro_batch_size
            numbers = np.arange(first, first + micro_batch_size)
            row_numbers = np.minimum(numbers, len(dataset.row_ends) - 1)
            located_rows.append(LocatedRows([dataset] * micro_batch_size, row_numbers, numbers < num_rows))
        self.begin_evaluation(model, located_rows)
        with eval_mode(model), force_eager():
            for datasets, row_numbers, is_real in located_rows:
                batch = dataset.read(row_numbers).to_batch()
                batch.labels[~torch.from_numpy(is_real)] = IGNORE_INDEX
                answers = self.attach(self.run.source.trim(batch), datasets, row_numbers)
                total_n += self.loss(model, to_answer_device(answers, device))
                units += self.denominator(answers)
        means_n = sum_losses(total_n, self.mesh) / (sum_over_ranks(units) / num_row_replicas(self.mesh))
        return dict(zip(self.TERMS, means_n.tolist(), strict=True))

    def begin_evaluation(self, model: ParallelModel, batches: Sequence[LocatedRows]) -> None:
        """Prepare an evaluation of these rows with the model; KTO estimates its divergence here."""

    def units_per_row(self, batch: AnswerBatch) -> Tensor:
        """Return the number of pairs [B] of each row."""
        exists_BK = batch.answer_tokens > 0
        return torch.logical_and(*split_answers(exists_BK)).sum(1)


class RewardLearning(PreferenceLearning):
    """The task of giving chosen answers higher rewards than rejected ones."""

    def __init__(self, run: Run, mesh: DeviceMesh, compile: bool) -> None:
        super().__init__(run, mesh, compile)
        self._rewards = RewardHead(mesh)

    def _sum_terms(self, batch: AnswerBatch, hidden_BCD: Tensor, weight_VD: Tensor) -> Tensor:
        assert batch.weights is not None
        rewards_BK = self._rewards.compute(batch, hidden_BCD, weight_VD)
        chosen_BP, rejected_BP = split_answers(rewards_BK)
        # The weights of preference rows are margins.
        margin_BP, _ = split_answers(batch.sum_by_answer((batch.weights * batch.is_last).to(chosen_BP.dtype)))
        losses_BP = reward_losses(chosen_BP, rejected_BP, margin_BP, self.settings.centering)
        tokens_BK = batch.answer_tokens
        exists_BP = torch.logical_and(*split_answers(tokens_BK > 0))
        return _sum_pairs(losses_BP, chosen_BP.detach(), rejected_BP.detach(), exists_BP)


def exceeds_rounding(differences: Tensor) -> Tensor:
    """Return whether differences of rewards are above 0 by more than rounding.

    Before the first step, every difference is 0 up to rounding, which must not count as a preference.
    """
    return differences > (1e-9 if differences.dtype == torch.float64 else 1e-4)


def _sum_pairs(losses_BP: Tensor, chosen_BP: Tensor, rejected_BP: Tensor, exists_BP: Tensor) -> Tensor:
    """Return the sums over pairs of loss, accuracy, margin and both rewards."""
    margin_BP = chosen_BP - rejected_BP
    terms = [losses_BP, exceeds_rounding(margin_BP), margin_BP, chosen_BP, rejected_BP]
    return torch.stack([term.to(losses_BP.dtype).where(exists_BP, 0.0).sum() for term in terms])


def _answers(batch: Batch) -> AnswerBatch:
    assert isinstance(batch, AnswerBatch)
    return batch


def check_run(run: Run) -> None:
    """Raise JinguError for a run whose data or settings do not fit preference learning."""
    config = run.config
    task = config.task
    objective = config.data.objective
    rows = "labels" if isinstance(task, KtoSettings) else "pairs"
    if not isinstance(objective, PreferenceSettings) or objective.rows != rows:
        raise JinguError(
            f"the task {task.type} learns from {rows} of preference data.",
            where="data.objective",
            fix=f"Set data.objective.type=preference and data.objective.rows={rows}.",
        )
    if run.spec.num_encoder_layers is not None:
        raise JinguError(
            f"the task {task.type} supports only decoders, and {run.spec.family} has an encoder.", where="task.type"
        )
    # The loss depends on the difference to the reference, which computes without dropout and noise.
    settings = {
        "train.neftune_alpha": config.train.neftune_alpha,
        "train.label_smoothing": config.train.label_smoothing,
        "train.z_loss_coef": config.train.z_loss_coef,
        "tune.dropout": config.tune.dropout if isinstance(config.tune, LoraSettings) else 0.0,
    }
    for name, value in settings.items():
        if value:
            raise JinguError(
                f"the task {task.type} does not support it, and it is {value}.", where=name, fix="Set it to 0."
            )
    if isinstance(task, DpoSettings) and task.tail_weight != 1.0 and task.sft_weight:
        what = "the likelihood of the chosen answer would have this weight too."
        raise JinguError(what, where="task.tail_weight", fix="Set it to 1, or task.sft_weight to 0.")
    if isinstance(task, DpoSettings | KtoSettings) and not (task.reference or config.initialize.from_):
        raise JinguError(
            f"the task {task.type} needs a model to start from, which also serves as the reference.",
            where="initialize.from",
            fix="Name a model, such as the run of instruction tuning.",
        )


PREFERENCE_LEARNING = TaskFactory(PreferenceLearning, check=check_run)
REWARD_LEARNING = TaskFactory(RewardLearning, check=check_run)


# KTO: learning from single answers that are labeled desirable or not (Ethayarajh et al., 2024).
#
# Shapes: B rows, K answers of a row.


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

    def begin_evaluation(self, model: ParallelModel, batches: Sequence[LocatedRows]) -> None:
        self._estimate_divergence(model, batches)

    def _estimate_divergence(self, model: ParallelModel, batches: Sequence[LocatedRows]) -> None:
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
            for datasets, rows, is_real in batches:
                parts = [
                    dataset.read(rows[[index]]) if is_bco else dataset.read_mismatched(rows[[index]])
                    for index, dataset in enumerate(datasets)
                ]
                fields = zip(*[(part.tokens, part.labels, part.documents) for part in parts], strict=True)
                batch = self.run.source.trim(RowArrays(*map(np.concatenate, fields)).to_batch())
                batch.labels[~torch.from_numpy(is_real)] = IGNORE_INDEX
                attached_batch = self.attach(batch, datasets, rows, is_mismatched=not is_bco)
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
        is_desirable_BK = torch.zeros(answers.policy.shape, dtype=torch.bool, device=hidden_BCD.device)
        split_answers(is_desirable_BK)[0].fill_(True)
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
