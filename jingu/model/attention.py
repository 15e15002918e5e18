"""Self-attention (causal or full) and cross-attention, with their masks and position biases.

Shapes: B rows, T tokens, S keys, D hidden size, H heads, G key-value heads, K head size, V size of a head's values,
F = H · V, N buckets of distances.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from jingu.model.adapter_specs import DeepPrompt
from jingu.model.components import AlibiPositions, LayerSpec, RelativeBias, RotaryPositions
from jingu.model.document_mask import DocumentMask, same_document
from jingu.model.inputs import LayerKVCache
from jingu.model.layers import (
    Linear,
    Vector,
    apply_batch_invariant,
    build_linear,
    build_norm,
    build_query_norm,
    soft_cap,
)
from jingu.model.matmul_kernels import dot_product_attention
from jingu.model.part_spec import Rows, styles
from jingu.model.parts import attention_rows
from jingu.model.prompt_tuning import DeepPromptLayer
from jingu.model.rotary import RotaryTables, apply_rotary
from jingu.model.spec import ModelSpec

# Which keys a query attends to: a tensor of booleans or of biases that are added to the scores, a mask of documents, or
# None for plain causal (or full) attention.
AttentionMask = Tensor | DocumentMask | None
KeysAndValues = tuple[Tensor, Tensor]


class BlockContext(NamedTuple):
    """The data that all blocks of the same kind of a stack share in one forward pass.

    Attributes:
        rotary: rotary tables of the positions; None if the layer has none.
        shared_kv: keys [B, T, G, K] and values [B, T, G, V] that a layer has from one before it; None: its own.
        layer_inputs: [B, T, P] the vectors that a layer gets for each token; None: the model has none.
        query_factor: factors [B or 1, T, 1, 1] of the queries; None: the layer has none.
        mask: mask of self-attention; unused with a cache.
        starts: [B, T] whether a document starts at a token, for mixers with a state; None: nowhere.
        document_parents: [B, T] document of each token, and the one that it continues, for mixers with a state; None
            if no document continues another one.
        encoder_states: [B, S, D] final hidden states of the encoder; None if there is no encoder, or if a cache has
            their keys and values.
        encoder_mask: which of these states each token attends to; None: all.
        tokens: [B, T] token ids, for blocks with virtual tokens.
        dropout_seeds: [B, T] dropout seeds of the tokens; see `Inputs`.
        source_dropout_seeds: [B, S] dropout seeds of the encoder's tokens.
    """

    # A tuple rather than a dataclass: FSDP and activation checkpointing look for tensors with gradients in it.
    rotary: RotaryTables | None = None
    shared_kv: KeysAndValues | None = None
    layer_inputs: Tensor | None = None
    query_factor: Tensor | None = None
    mask: AttentionMask = None
    starts: Tensor | None = None
    document_parents: tuple[Tensor, Tensor] | None = None
    encoder_states: Tensor | None = None
    encoder_mask: Tensor | None = None
    tokens: Tensor | None = None
    dropout_seeds: Tensor | None = None
    source_dropout_seeds: Tensor | None = None


class Attention(nn.Module):
    """Multi-head or grouped-query attention: the projections and methods that self- and cross-attention share."""

    def __init__(self, model: ModelSpec, layer: LayerSpec) -> None:
        super().__init__()
        spec = layer.attention
        rows = attention_rows(model, layer)
        self.sharding = styles(rows)
        self.head_dim = spec.head_dim
        self.scale = spec.scale if spec.scale is not None or spec.scale_scores else 1.0
        if self.scale == spec.head_dim**-0.5:
            self.scale = None  # the default, which all kernels support
        self.softcap = spec.softcap
        self.value_dim, self.value_scale = spec.value_size, spec.value_scale
        self.input_scale, self.key_scale, self.output_scale = spec.input_scale, spec.key_scale, spec.output_scale
        self.norm_width, self.norm_last = spec.qk_norm_width, spec.qk_norm_after_rotary
        # Index of this rank's first head in the whole model. Tensor and Ulysses parallelism set it.
        self.first_head = 0
        self.sizes = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]
        self.build_projections(rows)
        self.gate = build_linear(rows["gate"]) if "gate" in rows else None
        self.gate_width = spec.gate_width
        self.output = build_linear(rows["output"])
        self.sinks = Vector(rows["sinks"]) if "sinks" in rows else None
        norm = spec.head_norm(layer.norm)
        has_norms = (spec.qk_norm, spec.qk_norm and not spec.shares_kv)
        self.q_norm, self.k_norm = (
            build_query_norm(norm, spec.qk_norm_width, number, spec.head_dim) if has_norm else None
            for number, has_norm in zip(self.sizes[:2], has_norms, strict=True)
        )
        value_norm = spec.own_value_norm(layer.norm)
        self.value_norm = None if value_norm is None else build_norm(value_norm, spec.value_size)

    def build_projections(self, rows: Rows) -> None:
        """Create the projections of queries, keys and values."""
        self.q = build_linear(rows["q"])
        # Layers that share the keys and values of another one have no projections of these.
        self.k, self.v = (build_linear(rows[name]) if name in rows else None for name in ("k", "v"))
        # The three projections of self-attention as one matrix, if the model was prepacked for inference.
        self.qkv: Linear | None = None

    def split_heads(self, projected: Tensor, norm: nn.Module | None = None) -> Tensor:
        """Split [B, T, H · K] into heads [B, T, H, K], and normalize them if there is a `norm`."""
        if norm is not None and self.norm_width != "head":
            projected = norm(projected)
            norm = None
        # The number of heads is left open (-1): under tensor parallelism a rank holds only some of them.
        split = projected.view(*projected.shape[:-1], -1, self.head_dim)
        return split if norm is None else norm(split)

    def split_values(self, projected: Tensor) -> Tensor:
        """Split [B, T, G · V] into the values of heads [B, T, G, V], multiplied by their scale."""
        split = projected.view(*projected.shape[:-1], -1, self.value_dim)
        if self.value_norm is not None:
            split = self.value_norm(split)
        return split if self.value_scale == 1.0 else split * self.value_scale

    def attend(self, q_BHTK: Tensor, k_BGSK: Tensor, v_BGSV: Tensor, mask: AttentionMask, *, causal: bool) -> Tensor:
        """Return [B, T, F]: attention of the queries to the keys, before the output projection."""
        scale = self.scale
        if self.softcap is not None or self.sinks is not None:
            return self._attend_with_scores(q_BHTK, k_BGSK, v_BGSV, mask, causal=causal)
        if k_BGSK.shape[-1] != v_BGSV.shape[-1]:
            # The fast kernels need keys and values of one size.
            scale = self.head_dim**-0.5 if scale is None else scale
            q_BHTK, k_BGSK, v_BGSV = pad_to_one_size(q_BHTK, k_BGSK, v_BGSV)
        if isinstance(mask, DocumentMask):
            y_BHTV = mask.attend(q_BHTK, k_BGSK, v_BGSV, scale)
        else:
            mask = self._own_heads(mask, q_BHTK.shape[1])
            y_BHTV = dot_product_attention(q_BHTK, k_BGSK, v_BGSV, mask, causal=causal, scale=scale)
        return y_BHTV[..., : self.value_dim].transpose(1, 2).flatten(2)

    def _attend_with_scores(
        self, q_BHTK: Tensor, k_BGSK: Tensor, v_BGSV: Tensor, mask: AttentionMask, *, causal: bool
    ) -> Tensor:
        """Compute `attend` for layers whose scores have a soft cap or sinks, which no kernel of PyTorch supports."""
        if isinstance(mask, DocumentMask):
            mask = mask.mask()
        mask = self._own_heads(mask, q_BHTK.shape[1])
        if mask is None and causal:
            tokens = q_BHTK.shape[2]
            mask = torch.ones(tokens, tokens, dtype=torch.bool, device=q_BHTK.device).tril()
        sinks_H11 = None
        if self.sinks is not None:
            sinks_H11 = self.rank_sinks(q_BHTK.shape[1]).view(-1, 1, 1)
        y_BHTV = scored_attention(q_BHTK, k_BGSK, v_BGSV, mask, self.scale, self.softcap, sinks_H11)
        return y_BHTV.transpose(1, 2).flatten(2)

    def _own_heads(self, mask: Tensor | None, heads: int) -> Tensor | None:
        """Return the part of a mask of all heads of the model that belongs to this rank's heads."""
        if mask is not None and mask.dim() > 2 and mask.shape[-3] > 1:
            return mask.narrow(-3, self.first_head, heads)
        return mask

    def rank_sinks(self, heads: int) -> Tensor:
        """Return the sinks [H] of the heads that this rank computes."""
        assert self.sinks is not None
        sinks: Tensor = self.sinks.weight
        # Ulysses divides the heads of a rank of `tensor` further.
        return sinks if len(sinks) == heads else sinks.narrow(0, self.first_head % len(sinks), heads)

    def attend_cache(self, cache_attention: Callable[..., Tensor], *x_BTHK: Tensor) -> Tensor:
        """Return [B, T, F]: the result of a cache's attention method, before the output projection.

        Args:
            cache_attention: `LayerKVCache.attend` or `LayerKVCache.attend_source`.
            x_BTHK: queries; for self-attention also keys and values.
        """
        return cache_attention(*x_BTHK, self.scale).flatten(2)


