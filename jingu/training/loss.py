"""Head and cross-entropy in chunks of tokens: the logits of the whole sequence never exist.

Shapes: N tokens (rows × sequence), D hidden size, V vocab, C tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from jingu.compat.torch_distributed import all_reduce
from jingu.model.matmul_kernels import matmul, matmul_accumulate
from jingu.parallel.tensor import VocabShard

# Elements of one chunk of logits. On CPU a chunk should stay near the caches (16 MB in fp32); on a card it should
# be large enough to fill it.
CHUNK_ELEMENTS = 2**22
CHUNK_ELEMENTS_ON_CARD = 2**27
# Tokens of a chunk, however large the vocab: products of fewer rows are slow.
MIN_CHUNK_TOKENS = 256

# Computes, from the logits and labels of a chunk, the loss of each token and its gradient with respect to the logits.
# Where the label is -100, both are finite, and unused.
ChunkLoss = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def chunk_loss(
    logits_CV: Tensor, labels_C: Tensor, smoothing: float = 0.0, z: float = 0.0, shard: VocabShard | None = None
) -> tuple[Tensor, Tensor]:
    """Return the cross-entropy of each token of a chunk, and its gradient with respect to the logits.

    The arithmetic is at least fp32; the gradient has the dtype of the logits.

    Args:
        smoothing: share of the target that is spread evenly over the vocab (Szegedy et al., 2016).
        z: coefficient of the squared log of the softmax's sum, which keeps logits near zero (PaLM, section 5).
        shard: the part of the vocab that the logits cover; None: all. Every rank that has a shard returns the whole
            losses, and the gradient of its own logits.
    """
    wide_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32))
    size, start = (wide_CV.shape[1], 0) if shard is None else (shard.size, shard.start)
    # The column of each label, where this rank has it.
    column_C1 = (labels_C - start).unsqueeze(1)
    is_local_C1 = (column_C1 >= 0) & (column_C1 < wide_CV.shape[1])
    column_C1 = column_C1.where(is_local_C1, 0)
    if shard is None:
        scores_CV = torch.log_softmax(wide_CV, 1)
    else:
        # The ranks agree on the largest logit first, so that no exponential overflows.
        max_C = all_reduce(wide_CV.amax(1), "max", shard.group)
        scores_CV = wide_CV - max_C.unsqueeze(1)
    target_C = (1.0 - smoothing) * (scores_CV.gather(1, column_C1) * is_local_C1).squeeze(1)
    if smoothing:
        target_C = target_C + smoothing / size * scores_CV.sum(1)
    # In place, since the chunk is the largest tensor of a step.
    gradient_CV = scores_CV.exp_()
    factor_C = torch.ones_like(target_C)
    if shard is not None:
        sum_C, target_C = all_reduce(torch.stack([gradient_CV.sum(1), target_C]), "sum", shard.group)
        target_C = target_C - sum_C.log()
        factor_C = 1.0 / sum_C
    losses_C = -target_C
    if z:
        log_sum_C = torch.logsumexp(wide_CV, 1) if shard is None else max_C + sum_C.log()
        losses_C = losses_C + z * log_sum_C.square()
        factor_C = factor_C * (1.0 + 2.0 * z * log_sum_C)
    if z or shard is not None:
        gradient_CV.mul_(factor_C.unsqueeze(1))
    # The gradient is softmax - target.
    gradient_CV.scatter_add_(1, column_C1, (smoothing - 1.0) * is_local_C1.to(gradient_CV.dtype))
    if smoothing:
        gradient_CV.sub_(smoothing / size)
    return losses_C, gradient_CV.to(logits_CV.dtype)


@dataclass(frozen=True)
class ChunkedHead:
    """Losses of tokens and gradients of their factored sum, with the logits of one chunk at a time in memory.

    Attributes:
        rows: tokens of a chunk (C).
        chunk: computes the losses of a chunk.
    """

    rows: int
    chunk: ChunkLoss

    def compute(
        self,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        labels_N: Tensor,
        factors_N: Tensor,
        needs_hidden: bool,
        needs_weight: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the loss of each token [N], and the gradients of Σ factor · loss by hidden states and weight.

        Losses and the weight's gradient are in fp32 (fp64 for fp64 states). What is not needed is None.
        """
        weight_VD = weight_VD.to(hidden_ND.dtype)
        wide = torch.promote_types(hidden_ND.dtype, torch.float32)
        losses_N = torch.empty(len(labels_N), dtype=wide, device=hidden_ND.device)
        hidden_gradient_ND = torch.empty_like(hidden_ND) if needs_hidden else None
        # Chunks are summed in at least fp32: bf16 would lose the share of small ones.
        weight_gradient_VD = torch.zeros_like(weight_VD, dtype=wide) if needs_weight else None
        for start in range(0, hidden_ND.shape[0], self.rows):
            part = slice(start, start + self.rows)
            losses_N[part], gradient_CV = self.chunk(matmul(hidden_ND[part], weight_VD.t()), labels_N[part])
            # The factors are applied to the narrow side of each product.
            factors_C1 = factors_N[part].unsqueeze(1)
            if hidden_gradient_ND is not None:
                torch.mul(matmul(gradient_CV, weight_VD), factors_C1, out=hidden_gradient_ND[part])
            if weight_gradient_VD is not None:
                matmul_accumulate(weight_gradient_VD, gradient_CV.t(), hidden_ND[part] * factors_C1)
        return losses_N, hidden_gradient_ND, weight_gradient_VD


