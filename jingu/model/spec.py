"""What a model is: its dimensions and the components it is put together from. Frozen, and JSON both ways."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from jingu.errors import JinguError

Size = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0)]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]
Kind = Literal["int8", "int4", "nf4"]
"""Of matrices of few bits an element (`jingu.model.packed`)."""


class Component(BaseModel):
    """A part of the spec: frozen and closed to unknown keys. Variants are told apart by their `type`."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


class RmsNorm(Component):
    """Root mean square norm (Zhang and Sennrich, 2019): a weight, no bias."""

    type: Literal["rms"] = "rms"
    epsilon: Positive = 1e-5


class LayerNorm(Component):
    """Layer norm (Ba et al., 2016): a weight and a bias."""

    type: Literal["layer"] = "layer"
    epsilon: Positive = 1e-5


class LearnedPositions(Component):
    """A trained vector for each position, added to the embedding."""

    type: Literal["learned"] = "learned"


class LinearScaling(Component):
    """Positions divided by a factor."""

    type: Literal["linear"] = "linear"
    factor: Positive


class DynamicScaling(Component):
    """A base that grows with the sequence beyond the original context (dynamic NTK)."""

    type: Literal["dynamic"] = "dynamic"
    factor: Positive
    original_context: Size


class YarnScaling(Component):
    """Low frequencies divided by a factor, high ones kept, a ramp between (Peng et al., 2023)."""

    type: Literal["yarn"] = "yarn"
    factor: Positive
    original_context: Size
    attention_factor: Positive
    """Multiplies cosines and sines, and so the scores by its square."""
    beta_fast: Positive = 32.0
    beta_slow: Positive = 1.0
    truncate: bool = True
    """Whether the ramp begins and ends at whole dimensions."""


class Llama3Scaling(Component):
    """As yarn, with the ramp over wavelengths relative to the original context (Llama 3.1)."""

    type: Literal["llama3"] = "llama3"
    factor: Positive
    original_context: Size
    low_freq_factor: Positive
    high_freq_factor: Positive


RopeScaling = Annotated[LinearScaling | DynamicScaling | YarnScaling | Llama3Scaling, Field(discriminator="type")]


class RotaryPositions(Component):
    """Rotary embedding (Su et al., 2021) of queries and keys; the two halves of a head rotate against each other."""

    type: Literal["rope"] = "rope"
    base: Positive = 10000.0
    share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of a head that is turned: its first dimensions."""
    interleaved: bool = False
    """Whether neighbours make a pair, instead of the two halves."""
    scaling: RopeScaling | None = None


class AlibiPositions(Component):
    """Scores fall with the distance, for each head at its own slope (Press et al., 2022)."""

    type: Literal["alibi"] = "alibi"


class RelativeBias(Component):
    """A trained bias of the scores for each head and range of distances, shared by the layers of a stack
    (Raffel et al., 2020): half of the ranges hold one distance each, the others ever more, up to the largest."""

    type: Literal["relative_bias"] = "relative_bias"
    buckets: Annotated[int, Field(ge=4)] = 32
    """Ranges; where a token sees what follows it, half of them are for that."""
    max_distance: Size = 128
    """All distances from here on are in one range."""


class Attention(Component):
    """Attention with as many or fewer key-value heads than query heads (Ainslie et al., 2023)."""

    heads: Size
    kv_heads: Size
    head_size: Size
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    """Whether each head's queries and keys are normalised."""
    scaled: bool = True
    """Whether scores are divided by the root of the head size."""
    window: Size | None = None
    """How many tokens a token sees, itself among them; None: all before it."""


class PlainFeedForward(Component):
    """down(activation(up(x)))."""

    type: Literal["plain"] = "plain"
    size: Size
    activation: Activation = "gelu_tanh"
    bias: bool = False


class GatedFeedForward(Component):
    """down(activation(gate(x)) · up(x)) (Shazeer, 2020)."""

    type: Literal["gated"] = "gated"
    size: Size
    activation: Activation = "silu"
    bias: bool = False


class TopK(Component):
    """The experts with the highest probabilities (Shazeer et al., 2017), weighted with them."""

    type: Literal["top_k"] = "top_k"
    softmax: Literal["before", "after"] = "before"
    """Probabilities over all experts, or over the chosen ones only."""
    normalised: bool = True
    """Whether probabilities made before the choice are divided by the sum of the chosen ones."""


class Balanced(Component):
    """BASE (Lewis et al., 2021): while training equally many tokens of a sequence for each expert, at the largest
    sum of scores; otherwise the best expert. Weighted with the sigmoid of the score."""

    type: Literal["balanced"] = "balanced"


