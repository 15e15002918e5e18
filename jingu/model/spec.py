"""The specification of a model: its dimensions and components, which can be stored as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import from_json

from jingu.config.batch_plan import divisors
from jingu.config.legacy import migrate_spec
from jingu.errors import JinguError
from jingu.tables import flatten

PositiveInt = Annotated[int, Field(ge=1)]
PositiveFloat = Annotated[float, Field(gt=0)]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]
# Formats of quantized matrices (`jingu.model.quantized_weight`).
QuantizationFormat = Literal["int8", "int4", "nf4", "fp8"]


# How the matrices of a LoRA begin.
LoraInit = Literal["default", "pissa", "olora", "eva", "loftq"]


class Component(BaseModel):
    """A part of the spec, which rejects unknown keys. Variants are distinguished by their `type`."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class RmsNorm(Component):
    """Root mean square norm (Zhang and Sennrich, 2019): a weight, no bias."""

    type: Literal["rms"] = "rms"
    eps: PositiveFloat = 1e-5


class LayerNorm(Component):
    """Layer norm (Ba et al., 2016): a weight and a bias."""

    type: Literal["layer"] = "layer"
    eps: PositiveFloat = 1e-5


class LearnedPositions(Component):
    """A trained vector for each position, which is added to the embedding."""

    type: Literal["learned"] = "learned"


class LinearScaling(Component):
    """Positions are divided by a factor."""

    type: Literal["linear"] = "linear"
    factor: PositiveFloat


class DynamicScaling(Component):
    """The base grows with the length of the sequence beyond the original context (dynamic NTK)."""

    type: Literal["dynamic"] = "dynamic"
    factor: PositiveFloat
    original_max_position_embeddings: PositiveInt


class YarnScaling(Component):
    """Low frequencies are divided by a factor, high ones are not, with a ramp between (YaRN, Peng et al., 2023).

    Attributes:
        attention_factor: multiplies cosines and sines, so that its square multiplies the scores.
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
    """Like YaRN, with the ramp over wavelengths relative to the original context (Llama 3.1)."""

    type: Literal["llama3"] = "llama3"
    factor: PositiveFloat
    original_max_position_embeddings: PositiveInt
    low_freq_factor: PositiveFloat
    high_freq_factor: PositiveFloat


RopeScaling = Annotated[LinearScaling | DynamicScaling | YarnScaling | Llama3Scaling, Field(discriminator="type")]


class RotaryPositions(Component):
    """Rotary position embedding (RoPE, Su et al., 2021) of queries and keys.

    Attributes:
        partial_rotary_factor: share of a head's dimensions, the first ones, that are rotated.
        interleaved: whether neighbouring dimensions form a pair, rather than those of the two halves of a head.
    """

    type: Literal["rope"] = "rope"
    theta: PositiveFloat = 10000.0
    partial_rotary_factor: Annotated[float, Field(gt=0, le=1)] = 1.0
    interleaved: bool = False
    scaling: RopeScaling | None = None


class AlibiPositions(Component):
    """Scores decrease with the distance, with a slope for each head (Press et al., 2022)."""

    type: Literal["alibi"] = "alibi"


class RelativeBias(Component):
    """A trained bias of the scores for each head and bucket of distances, shared by the layers of a stack
    (Raffel et al., 2020). Half of the buckets have one distance each; the others grow up to the largest distance.

    Attributes:
        num_buckets: if tokens see what follows them, half of the buckets are for that.
        max_distance: the last bucket has all distances from here on.
    """

    type: Literal["relative_bias"] = "relative_bias"
    num_buckets: Annotated[int, Field(ge=4)] = 32
    max_distance: PositiveInt = 128


class AttentionSpec(Component):
    """Multi-head attention, or grouped-query attention (Ainslie et al., 2023).

    Attributes:
        qk_norm: whether the queries and keys of each head are normalized.
        scale_scores: whether scores are divided by the root of the head size.
        sliding_window: number of tokens that a token sees, including itself; None: all before it.
    """

    num_heads: PositiveInt
    num_kv_heads: PositiveInt
    head_dim: PositiveInt
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    scale_scores: bool = True
    sliding_window: PositiveInt | None = None


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
    """Chooses the experts with the highest probabilities (Shazeer et al., 2017), which are their weights.

    Attributes:
        softmax: before: over all experts; after: over the chosen ones only.
        norm_topk_prob: whether probabilities over all experts are divided by the sum of the chosen ones.
    """

    type: Literal["top_k"] = "top_k"
    softmax: Literal["before", "after"] = "before"
    norm_topk_prob: bool = True


class BalancedRouter(Component):
    """BASE (Lewis et al., 2021). In training every expert gets equally many tokens of a sequence, so that the sum of
    scores is as large as possible; otherwise a token gets its best expert. Weights are the sigmoids of scores."""

    type: Literal["balanced"] = "balanced"


class RandomProjectionRouter(Component):
    """A router that is not trained: a hash that sends similar states to the same expert. All weights are equal."""

    type: Literal["random_projection"] = "random_projection"


Router = Annotated[TopKRouter | BalancedRouter | RandomProjectionRouter, Field(discriminator="type")]


class Experts(Component):
    """A mixture of experts: gated feed-forwards without biases, of which a router chooses some for each token.

    Attributes:
        intermediate_size: inner size of one expert.
        shared_intermediate_size: inner size of a shared expert, which every token uses; None: there is none.
        shared_expert_gate: whether the output of the shared expert is weighted with the sigmoid of a score of its own.
        capacity_factor: most choices that an expert accepts from a training sequence, as a multiple of an even share;
            None: all of them.
        aux_loss_coef: weight of the balancing loss.
        aux_loss_scope: whether every layer should be balanced, or the mean of all layers (as transformers computes it).
        z_loss_coef: weight of the router's z loss.
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
Position = Annotated[LearnedPositions | RotaryPositions | AlibiPositions | RelativeBias, Field(discriminator="type")]
FeedForward = Annotated[PlainFeedForward | GatedFeedForward | Experts, Field(discriminator="type")]