class SelfAttention(Attention):
    """Attention of tokens to earlier tokens (causal), or to all tokens of the row (in an encoder)."""

    def __init__(self, model: ModelSpec, layer: LayerSpec, *, causal: bool = True) -> None:
        super().__init__(model, layer)
        self.causal = causal
        self.returns_kv = model.has_shared_kv
        self.interleaved = isinstance(layer.position, RotaryPositions) and layer.position.interleaved
        self.prompt = None
        if model.prompts[not causal] and isinstance(model.adapter, DeepPrompt):
            self.prompt = DeepPromptLayer(model.adapter, model, layer)

    def forward(
        self, x_BTD: Tensor, context: BlockContext, cache: LayerKVCache | None = None
    ) -> Tensor | tuple[Tensor, Tensor, Tensor]:
        """Return [B, T, D] and, in models whose layers share them, keys and values. With a cache, tokens attend to the
        keys and values that it stores, too."""
        if context.shared_kv is not None:
            q_BTHK, (k_BTGK, v_BTGV) = self.project_query(x_BTD, context.rotary), context.shared_kv
        else:
            q_BTHK, k_BTGK, v_BTGV = self.project_qkv(x_BTD, context.rotary)
        y_BTD = self._attend_and_project(x_BTD, q_BTHK, k_BTGK, v_BTGV, context, cache)
        return (y_BTD, k_BTGK, v_BTGV) if self.returns_kv else y_BTD

    def _attend_and_project(
        self,
        x_BTD: Tensor,
        q_BTHK: Tensor,
        k_BTGK: Tensor,
        v_BTGV: Tensor,
        context: BlockContext,
        cache: LayerKVCache | None,
    ) -> Tensor:
        """Return [B, T, D]: attention and its output projection."""
        if context.query_factor is not None:
            q_BTHK = (q_BTHK * context.query_factor).to(q_BTHK.dtype)
        if self.prompt is not None and context.tokens is not None:
            k_BTGK, v_BTGV = self.prompt(k_BTGK, v_BTGV, context.tokens)
        if cache is not None:
            sinks_H = None if self.sinks is None else self.rank_sinks(q_BTHK.shape[2])
            attend = partial(cache.attend, first_head=self.first_head, sinks_H=sinks_H)
            return self.project_output(self.attend_cache(attend, q_BTHK, k_BTGK, v_BTGV), x_BTD)
        q_BHTK, k_BGTK, v_BGTV = (x.transpose(1, 2) for x in (q_BTHK, k_BTGK, v_BTGV))
        return self.project_output(self.attend_tokens(q_BHTK, k_BGTK, v_BGTV, context.mask), x_BTD)

    def project_output(self, y_BTF: Tensor, x_BTD: Tensor) -> Tensor:
        """Return [B, T, D]: the output projection of the result of attention, multiplied by its gate if it has one."""
        if self.gate is not None:
            gate = apply_batch_invariant(torch.sigmoid, self.gate(x_BTD))
            # Each element of the gate multiplies as many adjacent channels.
            y_BTF = (y_BTF.unflatten(-1, (-1, self.gate_width)) * gate.unsqueeze(-1)).flatten(2)
        output: Tensor = self.output(y_BTF)
        return output if self.output_scale == 1.0 else output * self.output_scale

    def project_query(self, x_BTD: Tensor, rotary: RotaryTables | None) -> Tensor:
        """Return the queries [B, T, H, K] of a layer that has no keys and values of its own."""
        x_BTD = x_BTD if self.input_scale == 1.0 else x_BTD * self.input_scale
        q_BTHK = self.split_heads(self.q(x_BTD), None if self.norm_last else self.q_norm)
        q_BTHK = q_BTHK if rotary is None else apply_rotary(q_BTHK, rotary, interleaved=self.interleaved)
        return self.q_norm(q_BTHK) if self.norm_last and self.q_norm is not None else q_BTHK

    def project_qkv(self, x_BTD: Tensor, rotary: RotaryTables | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [B, T, H, K], keys [B, T, G, K] and values [B, T, G, V], with rotary positions."""
        before = (None, None) if self.norm_last else (self.q_norm, self.k_norm)
        if self.input_scale != 1.0:
            x_BTD = x_BTD * self.input_scale
        if self.qkv is None:
            q_BTHK = self.split_heads(self.q(x_BTD), before[0])
            assert self.k is not None
            keys = self.k(x_BTD)
            k_BTGK = self.split_heads(keys, before[1])
            if self.key_scale != 1.0:
                k_BTGK = k_BTGK * self.key_scale
            v_BTGV = self.split_values(keys if self.v is None else self.v(x_BTD))
        else:
            heads, kv_heads, _ = self.sizes
            qkv = self.split_heads(self.qkv(x_BTD))
            if self.q_norm is None and rotary is not None:
                # Queries and keys are adjacent in the joined projection, so rotate both at once.
                qk, v_BTGV = qkv.split_with_sizes([heads + kv_heads, kv_heads], 2)
                qk = apply_rotary(qk, rotary, interleaved=self.interleaved)
                q_BTHK, k_BTGK = qk.split_with_sizes([heads, kv_heads], 2)
                return q_BTHK, k_BTGK, v_BTGV
            q_BTHK, k_BTGK, v_BTGV = qkv.split_with_sizes(self.sizes, 2)
            if before[0] is not None:
                q_BTHK, k_BTGK = (
                    self.split_heads(x.flatten(2), norm) for x, norm in ((q_BTHK, before[0]), (k_BTGK, before[1]))
                )
        if rotary is not None:
            q_BTHK = apply_rotary(q_BTHK, rotary, interleaved=self.interleaved)
            k_BTGK = apply_rotary(k_BTGK, rotary, interleaved=self.interleaved)
        if self.norm_last and self.q_norm is not None and self.k_norm is not None:
            q_BTHK = self.q_norm(q_BTHK)
            k_BTGK = self.k_norm(k_BTGK)
        return q_BTHK, k_BTGK, v_BTGV

    def attend_tokens(self, q_BHTK: Tensor, k_BGTK: Tensor, v_BGTV: Tensor, mask: AttentionMask) -> Tensor:
        """Return [B, T, F]: attention of the tokens to each other."""
        return self.attend(q_BHTK, k_BGTK, v_BGTV, mask, causal=self.causal and mask is None)


class CrossAttention(Attention):
    """Attention to the hidden states of an encoder, without positions."""

    def __init__(self, model: ModelSpec, layer: LayerSpec) -> None:
        super().__init__(model, layer)
        self.skipped = num_skipped_states(model)

    def forward(self, x_BTD: Tensor, context: BlockContext, cache: LayerKVCache | None = None) -> Tensor:
        """Return [B, T, D]. A cache stores the keys and values of the encoder's states in the step that provides them.

        Raises:
            ValueError: there are neither an encoder's states nor a cache.
        """
        q_BTHK = self.split_heads(self.q(x_BTD), self.q_norm)
        states_BSD = context.encoder_states
        if states_BSD is not None:
            assert self.k is not None
            assert self.v is not None
            k_BSGK = self.split_heads(self.k(states_BSD), self.k_norm)[:, self.skipped :]
            v_BSGK = self.split_heads(self.v(states_BSD))[:, self.skipped :]
            if cache is None:
                q_BHTK, k_BGSK, v_BGSK = (x.transpose(1, 2) for x in (q_BTHK, k_BSGK, v_BSGK))
                return self.output(self.attend(q_BHTK, k_BGSK, v_BGSK, context.encoder_mask, causal=False))
            cache.read(k_BSGK, v_BSGK)
        if cache is None:
            raise ValueError("cross-attention needs an encoder's states, or a cache of them")
        return self.output(self.attend_cache(cache.attend_source, q_BTHK))


def pad_to_one_size(*x: Tensor) -> list[Tensor]:
    """Return tensors [..., K] padded with zeros to the largest of their last dims."""
    size = max(tensor.shape[-1] for tensor in x)
    return [tensor if tensor.shape[-1] == size else pad(tensor, (0, size - tensor.shape[-1])) for tensor in x]


def scored_attention(
    q_BHTK: Tensor,
    k_BGSK: Tensor,
    v_BGSV: Tensor,
    mask: Tensor | None,
    scale: float | None,
    cap: float | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return attention [B, H, T, V] whose scaled scores have a soft cap, or with sinks. It stores the scores.

    Args:
        mask: booleans (true where a query attends to a key) or biases that are added to the capped scores; None: all.
        cap: the soft cap; None: there is none.
        sinks: scores that broadcast to [B, H, T, 1]. They join the softmax, and have no value.
    """
    wide = torch.promote_types(q_BHTK.dtype, torch.float32)
    scale = q_BHTK.shape[-1] ** -0.5 if scale is None else scale
    repeats = q_BHTK.shape[1] // k_BGSK.shape[1]
    k_BHSK, v_BHSV = (x.repeat_interleave(repeats, 1) if repeats > 1 else x for x in (k_BGSK, v_BGSV))
    scores_BHTS = (q_BHTK @ k_BHSK.transpose(2, 3)).to(wide) * scale
    if cap is not None:
        scores_BHTS = soft_cap(scores_BHTS, cap)
    if mask is not None:
        is_boolean = mask.dtype == torch.bool
        scores_BHTS = scores_BHTS.masked_fill(~mask, -torch.inf) if is_boolean else scores_BHTS + mask
    if sinks is None:
        return scores_BHTS.softmax(-1).to(v_BHSV.dtype) @ v_BHSV
    sinks_BHT1 = sinks.to(wide).expand(*scores_BHTS.shape[:-1], 1)
    probabilities = torch.cat((scores_BHTS, sinks_BHT1), -1).softmax(-1)
    return probabilities[..., :-1].to(v_BHSV.dtype) @ v_BHSV


def has_biases(spec: ModelSpec) -> bool:
    """Return whether the positions of some layers are biases of attention scores."""
    return any(isinstance(layer.position, AlibiPositions | RelativeBias) for layer in spec.kinds)


def mask_key(layer: LayerSpec) -> Hashable:
    """Return a key that is equal for layers with the same attention mask."""
    has_bias = isinstance(layer.position, AlibiPositions | RelativeBias)
    part = layer.attention
    return part.sliding_window, part.chunk_size, part.head_dim, part.num_heads if has_bias else None


def attention_mask(
    layer: LayerSpec,
    positions_BT: Tensor,
    documents_BT: Tensor | None,
    dtype: torch.dtype,
    *,
    causal: bool = True,
    parents_BT: Tensor | None = None,
    bias_NH: Tensor | None = None,
    prefix_lengths_BT: Tensor | None = None,
) -> AttentionMask:
    """Return the mask of a layer's self-attention without a cache, in the cheapest form that suffices.

    Args:
        dtype: dtype of the biases in the mask.
        causal: whether tokens attend to earlier tokens only.
        parents_BT: the document that each token's document continues; see `Inputs`.
        bias_NH: relative position biases per bucket and head.
        prefix_lengths_BT: number of first tokens of the row that a token attends to besides earlier tokens.

    Returns:
        None if plain causal (or full) attention suffices; a `DocumentMask` if only documents restrict it; otherwise
        booleans, or biases that are added to the scores, that broadcast to [B, H, T, S]. These have four dims, because
        the CPU kernel does not accept three.
    """
    tokens = positions_BT.shape[-1]
    window, chunk = layer.attention.sliding_window, layer.attention.chunk_size
    has_bias = bias_NH is not None or isinstance(layer.position, AlibiPositions)

    # The cheap cases, in which no mask of size T² is needed.
    # Rows whose positions do not begin at zero may cross the border of a chunk anywhere.
    window_sees_all = (window is None or tokens <= window) and chunk is None
    if prefix_lengths_BT is None and not has_bias and window_sees_all:
        if documents_BT is None:
            return None
        return DocumentMask.of(documents_BT, layer.attention.head_dim, dtype, causal=causal, parents_BT=parents_BT)

    # Distances count places in the row. If documents continue others, they count positions: several answers may have
    # the same positions after one prompt.
    place_1T = torch.arange(tokens, device=positions_BT.device).unsqueeze(0)
    own_BT = place_1T if parents_BT is None else positions_BT.view(-1, tokens)
    distance_BTS = own_BT.unsqueeze(2) - own_BT.unsqueeze(1)

    # A token attends to earlier tokens and the prefix, limited to the window and to its own document and its parent.
    seen_BTS = distance_BTS >= 0 if causal else torch.ones_like(distance_BTS, dtype=torch.bool)
    if prefix_lengths_BT is not None:
        seen_BTS = seen_BTS | (place_1T.unsqueeze(1) < prefix_lengths_BT.unsqueeze(2))
    if window is not None:
        seen_BTS = seen_BTS & (distance_BTS.abs() < window)
    if chunk is not None:
        chunk_BT = positions_BT.view(-1, tokens) // chunk
        seen_BTS = seen_BTS & (chunk_BT.unsqueeze(2) == chunk_BT.unsqueeze(1))
    if documents_BT is not None:
        seen_BTS = seen_BTS & same_document(documents_BT, parents_BT)

    bias = position_bias(layer, distance_BTS, dtype, bias_NH, causal=causal)
    if bias is None:
        return seen_BTS.unsqueeze(1)
    return bias.masked_fill(~seen_BTS.unsqueeze(1), -torch.inf)


def attention_bias(
    layer: LayerSpec, positions: Tensor, keys: Tensor, seen: Tensor, dtype: torch.dtype, bias_NH: Tensor | None
) -> Tensor:
    """Return the biases that are added to the attention scores in generation.

    Args:
        positions: [..., T, 1] positions of the queries.
        keys: [S] positions of the keys.
        seen: [..., T, S] whether a query attends to a key, before the sliding window is applied.
        bias_NH: relative position biases per bucket and head.

    Returns:
        [..., T, S], or [..., H, T, S] if positions have biases; -inf for keys that a query does not attend to.
    """
    distance = positions - keys
    bias = position_bias(layer, distance, dtype, bias_NH, causal=True)
    if layer.attention.chunk_size is not None:
        seen = seen & (positions // layer.attention.chunk_size == keys // layer.attention.chunk_size)
    if layer.attention.sliding_window is not None:
        seen = seen & (distance.abs() < layer.attention.sliding_window)
    if bias is None:
        return torch.zeros(distance.shape, dtype=dtype, device=distance.device).masked_fill(~seen, -torch.inf)
    return bias.masked_fill(~seen.unsqueeze(-3), -torch.inf)


def position_bias(
    layer: LayerSpec, distance: Tensor, dtype: torch.dtype, bias_NH: Tensor | None, *, causal: bool
) -> Tensor | None:
    """Return the position biases [..., H, T, S] of distances [..., T, S]; None if positions have no biases."""
    if isinstance(layer.position, AlibiPositions):
        slopes_H = torch.tensor(alibi_slopes(layer.attention.num_heads), dtype=dtype)
        slopes_H = slopes_H.to(distance.device, non_blocking=True)
        return -slopes_H[:, None, None] * distance.abs().unsqueeze(-3)
    if bias_NH is not None and isinstance(layer.position, RelativeBias):
        return bias_NH.to(dtype)[relative_buckets(layer.position, distance, causal=causal)].movedim(-1, -3)
    return None


def num_skipped_states(spec: ModelSpec) -> int:
    """Return the number of an encoder's first states that cross-attention skips.

    These are the virtual tokens of a deep prompt, which consist of keys and values in the encoder's blocks only.
    """
    return spec.prompts[1] if isinstance(spec.adapter, DeepPrompt) else 0


def cross_mask(documents_BT: Tensor | None, source_documents_BS: Tensor | None) -> Tensor | None:
    """Return which of an encoder's states each token attends to, as booleans that broadcast to [B, H, T, S].

    Tokens attend to the states of their own document. Without documents, they attend to all states that are not padding
    (-1). None means all states.
    """
    if source_documents_BS is None:
        return None
    if documents_BT is None:
        return (source_documents_BS >= 0)[:, None, None, :]
    seen_BTS = documents_BT[:, :, None] == source_documents_BS[:, None, :]
    # A token whose document has no source, such as padding, attends to everything: softmax over no keys would be NaN.
    return (seen_BTS | ~seen_BTS.any(-1, keepdim=True)).unsqueeze(1)


def relative_buckets(spec: RelativeBias, distance: Tensor, *, causal: bool) -> Tensor:
    """Return the bucket number of each distance (query minus key), as in T5 (Raffel et al., 2020).

    Without causal attention, the second half of the buckets is for keys after the query. In each direction, half of the
    buckets hold one distance each. The ranges of the others grow geometrically, up to the largest distance.
    """
    number = spec.num_buckets if causal else spec.num_buckets // 2
    num_exact = number // 2
    far = distance.clamp_min(0) if causal else distance.abs()
    # Compute in fp32, as the published models were trained: some distances lie on the border of two buckets.
    log_ratio = torch.log(far.clamp_min(1).float() / num_exact) / math.log(spec.max_distance / num_exact)
    growing = (num_exact + (log_ratio * (number - num_exact)).long()).clamp_max(number - 1)
    bucket = torch.where(far < num_exact, far, growing)
    return bucket if causal else bucket + (distance < 0) * number


def alibi_slopes(heads: int) -> list[float]:
    """Return the slopes of ALiBi (Press et al., 2022): 2^(-8/n), its square, its cube and so on for n heads.

    If n is not a power of two, these are the slopes of the largest power of two below n, followed by every other slope
    of twice that power.
    """
    power = 1 << (heads.bit_length() - 1)
    slopes = [2 ** (-8 * number / power) for number in range(1, power + 1)]
    if power < heads:
        slopes += alibi_slopes(2 * power)[::2][: heads - power]
    return slopes
