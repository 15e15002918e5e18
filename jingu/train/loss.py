"""Cross-entropy summed over the trained tokens, without ever holding the logits of the whole sequence.

Shapes: N tokens (rows × sequence), D width, V vocabulary, C tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from jingu.model.products import accumulate_product, matmul
from jingu.parallel.collectives import all_reduce
from jingu.parallel.tensor import Vocabulary

# Elements of one chunk of logits. On CPU a chunk should stay near the caches (16 MB in fp32); on a card it should
# be large enough to fill it.
CHUNK_ELEMENTS = {"cpu": 2**22, "cuda": 2**27}
LEAST_ROWS = 256
"""Tokens of a chunk, however large the vocabulary: for fewer, the products are slow."""

ChunkLoss = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""From the logits and labels of a chunk to the loss of each token and its gradient with respect to the logits; where
the label is -100, both are finite, and nobody uses them."""


def chunk_loss(
    logits_CV: Tensor, labels_C: Tensor, smoothing: float = 0.0, z: float = 0.0, share: Vocabulary | None = None
) -> tuple[Tensor, Tensor]:
    """Cross-entropy of each token of a chunk, and its gradient. The arithmetic is fp32 at least; the gradient has the
    logits' dtype.

    Args:
        smoothing: share of the target that is spread evenly over the vocabulary (Szegedy et al., 2016).
        z: weight of the squared logarithm of the softmax's sum, which keeps logits near zero (PaLM, section 5).
        share: of the vocabulary, whose logits these are; None: all. Every rank that has a share gets the whole losses,
            and the gradient with respect to its own entries.
    """
    wide_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32))
    size, start = (wide_CV.shape[1], 0) if share is None else (share.size, share.start)
    picked_C1 = (labels_C - start).unsqueeze(1)
    here_C1 = (picked_C1 >= 0) & (picked_C1 < wide_CV.shape[1])
    picked_C1 = picked_C1.where(here_C1, 0)
    if share is None:
        scores_CV = torch.log_softmax(wide_CV, 1)
    else:
        most_C = all_reduce(wide_CV.amax(1), "max", share.group)
        scores_CV = wide_CV - most_C.unsqueeze(1)
    target_C = (1.0 - smoothing) * (scores_CV.gather(1, picked_C1) * here_C1).squeeze(1)
    if smoothing:
        target_C = target_C + smoothing / size * scores_CV.sum(1)
    # In place: the chunk is the largest tensor of a step.
    gradient_CV, factor_C = scores_CV.exp_(), torch.ones_like(target_C)
    if share is not None:
        sum_C, target_C = all_reduce(torch.stack([gradient_CV.sum(1), target_C]), "sum", share.group)
        target_C, factor_C = target_C - sum_C.log(), 1.0 / sum_C
    losses_C = -target_C
    if z:
        log_sum_C = torch.logsumexp(wide_CV, 1) if share is None else most_C + sum_C.log()
        losses_C = losses_C + z * log_sum_C.square()
        factor_C = factor_C * (1.0 + 2.0 * z * log_sum_C)
    if z or share is not None:
        gradient_CV.mul_(factor_C.unsqueeze(1))
    gradient_CV.scatter_add_(1, picked_C1, (smoothing - 1.0) * here_C1.to(gradient_CV.dtype))
    if smoothing:
        gradient_CV.sub_(smoothing / size)
    return losses_C, gradient_CV.to(logits_CV.dtype)


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Head and cross-entropy together; gradients are made in the forward pass, while a chunk's logits are at hand."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        labels_N: Tensor,
        factors_N: Tensor | None,
        rows: int,
        chunk: ChunkLoss,
        grads: bool,
    ) -> Tensor:
        # A weight that is not trained (as beside adapters) costs a third less.
        wants_hidden, wants_weight = grads and hidden_ND.requires_grad, grads and weight_VD.requires_grad
        ctx.dtype, weight_VD = weight_VD.dtype, weight_VD.to(hidden_ND.dtype)
        total = torch.zeros((), dtype=torch.promote_types(hidden_ND.dtype, torch.float32), device=hidden_ND.device)
        hidden_gradient_ND = torch.empty_like(hidden_ND) if wants_hidden else None
        # Summed over chunks in fp32 at least: bf16 would lose the small chunks' share.
        weight_gradient_VD = torch.zeros_like(weight_VD, dtype=total.dtype) if wants_weight else None
        trained_N = labels_N >= 0
        factors_N = trained_N if factors_N is None else (factors_N * trained_N).to(hidden_ND.dtype)
        for start in range(0, hidden_ND.shape[0], rows):
            part = slice(start, start + rows)
            losses_C, gradient_CV = chunk(matmul(hidden_ND[part], weight_VD.t()), labels_N[part])
            total += (losses_C * factors_N[part]).sum()
            # The factors go onto the narrow side of each product.
            factors_C1 = factors_N[part].unsqueeze(1)
            if hidden_gradient_ND is not None:
                torch.mul(matmul(gradient_CV, weight_VD), factors_C1, out=hidden_gradient_ND[part])
            if weight_gradient_VD is not None:
                accumulate_product(weight_gradient_VD, gradient_CV.t(), hidden_ND[part] * factors_C1)
        ctx.save_for_backward(hidden_gradient_ND, weight_gradient_VD)
        return total

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        hidden_gradient_ND, weight_gradient_VD = ctx.saved_tensors
        scale = upstream[0]
        # Not in place: schedules that split the backward pass ask twice.
        hidden = None if hidden_gradient_ND is None else hidden_gradient_ND * scale.to(hidden_gradient_ND.dtype)
        weight = None if weight_gradient_VD is None else (weight_gradient_VD * scale).to(ctx.dtype)
        return hidden, weight, None, None, None, None, None


def summed_cross_entropy(
    hidden_BTD: Tensor,
    weight_VD: Tensor,
    labels_BT: Tensor,
    chunk: ChunkLoss = chunk_loss,
    columns: int | None = None,
    factors_BT: Tensor | None = None,
) -> Tensor:
    """Sum of -log p(label) over the labels that are not -100, in fp32 (fp64 for fp64 states).

    Args:
        hidden_BTD: final hidden states.
        weight_VD: weight of the head.
        labels_BT: the token each position should predict, or -100.
        chunk: `chunk_loss`, or a compiled form of it.
        columns: entries of the vocabulary on the rank that has most, so that all cut the same chunks; None: those here.
        factors_BT: of each place's loss; None: 1.
    """
    rows = max(LEAST_ROWS, CHUNK_ELEMENTS.get(hidden_BTD.device.type, 2**22) // (columns or weight_VD.shape[0]))
    hidden_ND, labels_N = hidden_BTD.flatten(0, -2), labels_BT.flatten()
    factors_N = None if factors_BT is None else factors_BT.flatten()
    if labels_N.device.type == "cpu" and len(places := labels_N.ge(0).nonzero().flatten()) < len(labels_N):
        # Not on a card, where to know their number would be to wait for it.
        hidden_ND, labels_N = hidden_ND[places], labels_N[places]
        factors_N = None if factors_N is None else factors_N[places]
    grads = torch.is_grad_enabled()
    total: Tensor = _ChunkedCrossEntropy.apply(hidden_ND, weight_VD, labels_N, factors_N, rows, chunk, grads)
    return total