class Lora(Component):
    """Low-rank adapters of matrices, which are not trained themselves (Hu et al., 2022).

    Attributes:
        alpha: the adapters' product is scaled by alpha / rank.
        target_modules: patterns of the names of the adapted modules.
        use_rslora: scale by alpha / √rank instead (Kalajdzievski, 2023).
        use_dora: whether the norm of each row of the sum is trained separately (DoRA, Liu et al., 2024).
        dropout: dropout probability of the adapter's inputs.
        rank_pattern: pairs of a pattern of modules' names and their rank, if it differs.
        alpha_pattern: likewise, their alpha.
        lora_bias: whether the second of the two matrices has a bias.
        init_lora_weights: how the matrices begin. With pissa and olora they begin as a part of the adapted matrix,
            and the frozen matrix is what remains.
        modules_to_save: patterns of the names of modules whose own parameters are trained, too.
        trainable_token_indices: tokens whose rows of the embedding are trained, too.
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
        """Factor of the adapters' product."""
        return self.alpha / (self.rank**0.5 if self.use_rslora else self.rank)

    def of_module(self, name: str) -> Lora:
        """Return the adapter with the rank and alpha of one module: those of the first pattern that matches."""
        rank = next((rank for pattern, rank in self.rank_pattern if fnmatchcase(name, pattern)), self.rank)
        alpha = next((alpha for pattern, alpha in self.alpha_pattern if fnmatchcase(name, pattern)), self.alpha)
        return self.model_copy(update={"rank": rank, "alpha": alpha})


class Ia3(Component):
    """Trained factors of the outputs of matrices; for a feed-forward's `down`, of its inputs (Liu et al., 2022).

    Attributes:
        target_modules: patterns of the names of the adapted modules.
    """

    type: Literal["ia3"] = "ia3"
    target_modules: tuple[str, ...]

    def of_module(self, _name: str) -> Ia3:
        """Return the adapter of one module: all are alike."""
        return self


class SoftPrompt(Component):
    """Trained vectors in place of embedded tokens (Lester et al., 2021), before the input of the encoder if there is
    one, otherwise of the decoder.

    Attributes:
        encoder: network that computes the vectors from trained ones (P-tuning, Liu et al., 2021).
        encoder_hidden_size: its hidden size.
        after_input: whether the vectors stand after the encoder's input.
    """

    type: Literal["soft_prompt"] = "soft_prompt"
    num_virtual_tokens: PositiveInt
    encoder: Literal["none", "mlp", "lstm"] = "none"
    encoder_hidden_size: PositiveInt = 1
    after_input: bool = False


class DeepPrompt(Component):
    """Trained keys and values before those of the text, in each block (P-tuning v2, Liu et al., 2022).

    Attributes:
        encoder_hidden_size: hidden size of the network that computes those of each block from trained vectors (prefix
            tuning, Li and Liang, 2021); None: they are trained directly.
        in_encoder: whether the blocks of an encoder, if there is one, have them, too.
    """

    type: Literal["deep_prompt"] = "deep_prompt"
    num_virtual_tokens: PositiveInt
    encoder_hidden_size: PositiveInt | None = None
    in_encoder: bool = True


