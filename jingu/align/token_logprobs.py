"""Log-probabilities of given tokens, computed in chunks, so that the logits of a whole sequence never exist at once.

Shapes: B rows, T tokens of a row, C of them on a context rank, N = B · C, D hidden size, V vocab.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from jingu.compat.torch_distributed import all_gather, all_reduce
from jingu.data.batch import IGNORE_INDEX
from jingu.parallel.tensor import VocabShard
from jingu.parallel.token_sharding import TokenSharding
from jingu.training.loss import ChunkedHead, chunk_loss, chunked_head


class TokenLogProbs:
    """The log-probability of each token of a batch under a model, in any layout.

    With context parallelism, every rank of `context` gets the values of whole rows and computes the whole loss from
    them, and the training loop sums these losses: multiply the loss by `share`.

    Args:
        mesh: the mesh of the model; None for one rank.
        compile: whether to compile the operations on a chunk of logits.
        softcap: soft cap of the logits, `ModelSpec.logit_softcap`.

    Attributes:
        share: 1 / the ranks of `context`.
    """

    def __init__(
        self,
        vocab_size: int,
        mesh: DeviceMesh | None = None,
        *,
        compile: bool = False,
        softcap: float | None = None,
    ) -> None:
        self._softcap = softcap
        # Without context parallelism, every rank has whole rows.
        is_divided = mesh is not None and mesh["context"].size() > 1
        self._tokens = TokenSharding(mesh) if is_divided and mesh is not None else None
        self._max_columns = vocab_size
        self._shard = None
        if mesh is not None and mesh["tensor"].size() > 1:
            self._shard = VocabShard.of(mesh, vocab_size)
            self._max_columns = self._shard.most
        self.share = 1.0 if self._tokens is None else 1.0 / self._tokens.context
        chunk = partial(chunk_loss, shard=self._shard)
        self._chunk = torch.compile(chunk) if compile else chunk

    def __call__(
        self, hidden_BCD: Tensor, weight_VD: Tensor, tokens_BT: Tensor, temperature: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """Return log-probabilities [B, T] of tokens, and entropies [B, T] of the distributions at their positions.

        Both are 0 where `tokens_BT` is -100, in fp32 (fp64 for fp64 states), and complete on every rank. Only the
        log-probabilities are differentiable.

        Args:
            hidden_BCD: final hidden states, as the model passes them to its loss, together with the head's weight.
            tokens_BT: the token that each position predicts, or -100.
            temperature: divides the logits.
        """
        labels_BC = tokens_BT
        if self._tokens is not None:
            labels_BC = self._tokens.shard_context(tokens_BT, fill=IGNORE_INDEX)
        labels_N = labels_BC.flatten()
        # Compute only labeled tokens on CPUs. On GPUs compute all: the host would have to wait for their number.
        index_M = torch.arange(len(labels_N), device=labels_N.device)
        if labels_N.device.type == "cpu":
            index_M = labels_N.ge(0).nonzero().flatten()
        head = chunked_head(hidden_BCD, self._max_columns, self._chunk, self._softcap)
        hidden_MD = hidden_BCD.flatten(0, 1)[index_M]
        values_2M = _TokenLogProbs.apply(hidden_MD, weight_VD, labels_N[index_M], head, temperature, self._shard)
        values_2N = values_2M.new_zeros(2, len(labels_N)).index_copy(1, index_M, values_2M)
        values_2BC = values_2N.where(labels_N >= 0, 0.0).unflatten(1, labels_BC.shape)
        if self._tokens is not None:
            values_2BC = all_gather(values_2BC, 2, self._tokens.context_group)
        log_probs_BT, entropies_BT = values_2BC[..., : tokens_BT.shape[1]]
        return log_probs_BT, entropies_BT.detach()


def _divide(logits_CV: Tensor, temperature: float) -> Tensor:
    """Return logits divided by the temperature, in at least fp32."""
    return logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32)) / temperature


class _TokenLogProbs(torch.autograd.Function):
    """Log-probabilities and entropies [2, N]. The backward pass computes the logits of each chunk again, since the
    gradient of each token is only known then."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        labels_N: Tensor,
        head: ChunkedHead,
        temperature: float,
        shard: VocabShard | None,
    ) -> Tensor:
        entropies = []

        def chunk(logits_CV: Tensor, labels_C: Tensor) -> tuple[Tensor, Tensor]:
            wide_CV = _divide(logits_CV, temperature)
            losses_C, gradient_CV = head.chunk(wide_CV, labels_C)
            # The gradient is p - target, so its product with the logits is their mean minus that of the label.
            excess_C = (gradient_CV * wide_CV).sum(1)
            if shard is not None:
                excess_C = all_reduce(excess_C, "sum", shard.group)
            entropies.append(losses_C - excess_C)
            return losses_C, gradient_CV

        ctx.save_for_backward(hidden_ND, weight_VD, labels_N)
        ctx.head = head
        ctx.temperature = temperature
        losses_N, _, _ = ChunkedHead(head.rows, chunk, head.softcap).compute(
            hidden_ND, weight_VD, labels_N, torch.ones_like(labels_N), False, False
        )
        return torch.stack([-losses_N, torch.cat(entropies) if entropies else losses_N])

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        hidden_ND, weight_VD, labels_N = ctx.saved_tensors

        def chunk(logits_CV: Tensor, labels_C: Tensor) -> tuple[Tensor, Tensor]:
            losses_C, gradient_CV = ctx.head.chunk(_divide(logits_CV, ctx.temperature), labels_C)
            return losses_C, gradient_CV.to(logits_CV.dtype)

        # The loss is the negative log-probability.
        factors_N = (upstream[0][0] / -ctx.temperature).to(hidden_ND.dtype)
        _, hidden, weight = ChunkedHead(ctx.head.rows, chunk, ctx.head.softcap).compute(
            hidden_ND, weight_VD, labels_N, factors_N, *ctx.needs_input_grad[:2]
        )
        return hidden, None if weight is None else weight.to(weight_VD.dtype), None, None, None, None
