"""The specification of a model: its dimensions and components, which can be stored as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import from_json

from jingu.config.batch_plan import divisors
from jingu.errors import JinguError
from jingu.tables import flatten

PositiveInt = Annotated[int, Field(ge=1)]
PositiveFloat = Annotated[float, Field(gt=0)]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "xielu"]
# Where the norms of a block stand: before its branches, behind them (on their outputs, before the residual; OLMo 2), or
# before and behind (sandwich; Gemma 2).
NormPlacement = Literal["before", "behind", "around"]
# How attention and feed-forward follow each other: one after the other, or both on the same hidden states, whose norm
# they share or not.
BlockOrder = Literal["sequential", "parallel", "parallel_one_norm"]
# Formats of quantized matrices (`jingu.model.quantized_weight`).
QuantizationFormat = Literal["int8", "int4", "nf4", "fp8"]


# How the matrices of a LoRA adapter are initialized.
LoraInit = Literal["default", "pissa", "olora", "eva", "loftq"]


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
    """down(activation(gate(x)) · up(x)) (Shazeer, 2020)."""

    type: Literal["gated"] = "gated"
    intermediate_size: PositiveInt
    activation: Activation = "silu"
    bias: bool = False


class TopKRouter(Component):
    """Selects the experts with the highest logits, and weights their outputs by softmax (Shazeer et al., 2017).

    Attributes:
        softmax: `before`: softmax over all experts, then selection. `after`: softmax over the selected experts only.
        norm_topk_prob: whether the weights of the selected experts are divided by their sum (only for `before`).
    """

    type: Literal["top_k"] = "top_k"
    softmax: Literal["before", "after"] = "before"
    norm_topk_prob: bool = True


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


class Experts(Component):
    """A mixture of experts: gated feed-forwards without biases, of which a router selects a few per token.

    Attributes:
        intermediate_size: intermediate size of one expert.
        gated: always true; a dense feed-forward is gated or plain.
        bias: always false; a dense feed-forward may have biases.
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
    gated: Literal[True] = True
    bias: Literal[False] = False
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
        return self


Norm = Annotated[RmsNorm | LayerNorm, Field(discriminator="type")]
Position = Annotated[
    LearnedPositions | RotaryPositions | AlibiPositions | RelativeBias | NoPositions, Field(discriminator="type")
]
FeedForward = Annotated[PlainFeedForward | GatedFeedForward | Experts, Field(discriminator="type")]


class Lora(Component):
    """LoRA: low-rank adapters beside frozen matrices (Hu et al., 2022).

    Attributes:
        alpha: the update B·A of a matrix is scaled by alpha / rank.
        target_modules: patterns (fnmatch) of the names of the adapted modules.
        use_rslora: whether to scale by alpha / √rank instead (Kalajdzievski, 2023).
        use_dora: whether the norm of each row of matrix plus update is trained separately (DoRA, Liu et al., 2024).
        dropout: dropout probability of the adapter's inputs.
        rank_pattern: pairs of a pattern of module names and the rank of these modules. The first match counts.
        alpha_pattern: the same for alpha.
        lora_bias: whether the matrix B has a bias.
        init_lora_weights: how the matrices A and B are initialized. With pissa and olora they start as a part of the
            adapted matrix, and the frozen matrix is the rest.
        modules_to_save: patterns of the names of modules whose own parameters are trained, too.
        trainable_token_indices: ids of the tokens whose rows of the embedding are trained, too.
    """

    type: Literal["lora"] = "lora"
    rank: PositiveInt
    alpha: PositiveFloat
    target_modules: tuple[str, ...]
    use_rslora: bool = False
    use_dora: bool = False
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    rank_pattern: tuple[tuple[str, PositiveInt], ...] = ()
    alpha_pattern: tuple[tuple[str, PositiveFloat], ...] = ()
    lora_bias: bool = False
    init_lora_weights: LoraInit = "default"
    modules_to_save: tuple[str, ...] = ()
    trainable_token_indices: tuple[int, ...] = ()

    @property
    def scale(self) -> float:
        """Factor of the update B·A."""
        return self.alpha / (self.rank**0.5 if self.use_rslora else self.rank)

    def of_module(self, name: str) -> Lora:
        """Return the adapter of one module, with the rank and alpha of the first matching pattern of each."""
        rank = next((rank for pattern, rank in self.rank_pattern if fnmatchcase(name, pattern)), self.rank)
        alpha = next((alpha for pattern, alpha in self.alpha_pattern if fnmatchcase(name, pattern)), self.alpha)
        return self.model_copy(update={"rank": rank, "alpha": alpha})