class RandomProjection(Component):
    """A router that stays as it was drawn: a hash that sends near states to one expert; equal weights."""

    type: Literal["random_projection"] = "random_projection"


Router = Annotated[TopK | Balanced | RandomProjection, Field(discriminator="type")]


class Experts(Component):
    """A mixture of experts: gated feed-forwards without biases, of which a router gives each token a few."""

    type: Literal["experts"] = "experts"
    number: Size
    active: Size
    """Experts a token."""
    size: Size
    """Inner size of one expert."""
    activation: Activation = "silu"
    gated: Literal[True] = True
    bias: Literal[False] = False
    router: Router = TopK()
    shared: Size | None = None
    """Inner size of a further feed-forward that every token passes; None: there is none."""
    shared_gated: bool = False
    """Whether what it says is weighted with the sigmoid of a score of its own."""
    capacity: Positive | None = None
    """Choices that an expert takes of a training sequence, as a multiple of an even share; None: all of them."""
    balance: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the balancing loss."""
    balance_over: Literal["layer", "model"] = "layer"
    """Whether every layer should be balanced, or the mean of all layers (as transformers computes it)."""
    z: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the router's z loss."""

    @model_validator(mode="after")
    def _experts_fit(self) -> Experts:
        if self.active > self.number:
            raise JinguError(
                f"a token cannot pass {self.active} of {self.number} experts.",
                where="model.experts",
                fix=f"Choose at most {self.number} active experts.",
            )
        if isinstance(self.router, Balanced) and self.active != 1:
            raise JinguError(
                f"the balanced router gives each token one expert, not {self.active}.",
                where="model.experts",
                fix="Set active to 1, or choose another router.",
            )
        return self


Norm = Annotated[RmsNorm | LayerNorm, Field(discriminator="type")]
Position = Annotated[LearnedPositions | RotaryPositions | AlibiPositions | RelativeBias, Field(discriminator="type")]
FeedForward = Annotated[PlainFeedForward | GatedFeedForward | Experts, Field(discriminator="type")]


class Lora(Component):
    """Adapters of low rank beside matrices that stay as they are (Hu et al., 2022)."""

    type: Literal["lora"] = "lora"
    rank: Size
    alpha: Positive
    """The adapters' product is scaled by alpha / rank."""
    targets: tuple[str, ...]
    """Patterns of the names of matrices that have one."""
    rank_stabilised: bool = False
    """Scaled by alpha / √rank instead (Kalajdzievski, 2023)."""
    magnitudes: bool = False
    """Whether the length of each row of the sum is trained by itself (DoRA, Liu et al., 2024)."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of an adapter's inputs that is zero in a step of training."""

    @property
    def scale(self) -> float:
        """Factor of the adapters' product."""
        return self.alpha / (self.rank**0.5 if self.rank_stabilised else self.rank)


class Ia3(Component):
    """Trained factors of what matrices give; of a feed-forward's `down`, of what it gets (Liu et al., 2022)."""

    type: Literal["ia3"] = "ia3"
    targets: tuple[str, ...]
    """Patterns of the names of these matrices."""


class SoftPrompt(Component):
    """Trained vectors in the place of embedded tokens (Lester et al., 2021), before the text that a decoder reads; or
    that an encoder reads, where there is one."""

    type: Literal["soft_prompt"] = "soft_prompt"
    tokens: Size
    encoder: Literal["none", "mlp", "lstm"] = "none"
    """What makes the vectors of trained ones (P-tuning, Liu et al., 2021)."""
    hidden: Size = 1
    """Width of that."""
    behind: bool = False
    """Whether they stand behind what an encoder reads."""


class DeepPrompt(Component):
    """Trained keys and values before those of the text, in each block (P-tuning v2, Liu et al., 2022)."""

    type: Literal["deep_prompt"] = "deep_prompt"
    tokens: Size
    hidden: Size | None = None
    """Inner size of the network that makes those of each block from trained vectors (prefix tuning, Li and Liang,
    2021); None: they are trained themselves."""
    in_encoder: bool = True
    """Whether the blocks of an encoder, where there is one, have them, too."""


Adapter = Annotated[Lora | Ia3 | SoftPrompt | DeepPrompt, Field(discriminator="type")]


