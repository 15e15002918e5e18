"""The components of a layer in the spec of a model: norms, positions, attention, feed-forwards, experts."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from jingu.errors import JinguError

PositiveInt = Annotated[int, Field(ge=1)]

PositiveFloat = Annotated[float, Field(gt=0)]

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "xielu"]

# Where the norms of a block stand: before its branches, behind them (on their outputs, before the residual; OLMo 2), or
# before and behind (sandwich; Gemma 2).
NormPlacement = Literal["before", "behind", "around"]

# How attention and feed-forward follow each other: one after the other, or both on the same hidden states, whose norm
# they share or not.
BlockOrder = Literal["sequential", "parallel", "parallel_one_norm"]


class Component(BaseModel):
    """A part of the spec. It rejects unknown keys; its `type` tells variants apart."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def optional(default: Any) -> Any:
    """Return a field that JSON omits at its default: the JSON of models without the component stays as it was."""
    return Field(default=default, exclude_if=lambda value: bool(value == default))


class RmsNorm(Component):
    """Root mean square norm (Zhang and Sennrich, 2019): a weight, no bias.

    Attributes:
        offset: whether one is added to the weight, which therefore starts at zero.
        has_weight: whether it has a weight.
    """

    type: Literal["rms"] = "rms"
    eps: PositiveFloat = 1e-5
    offset: bool = optional(False)
    has_weight: bool = optional(True)


class LayerNorm(Component):
    """Layer norm (Ba et al., 2016): a weight and, by default, a bias."""

    type: Literal["layer"] = "layer"
    eps: PositiveFloat = 1e-5
    bias: bool = optional(True)


class LearnedPositions(Component):
    """A trained vector per position, added to the embedding."""

    type: Literal["learned"] = "learned"


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
    """Multi-head attention, or grouped-query attention (Ainslie et al., 2023).

    Attributes:
        num_kv_heads: number of key-value heads; fewer than `num_heads` for grouped-query attention.
        qk_norm: whether the queries and keys of each head are normalized.
        scale_scores: whether scores are divided by √head_dim.
        sliding_window: number of tokens that a token attends to, including itself; None: itself and all before it.
        chunk_size: positions are divided into chunks of this size, and a token attends to its own chunk only; None:
            there are no chunks.
        scale: multiplies the scores; None: what `scale_scores` says.
        softcap: scores s become softcap · tanh(s / softcap); None: they stay.
        qk_norm_width: whether `qk_norm` normalizes each head, with the same weights, or all heads together.
        qk_norm_after_rotary: whether positions are rotated before queries and keys are normalized.
        qk_norm_weight: whether these norms have weights.
        query_scaling: how queries are multiplied by position; None: not at all.
        sinks: whether each head has a trained sink: a score that joins the softmax and has no value (gpt-oss).
        output_gate: whether the result of attention is multiplied by the sigmoid of a projection of the inputs.
        value_dim: size of a head's values; None: `head_dim`.
        value_scale: multiplies the values.
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
    qk_norm_width: Literal["head", "all_heads"] = optional("head")
    qk_norm_after_rotary: bool = optional(False)
    qk_norm_weight: bool = optional(True)
    query_scaling: QueryScaling | None = optional(None)
    sinks: bool = optional(False)
    output_gate: bool = optional(False)
    value_dim: PositiveInt | None = optional(None)
    value_scale: PositiveFloat = optional(1.0)
    latent: LatentAttention | None = optional(None)
    input_scale: PositiveFloat = optional(1.0)
    key_scale: PositiveFloat = optional(1.0)
    output_scale: PositiveFloat = optional(1.0)

    @property
    def value_size(self) -> int:
        """The size of a head's values."""
        return self.value_dim or self.head_dim

    @property
    def rotary_size(self) -> int:
        """The size of the part of a head that rotary positions apply to."""
        return self.head_dim if self.latent is None else self.latent.rotary_dim

    @property
    def reach(self) -> int | None:
        """The most tokens that a token attends to, including itself; None: there is no limit."""
        return min(filter(None, (self.sliding_window, self.chunk_size)), default=None)


class PlainFeedForward(Component):
    """down(activation(up(x)))."""

    type: Literal["plain"] = "plain"
    intermediate_size: PositiveInt
    activation: Activation = "gelu_tanh"
    bias: bool = False


