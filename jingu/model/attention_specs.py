"""The spec of attention: its fields, rows and saved bytes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from jingu.model.norm_specs import LayerNorm, Norm, RmsNorm
from jingu.model.part_spec import Component, ModuleRow, PositiveFloat, PositiveInt, optional


class QueryScaling(Component):
    """Queries are multiplied by 1 + beta · ln(1 + ⌊(position + offset) / length⌋), which grows with the position."""

    beta: PositiveFloat
    length: PositiveInt
    offset: Annotated[int, Field(ge=0)] = 0


class LatentAttention(Component):
    """Multi-head latent attention (DeepSeek-V2, 2024): keys and values are projections of one small latent vector.

    The last `rotary_dim` dims of each query are rotated, and meet a rotated key that all heads share. Only the latent
    vector and this key are cached.

    Attributes:
        rank: size of the latent vector of keys and values.
        rotary_dim: size of the rotated part of a head.
        query_rank: size of the latent vector of queries; None: queries are projected directly.
        eps: epsilon of the norms of the latent vectors.
    """

    rank: PositiveInt
    rotary_dim: PositiveInt
    query_rank: PositiveInt | None = None
    eps: PositiveFloat = 1e-6


class AttentionSpec(Component):
    """Multi-head attention, or grouped-query attention (Ainslie et al., 2023). Its module is `Attention`.

    Attributes:
        num_kv_heads: number of key-value heads; fewer than `num_heads` for grouped-query attention.
        qk_norm: whether the queries and keys of each head are normalized.
        scale_scores: whether scores are divided by √head_dim.
        sliding_window: number of tokens that a token attends to, including itself; None: itself and all before it.
        chunk_size: positions are divided into chunks of this size, and a token attends to its own chunk only; None:
            there are no chunks.
        scale: multiplies the scores; None: what `scale_scores` says.
        softcap: scores s become softcap · tanh(s / softcap); None: they stay.
        qk_norm_width: whether `qk_norm` normalizes each head, with the same weights or (`each_head`) with weights of
            its own and no bias, or all heads together.
        qk_norm_after_rotary: whether positions are rotated before queries and keys are normalized.
        qk_norm_weight: whether these norms have weights.
        query_scaling: how queries are multiplied by position; None: not at all.
        sinks: whether each head has a trained sink: a score that joins the softmax and has no value (gpt-oss).
        output_gate: whether the result of attention is multiplied by the sigmoid of a projection of the inputs.
        output_gate_width: whether that gate has a number for each channel, or one for each head.
        value_dim: size of a head's values; None: `head_dim`.
        value_scale: multiplies the values.
        values_are_keys: whether values are the keys before their norm and positions, instead of a projection.
        value_norm: whether the values of each head are normalized, without a weight.
        shares_kv: whether keys and values are those of the last layer before that has the same attention and
            positions, and keys and values of its own.
        latent: how keys and values are computed from a latent vector; None: each has a projection of its own.
        input_scale: multiplies the hidden states.
        key_scale: multiplies the keys, before rotary positions.
        output_scale: multiplies the results of the output projection.
    """

    num_heads: PositiveInt
    num_kv_heads: PositiveInt
    head_dim: PositiveInt
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    scale_scores: bool = True
    sliding_window: PositiveInt | None = None
    chunk_size: PositiveInt | None = optional(None)
    scale: PositiveFloat | None = optional(None)
    softcap: PositiveFloat | None = optional(None)
    qk_norm_width: Literal["head", "each_head", "all_heads"] = optional("head")
    qk_norm_after_rotary: bool = optional(False)
    qk_norm_weight: bool = optional(True)
    query_scaling: QueryScaling | None = optional(None)
    sinks: bool = optional(False)
    output_gate: bool = optional(False)
    output_gate_width: Literal["channel", "head"] = optional("channel")
    value_dim: PositiveInt | None = optional(None)
    value_scale: PositiveFloat = optional(1.0)
    values_are_keys: bool = optional(False)
    value_norm: bool = optional(False)
    shares_kv: bool = optional(False)
    latent: LatentAttention | None = optional(None)
    input_scale: PositiveFloat = optional(1.0)
    key_scale: PositiveFloat = optional(1.0)
    output_scale: PositiveFloat = optional(1.0)

    @property
    def value_size(self) -> int:
        """The size of a head's values."""
        return self.value_dim or self.head_dim

    @property
    def gate_width(self) -> int:
        """The number of channels that share an element of the output gate."""
        return self.value_size if self.output_gate_width == "head" else 1

    @property
    def rotary_size(self) -> int:
        """The size of the part of a head that rotary positions apply to."""
        return self.head_dim if self.latent is None else self.latent.rotary_dim

    @property
    def reach(self) -> int | None:
        """The most tokens that a token attends to, including itself; None: there is no limit."""
        return min(filter(None, (self.sliding_window, self.chunk_size)), default=None)

    def latent_norm(self) -> RmsNorm:
        """Return the norm of latent vectors."""
        return RmsNorm() if self.latent is None else RmsNorm(eps=self.latent.eps)

    def own_value_norm(self, norm: Norm) -> RmsNorm | None:
        """Return the norm of values in a layer with this norm; None if there is none."""
        return RmsNorm(eps=norm.eps, has_weight=False) if self.value_norm else None

    def head_norm(self, norm: Norm) -> Norm:
        """Return the norm of queries and keys in a layer with this norm."""
        if self.qk_norm_width == "each_head":
            norm = norm.without_bias()
        return norm if self.qk_norm_weight else norm.without_weight()

    def rows(self, width: int, norm: Norm, std: float, output_std: float) -> dict[str, ModuleRow]:
        """Return the rows of self-attention or cross-attention.

        Args:
            width: the hidden size.
            norm: the norm of the layer.
            std: standard deviation of the initial weights of a matrix.
            output_std: that of the weights of `output`.
        """
        inner, kv_inner = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        values = self.num_heads * self.value_size
        if self.latent is not None:
            rows = self._latent_rows(self.latent, width)
        else:
            # If scores are not scaled, the query matrix is.
            q_std = None if self.scale_scores else std * self.head_dim**-0.5
            rows = {
                "q": ModuleRow((inner, width), "heads", self.qkv_bias, std=q_std),
                "k": ModuleRow((kv_inner, width), "kv_heads", self.qkv_bias),
                "v": ModuleRow((self.num_kv_heads * self.value_size, width), "kv_heads", self.qkv_bias),
            }
            if self.shares_kv or self.values_are_keys:
                del rows["v"]
            if self.shares_kv:
                del rows["k"]
        if self.output_gate:
            rows["gate"] = ModuleRow((values // self.gate_width, width), "heads")
        rows["output"] = ModuleRow((width, values), "from_heads", self.output_bias, std=output_std)
        if self.sinks:
            rows["sinks"] = ModuleRow((self.num_heads,), "heads")
        if self.qk_norm:
            by_head = self.qk_norm_width == "head"
            norm = self.head_norm(norm)
            rows |= norm.rows("q_norm", self.head_dim if by_head else inner, None if by_head else "heads")
            if not self.shares_kv:
                rows |= norm.rows("k_norm", self.head_dim if by_head else kv_inner, None if by_head else "kv_heads")
        return rows

    def _latent_rows(self, latent: LatentAttention, width: int) -> dict[str, ModuleRow]:
        """Return the rows of the projections of latent attention. Every rank has the whole latent vectors."""
        norm = self.latent_norm()
        rows: dict[str, ModuleRow] = {}
        query_inputs = width
        if latent.query_rank is not None:
            rows["q_down"] = ModuleRow((latent.query_rank, width), bias=self.qkv_bias)
            rows |= norm.rows("q_latent_norm", latent.query_rank)
            query_inputs = latent.query_rank
        rows["q"] = ModuleRow((self.num_heads * self.head_dim, query_inputs), "heads")
        rows["kv_down"] = ModuleRow((latent.rank, width), bias=self.qkv_bias)
        rows["k_rotary"] = ModuleRow((latent.rotary_dim, width), bias=self.qkv_bias)
        rows |= norm.rows("kv_latent_norm", latent.rank)
        # For each head the unrotated part of the key, then the value.
        head = self.head_dim - latent.rotary_dim + self.value_size
        rows["kv"] = ModuleRow((self.num_heads * head, latent.rank), "heads")
        return rows

    def saved_bytes(self, norm: Norm, size: float, *, is_compiled: bool = False) -> float:
        """Return the bytes per token that attention saves beside its input.

        Args:
            norm: the norm of the layer.
            size: bytes of the compute dtype.
            is_compiled: whether the block is compiled.
        """
        wide = max(size, 4.0)
        values = self.num_heads * self.value_size
        # Queries, keys and values repeated for all heads and padded to one size, in fp32 as without a fused kernel; and
        # the input of the output projection.
        largest = self.num_heads * max(self.head_dim, self.value_size)
        if self.stores_scores:
            saved = (2 * self.num_heads * self.head_dim + 2 * values) * size
        else:
            saved = 3 * largest * wide + values * size
        # A gate saves both factors.
        saved += (values + values // self.gate_width) * size if self.output_gate else 0.0
        saved += self.num_heads * wide if self.sinks else 0.0
        latent = self.latent
        if latent is not None:
            ranks = [latent.rank, *([] if latent.query_rank is None else [latent.query_rank])]
            saved += sum(
                self.latent_norm().saved_bytes(rank, 1, size, is_compiled=is_compiled) + rank * size for rank in ranks
            )
            if size >= 4:
                saved += self.joined_bytes(size)
        if self.qk_norm:
            heads = self.num_heads + (0 if self.shares_kv else self.num_kv_heads)
            groups = 2 if self.qk_norm_width == "all_heads" else heads
            if self.qk_norm_width == "each_head" and isinstance(norm, LayerNorm) and not is_compiled:
                # Computed in at least fp32; the results before the multiplication with the weights are saved, too.
                saved += norm.saved_bytes(heads * self.head_dim, groups, wide) + heads * self.head_dim * wide
            else:
                saved += self.head_norm(norm).saved_bytes(heads * self.head_dim, groups, size, is_compiled=is_compiled)
        value_norm = self.own_value_norm(norm)
        if value_norm is not None and not self.shares_kv:
            values = self.num_kv_heads * self.value_size
            saved += value_norm.saved_bytes(values, self.num_kv_heads, size, is_compiled=is_compiled)
            # Unless they are cast, keys and values have the same input.
            saved -= values * size if self.values_are_keys and self.qk_norm and size >= 4 else 0.0
        return saved

    def joined_bytes(self, size: float) -> float:
        """Return the bytes per token of what is saved with the values, because one projection computes both.

        With latent attention, that are parts of keys, unless values are padded or cast.
        """
        if self.latent is None or self.value_size < self.head_dim:
            return 0.0
        return self.num_heads * (self.head_dim - self.latent.rotary_dim) * size

    @property
    def stores_scores(self) -> bool:
        """Whether scores are computed one by one, since no kernel of PyTorch has them."""
        return self.softcap is not None or self.sinks

    def score_bytes(self, size: float, *, is_compiled: bool = False) -> float:
        """Return the bytes that are saved for each score of a head: none with the kernels of PyTorch."""
        if not self.stores_scores:
            return 0.0
        if is_compiled and not self.sinks:
            # The scores and the probabilities, from which the others are computed again.
            return 2 * size
        # The results of tanh and of softmax, and the probabilities in the compute dtype.
        return (1 + (self.softcap is not None)) * max(size, 4.0) + (size if size < 4 else 0.0)

    @property
    def cached_numbers(self) -> int:
        """The numbers that are cached for each token: keys and values, or the latent vector of both; none if those of
        another layer are used."""
        if self.shares_kv:
            return 0
        if self.latent is not None:
            return self.latent.rank + self.latent.rotary_dim
        return self.num_kv_heads * (self.head_dim + self.value_size)