Adapter = Annotated[Lora | Ia3 | SoftPrompt | DeepPrompt, Field(discriminator="type")]


class ModelSpec(Component):
    """A decoder: `num_layers` pre-norm blocks of attention and feed-forward between an embedding and a head. If there
    are `num_encoder_layers`, each block also attends to the states of an encoder of the same width.

    Attributes:
        family: name of the family, which defines tensor names and the Hugging Face config.
        vocab_size: rows of the embedding.
        num_encoder_layers: blocks of the encoder, which shares the embedding; None: there is no encoder.
        max_position_embeddings: longest sequence, in tokens.
        tie_word_embeddings: whether the head uses the embedding's weight.
        embedding_norm: whether embeddings are normalized before the first block.
        normalize_lm_head: whether each row of the head's weight is divided by its norm.
        scale_lm_head: whether the final states are divided by √hidden_size before the head.
        score_head: whether the head gives one number, the reward of the text so far, in place of logits.
        value_head: whether there is a head for the value of the text so far beside that for logits, in training.
        initializer_range: standard deviation of the initial weights.
        adapter: adapters, the only parameters that are then trained.
        quantization: format of the blocks' matrices, which are then frozen; None: they are not quantized.
        frozen_parameters: patterns of the names of parameters that are not trained.
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

    @model_validator(mode="after")
    def _dimensions_fit(self) -> ModelSpec:
        part = self.attention
        if part.num_heads % part.num_kv_heads:
            raise JinguError(
                f"{part.num_heads} attention heads cannot share {part.num_kv_heads} key-value heads evenly.",
                where="model.num_kv_heads",
                fix=f"Choose a divisor of {part.num_heads}: {', '.join(map(str, divisors(part.num_heads)))}.",
            )
        if isinstance(self.position, RotaryPositions) and rotary_dim(self.position, part.head_dim) % 2:
            raise JinguError(
                f"rotary positions rotate pairs, so the head size must be even; it is {part.head_dim}.",
                where="model.head_dim",
                fix="Choose a hidden size and a number of heads whose quotient is even, or set model.head_dim.",
            )
        bias = self.position
        if isinstance(bias, RelativeBias) and bias.max_distance <= bias.num_buckets // 2:
            raise JinguError(
                f"{bias.num_buckets} buckets of distances up to {bias.max_distance} leave none that grow.",
                where="model.position",
                fix=f"Choose a max_distance above {bias.num_buckets // 2}.",
            )
        return self

    @property
    def prompts(self) -> tuple[int, int]:
        """Numbers of virtual tokens, whose ids follow the vocabulary, in the inputs of decoder and encoder."""
        adapter, encodes = self.adapter, self.num_encoder_layers is not None
        if isinstance(adapter, SoftPrompt):
            return (0, adapter.num_virtual_tokens) if encodes else (adapter.num_virtual_tokens, 0)
        if isinstance(adapter, DeepPrompt):
            return adapter.num_virtual_tokens, adapter.num_virtual_tokens if encodes and adapter.in_encoder else 0
        return 0, 0

    def prompted(self, ids: Sequence[int], *, encoder: bool = False) -> tuple[int, ...]:
        """Return the ids that the decoder, or the encoder, reads: these, and those of its virtual tokens."""
        own = range(self.vocab_size, self.vocab_size + self.prompts[encoder])
        behind = isinstance(self.adapter, SoftPrompt) and self.adapter.after_input
        return (*ids, *own) if behind else (*own, *ids)

    def to_json(self) -> str:
        """Return the spec as indented JSON."""
        return self.model_dump_json(indent=2) + "\n"

    @staticmethod
    def from_json(text: str | bytes, where: object = "model.json") -> ModelSpec:
        """Return the spec that `to_json` wrote. Raises JinguError, which names each wrong field."""
        try:
            tree = from_json(text)
            return ModelSpec.model_validate(migrate_spec(tree) if isinstance(tree, dict) else tree)
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


def rotary_dim(position: RotaryPositions, head_size: int) -> int:
    """Return how many dimensions of a head are rotated."""
    return int(head_size * position.partial_rotary_factor)


def replace_fields(spec: ModelSpec, **changes: Any) -> ModelSpec:
    """Return a validated copy with other values; a key may be a path, such as `attention.num_heads`."""
    values = spec.model_dump()
    for path, value in changes.items():
        *parts, last = path.split(".")
        component = values
        for part in parts:
            component = component[part]
        component[last] = value.model_dump() if isinstance(value, Component) else value
    return ModelSpec.model_validate(values)


def flatten_fields(spec: ModelSpec) -> dict[str, Any]:
    """Return all values by their paths, as `replace_fields` takes them."""
    return flatten(spec.model_dump())