class Ia3(Component):
    """IA³ (Liu et al., 2022): trained factors of a matrix's outputs, or for a feed-forward's `down`, of its inputs.

    Attributes:
        target_modules: patterns (fnmatch) of the names of the adapted modules.
    """

    type: Literal["ia3"] = "ia3"
    target_modules: tuple[str, ...]

    def of_module(self, _name: str) -> Ia3:
        """Return the adapter of one module: the same for all."""
        return self


class SoftPrompt(Component):
    """Prompt tuning (Lester et al., 2021): virtual tokens with trained vectors in place of embeddings.

    The virtual tokens stand before the input of the encoder, or of the decoder if there is no encoder.

    Attributes:
        encoder: network that computes the vectors from trained parameters (P-tuning, Liu et al., 2021); `none`: the
            vectors are trained directly.
        encoder_hidden_size: hidden size of that network.
        after_input: whether the virtual tokens stand after the input instead.
    """

    type: Literal["soft_prompt"] = "soft_prompt"
    num_virtual_tokens: PositiveInt
    encoder: Literal["none", "mlp", "lstm"] = "none"
    encoder_hidden_size: PositiveInt = 1
    after_input: bool = False


class DeepPrompt(Component):
    """Virtual tokens with trained keys and values in each block, before the text (P-tuning v2, Liu et al., 2022).

    Attributes:
        encoder_hidden_size: hidden size of a network in each block that computes keys and values from trained vectors
            (prefix tuning, Li and Liang, 2021); None: keys and values are trained directly.
        in_encoder: whether the blocks of an encoder, if there is one, have virtual tokens, too.
    """

    type: Literal["deep_prompt"] = "deep_prompt"
    num_virtual_tokens: PositiveInt
    encoder_hidden_size: PositiveInt | None = None
    in_encoder: bool = True


Adapter = Annotated[Lora | Ia3 | SoftPrompt | DeepPrompt, Field(discriminator="type")]


class LayerSpec(Component):
    """A layer: its attention with the positions of that attention, its feed-forward, and its norms.

    `ModelSpec.layer` returns it. The fields are those of `ModelSpec`.
    """

    norm: Norm
    position: Position
    attention: AttentionSpec
    feed_forward: FeedForward
    norm_placement: NormPlacement = "before"
    block_order: BlockOrder = "sequential"
    residual_scale: PositiveFloat = 1.0