class GatedFeedForward(Component):
    """down(activation(gate(x)) · up(x)) (Shazeer, 2020).

    Attributes:
        gate_scale: multiplies the gate before the activation.
        output_scale: multiplies the results.
    """

    type: Literal["gated"] = "gated"
    intermediate_size: PositiveInt
    activation: Activation = "silu"
    bias: bool = False
    gate_scale: PositiveFloat = optional(1.0)
    output_scale: PositiveFloat = optional(1.0)


class NoFeedForward(Component):
    """No feed-forward: the layer is attention or a mixer alone."""

    type: Literal["none"] = "none"


class TopKRouter(Component):
    """Selects the experts with the highest logits, and weights their outputs by softmax (Shazeer et al., 2017).

    Attributes:
        softmax: `before`: softmax over all experts, then selection. `after`: softmax over the selected experts only.
        norm_topk_prob: whether the weights of the selected experts are divided by their sum (only for `before`).
        scores: whether the scores are the softmax over all experts, or the sigmoid of each logit (only for `before`).
        bias: whether the logits have a trained bias.
        correction: whether a bias is added to the scores for the selection only, not for the weights (Wang et al.,
            2024). It has no gradient; see `correction_rate`.
        correction_rate: after each step of training, the correction of an expert with fewer tokens than the mean grows
            by this, and that of one with more shrinks.
        num_groups: number of groups that the experts are divided into.
        num_groups_per_token: number of groups that the experts of a token are chosen from: those with the best scores.
        group_score: whether the score of a group is the sum of its two best scores, or the best one.
        sum_offset: is added to the sum that weights are divided by.
        min_sum: the sum that weights are divided by is at least this.
        scaling_factor: multiplies the weights.
        weights_inputs: whether the weights multiply the inputs of the experts instead of their outputs (Llama 4).
    """

    type: Literal["top_k"] = "top_k"
    softmax: Literal["before", "after"] = "before"
    norm_topk_prob: bool = True
    scores: Literal["softmax", "sigmoid"] = optional("softmax")
    bias: bool = optional(False)
    correction: bool = optional(False)
    correction_rate: Annotated[float, Field(ge=0)] = optional(0.0)
    num_groups: PositiveInt = optional(1)
    num_groups_per_token: PositiveInt = optional(1)
    group_score: Literal["two_best", "best"] = optional("two_best")
    sum_offset: Annotated[float, Field(ge=0)] = optional(0.0)
    min_sum: Annotated[float, Field(ge=0)] = optional(0.0)
    scaling_factor: PositiveFloat = optional(1.0)
    weights_inputs: bool = optional(False)


class BalancedRouter(Component):
    """The router of BASE layers (Lewis et al., 2021), with one expert per token.

    In training, every expert gets equally many tokens of a sequence, in the assignment that (almost) maximizes the sum
    of scores. Outside training, each token gets its best expert. The weight of an expert is the sigmoid of its score.
    """

    type: Literal["balanced"] = "balanced"


class RandomProjectionRouter(Component):
    """A frozen random projection that sends similar hidden states to the same expert. All weights are equal."""

    type: Literal["random_projection"] = "random_projection"


Router = Annotated[TopKRouter | BalancedRouter | RandomProjectionRouter, Field(discriminator="type")]


class ClampedGate(Component):
    """The activation of gpt-oss's experts: g · sigmoid(alpha · g) · (u + 1), with clamped gate g and up-projection u.

    Attributes:
        limit: g is at most this, and u between its negative and it.
        alpha: factor in the sigmoid.
    """

    limit: PositiveFloat = 7.0
    alpha: PositiveFloat = 1.702