class _LinearCrossEntropy(torch.autograd.Function):
    """Head and cross-entropy together. Gradients are computed in forward, while a chunk's logits are at hand."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        labels_N: Tensor,
        factors_N: Tensor | None,
        head: ChunkedHead,
        grads: bool,
    ) -> Tensor:
        # A frozen head, as beside adapters, saves a third of the work.
        needs_hidden = grads and hidden_ND.requires_grad
        needs_weight = grads and weight_VD.requires_grad
        ctx.dtype = weight_VD.dtype
        has_label_N = labels_N >= 0
        factors_N = has_label_N if factors_N is None else (factors_N * has_label_N).to(hidden_ND.dtype)
        losses_N, *gradients = head.compute(hidden_ND, weight_VD, labels_N, factors_N, needs_hidden, needs_weight)
        ctx.save_for_backward(*gradients)
        total = torch.zeros((), dtype=losses_N.dtype, device=losses_N.device)
        # Chunk by chunk: a sum of sums has the smaller rounding error.
        for losses_C in (losses_N * factors_N).split(head.rows):
            total += losses_C.sum()
        return total

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        hidden_gradient_ND, weight_gradient_VD = ctx.saved_tensors
        scale = upstream[0]
        # Not in place: schedules that split the backward pass ask twice.
        hidden = None if hidden_gradient_ND is None else hidden_gradient_ND * scale.to(hidden_gradient_ND.dtype)
        weight = None if weight_gradient_VD is None else (weight_gradient_VD * scale).to(ctx.dtype)
        return hidden, weight, None, None, None, None


def chunked_head(hidden_BTD: Tensor, columns: int, chunk: ChunkLoss) -> ChunkedHead:
    """Return how the head is computed in chunks on the device of the hidden states.

    Args:
        columns: the largest vocab shard of any rank, so that all cut the same chunks.
    """
    elements = CHUNK_ELEMENTS if hidden_BTD.device.type == "cpu" else CHUNK_ELEMENTS_ON_CARD
    rows = max(MIN_CHUNK_TOKENS, elements // columns)
    return ChunkedHead(rows, chunk)


def linear_cross_entropy(
    hidden_BTD: Tensor,
    weight_VD: Tensor,
    labels_BT: Tensor,
    chunk: ChunkLoss = chunk_loss,
    max_columns: int | None = None,
    factors_BT: Tensor | None = None,
) -> Tensor:
    """Return the sum of -log p(label) over the labels that are not -100, in fp32 (fp64 for fp64 states).

    Args:
        hidden_BTD: final hidden states.
        weight_VD: weight of the head.
        labels_BT: the token that each position predicts, or -100.
        chunk: `chunk_loss`, or a compiled form of it.
        max_columns: the largest vocab shard of any rank, so that all cut the same chunks; None: the columns here.
        factors_BT: factor on the loss of each token; None: 1.
    """
    head = chunked_head(hidden_BTD, max_columns or weight_VD.shape[0], chunk)
    hidden_ND = hidden_BTD.flatten(0, -2)
    labels_N = labels_BT.flatten()
    factors_N = None if factors_BT is None else factors_BT.flatten()
    if labels_N.device.type == "cpu":
        # Skip tokens without a label. On a card, their number would have to be waited for.
        index = labels_N.ge(0).nonzero().flatten()
        if len(index) < len(labels_N):
            hidden_ND = hidden_ND[index]
            labels_N = labels_N[index]
            factors_N = None if factors_N is None else factors_N[index]
    grads = torch.is_grad_enabled()
    total: Tensor = _LinearCrossEntropy.apply(hidden_ND, weight_VD, labels_N, factors_N, head, grads)
    return total
