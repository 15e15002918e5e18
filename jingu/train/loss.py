"""Cross-entropy summed over the trained tokens, without ever holding the logits of the whole sequence.

Shapes: N tokens (rows × sequence), D width, V vocabulary, C tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from jingu.model.products import accumulate_product, matmul
from jingu.parallel.collectives import all_reduce

# Elements of one chunk of logits. On CPU a chunk should stay near the caches (16 MB in fp32); on a card it should
# be large enough to fill it.
CHUNK_ELEMENTS = {"cpu": 2**22, "cuda": 2**27}

ChunkLoss = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def chunk_loss(logits_CV: Tensor, labels_C: Tensor) -> tuple[Tensor, Tensor]:
    """Summed cross-entropy of a chunk's trained tokens, and softmax minus one-hot for *every* token of it.

    The arithmetic is fp32 at least; the second result has the logits' dtype. Rows whose label is -100 hold
    something finite there that the caller must not use.
    """
    wide_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32))
    picked_C1 = labels_C.clamp_min(0).unsqueeze(1)
    scores_CV = torch.log_softmax(wide_CV, dim=1)
    total = -(scores_CV.gather(1, picked_C1).squeeze(1) * (labels_C >= 0)).sum()
    # In place: the chunk is the largest tensor of a step.
    gradient_CV = scores_CV.exp_().scatter_add_(1, picked_C1, -torch.ones_like(picked_C1, dtype=scores_CV.dtype))
    return total, gradient_CV.to(logits_CV.dtype)


def divided_chunk_loss(start: int, group: dist.ProcessGroup) -> ChunkLoss:
    """`chunk_loss` where the vocabulary is divided over the ranks of `group`, and begins here with entry `start`.

    Every rank gets the whole loss, and softmax minus one-hot of its own entries.
    """

    def chunk(logits_CV: Tensor, labels_C: Tensor) -> tuple[Tensor, Tensor]:
        wide_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32))
        most_C = all_reduce(wide_CV.amax(1), "max", group)
        scores_CV = wide_CV - most_C.unsqueeze(1)
        picked_C1 = (labels_C - start).unsqueeze(1)
        here_C1 = (picked_C1 >= 0) & (picked_C1 < wide_CV.shape[1])
        picked_C1 = picked_C1.where(here_C1, 0)
        picked_C = (scores_CV.gather(1, picked_C1) * here_C1).squeeze(1)
        gradient_CV = scores_CV.exp_()
        sums_2C = all_reduce(torch.stack([gradient_CV.sum(1), picked_C]), "sum", group)
        total = ((sums_2C[0].log() - sums_2C[1]) * (labels_C >= 0)).sum()
        gradient_CV.div_(sums_2C[0].unsqueeze(1)).scatter_add_(1, picked_C1, -here_C1.to(gradient_CV.dtype))
        return total, gradient_CV.to(logits_CV.dtype)

    return chunk


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Head and cross-entropy together; gradients are made in the forward pass, while a chunk's logits are at hand."""

    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, rows: int, chunk: ChunkLoss
    ) -> Tensor:
        wants = hidden_ND.requires_grad or weight_VD.requires_grad
        ctx.dtype, weight_VD = weight_VD.dtype, weight_VD.to(hidden_ND.dtype)
        total = torch.zeros((), dtype=torch.promote_types(hidden_ND.dtype, torch.float32), device=hidden_ND.device)
        hidden_gradient_ND = torch.empty_like(hidden_ND) if wants else None
        # Summed over chunks in fp32 at least: bf16 would lose the small chunks' share.
        weight_gradient_VD = torch.zeros_like(weight_VD, dtype=total.dtype) if wants else None
        trained_N1 = (labels_N >= 0).unsqueeze(1)
        for start in range(0, hidden_ND.shape[0], rows):
            part = slice(start, start + rows)
            loss, gradient_CV = chunk(matmul(hidden_ND[part], weight_VD.t()), labels_N[part])
            total += loss
            if hidden_gradient_ND is not None and weight_gradient_VD is not None:
                # The mask goes onto the narrow side of each product.
                torch.mul(matmul(gradient_CV, weight_VD), trained_N1[part], out=hidden_gradient_ND[part])
                accumulate_product(weight_gradient_VD, gradient_CV.t(), hidden_ND[part] * trained_N1[part])
        if wants:
            ctx.save_for_backward(hidden_gradient_ND, weight_gradient_VD)
        return total

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        hidden_gradient_ND, weight_gradient_VD = ctx.saved_tensors
        scale = upstream[0]
        # Not in place: schedules that split the backward pass ask twice.
        hidden = hidden_gradient_ND * scale.to(hidden_gradient_ND.dtype)
        return hidden, (weight_gradient_VD * scale).to(ctx.dtype), None, None, None


def summed_cross_entropy(
    hidden_BTD: Tensor,
    weight_VD: Tensor,
    labels_BT: Tensor,
    chunk: ChunkLoss = chunk_loss,
    columns: int | None = None,
) -> Tensor:
    """Sum of -log p(label) over the labels that are not -100, in fp32 (fp64 for fp64 states).

    Args:
        hidden_BTD: final hidden states.
        weight_VD: weight of the head.
        labels_BT: the token each position should predict, or -100.
        chunk: `chunk_loss`, or a compiled form of it; or the one of a divided vocabulary.
        columns: entries of the vocabulary on the rank that has most, so that all cut the same chunks; None: those here.
    """
    rows = max(1, CHUNK_ELEMENTS.get(hidden_BTD.device.type, 2**22) // (columns or weight_VD.shape[0]))
    hidden_ND, labels_N = hidden_BTD.flatten(0, -2), labels_BT.flatten()
    total: Tensor = _ChunkedCrossEntropy.apply(hidden_ND, weight_VD, labels_N, rows, chunk)
    return total