class ModelSpec(Component):
    """A decoder: `num_layers` blocks of attention and feed-forward between an embedding and a head.

    With `num_encoder_layers` the model is an encoder-decoder. The encoder has the same dimensions, and each block of
    the decoder also attends to the encoder's last hidden states.

    All layers are equal, unless `layer_kinds` names kinds of layers and `layer_pattern` gives the kind of each layer.
    Use `layer` to find out what a layer is.

    Attributes:
        family: name of the family, which defines tensor names and the Hugging Face config.
        vocab_size: rows of the embedding.
        num_encoder_layers: blocks of the encoder, which shares the decoder's embedding; None: there is no encoder.
        max_position_embeddings: longest sequence, in tokens.
        tie_word_embeddings: whether the head uses the embedding's weight.
        embedding_norm: whether a norm follows the embedding.
        normalize_lm_head: whether each row of the head's weight is divided by its norm.
        scale_lm_head: whether the final hidden states are divided by √hidden_size before the head.
        score_head: whether the head returns one number, the reward of the text so far, instead of logits.
        value_head: whether the model has a value head beside the head for logits, as the critic of PPO.
        initializer_range: standard deviation of the initial weights.
        adapter: adapters. Only their parameters, a score head, and `modules_to_save` are then trained.
        quantization: format of the blocks' matrices, which are then frozen; None: they are not quantized.
        frozen_parameters: patterns of the names of parameters that are not trained. Ignored if there is an adapter.
        norm_placement: where the norms of a block stand.
        block_order: whether attention and feed-forward of a block follow each other or are parallel.
        residual_scale: multiplies the outputs of attention and feed-forward before they are added to the hidden states.
        embedding_scale: multiplies the embedding.
        round_embedding_scale: whether `embedding_scale` is rounded to the dtype of the embedding.
        logit_scale: multiplies the logits.
        logit_softcap: logits l become softcap · tanh(l / softcap); None: they stay.
        layer_kinds: by the name of a kind of layer, the fields in which it differs from the model's, by their paths,
            such as `attention.sliding_window`.
        layer_pattern: name of the kind of each layer of the decoder; empty if all layers are equal.
    """

    family: str
    vocab_size: PositiveInt
    hidden_size: PositiveInt
    num_layers: PositiveInt
    num_encoder_layers: PositiveInt | None = None
    max_position_embeddings: PositiveInt
    norm: Norm
    position: Position
    attention: AttentionSpec
    feed_forward: FeedForward
    tie_word_embeddings: bool = False
    embedding_norm: bool = False
    normalize_lm_head: bool = False
    scale_lm_head: bool = False
    score_head: bool = False
    value_head: bool = False
    initializer_range: PositiveFloat = 0.02
    adapter: Adapter | None = None
    quantization: QuantizationFormat | None = None
    frozen_parameters: tuple[str, ...] = ()
    norm_placement: NormPlacement = optional("before")
    block_order: BlockOrder = optional("sequential")
    residual_scale: PositiveFloat = optional(1.0)
    embedding_scale: PositiveFloat | Literal["sqrt_hidden_size"] = optional(1.0)
    round_embedding_scale: bool = optional(False)
    logit_scale: PositiveFloat = optional(1.0)
    logit_softcap: PositiveFloat | None = optional(None)
    layer_kinds: dict[str, dict[str, Any]] = optional({})
    layer_pattern: tuple[str, ...] = optional(())

    def __hash__(self) -> int:
        # Without `layer_kinds`, which has no hash; specs that differ only in them are told apart by equality.
        values = (value for name, value in self.__dict__.items() if name != "layer_kinds")
        return hash(tuple(values))

    @model_validator(mode="after")
    def _pattern_fits(self) -> ModelSpec:
        pattern = self.layer_pattern
        unknown = [name for name in dict.fromkeys(pattern) if name not in self.layer_kinds]
        if unknown or bool(pattern) != bool(self.layer_kinds):
            raise JinguError(
                f"layer_pattern has the kinds {', '.join(dict.fromkeys(pattern)) or 'none'}, and layer_kinds describes "
                f"{', '.join(self.layer_kinds) or 'none'}.",
                where="model.layer_kinds",
                fix="Describe each kind of the pattern in layer_kinds; {} stands for a kind without differences.",
            )
        if pattern and len(pattern) != self.num_layers:
            raise JinguError(
                f"layer_pattern names {len(pattern)} layers, and the model has {self.num_layers}.",
                where="model.layer_pattern",
                fix="Name one kind for each layer.",
            )
        return self

    @model_validator(mode="after")
    def _dimensions_fit(self) -> ModelSpec:
        for layer in self.kinds:
            self._check_layer(layer)
        routing = [
            (part.num_experts, part.num_experts_per_token, part.aux_loss_coef, part.aux_loss_scope, part.z_loss_coef)
            for part in (layer.feed_forward for layer in self.kinds)
            if isinstance(part, Experts)
        ]
        if len(set(routing)) > 1:
            raise JinguError(
                f"the layers have {' and '.join(str(numbers[0]) for numbers in routing)} experts, or differ in the "
                "experts of a token or in auxiliary losses.",
                where="model.layer_kinds",
                fix="All layers with experts need the same number of experts and the same auxiliary losses.",
            )
        return self

    def _check_layer(self, layer: LayerSpec) -> None:
        """Raise JinguError if the dimensions of a layer do not fit together."""
        part = layer.attention
        if part.num_heads % part.num_kv_heads:
            raise JinguError(
                f"{part.num_heads} attention heads cannot share {part.num_kv_heads} key-value heads evenly.",
                where="model.num_kv_heads",
                fix=f"Choose a divisor of {part.num_heads}: {', '.join(map(str, divisors(part.num_heads)))}.",
            )
        rotated_dims = rotary_dim(layer.position, part.head_dim) if isinstance(layer.position, RotaryPositions) else 0
        if rotated_dims % 2:
            raise JinguError(
                f"rotary positions rotate pairs, and {rotated_dims} of a head's {part.head_dim} dims is no even number.",
                where="model.head_dim",
                fix="Choose a hidden size and a number of heads whose quotient is even, or set model.head_dim.",
            )
        self._check_parts(layer)
        bias = layer.position
        if isinstance(bias, RelativeBias) and bias.max_distance <= bias.num_buckets // 2:
            raise JinguError(
                f"with {bias.num_buckets} buckets, the largest distance must exceed {bias.num_buckets // 2}; it is "
                f"{bias.max_distance}.",
                where="model.position",
                fix=f"Choose a max_distance above {bias.num_buckets // 2}.",
            )
        # Vectors of positions and buckets belong to the whole stack.
        is_shared = any(isinstance(place, LearnedPositions | RelativeBias) for place in (layer.position, self.position))
        if is_shared and layer.position != self.position:
            raise JinguError(
                f"a kind of layer has positions of the type {layer.position.type}, and the model of the type "
                f"{self.position.type}, which is shared by all layers.",
                where="model.layer_kinds",
                fix="Use rope, alibi or none in all kinds of layers.",
            )

    def _check_parts(self, layer: LayerSpec) -> None:
        """Raise JinguError if parts of a layer do not go together."""
        part, position = layer.attention, layer.position
        problem = None
        if layer.block_order != "sequential" and (self.num_encoder_layers or layer.norm_placement != "before"):
            problem = "attention and feed-forward are parallel, which needs norms before both and no encoder"
        elif part.qk_norm_width == "all_heads" and part.qk_norm_after_rotary:
            problem = "queries and keys are normalized over all heads, which must come before rotary positions"
        elif isinstance(layer.feed_forward, GatedFeedForward | Experts) and layer.feed_forward.activation == "xielu":
            problem = "xielu needs a feed-forward of the type plain"
        elif isinstance(position, RotaryPositions) and isinstance(position.scaling, LongropeScaling):
            pairs = rotary_dim(position, part.head_dim) // 2
            factors = (len(position.scaling.short_factor), len(position.scaling.long_factor))
            if factors != (pairs, pairs):
                problem = f"longrope has {factors[0]} short and {factors[1]} long factors, for {pairs} rotated pairs"
        if problem is not None:
            raise JinguError(f"{problem}.", where="model", fix="Change the fields of the layer.")

    @property
    def embedding_factor(self) -> float:
        """The number that `embedding_scale` stands for."""
        return self.hidden_size**0.5 if self.embedding_scale == "sqrt_hidden_size" else self.embedding_scale

    def layer(self, number: int) -> LayerSpec:
        """Return what layer `number` of the decoder is. All layers of an encoder are `default_layer`."""
        return _kind(self, self.layer_pattern[number]) if self.layer_pattern else self.default_layer

    def layer_of(self, name: str) -> LayerSpec:
        """Return the layer that a parameter belongs to; for parameters outside the decoder, `default_layer`."""
        return self.layer(int(name.split(".", 2)[1])) if name.startswith("blocks.") else self.default_layer

    def kind(self, name: str) -> LayerSpec:
        """Return what the layers of a kind are."""
        return _kind(self, name)

    @property
    def default_layer(self) -> LayerSpec:
        """The layer that the model's own fields describe."""
        return _kind(self, None)

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        """The layers of the decoder, in order."""
        return tuple(self.layer(number) for number in range(self.num_layers))

    @property
    def kinds(self) -> tuple[LayerSpec, ...]:
        """The distinct layers of the model, in order of their first use."""
        return _kinds(self)

    @property
    def experts(self) -> Experts | None:
        """The experts of the layers that have some; None if there are none."""
        return next((layer.feed_forward for layer in self.kinds if isinstance(layer.feed_forward, Experts)), None)

    def uniform(self, layer: LayerSpec, num_layers: int = 1) -> ModelSpec:
        """Return the spec of a model whose layers are all equal to `layer`."""
        fields = {field: getattr(layer, field) for field in LayerSpec.model_fields}
        encoder = {"num_encoder_layers": 1} if self.num_encoder_layers else {}
        pattern = {"layer_kinds": {}, "layer_pattern": (), "num_layers": num_layers}
        return self.model_copy(update={**fields, **encoder, **pattern})

    def select_layers(self, numbers: Sequence[int]) -> ModelSpec:
        """Return the spec of a model with copies of these layers."""
        pattern = tuple(self.layer_pattern[number] for number in numbers) if self.layer_pattern else ()
        return self.model_copy(update={"num_layers": len(numbers), "layer_pattern": pattern})

    @property
    def prompts(self) -> tuple[int, int]:
        """Number of virtual tokens in the input of the decoder and of the encoder. Their ids follow the vocabulary."""
        adapter, encodes = self.adapter, self.num_encoder_layers is not None
        if isinstance(adapter, SoftPrompt):
            return (0, adapter.num_virtual_tokens) if encodes else (adapter.num_virtual_tokens, 0)
        if isinstance(adapter, DeepPrompt):
            return adapter.num_virtual_tokens, adapter.num_virtual_tokens if encodes and adapter.in_encoder else 0
        return 0, 0

    def prompted(self, ids: Sequence[int], *, encoder: bool = False) -> tuple[int, ...]:
        """Return token ids together with the ids of the virtual tokens of the decoder, or of the `encoder`."""
        own = range(self.vocab_size, self.vocab_size + self.prompts[encoder])
        behind = isinstance(self.adapter, SoftPrompt) and self.adapter.after_input
        return (*ids, *own) if behind else (*own, *ids)

    def to_json(self) -> str:
        """Return the spec as indented JSON."""
        return self.model_dump_json(indent=2) + "\n"

    @staticmethod
    def from_json(text: str | bytes, where: object = "model.json") -> ModelSpec:
        """Return the spec that `to_json` wrote.

        Args:
            where: the file, for messages.

        Raises:
            JinguError: the text is not JSON or not a valid spec. The message names each wrong field.
        """
        try:
            return ModelSpec.model_validate(from_json(text))
        except ValueError as error:
            if isinstance(error, ValidationError):
                wrong = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'file'}: {e['msg']}" for e in error.errors())
            else:
                wrong = f"file: Invalid JSON: {error}"
            raise JinguError(
                f"this does not describe a model ({wrong}).",
                where=where,
                fix="Restore the file; it is written when a run starts.",
            ) from error


