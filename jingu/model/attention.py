"""Attention to earlier tokens, to all tokens, or to an encoder's states; and its masks.

Shapes: B rows, T tokens, S keys (T and what a cache holds), D width, H heads, G key-value heads, K head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn

from jingu.model import spec as specs
from jingu.model.documents import Documents
from jingu.model.layers import Linear, make_norm
from jingu.model.products import attend
from jingu.model.prompts import DeepPromptLayer
from jingu.model.rotary import Rotary, rotate
from jingu.model.sharding import Table

SHARED = -2
"""In place of a document's number: tokens that every document sees, such as a prompt's."""

Mask = Tensor | Documents | None
"""Which keys a query sees: booleans, or what is added to the scores; its document; None: all, or earlier ones."""


class LayerCache(Protocol):
    """Keys and values of one layer, of earlier tokens and of an encoder's states."""

    def attend(self, q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, scale: float | None, first_head: int) -> Tensor:
        """Keep these keys and values, and let each token see its sequence up to itself: [B, T, H, K].

        Args:
            scale: multiplies the scores; None: 1/√K.
            first_head: of the whole model's heads, the first that is here.
        """

    def tokens(self, rows: int) -> int:
        """Of so many rows of a step, the first that are tokens; the others fill up, and what they give is not asked."""

    def read(self, k_BSGK: Tensor, v_BSGK: Tensor) -> None:
        """Keep keys and values of an encoder's states."""

    def attend_source(self, q_BTHK: Tensor, scale: float | None) -> Tensor:
        """Let each token see the states that its sequence's encoder gave."""


class Cache(Protocol):
    """Keys and values of earlier tokens, for generation: of many sequences, whose tokens of a step are in one row."""

    def begin(self, bias_NH: Tensor | None) -> None:
        """Take the biases of relative positions, before the first layer."""

    def rotary(self, positions_BT: Tensor, dtype: torch.dtype) -> Rotary | None:
        """Tables of rotary positions, where the model has them."""

    def layer(self, number: int) -> LayerCache:
        """The part of one block."""


class Attention(nn.Module):
    """What every multi-head or grouped-query attention has."""

    SHARDING: ClassVar[Table] = {"q": "heads", "k": "kv_heads", "v": "kv_heads", "output": "from_heads"}

    def __init__(self, model: specs.ModelSpec) -> None:
        super().__init__()
        spec, width = model.attention, model.width
        self.head_size = spec.head_size
        self.scale = None if spec.scaled else 1.0
        self.first_head = 0
        self.q = Linear(width, spec.heads * spec.head_size, bias=spec.qkv_bias)
        self.k = Linear(width, spec.kv_heads * spec.head_size, bias=spec.qkv_bias)
        self.v = Linear(width, spec.kv_heads * spec.head_size, bias=spec.qkv_bias)
        self.output = Linear(spec.heads * spec.head_size, width, bias=spec.output_bias)
        # The three of self-attention as one, where a model is arranged for inference.
        self.qkv: Linear | None = None
        self.sizes = [spec.heads, spec.kv_heads, spec.kv_heads]
        self.q_norm = make_norm(model.norm, spec.head_size) if spec.qk_norm else None
        self.k_norm = make_norm(model.norm, spec.head_size) if spec.qk_norm else None

    def heads(self, projected: Tensor, norm: nn.Module | None = None) -> Tensor:
        """[B, T, H, K], normalised."""
        # The number of heads is left open (-1): under tensor parallelism a rank holds only some of them.
        split = projected.view(*projected.shape[:-1], -1, self.head_size)
        return split if norm is None else norm(split)

    def attended(self, q_BHTK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, mask: Mask, *, causal: bool) -> Tensor:
        """[B, T, D]: what the queries see, through the output's matrix."""
        if isinstance(mask, Documents):
            y_BHTK = mask.attend(q_BHTK, k_BGSK, v_BGSK, self.scale)
        else:
            if mask is not None and mask.dim() > 2 and mask.shape[-3] > 1:  # one for each head of the whole
                mask = mask.narrow(-3, self.first_head, q_BHTK.shape[1])
            y_BHTK = attend(q_BHTK, k_BGSK, v_BGSK, mask, causal=causal, scale=self.scale)
        return self.output(y_BHTK.transpose(1, 2).flatten(2))

    def recalled(self, look: Callable[..., Tensor], *x_BTHK: Tensor) -> Tensor:
        """[B, T, D]: what a cache's `look` makes of queries (and keys and values), through the output's matrix."""
        return self.output(look(*x_BTHK, self.scale).flatten(2))


