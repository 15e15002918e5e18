"""Batches of answers, and the log-probabilities of whole answers.

Shapes: B rows, T tokens of a row, K answers of a row, D hidden size, V vocab.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from jingu.align.token_logprobs import TokenLogProbs
from jingu.compat.torch_distributed import all_gather
from jingu.config.sections.pairs import AnswerLogProbs
from jingu.data.batch import Batch
from jingu.data.preference_data import split_answers
from jingu.model.spec import ModelSpec
from jingu.parallel.pipeline import ParallelModel
from jingu.training.batch_transforms import model_inputs


@dataclass(frozen=True)
class AnswerBatch(Batch):
    """Rows of answers with their prompts. Answer k of a row is its document k (`split_answers`)."""

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
        """[B, T] whether a token is the last one of its answer.

        What a template writes after it, such as a line break after the end token, does not count: an answer that a
        model generates ends without it.
        """
        assert self.documents is not None
        # A label is the next token.
        is_trained_BT = torch.cat([torch.zeros_like(self.labels[:, :1]), self.labels[:, :-1].ge(0).long()], 1)
        last_BK = self.answer_tokens.long().cumsum(1)
        answer_BT = self.documents.clamp(0, self.num_answers - 1).long()
        return (is_trained_BT > 0) & (is_trained_BT.cumsum(1) == last_BK.gather(1, answer_BT))

    @property
    def answer_tokens(self) -> Tensor:
        """[B, K] trained tokens of each answer."""
        return self.sum_by_answer((self.labels >= 0).double())

    def weigh_tails(self, values_BT: Tensor, weight: float) -> Tensor:
        """Multiply values of tokens by a weight where the other answer of the pair has ended already (LD-DPO)."""
        assert self.documents is not None
        count_BK = self.answer_tokens.long()
        shared_BP = torch.minimum(*split_answers(count_BK))
        # The number, from 1, of the last common token of each answer among the trained tokens of the row.
        last_BK = count_BK.cumsum(1) - count_BK + shared_BP.repeat_interleave(2, 1)
        answer_BT = self.documents.clamp(0, self.num_answers - 1).long()
        is_tail_BT = (self.labels >= 0).cumsum(1) > last_BK.gather(1, answer_BT)
        return torch.where(is_tail_BT, weight * values_BT, values_BT)


class AnswerScorer:
    """Log-probabilities of answers under a model, in any layout.

    Attributes:
        share: factor for a loss over answers: every rank of `context` computes the whole loss, and the training loop
            sums it over them.

    Args:
        tail_weight: weight of tokens beyond the common length of a pair.
    """

    def __init__(self, spec: ModelSpec, mesh: DeviceMesh, *, compile: bool, tail_weight: float = 1.0) -> None:
        self._tail_weight = tail_weight
        self._log_probs = TokenLogProbs(spec.vocab_size, mesh, compile=compile, softcap=spec.logit_softcap)
        self.share = self._log_probs.share

    def compute(self, batch: AnswerBatch, hidden_BCD: Tensor, weight_VD: Tensor) -> AnswerLogProbs:
        """Return the log-probabilities of all answers [B, K]. Call it while the head's weight is gathered."""
        assert batch.reference is not None
        log_probs_BT, _ = self._log_probs(hidden_BCD, weight_VD, batch.labels)
        if self._tail_weight != 1.0:
            log_probs_BT = batch.weigh_tails(log_probs_BT, self._tail_weight)
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
