"""Context parallelism with `context_method: ring`: each rank has all heads for its tokens.

Keys and values travel around a ring, one rank's part at a time (PyTorch's ring attention; Liu et al., 2023). They are
all-gathered instead if attention needs a mask (documents, windows, position biases), if it is not causal, or if the
kernel does not support the dtype.

Shapes: B rows, T tokens of a row, C of them on a context rank, H heads, G key-value heads, K head dim, S keys.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from jingu.compat.torch_ring_attention import ring_attention
from jingu.model.attention import Attention, AttentionMask, BlockContext, CrossAttention, SelfAttention
from jingu.model.document_mask import DocumentMask
from jingu.parallel.token_sharding import TokenSharding, compose


def apply_ring_attention(attention: Attention, sharding: TokenSharding, key_sharding: TokenSharding) -> None:
    """Make an attention module attend from the tokens of this context rank to the keys and values of all ranks.

    Wraps the methods of `attention` in place.

    Args:
        sharding: how the tokens of the queries are divided.
        key_sharding: how the tokens of keys and values are divided: in cross-attention, those of the encoder.
    """
    module: Any = attention
    module.attend_cache = partial(_attend_cache, sharding, attention)
    if isinstance(attention, CrossAttention):
        for projection in (attention.k, attention.v):
            projection.forward = compose(projection.forward, key_sharding.gather_context)  # type: ignore[method-assign]
        attend = attention.attend
        module.attend = lambda q, k, v, mask, *, causal: attend(q, k, v, _own_rows(sharding, mask), causal=causal)
    elif isinstance(attention, SelfAttention):
        module.forward = partial(_with_own_positions, sharding, attention.forward)
        module.attend_tokens = partial(_attend_tokens, sharding, attention)


def _own_rows(sharding: TokenSharding, mask: AttentionMask) -> Tensor | None:
    """Return the rows of a mask that belong to this rank's queries.

    Rows of padding may attend to all keys: the softmax over no keys is NaN.
    """
    if isinstance(mask, DocumentMask):
        mask = mask.mask()
    if mask is None or mask.shape[-2] == 1:
        return mask
    padding = sharding.padded_length(sharding.tokens) - sharding.tokens
    padded = F.pad(mask, (0, 0, 0, padding), value=mask.dtype == torch.bool)
    return padded.chunk(sharding.context, -2)[sharding.context_rank]


def _with_own_positions(
    sharding: TokenSharding, original: Callable[..., Tensor], x_BCD: Tensor, context: BlockContext, *others: Any
) -> Tensor:
    """Call `SelfAttention.forward` with the rotary tables and query factors of this rank's tokens."""

    def share(table: Tensor) -> Tensor:
        return sharding.shard_context(table.movedim(-3, -1)).movedim(-1, -3)

    if context.rotary is not None:
        cos, sin = map(share, context.rotary)
        context = context._replace(rotary=(cos, sin))
    if context.query_factor is not None:
        context = context._replace(query_factor=share(context.query_factor))
    return original(x_BCD, context, *others)


def _attend_tokens(
    sharding: TokenSharding,
    attention: SelfAttention,
    q_BHCK: Tensor,
    k_BGCK: Tensor,
    v_BGCK: Tensor,
    mask: AttentionMask,
) -> Tensor:
    """Replace `SelfAttention.attend_tokens`: this rank's queries attend to the keys of all ranks."""
    if attention.causal and mask is None and attention.softcap is None and _has_ring_kernel(q_BHCK):
        # PyTorch's ring attention does not support grouped-query attention, so repeat keys and values.
        groups = q_BHCK.shape[1] // k_BGCK.shape[1]
        k_BHCK = k_BGCK.repeat_interleave(groups, 1)
        v_BHCK = v_BGCK.repeat_interleave(groups, 1)
        y_BHCK = ring_attention(q_BHCK, k_BHCK, v_BHCK, attention.scale, sharding.context_group)
        return attention.output(y_BHCK.transpose(1, 2).flatten(2))
    # Otherwise, gather all keys and values, and use the mask rows of this rank's queries.
    k_BGTK, v_BGTK = (sharding.gather_context(x.transpose(1, 2)).transpose(1, 2) for x in (k_BGCK, v_BGCK))
    if mask is None and attention.causal and sharding.tokens > 1:
        mask = torch.ones(sharding.tokens, sharding.tokens, dtype=torch.bool, device=q_BHCK.device).tril()
    return attention.attend(q_BHCK, k_BGTK, v_BGTK, _own_rows(sharding, mask), causal=False)


def _attend_cache(
    sharding: TokenSharding, attention: Attention, cache_attention: Callable[..., Tensor], *x_BCHK: Tensor
) -> Tensor:
    """Replace `Attention.attend_cache`: the KV cache of every rank holds the tokens of all ranks."""
    y_BTHK = cache_attention(*(sharding.gather_context(x) for x in x_BCHK), attention.scale)
    return attention.output(sharding.shard_context(y_BTHK.movedim(1, -1)).movedim(-1, 1).flatten(2))


def _has_ring_kernel(q: Tensor) -> bool:
    """Return whether ring attention's kernel supports the dtype.

    The ring needs a kernel that also returns the log-sum-exp, with which it combines the parts.
    """
    return q.device.type == "cpu" or q.dtype in (torch.bfloat16, torch.float16)