class SelfAttention(Attention):
    """Attention over earlier tokens; or, not causal, over all of them."""

    def __init__(self, model: specs.ModelSpec, *, causal: bool = True) -> None:
        super().__init__(model)
        self.causal = causal
        self.interleaved = isinstance(model.position, specs.RotaryPositions) and model.position.interleaved
        deep = model.adapter if model.prompts[not causal] else None
        self.prompt = DeepPromptLayer(deep, model) if isinstance(deep, specs.DeepPrompt) else None

    def forward(
        self,
        x_BTD: Tensor,
        rotary: Rotary | None,
        mask: Mask,
        cache: LayerCache | None,
        tokens_BT: Tensor | None = None,
    ) -> Tensor:
        """`tokens_BT` are for a block with a prompt."""
        q, k, v = self.turned(x_BTD, rotary)
        if self.prompt is not None and tokens_BT is not None:
            k, v = self.prompt(k, v, tokens_BT)
        if cache is not None:
            return self.recalled(partial(cache.attend, first_head=self.first_head), q, k, v)
        return self.look(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask)

    def turned(self, x_BTD: Tensor, rotary: Rotary | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [B, T, H or G, K], turned to their positions."""
        qkv, sizes = self.qkv, self.sizes
        if qkv is not None:
            whole = self.heads(qkv(x_BTD))
            if self.q_norm is None and rotary is not None:
                qk, v = whole.split_with_sizes([sizes[0] + sizes[1], sizes[2]], 2)
                q, k = rotate(qk, rotary, interleaved=self.interleaved).split_with_sizes(sizes[:2], 2)
                return q, k, v
            q, k, v = whole.split_with_sizes(sizes, 2)
            q, k = (x if norm is None else norm(x) for x, norm in ((q, self.q_norm), (k, self.k_norm)))
        else:
            q, k = self.heads(self.q(x_BTD), self.q_norm), self.heads(self.k(x_BTD), self.k_norm)
            v = self.heads(self.v(x_BTD))
        if rotary is not None:
            q, k = (rotate(part, rotary, interleaved=self.interleaved) for part in (q, k))
        return q, k, v

    def look(self, q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, mask: Mask) -> Tensor:
        """[B, T, D]: what the queries of tokens see of these."""
        return self.attended(q_BHTK, k_BGTK, v_BGTK, mask, causal=self.causal and mask is None)


class CrossAttention(Attention):
    """Attention to the states of an encoder; positions play no part in it."""

    def __init__(self, model: specs.ModelSpec) -> None:
        super().__init__(model)
        self.skipped = skipped_states(model)

    def forward(
        self, x_BTD: Tensor, states_BSD: Tensor | None, mask: Tensor | None, cache: LayerCache | None
    ) -> Tensor:
        """`states_BSD` may be None where the cache has their keys and values."""
        q = self.heads(self.q(x_BTD), self.q_norm)
        if states_BSD is not None:
            k, v = self.heads(self.k(states_BSD), self.k_norm), self.heads(self.v(states_BSD))
            k, v = k[:, self.skipped :], v[:, self.skipped :]
            if cache is None:
                q_BHTK, k_BGSK, v_BGSK = (x.transpose(1, 2) for x in (q, k, v))
                return self.attended(q_BHTK, k_BGSK, v_BGSK, mask, causal=False)
            cache.read(k, v)
        if cache is None:
            raise ValueError("neither an encoder's states nor a cache of them")
        return self.recalled(cache.attend_source, q)


def attention_mask(
    spec: specs.ModelSpec,
    positions_BT: Tensor,
    documents_BT: Tensor | None,
    dtype: torch.dtype,
    *,
    causal: bool = True,
    bias_NH: Tensor | None = None,
    reach_BT: Tensor | None = None,
) -> Mask:
    """Which of all tokens each token sees, where the kernel cannot say it by itself.

    Args:
        bias_NH: of relative positions, the bias of each bucket and head.
        reach_BT: first tokens of the row that a token sees besides those before it.

    Returns:
        None where it can; documents, where these are all there is to say; else booleans that broadcast to
        [B, H, T, S], or what is added to the scores. Four dims: of three, CPUs' kernel takes no mask.
    """
    tokens, window, prompted = positions_BT.shape[-1], spec.attention.window, any(spec.prompts)
    biased = bias_NH is not None or isinstance(spec.position, specs.AlibiPositions)
    if reach_BT is None and not biased and (window is None or tokens <= window):
        if documents_BT is None:
            return None
        if not prompted:
            return Documents.of(documents_BT, spec.attention.head_size, dtype, causal=causal)
    place_1T = torch.arange(tokens, device=positions_BT.device).unsqueeze(0)
    # One prompt stands right before each of the documents.
    own_BT = positions_BT.view(-1, tokens) if prompted and documents_BT is not None else place_1T
    distance_BTS = own_BT.unsqueeze(2) - own_BT.unsqueeze(1)
    seen_BTS = distance_BTS >= 0 if causal else torch.ones_like(distance_BTS, dtype=torch.bool)
    if reach_BT is not None:
        seen_BTS = seen_BTS | (place_1T.unsqueeze(1) < reach_BT.unsqueeze(2))
    if window is not None:
        seen_BTS = seen_BTS & (distance_BTS.abs() < window)
    if documents_BT is not None:
        same_BTS = documents_BT.unsqueeze(2) == documents_BT.unsqueeze(1)
        seen_BTS = seen_BTS & (same_BTS | (documents_BT == SHARED).unsqueeze(1) if prompted else same_BTS)
    bias = head_bias(spec, distance_BTS, dtype, bias_NH, causal=causal)
    return seen_BTS.unsqueeze(1) if bias is None else bias.masked_fill(~seen_BTS.unsqueeze(1), -torch.inf)


def score_bias(
    spec: specs.ModelSpec, distance: Tensor, seen: Tensor, dtype: torch.dtype, bias_NH: Tensor | None
) -> Tensor:
    """What is added to the scores of keys [..., T, S] so far before their queries, -inf of those that are not `seen` or
    outside of the window: [..., T, S], or [..., H, T, S]."""
    bias = head_bias(spec, distance, dtype, bias_NH, causal=True)
    if spec.attention.window is not None:
        seen = seen & (distance.abs() < spec.attention.window)
    if bias is None:
        return torch.zeros(distance.shape, dtype=dtype, device=distance.device).masked_fill(~seen, -torch.inf)
    return bias.masked_fill(~seen.unsqueeze(-3), -torch.inf)


def head_bias(
    spec: specs.ModelSpec, distance: Tensor, dtype: torch.dtype, bias_NH: Tensor | None, *, causal: bool
) -> Tensor | None:
    """Biases [..., H, T, S] of the scores at distances [..., T, S], where positions have such."""
    if isinstance(spec.position, specs.AlibiPositions):
        slopes = torch.tensor(alibi_slopes(spec.attention.heads), dtype=dtype, device=distance.device)
        return -slopes[:, None, None] * distance.abs().unsqueeze(-3)
    if bias_NH is not None and isinstance(spec.position, specs.RelativeBias):
        return bias_NH.to(dtype)[relative_buckets(spec.position, distance, causal=causal)].movedim(-1, -3)
    return None


def skipped_states(spec: specs.ModelSpec) -> int:
    """The first of an encoder's states that nothing looks at: a deep prompt's, which is keys and values alone."""
    return spec.prompts[1] if isinstance(spec.adapter, specs.DeepPrompt) else 0


def cross_mask(documents_BT: Tensor | None, source_documents_BS: Tensor | None) -> Tensor | None:
    """Which of an encoder's states each token sees: those of its document; without documents, all that are not
    padding. None: all. Booleans that broadcast to [B, H, T, S]."""
    if source_documents_BS is None:
        return None
    if documents_BT is None:
        return (source_documents_BS >= 0)[:, None, None, :]
    seen_BTS = documents_BT[:, :, None] == source_documents_BS[:, None, :]
    # A token whose document has no source (padding, say) sees everything, as softmax over nothing has no value.
    return (seen_BTS | ~seen_BTS.any(-1, keepdim=True)).unsqueeze(1)


def relative_buckets(spec: specs.RelativeBias, distance: Tensor, *, causal: bool) -> Tensor:
    """The bucket of each distance (of the query's place from the key's), as T5 counts them (Raffel et al., 2020).

    Where a token sees what follows it, the second half of the buckets is for that. Of either half, the first half
    holds one distance each; the rest grow in the ratio that brings the last one to the largest distance.
    """
    number = spec.buckets if causal else spec.buckets // 2
    exact = number // 2
    far = distance.clamp_min(0) if causal else distance.abs()
    # In fp32, as the models were trained: some distances lie on the border of two buckets.
    share = torch.log(far.clamp_min(1).float() / exact) / math.log(spec.max_distance / exact)
    grown = (exact + (share * (number - exact)).long()).clamp_max(number - 1)
    bucket = torch.where(far < exact, far, grown)
    return bucket if causal else bucket + (distance < 0) * number


def alibi_slopes(heads: int) -> list[float]:
    """2^(-8/n), its square and so on for n heads; where n is no power of two, every other one of the next fills up."""
    power = 1 << (heads.bit_length() - 1)
    slopes = [2 ** (-8 * number / power) for number in range(1, power + 1)]
    return slopes if power == heads else slopes + alibi_slopes(2 * power)[::2][: heads - power]
