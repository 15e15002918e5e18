"""Attention to earlier tokens, to all tokens, or to an encoder's states; and its masks.

Shapes: B rows, T tokens, S keys (T and what a cache holds), D width, H heads, G key-value heads, K head size.
"""

from __future__ import annotations

import math
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
    """Keys and values of one layer's earlier tokens."""

    source: tuple[Tensor, Tensor] | None
    """Those of an encoder's states, computed once."""

    def extend(self, k_BGTK: Tensor, v_BGTK: Tensor) -> tuple[Tensor, Tensor]:
        """Append these, and return all keys and values [B, G, S, K]."""


class Cache(Protocol):
    """Keys and values of earlier tokens, for generation."""

    length: int
    """Tokens held."""

    def layer(self, number: int) -> LayerCache:
        """The part of one block."""

    def advance(self, tokens: int) -> None:
        """Count tokens as held, once every layer has them."""


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
        self.q_norm = make_norm(model.norm, spec.head_size) if spec.qk_norm else None
        self.k_norm = make_norm(model.norm, spec.head_size) if spec.qk_norm else None

    def heads(self, projected: Tensor, norm: nn.Module | None = None) -> Tensor:
        """[B, T, H, K], normalised."""
        # The number of heads is left open (-1): under tensor parallelism a rank holds only some of them.
        split = projected.unflatten(-1, (-1, self.head_size))
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
        q, k, v = (
            self.heads(self.q(x_BTD), self.q_norm),
            self.heads(self.k(x_BTD), self.k_norm),
            self.heads(self.v(x_BTD)),
        )
        if rotary is not None:
            q, k = (rotate(part, rotary, interleaved=self.interleaved) for part in (q, k))
        if self.prompt is not None and tokens_BT is not None:
            k, v = self.prompt(k, v, tokens_BT)
        return self.look(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask, cache)

    def look(self, q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, mask: Mask, cache: LayerCache | None) -> Tensor:
        """[B, T, D]: what the queries of tokens see of these and of those in the cache."""
        k_BGSK, v_BGSK = (k_BGTK, v_BGTK) if cache is None else cache.extend(k_BGTK, v_BGTK)
        # Without a mask, either queries and keys are the same tokens, or one new token sees all that came before.
        causal = self.causal and mask is None and q_BHTK.shape[2] == k_BGSK.shape[2]
        return self.attended(q_BHTK, k_BGSK, v_BGSK, mask, causal=causal)


class CrossAttention(Attention):
    """Attention to the states of an encoder; positions play no part in it."""

    def __init__(self, model: specs.ModelSpec) -> None:
        super().__init__(model)
        self.skipped = skipped_states(model)

    def forward(
        self, x_BTD: Tensor, states_BSD: Tensor | None, mask: Tensor | None, cache: LayerCache | None
    ) -> Tensor:
        """`states_BSD` may be None where the cache has their keys and values."""
        held = None if cache is None else cache.source
        if held is None:
            if states_BSD is None:
                raise ValueError("neither an encoder's states nor a cache of them")
            k, v = self.heads(self.k(states_BSD), self.k_norm), self.heads(self.v(states_BSD))
            k, v = k[:, self.skipped :], v[:, self.skipped :]
            held = k.transpose(1, 2), v.transpose(1, 2)
            if cache is not None:
                cache.source = held
        q_BHTK = self.heads(self.q(x_BTD), self.q_norm).transpose(1, 2)
        return self.attended(q_BHTK, *held, mask, causal=False)


def attention_mask(
    spec: specs.ModelSpec,
    positions_BT: Tensor,
    past: int,
    documents_BT: Tensor | None,
    dtype: torch.dtype,
    *,
    causal: bool = True,
    bias_NH: Tensor | None = None,
    reach_BT: Tensor | None = None,
) -> Mask:
    """Which of all keys each new query sees, where the kernel cannot say it by itself.

    Args:
        bias_NH: of relative positions, the bias of each bucket and head.
        reach_BT: first tokens of the row that a token sees besides those before it.

    Returns:
        None where it can; documents, where these are all there is to say; else booleans that broadcast to
        [B, H, T, S], or what is added to the scores.
    """
    tokens, device = positions_BT.shape[-1], positions_BT.device
    window, alibi = spec.attention.window, isinstance(spec.position, specs.AlibiPositions)
    narrow = window is not None and past + tokens > window
    all_seen = tokens == 1 or not past or not causal
    if documents_BT is None and reach_BT is None and not narrow and not alibi and bias_NH is None and all_seen:
        return None
    plain = not (narrow or alibi or any(spec.prompts)) and bias_NH is None and reach_BT is None
    if documents_BT is not None and plain:
        return Documents.of(documents_BT, spec.attention.head_size, dtype, causal=causal)
    queries = torch.arange(past, past + tokens, device=device)
    distance_TS = queries[:, None] - torch.arange(past + tokens, device=device)
    if documents_BT is not None and any(spec.prompts):  # one prompt stands right before each of the documents
        distance_TS = (positions_BT[..., :, None] - positions_BT[..., None, :]).unsqueeze(-3)
    seen = distance_TS >= 0 if causal else torch.ones_like(distance_TS, dtype=torch.bool)
    if reach_BT is not None:
        seen = seen | (torch.arange(tokens, device=device) < reach_BT.unsqueeze(-1)).unsqueeze(1)
    if window is not None:
        seen &= distance_TS.abs() < window
    if documents_BT is not None:
        keys_B1S = documents_BT[:, None, :]
        same = documents_BT[:, :, None] == keys_B1S
        seen = seen & (same | (keys_B1S == SHARED) if any(spec.prompts) else same).unsqueeze(1)
    if alibi:
        slopes = torch.tensor(alibi_slopes(spec.attention.heads), dtype=dtype, device=device)
        return (-slopes[:, None, None] * distance_TS.abs()).masked_fill(~seen, -torch.inf)
    if bias_NH is not None and isinstance(spec.position, specs.RelativeBias):
        bias = bias_NH.to(dtype)[relative_buckets(spec.position, distance_TS, causal=causal)].movedim(-1, -3)
        return (bias.squeeze(1) if bias.dim() == 5 else bias).masked_fill(~seen, -torch.inf)
    return seen


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
