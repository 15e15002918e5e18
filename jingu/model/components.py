"""The components of a layer in the spec of a model: positions, and what a layer consists of."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from jingu.model.attention_specs import AttentionSpec
from jingu.model.feed_forward_specs import FeedForward, NoFeedForward
from jingu.model.mixer_specs import Mixer, NoMixer, StateMixer
from jingu.model.norm_specs import Norm
from jingu.model.part_spec import Component, PositiveFloat, PositiveInt, optional

# Where the norms of a block stand: before its branches, behind them (on their outputs, before the residual; OLMo 2), or
# before and behind (sandwich; Gemma 2).
NormPlacement = Literal["before", "behind", "around"]

# How attention and feed-forward follow each other: one after the other, or both on the same hidden states, whose norm
# they share or not.
BlockOrder = Literal["sequential", "parallel", "parallel_one_norm"]


class LearnedPositions(Component):
    """A trained vector per position, added to the embedding.

    Attributes:
        offset: number of the vector of the first position; those before it are not used (OPT).
    """

    type: Literal["learned"] = "learned"
    offset: Annotated[int, Field(ge=0)] = optional(0)


class LinearScaling(Component):
    """Positions are divided by a factor (linear position interpolation)."""

    type: Literal["linear"] = "linear"
    factor: PositiveFloat


class DynamicScaling(Component):
    """The base `theta` grows with the sequence length once that exceeds the original context (dynamic NTK)."""

    type: Literal["dynamic"] = "dynamic"
    factor: PositiveFloat
    original_max_position_embeddings: PositiveInt


class YarnScaling(Component):
    """Low frequencies are divided by a factor, high ones stay, with a linear ramp between (YaRN, Peng et al., 2023).

    Attributes:
        attention_factor: multiplies cosines and sines; its square therefore multiplies the attention scores.
        beta_fast: frequencies with more turns than this over the original context stay.
        beta_slow: frequencies with fewer turns than this over the original context are divided by the whole factor.
        truncate: whether the ramp starts and ends at whole dimensions.
    """

    type: Literal["yarn"] = "yarn"
    factor: PositiveFloat
    original_max_position_embeddings: PositiveInt
    attention_factor: PositiveFloat
    beta_fast: PositiveFloat = 32.0
    beta_slow: PositiveFloat = 1.0
    truncate: bool = True


class Llama3Scaling(Component):
    """Like YaRN, but the ramp is linear in the number of turns over the original context (Llama 3.1).

    Attributes:
        low_freq_factor: frequencies with fewer turns than this are divided by the whole factor.
        high_freq_factor: frequencies with more turns than this stay.
    """

    type: Literal["llama3"] = "llama3"
    factor: PositiveFloat
    original_max_position_embeddings: PositiveInt
    low_freq_factor: PositiveFloat
    high_freq_factor: PositiveFloat


class LongropeScaling(Component):
    """Each frequency is divided by a factor of its own (LongRoPE, Ding et al., 2024).

    Attributes:
        short_factor: factors for sequences that fit the original context, one for each rotated pair.
        long_factor: factors for longer sequences.
        attention_factor: multiplies cosines and sines.
    """

    type: Literal["longrope"] = "longrope"
    short_factor: tuple[PositiveFloat, ...]
    long_factor: tuple[PositiveFloat, ...]
    original_max_position_embeddings: PositiveInt
    attention_factor: PositiveFloat


class AlphaScaling(Component):
    """The base is multiplied by alpha^(d/(d-2)), for d rotated dims, at every length (NTK-aware scaling)."""

    type: Literal["alpha"] = "alpha"
    alpha: PositiveFloat


RopeScaling = Annotated[
    LinearScaling | DynamicScaling | YarnScaling | Llama3Scaling | LongropeScaling | AlphaScaling,
    Field(discriminator="type"),
]


class RotaryPositions(Component):
    """Rotary position embedding (RoPE, Su et al., 2021) of queries and keys.

    Attributes:
        theta: base of the frequencies.
        partial_rotary_factor: share of a head's dimensions that are rotated: the first ones.
        interleaved: whether a rotated pair is two neighboring dimensions, instead of one dimension of each half of the
            head.
        scaling: how the frequencies are scaled to a longer context; None: not at all.
        proportional: whether frequencies are spaced over the whole head instead of its rotated share, and a pair is
            one dimension of each half of the whole head; pairs beyond the share do not turn.
    """

    type: Literal["rope"] = "rope"
    theta: PositiveFloat = 10000.0
    partial_rotary_factor: Annotated[float, Field(gt=0, le=1)] = 1.0
    interleaved: bool = False
    scaling: RopeScaling | None = None
    proportional: bool = optional(False)

    def rotated_dims(self, head_size: int) -> int:
        """Return how many dims of a head are rotated: with proportional positions all, some by no angle."""
        return head_size if self.proportional else int(head_size * self.partial_rotary_factor)


class NoPositions(Component):
    """No positions: attention knows the order of tokens only from its mask (NoPE, Kazemnejad et al., 2023)."""

    type: Literal["none"] = "none"


class AlibiPositions(Component):
    """Attention scores decrease linearly with the distance, with one slope per head (ALiBi, Press et al., 2022)."""

    type: Literal["alibi"] = "alibi"


class RelativeBias(Component):
    """A trained bias of attention scores per head and bucket of distances, shared by all layers of a stack (T5, Raffel
    et al., 2020).

    Half of the buckets hold one distance each. The other half hold ranges that grow up to the largest distance.

    Attributes:
        num_buckets: number of buckets. In an encoder, half of them are for tokens that follow the query.
        max_distance: the last bucket holds all distances from this one on.
    """

    type: Literal["relative_bias"] = "relative_bias"
    num_buckets: Annotated[int, Field(ge=4)] = 32
    max_distance: PositiveInt = 128


Position = Annotated[
    LearnedPositions | RotaryPositions | AlibiPositions | RelativeBias | NoPositions, Field(discriminator="type")
]


class LayerSpec(Component):
    """A layer: its attention with the positions of that attention, its feed-forward, and its norms.

    `ModelSpec.layer` returns it. The fields are those of `ModelSpec`. `has_attention` and `state_mixer` say what of
    attention and a mixer the layer has.
    """

    norm: Norm
    position: Position
    attention: AttentionSpec
    feed_forward: FeedForward
    norm_placement: NormPlacement = "before"
    block_order: BlockOrder = "sequential"
    residual_scale: PositiveFloat = 1.0
    scale: bool = False
    mixer: Mixer | None = None
    parallel_mixer: bool = False

    @property
    def has_attention(self) -> bool:
        """Whether the layer has attention."""
        return self.mixer is None or self.parallel_mixer

    @property
    def shares_kv(self) -> bool:
        """Whether the layer attends to the keys and values of another one."""
        return self.has_attention and self.attention.shares_kv

    def with_own_kv(self) -> LayerSpec:
        """Return the layer with keys and values of its own, and equal otherwise."""
        return self.model_copy(update={"attention": self.attention.model_copy(update={"shares_kv": False})})

    @property
    def state_mixer(self) -> StateMixer | None:
        """The mixer with a state; None if the layer has none."""
        return None if isinstance(self.mixer, NoMixer) else self.mixer

    @property
    def intermediate_size(self) -> int:
        """The intermediate size of the feed-forward; 0 if there is none."""
        return 0 if isinstance(self.feed_forward, NoFeedForward) else self.feed_forward.intermediate_size
