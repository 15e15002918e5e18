"""Cross-entropy summed over the trained tokens, without ever holding the logits of the whole sequence.

Shapes: N tokens (rows × sequence), D width, V vocabulary, C tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from jingu.model.products import matmul

# Elements of one chunk of logits. On CPU a chunk should stay near the caches (16 MB in fp32); on a card it should
# be large enough to fill it.
CHUNK_ELEMENTS = {"cpu": 2**22, "cuda": 2**27}

ChunkLoss = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def chunk_loss(logits_CV: Tensor, labels_C: Tensor) -> tuple[Tensor, Tensor]:
    """Summed cross-entropy of a chunk, and its gradient with respect to the logits (in their dtype).

    The arithmetic is fp32 at least; labels of -100 count neither for the sum nor for the gradient.
    """
    wide_CV = logits_CV.float() if logits_CV.dtype in (torch.bfloat16, torch.float16) else logits_CV
    trained_C1 = (labels_C >= 0).unsqueeze(1)
    picked_C1 = labels_C.clamp_min(0).unsqueeze(1)
    log_total_C1 = torch.logsumexp(wide_CV, dim=1, keepdim=True)
    losses_C1 = (log_total_C1 - wide_CV.gather(1, picked_C1)) * trained_C1
    gradient_CV = torch.exp(wide_CV - log_total_C1) * trained_C1
    gradient_CV = gradient_CV.scatter_add(1, picked_C1, -trained_C1.to(wide_CV.dtype))
    return losses_C1.sum(), gradient_CV.to(logits_CV.dtype)


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Head and cross-entropy together; gradients are made in the forward pass, while a chunk's logits are at hand."""

    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, rows: int, chunk: ChunkLoss
    ) -> Tensor:
        wants = hidden_ND.requires_grad or weight_VD.requires_grad
        total = torch.zeros((), dtype=torch.promote_types(hidden_ND.dtype, torch.float32), device=hidden_ND.device)
        hidden_gradient_ND = torch.empty_like(hidden_ND) if wants else None
        # Summed over chunks in fp32 at least: bf16 would lose the small chunks' share.
        weight_gradient_VD = torch.zeros_like(weight_VD, dtype=total.dtype) if wants else None
        for start in range(0, hidden_ND.shape[0], rows):
            hidden_CD, labels_C = hidden_ND[start : start + rows], labels_N[start : start + rows]
            loss, gradient_CV = chunk(matmul(hidden_CD, weight_VD.t()), labels_C)
            total += loss
            if hidden_gradient_ND is not None and weight_gradient_VD is not None:
                hidden_gradient_ND[start : start + rows] = matmul(gradient_CV, weight_VD)
                weight_gradient_VD += matmul(gradient_CV.t(), hidden_CD)
        if wants:
            ctx.save_for_backward(hidden_gradient_ND, weight_gradient_VD)
            ctx.dtype = weight_VD.dtype
        return total

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        hidden_gradient_ND, weight_gradient_VD = ctx.saved_tensors
        scale = upstream[0]
        hidden = (hidden_gradient_ND * scale).to(hidden_gradient_ND.dtype)
        return hidden, (weight_gradient_VD * scale).to(ctx.dtype), None, None, None


def summed_cross_entropy(
    hidden_BTD: Tensor, weight_VD: Tensor, labels_BT: Tensor, chunk: ChunkLoss = chunk_loss
) -> Tensor:
    """Sum of -log p(label) over the labels that are not -100, in fp32 (fp64 for fp64 states).

    Args:
        hidden_BTD: final hidden states.
        weight_VD: weight of the head.
        labels_BT: the token each position should predict, or -100.
        chunk: `chunk_loss`, or a compiled form of it.
    """
    rows = max(1, CHUNK_ELEMENTS.get(hidden_BTD.device.type, 2**22) // weight_VD.shape[0])
    hidden_ND, labels_N = hidden_BTD.flatten(0, -2), labels_BT.flatten()
    total: Tensor = _ChunkedCrossEntropy.apply(hidden_ND, weight_VD, labels_N, rows, chunk)
    return total