class ModelSpec(Component):
    """A decoder: `layers` pre-norm blocks of attention and feed-forward between an embedding and a head; where there
    are `encoder_layers`, each block also attends to the states that an encoder of the same dimensions gives."""

    family: str
    """Name of the family, whose name map and Hugging Face config it follows."""
    vocabulary: Size
    """Rows of the embedding."""
    width: Size
    """Size of the hidden state."""
    layers: Size
    encoder_layers: Size | None = None
    """Blocks of the encoder, which shares the embedding; None: there is no encoder."""
    context: Size
    """Longest sequence, in tokens."""
    norm: Norm
    position: Position
    attention: Attention
    feed_forward: FeedForward
    tied_embeddings: bool = False
    """Whether the head uses the embedding's weight."""
    embedding_norm: bool = False
    """Whether the embedding is normalised before the first block."""
    normalised_head: bool = False
    """Whether each row of the head's weight is divided by its length."""
    scaled_head: bool = False
    """Whether the final states are divided by the root of the width, for the head."""
    initial_std: Positive = 0.02
    """Standard deviation of the initial matrices."""
    adapter: Adapter | None = None
    """Adapters, which alone are trained."""
    base: Kind | None = None
    """What the blocks' matrices that these stand beside are rounded to; None: they are not."""
    frozen: tuple[str, ...] = ()
    """Patterns of the names of parameters that are not trained."""

    @model_validator(mode="after")
    def _dimensions_fit(self) -> ModelSpec:
        part = self.attention
        if part.heads % part.kv_heads:
            raise JinguError(
                f"{part.heads} attention heads cannot share {part.kv_heads} key-value heads evenly.",
                where="model.kv_heads",
                fix=f"Choose a divisor of {part.heads}: {_divisors(part.heads)}.",
            )
        if isinstance(self.position, RotaryPositions) and rotary_size(self.position, part.head_size) % 2:
            raise JinguError(
                f"rotary positions turn pairs, so the head size must be even; it is {part.head_size}.",
                where="model.head_size",
                fix="Choose a width and a number of heads whose quotient is even, or set model.head_size.",
            )
        bias = self.position
        if isinstance(bias, RelativeBias) and bias.max_distance <= bias.buckets // 2:
            raise JinguError(
                f"{bias.buckets} ranges of distances up to {bias.max_distance} leave none that grow.",
                where="model.position",
                fix=f"Choose a max_distance above {bias.buckets // 2}.",
            )
        return self

    @property
    def prompts(self) -> tuple[int, int]:
        """Prompt tokens, whose ids follow those of the vocabulary, of what a decoder and of what an encoder reads."""
        adapter, encodes = self.adapter, self.encoder_layers is not None
        if isinstance(adapter, SoftPrompt):
            return (0, adapter.tokens) if encodes else (adapter.tokens, 0)
        if isinstance(adapter, DeepPrompt):
            return adapter.tokens, adapter.tokens if encodes and adapter.in_encoder else 0
        return 0, 0

    def prompted(self, ids: Sequence[int], *, encoder: bool = False) -> tuple[int, ...]:
        """Ids that the decoder, or the encoder, reads, with those of its prompt tokens."""
        own = range(self.vocabulary, self.vocabulary + self.prompts[encoder])
        behind = isinstance(self.adapter, SoftPrompt) and self.adapter.behind
        return (*ids, *own) if behind else (*own, *ids)

    def to_json(self) -> str:
        """The spec as indented JSON."""
        return self.model_dump_json(indent=2) + "\n"

    @staticmethod
    def from_json(text: str | bytes, where: object = "model.json") -> ModelSpec:
        """The spec that `to_json` wrote. Raises JinguError, naming each wrong field."""
        try:
            return ModelSpec.model_validate_json(text)
        except ValidationError as error:
            wrong = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'file'}: {e['msg']}" for e in error.errors())
            raise JinguError(
                f"this does not describe a model ({wrong}).",
                where=where,
                fix="Restore the file; it is written when a run starts.",
            ) from error


def rotary_size(position: RotaryPositions, head_size: int) -> int:
    """Dimensions of a head that are turned."""
    return int(head_size * position.share)


def replaced(spec: ModelSpec, **changes: Any) -> ModelSpec:
    """A copy with other values, validated again; a key may be a place in a component, such as `attention.heads`."""
    values = spec.model_dump()
    for place, value in changes.items():
        *parts, last = place.split(".")
        within = values
        for part in parts:
            within = within[part]
        within[last] = value.model_dump() if isinstance(value, Component) else value
    return ModelSpec.model_validate(values)


def places(spec: ModelSpec) -> dict[str, Any]:
    """All values by their places, as `replaced` takes them."""

    def of(values: dict[str, Any], within: str) -> Iterator[tuple[str, Any]]:
        for name, value in values.items():
            if isinstance(value, dict):
                yield from of(value, f"{within}{name}.")
            else:
                yield f"{within}{name}", value

    return dict(of(spec.model_dump(), ""))


def _divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)
