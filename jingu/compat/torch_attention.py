"""PyTorch's attention kernel for CPUs, which also returns the log-sum-exp of the scores.

Attention to several ranges of keys can be computed separately, and combined with these log-sum-exps.

Shapes: B rows, H query heads, G key-value heads, T queries, S keys, K head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor


def cpu_attention(
    q_BHTK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, *, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Return the attention output [B, H, T, K], and the log-sum-exp [B, H, T] of the scores.

    Args:
        causal: whether query i attends only to keys 0 to i.
        scale: factor of the scores; None: 1 / sqrt(K).
    """
    groups = q_BHTK.shape[1] // k_BGSK.shape[1]
    y_BHTK, logsumexp_BHT = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q_BHTK,
        k_BGSK.repeat_interleave(groups, 1),
        v_BGSK.repeat_interleave(groups, 1),
        is_causal=causal,
        scale=scale,
    )
    return y_BHTK, logsumexp_BHT


def cpu_attention_backward(
    gradient_BHTK: Tensor,
    q_BHTK: Tensor,
    k_BGSK: Tensor,
    v_BGSK: Tensor,
    y_BHTK: Tensor,
    logsumexp_BHT: Tensor,
    *,
    causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values.

    The given keys and values may be one of several ranges that the queries attend to.

    Args:
        gradient_BHTK: gradient of the attention output.
        y_BHTK: attention output over all ranges.
        logsumexp_BHT: log-sum-exp of the scores over all ranges.
    """
    groups = q_BHTK.shape[1] // k_BGSK.shape[1]
    gradient_q, *gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        gradient_BHTK,
        q_BHTK,
        k_BGSK.repeat_interleave(groups, 1),
        v_BGSK.repeat_interleave(groups, 1),
        y_BHTK,
        logsumexp_BHT,
        dropout_p=0.0,
        is_causal=causal,
        scale=scale,
    )
    gradient_k, gradient_v = (gradient.unflatten(1, (-1, groups)).sum(2) for gradient in gradients)
    return gradient_q, gradient_k, gradient_v