@lru_cache(maxsize=256)
def _kind(spec: ModelSpec, name: str | None) -> LayerSpec:
    """Return the layer of a kind; None is the model's own."""
    values = {field: getattr(spec, field) for field in LayerSpec.model_fields}
    changes = spec.layer_kinds[name] if name is not None else {}
    if not changes:
        return LayerSpec.model_construct(**values)
    try:
        tree = {key: value.model_dump() if isinstance(value, Component) else value for key, value in values.items()}
        tree = replace_paths(tree, changes)
        return LayerSpec.model_validate(tree)
    except (KeyError, TypeError) as error:
        raise JinguError(
            f"the kind of layer {name!r} changes {error}, which a layer does not have.",
            where="model.layer_kinds",
            fix=f"Use paths in {', '.join(LayerSpec.model_fields)}.",
        ) from error


@lru_cache(maxsize=256)
def _kinds(spec: ModelSpec) -> tuple[LayerSpec, ...]:
    encoder = (spec.default_layer,) if spec.num_encoder_layers else ()
    kinds = (_kind(spec, name) for name in spec.layer_pattern) if spec.layer_pattern else (spec.default_layer,)
    return tuple(dict.fromkeys((*encoder, *kinds)))


def repeat_pattern(pattern: Sequence[str], number: int) -> tuple[str, ...]:
    """Return the kinds of `number` layers that continue the shortest period of a pattern."""
    for period in range(1, len(pattern) + 1):
        if all(name == pattern[i % period] for i, name in enumerate(pattern)):
            return tuple(pattern[i % period] for i in range(number))
    return ()


def rotary_dim(position: RotaryPositions, head_size: int) -> int:
    """Return the number of a head's dimensions that are rotated."""
    return int(head_size * position.partial_rotary_factor)


def replace_fields(spec: ModelSpec, **changes: Any) -> ModelSpec:
    """Return a validated copy of a spec with changed fields; a key may be a path, such as `attention.num_heads`."""
    return ModelSpec.model_validate(replace_paths(spec.model_dump(), changes))


def replace_paths(tree: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Set values in a tree by their paths, in place, and return the tree."""
    for path, value in changes.items():
        *parts, last = path.split(".")
        component = tree
        for part in parts:
            component = component[part]
        component[last] = value.model_dump() if isinstance(value, Component) else deepcopy(value)
    return tree


def flatten_fields(spec: ModelSpec) -> dict[str, Any]:
    """Return all fields by their paths, in the form that `replace_fields` accepts."""
    return flatten(spec.model_dump())
