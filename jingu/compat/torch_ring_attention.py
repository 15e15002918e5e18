"""PyTorch's ring attention (Liu et al., 2023), a private API.

Shapes: B rows, H heads, C tokens of a rank, K head dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor.experimental._context_parallel import _attention as ring


def ring_attention(q_BHCK: Tensor, k_BHCK: Tensor, v_BHCK: Tensor, scale: float | None, group: ProcessGroup) -> Tensor:
    """Compute causal attention, with gradients, over tokens that are divided over the ranks of a group, in order.

    Keys and values travel from rank to rank, one rank's part at a time.

    Args:
        scale: factor of the scores; None: 1 / sqrt(K).

    Returns:
        The attention output [B, H, C, K] of this rank's tokens.
    """
    y_BHCK: Tensor = _RingAttention.apply(q_BHCK, k_BHCK, v_BHCK, scale, group)
    return y_BHCK


class _RingAttention(torch.autograd.Function):
    """PyTorch's functions for the forward and the backward pass of ring attention, as one differentiable operation."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float | None, group: ProcessGroup) -> Tensor:
        on_cpu = q.device.type == "cpu"
        kernel = torch.ops.aten._scaled_dot_product_flash_attention
        if on_cpu:
            kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        with _ring_settings(q.dtype):
            y, logsumexp, *other_outputs = ring._templated_ring_attention(
                group, 2, kernel, q.contiguous(), k, v, is_causal=True, dropout_p=0.0, scale=scale
            )
        y = y.to(q.dtype)
        ctx.save_for_backward(q, k, v, y, logsumexp)
        # The backward kernel on CUDA requires these outputs of the forward kernel: lengths, and the state of the random
        # number generator (which is not used, as there is no dropout).
        names = ("cum_seq_q", "cum_seq_k", "max_q", "max_k", "philox_seed", "philox_offset")
        ctx.kernel_state = {} if on_cpu else dict(zip(names, other_outputs, strict=False))
        ctx.scale = scale
        ctx.group = group
        return y

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, y, logsumexp = ctx.saved_tensors
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
        if q.device.type == "cpu":
            kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        with _ring_settings(q.dtype):
            gradients = ring._templated_ring_attention_backward(
                ctx.group,
                2,
                kernel,
                grad_out=grad_outputs[0].contiguous(),
                grad_out_name="grad_out",
                query=q.contiguous(),
                key=k,
                value=v,
                out=y,
                logsumexp=logsumexp,
                is_causal=True,
                dropout_p=0.0,
                scale=ctx.scale,
                **ctx.kernel_state,
            )
        return (*gradients[:3], None, None)


@contextmanager
def _ring_settings(dtype: torch.dtype) -> Iterator[None]:
    """Configure PyTorch's ring attention within the block: tokens in order, sums in fp32 or wider.

    PyTorch's load balancing would expect the tokens in another order, so it is switched off.
    """
    options = ring._cp_options
    before = (options.convert_to_f32, options.enable_load_balance, options.rotate_method)
    options.convert_to_f32 = dtype.itemsize < 4
    options.enable_load_balance = False
    options.rotate_method = ring._RotateMethod.ALL_TO_ALL
    try:
        yield
    finally:
        options.convert_to_f32, options.enable_load_balance, options.rotate_method = before