class Experts(Component):
    """A mixture of experts: feed-forwards, of which a router selects a few per token.

    Attributes:
        intermediate_size: intermediate size of one expert.
        gated: whether the experts and the shared expert are gated feed-forwards, or plain ones.
        latent_size: the experts compute in a space of this size, between two projections that all share; None: they
            compute with the hidden states (Nemotron 3).
        bias: whether the matrices of the experts have biases.
        clamped_gate: replaces the activation and its product with the up-projection; None: it does not.
        shared_intermediate_size: intermediate size of a shared expert that every token uses; None: there is none.
        shared_expert_gate: whether the output of the shared expert is multiplied by the sigmoid of a trained score.
        capacity_factor: the most token-to-expert assignments that an expert accepts from a training sequence, relative
            to an even share. Assignments beyond it are dropped. None: no limit.
        aux_loss_coef: weight of the load-balancing loss.
        aux_loss_scope: whether each `layer` is balanced, or only the mean over all layers (`model`, as transformers
            computes it).
        z_loss_coef: weight of the router's z-loss.
    """

    type: Literal["experts"] = "experts"
    num_experts: PositiveInt
    num_experts_per_token: PositiveInt
    intermediate_size: PositiveInt
    activation: Activation = "silu"
    gated: bool = True
    latent_size: PositiveInt | None = optional(None)
    bias: bool = False
    clamped_gate: ClampedGate | None = optional(None)
    router: Router = TopKRouter()
    shared_intermediate_size: PositiveInt | None = None
    shared_expert_gate: bool = False
    capacity_factor: PositiveFloat | None = None
    aux_loss_coef: Annotated[float, Field(ge=0)] = 0.0
    aux_loss_scope: Literal["layer", "model"] = "layer"
    z_loss_coef: Annotated[float, Field(ge=0)] = 0.0

    @model_validator(mode="after")
    def _experts_fit(self) -> Experts:
        if self.num_experts_per_token > self.num_experts:
            raise JinguError(
                f"a token cannot use {self.num_experts_per_token} of {self.num_experts} experts.",
                where="model.experts",
                fix=f"Choose at most {self.num_experts} active experts.",
            )
        if isinstance(self.router, BalancedRouter) and self.num_experts_per_token != 1:
            raise JinguError(
                f"the balanced router gives each token one expert, not {self.num_experts_per_token}.",
                where="model.experts",
                fix="Set num_experts_per_token to 1, or choose another router.",
            )
        if self.clamped_gate is not None and not self.gated:
            raise JinguError("clamped_gate needs gated experts.", where="model.experts", fix="Set gated to true.")
        if isinstance(self.router, TopKRouter):
            self._check_router(self.router)
        return self

    def _check_router(self, router: TopKRouter) -> None:
        """Raise JinguError if the router cannot choose among these experts."""
        groups, chosen = router.num_groups, router.num_groups_per_token
        problem = None
        if router.softmax == "after" and (router.scores != "softmax" or router.correction or groups > 1):
            problem = "softmax over the selected experts has no other scores, no correction and no groups"
        elif self.num_experts % groups:
            problem = f"{self.num_experts} experts cannot be divided into {groups} groups evenly"
        elif chosen > groups:
            problem = f"a token cannot use experts of {chosen} of {groups} groups"
        elif self.num_experts // groups * chosen < self.num_experts_per_token:
            problem = f"{chosen} of {groups} groups have fewer than {self.num_experts_per_token} experts"
        elif groups > 1 and router.group_score == "two_best" and self.num_experts // groups < 2:
            problem = "a group of one expert has no two best scores"
        elif router.correction_rate and not router.correction:
            problem = "the correction has a rate, and there is no correction"
        if problem is not None:
            raise JinguError(f"{problem}.", where="model.experts", fix="Change the router's fields.")


Taps = Annotated[int, Field(ge=2)]


class GatedDelta(Component):
    """The gated delta rule (Qwen3-Next, Qwen3.5, OLMo hybrid), and Kimi Delta Attention.

    Attributes:
        num_heads: heads of the values.
        num_key_heads: heads of queries and keys; each serves as many adjacent heads of the values.
        num_taps: kernel length of the convolutions of queries, keys and values.
        decay_per_channel: whether each channel of a key has a decay (Kimi) instead of each head.
        decay_bound: the smallest logarithm of a decay, which then follows a sigmoid (Ling, GLM 5); None: a softplus
            without a bound.
        negative_eigenvalues: whether the share of its value that a token writes is up to 2 instead of 1.
        gate_rank: rank of the projections of gate and decay, if they are products of two matrices (Kimi).
        gate_activation: activation of the gate of the normalized outputs.
        eps: of the norm of the outputs.
    """

    type: Literal["gated_delta"] = "gated_delta"
    num_heads: PositiveInt
    num_key_heads: PositiveInt
    key_head_dim: PositiveInt
    value_head_dim: PositiveInt
    num_taps: Taps = 4
    decay_per_channel: bool = optional(False)
    decay_bound: Annotated[float, Field(lt=0)] | None = optional(None)
    negative_eigenvalues: bool = optional(False)
    gate_rank: PositiveInt | None = optional(None)
    gate_activation: Literal["silu", "sigmoid"] = "silu"
    eps: PositiveFloat = 1e-6

    @model_validator(mode="after")
    def _check_heads(self) -> GatedDelta:
        if self.num_heads % self.num_key_heads:
            raise JinguError(
                f"{self.num_heads} heads of values cannot share {self.num_key_heads} heads of keys.",
                fix="Set num_heads to a multiple of num_key_heads.",
            )
        return self


