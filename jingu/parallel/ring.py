"""Context parallelism that keeps the heads together: each rank's queries see the keys and values of all ranks.

Where no mask is needed these travel in a ring, a part at a time, through PyTorch's ring attention (Liu et al., 2023);
elsewhere (documents, windows, biases of positions, a dtype without such a kernel) they are gathered.

Shapes: B rows, T tokens of a row, C of them on a context rank, H heads, G key-value heads, K head size, S keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor.experimental._context_parallel import _attention as engine

from jingu.model.attention import Attention, CrossAttention, Mask, SelfAttention
from jingu.model.documents import Documents
from jingu.model.rotary import Rotary
from jingu.parallel.rows import Rows, chained

_ops = torch.ops.aten


def share_keys(part: Attention, rows: Rows, keys: Rows) -> None:
    """Let the queries of this context rank's tokens see the keys and values of all ranks, in place.

    Args:
        rows: those of the queries.
        keys: those that attention looks at.
    """
    replaced: Any = part
    replaced.recalled = partial(_recalled, rows, part)
    if isinstance(part, CrossAttention):
        for child in (part.k, part.v):
            child.forward = chained(child.forward, keys.row)  # type: ignore[method-assign]
        whole = part.attended
        replaced.attended = lambda q, k, v, mask, *, causal: whole(q, k, v, _own_rows(rows, mask), causal=causal)
    elif isinstance(part, SelfAttention):
        replaced.forward = partial(_with_own_positions, rows, part.forward)
        replaced.look = partial(_look, rows, part)


def _own_rows(rows: Rows, mask: Mask) -> Tensor | None:
    """A mask's rows for this rank's queries; one that only fills up sees all, as softmax over nothing has no value."""
    if isinstance(mask, Documents):
        mask = mask.mask()
    if mask is None or mask.shape[-2] == 1:
        return mask
    filled = F.pad(mask, (0, 0, 0, rows.filled(rows.tokens) - rows.tokens), value=mask.dtype == torch.bool)
    return filled.chunk(rows.context, -2)[rows.context_rank]


def _with_own_positions(
    rows: Rows, original: Callable[..., Tensor], x_BCD: Tensor, rotary: Rotary | None, *others: Any
) -> Tensor:
    if rotary is not None:
        cos, sin = (rows.of_context(table.movedim(-3, -1)).movedim(-1, -3) for table in rotary)
        rotary = cos, sin
    return original(x_BCD, rotary, *others)


def _look(rows: Rows, part: SelfAttention, q_BHCK: Tensor, k_BGCK: Tensor, v_BGCK: Tensor, mask: Mask) -> Tensor:
    """`SelfAttention.look` of this rank's queries at the keys of all ranks."""
    if part.causal and mask is None and _has_kernel(q_BHCK):
        groups = q_BHCK.shape[1] // k_BGCK.shape[1]
        k_BHCK, v_BHCK = (x.repeat_interleave(groups, 1) for x in (k_BGCK, v_BGCK))
        y: Tensor = _Ring.apply(q_BHCK, k_BHCK, v_BHCK, part.scale, rows.context_group)
        return part.output(y.transpose(1, 2).flatten(2))
    k_BGTK, v_BGTK = (rows.row(x.transpose(1, 2)).transpose(1, 2) for x in (k_BGCK, v_BGCK))
    if mask is None and part.causal and rows.tokens > 1:
        mask = torch.ones(rows.tokens, rows.tokens, dtype=torch.bool, device=q_BHCK.device).tril()
    return part.attended(q_BHCK, k_BGTK, v_BGTK, _own_rows(rows, mask), causal=False)


def _recalled(rows: Rows, part: Attention, look: Callable[..., Tensor], *x_BCHK: Tensor) -> Tensor:
    """`Attention.recalled` of the tokens of all ranks, which all have in their caches, for this rank's tokens."""
    y_BTHK = look(*(rows.row(x) for x in x_BCHK), part.scale)
    return part.output(rows.of_context(y_BTHK.movedim(1, -1)).movedim(-1, 1).flatten(2))


def _has_kernel(q: Tensor) -> bool:
    """Whether attention that also gives its log-sum-exp, by which the parts of a ring are added up, knows the dtype."""
    return q.device.type == "cpu" or q.dtype in (torch.bfloat16, torch.float16)


@contextmanager
def _options(dtype: torch.dtype) -> Iterator[None]:
    """PyTorch's settings of its ring, for as long as it runs: tokens in their order, sums in fp32 or wider."""
    options = engine._cp_options
    before = options.convert_to_f32, options.enable_load_balance, options.rotate_method
    options.convert_to_f32, options.enable_load_balance = dtype.itemsize < 4, False
    options.rotate_method = engine._RotateMethod.ALL_TO_ALL
    try:
        yield
    finally:
        options.convert_to_f32, options.enable_load_balance, options.rotate_method = before


class _Ring(torch.autograd.Function):
    """Causal attention of tokens that lie on the ranks of a group in their order."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float | None, group: ProcessGroup) -> Tensor:
        forward = _ops._scaled_dot_product_flash_attention
        if q.device.type == "cpu":
            forward = _ops._scaled_dot_product_flash_attention_for_cpu
        with _options(q.dtype):
            y, logsumexp, *rest = engine._templated_ring_attention(
                group, 2, forward, q.contiguous(), k, v, is_causal=True, dropout_p=0.0, scale=scale
            )
        y = y.to(q.dtype)
        ctx.save_for_backward(q, k, v, y, logsumexp)
        # What the kernel on CUDA wants back: lengths and the state of its random numbers, of which it drew none.
        names = ("cum_seq_q", "cum_seq_k", "max_q", "max_k", "philox_seed", "philox_offset")
        ctx.others = dict(zip(names, rest, strict=False)) if q.device.type != "cpu" else {}
        ctx.scale, ctx.group = scale, group
        return y

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, y, logsumexp = ctx.saved_tensors
        backward = _ops._scaled_dot_product_flash_attention_backward.default
        if q.device.type == "cpu":
            backward = _ops._scaled_dot_product_flash_attention_for_cpu_backward.default
        with _options(q.dtype):
            gradients = engine._templated_ring_attention_backward(
                ctx.group,
                2,
                backward,
                grad_out=upstream[0].contiguous(),
                grad_out_name="grad_out",
                query=q.contiguous(),
                key=k,
                value=v,
                out=y,
                logsumexp=logsumexp,
                is_causal=True,
                dropout_p=0.0,
                scale=ctx.scale,
                **ctx.others,
            )
        return (*gradients[:3], None, None)
