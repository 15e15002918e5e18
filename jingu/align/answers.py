"""Batches of answers, and the log-probabilities of whole answers.

Shapes: B rows, T tokens of a row, K answers of a row, D hidden size, V vocab.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from jingu.align.preference_losses import AnswerLogProbs
from jingu.align.token_logprobs import TokenLogProbs
from jingu.compat.torch_distributed import all_gather
from jingu.data.batch import Batch
from jingu.model.spec import ModelSpec
from jingu.parallel.pipeline import ParallelModel
from jingu.training.batch_transforms import model_inputs


@dataclass(frozen=True)
class AnswerBatch(Batch):
    """Rows of answers with their prompts. Answer k of a row is its document k: chosen or desirable if k is even."""

    # [B, K] log-probability of each answer under the reference model; 0 if there is no reference model.
    reference: Tensor | None = None

    @property
    def num_answers(self) -> int:
        """K: the number of answers in the row that has most of them."""
        assert self.reference is not None
        return self.reference.shape[1]

    def sum_by_answer(self, values_BT: Tensor) -> Tensor:
        """Sum values [B, T] of tokens over each answer [B, K], in the same order on any device."""
        assert self.documents is not None
        answers_K = torch.arange(self.num_answers, device=values_BT.device)
        is_answer_BTK = self.documents.unsqueeze(-1) == answers_K
        return torch.bmm(values_BT.unsqueeze(1), is_answer_BTK.to(values_BT.dtype)).squeeze(1)

    @property
    def is_last(self) -> Tensor:
        """[B, T] whether a token is the last one of its answer."""
        assert self.documents is not None
        following_BT = torch.cat([self.documents[:, 1:], torch.full_like(self.documents[:, :1], -1)], 1)
        return self.documents != following_BT

    @property
    def answer_tokens(self) -> Tensor:
        """[B, K] trained tokens of each answer."""
        return self.sum_by_answer((self.labels >= 0).double())


class AnswerScorer:
    """Log-probabilities of answers under a model, in any layout.

    Attributes:
        share: factor for a loss over answers: every rank of `context` computes the whole loss, and the training loop
            sums it over them.
    """

    def __init__(self, spec: ModelSpec, mesh: DeviceMesh, *, compile: bool) -> None:
        self._log_probs = TokenLogProbs(spec.vocab_size, mesh, compile=compile)
        self.share = self._log_probs.share

    def compute(self, batch: AnswerBatch, hidden_BCD: Tensor, weight_VD: Tensor) -> AnswerLogProbs:
        """Return the log-probabilities of all answers [B, K]. Call it while the head's weight is gathered."""
        assert batch.reference is not None
        log_probs_BT, _ = self._log_probs(hidden_BCD, weight_VD, batch.labels)
        reference_BK = batch.reference.to(log_probs_BT.dtype)
        return AnswerLogProbs(batch.sum_by_answer(log_probs_BT), reference_BK, batch.answer_tokens)

    def score(self, model: ParallelModel, batch: AnswerBatch) -> AnswerLogProbs:
        """Return the log-probabilities of all answers [B, K] on every rank that holds the rows, without gradients."""
        assert batch.reference is not None
        policy_BK: Tensor = model(
            model_inputs(batch), loss=lambda hidden, weight: self.compute(batch, hidden, weight).policy
        )
        return AnswerLogProbs(policy_BK, batch.reference, batch.answer_tokens)


class RewardHead:
    """Rewards of answers from the score head of a model, in any layout.

    Attributes:
        share: factor for a loss over rewards: every rank of `context` computes the whole loss, and the training loop
            sums it over them.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self._tensor_ranks = mesh["tensor"].size()
        self._context_group = mesh.get_group("context")
        self.share = 1.0 / mesh["context"].size()

    def compute(self, batch: AnswerBatch, hidden_BCD: Tensor, weight_1D: Tensor) -> Tensor:
        """Return the rewards [B, K]: scores of the last tokens of the answers, in at least fp32."""
        return batch.sum_by_answer(self.scores(hidden_BCD, weight_1D, batch) * batch.is_last)

    def scores(self, hidden_BCD: Tensor, weight_1D: Tensor, batch: Batch) -> Tensor:
        """Return the scores [B, T] of all tokens, in at least fp32."""
        wide = torch.promote_types(hidden_BCD.dtype, torch.float32)
        scores_BT = (hidden_BCD.to(wide) @ weight_1D.to(wide).t()).squeeze(-1)
        if scores_BT.requires_grad and self._tensor_ranks > 1:
            # All ranks of `tensor` compute the same scores, and their gradients are summed.
            scores_BT.register_hook(lambda gradient: gradient / self._tensor_ranks)
        if self.share < 1.0:
            scores_BT = all_gather(scores_BT, 1, self._context_group)[:, : batch.tokens.shape[1]]
        return scores_BT