class StateSpace(Component):
    """Mamba-2 (Granite 4, Nemotron-H, Falcon-H1, Bamba).

    Attributes:
        num_groups: groups of heads that share b and c.
        state_size: length of b and c.
        num_taps: kernel length of the convolutions of x, b and c.
        step_limits: smallest and largest length of a step; None: no largest one.
        norm: whether the gate is applied before the norm, behind it, or without a norm.
        eps: of the norm of each group of heads.
        bias: whether the projections of the inputs have biases.
        output_bias: whether the projection of the outputs has a bias.
        conv_bias: whether the convolutions have biases.
        input_scale: multiplies the hidden states.
        part_scales: multiply gate, x, b, c and step after their projections (Falcon-H1).
        output_scale: multiplies the results of the output projection.
    """

    type: Literal["state_space"] = "state_space"
    num_heads: PositiveInt
    num_groups: PositiveInt = 1
    head_dim: PositiveInt
    state_size: PositiveInt
    num_taps: Taps = 4
    step_limits: tuple[Annotated[float, Field(ge=0)], PositiveFloat | None] = (0.0, None)
    norm: Literal["behind_gate", "before_gate", "none"] = "behind_gate"
    eps: PositiveFloat = 1e-5
    bias: bool = False
    output_bias: bool = False
    conv_bias: bool = True
    input_scale: float = optional(1.0)
    part_scales: tuple[float, float, float, float, float] = optional((1.0, 1.0, 1.0, 1.0, 1.0))
    output_scale: float = optional(1.0)

    @model_validator(mode="after")
    def _check_heads(self) -> StateSpace:
        if self.num_heads % self.num_groups:
            raise JinguError(
                f"{self.num_heads} heads cannot be divided into {self.num_groups} groups.",
                fix="Set num_heads to a multiple of num_groups.",
            )
        return self


class ShortConv(Component):
    """The gated short convolution of LFM2: a convolution between two gates.

    Attributes:
        num_taps: kernel length of the convolution.
        bias: whether projections and convolution have biases.
    """

    type: Literal["short_conv"] = "short_conv"
    num_taps: Taps = 3
    bias: bool = False


class NoMixer(Component):
    """No mixer, and no attention either: the layer is a feed-forward alone."""

    type: Literal["none"] = "none"


Norm = Annotated[RmsNorm | LayerNorm, Field(discriminator="type")]

Position = Annotated[
    LearnedPositions | RotaryPositions | AlibiPositions | RelativeBias | NoPositions, Field(discriminator="type")
]

FeedForward = Annotated[PlainFeedForward | GatedFeedForward | Experts | NoFeedForward, Field(discriminator="type")]

# Mixers that keep a state.
StateMixer = GatedDelta | StateSpace | ShortConv

Mixer = Annotated[StateMixer | NoMixer, Field(discriminator="type")]


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
    mixer: Mixer | None = None
    parallel_mixer: bool = False

    @property
    def has_attention(self) -> bool:
        """Whether the layer has attention."""
        return self.mixer is None or self.parallel_mixer

    @property
    def state_mixer(self) -> StateMixer | None:
        """The mixer with a state; None if the layer has none."""
        return None if isinstance(self.mixer, NoMixer) else self.mixer

    @property
    def intermediate_size(self) -> int:
        """The intermediate size of the feed-forward; 0 if there is none."""
        return 0 if isinstance(self.feed_forward, NoFeedForward) else self.feed_forward.intermediate_size
