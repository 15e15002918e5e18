"""The specification of a model: its dimensions and components, which can be stored as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import lru_cache
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator
from pydantic_core import from_json

from jingu.config.batch_plan import divisors
from jingu.errors import JinguError
from jingu.model.adapter_specs import Adapter, DeepPrompt, SoftPrompt
from jingu.model.attention_specs import AttentionSpec
from jingu.model.components import (
    BlockOrder,
    LayerSpec,
    LearnedPositions,
    LongropeScaling,
    NormPlacement,
    Position,
    RelativeBias,
    RotaryPositions,
)
from jingu.model.feed_forward_specs import Experts, FeedForward, GatedFeedForward, NoFeedForward
from jingu.model.mixer_specs import Mixer
from jingu.model.norm_specs import Norm
from jingu.model.part_spec import Component, PositiveFloat, PositiveInt, optional
from jingu.tables import flatten

# Formats of quantized matrices (`jingu.model.quantized_weight`).
QuantizationFormat = Literal["int8", "int4", "nf4", "fp8"]
# Also that of the initial model's files, which other tools have quantized.
BaseFormat = QuantizationFormat | Literal["stored"]


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
        head_bias: whether the head, which must not be tied, has a bias.
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
        scale: whether the hidden states behind a layer are multiplied by a number that is not trained (Gemma 4).
        per_layer_inputs: size of a vector that each layer gets for each token, from an embedding of its own and a
            projection of the hidden states before the first layer (Gemma 3n, Gemma 4); None: there is none.
        mixer: a mixer with a state of fixed size, which replaces attention; None: attention.
        parallel_mixer: whether the mixer stands beside attention, on the same hidden states, instead of replacing it.
        embedding_scale: multiplies the embedding.
        round_embedding_scale: whether `embedding_scale` is rounded to the dtype of the embedding.
        logit_scale: multiplies the logits.
        logit_softcap: logits l become softcap · tanh(l / softcap); None: they stay.
        mtp_layers: number of layers of multi-token prediction.
        mtp_kind: the kind of these layers; None: they are like the last layer of the decoder.
        mtp_loss_weight: weight of their loss; with 0, they are kept as they are.
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
    quantization: BaseFormat | None = None
    frozen_parameters: tuple[str, ...] = ()
    norm_placement: NormPlacement = optional("before")
    block_order: BlockOrder = optional("sequential")
    residual_scale: PositiveFloat = optional(1.0)
    scale: bool = optional(False)
    per_layer_inputs: PositiveInt | None = optional(None)
    mixer: Mixer | None = optional(None)
    parallel_mixer: bool = optional(False)
    embedding_scale: PositiveFloat | Literal["sqrt_hidden_size"] = optional(1.0)
    round_embedding_scale: bool = optional(False)
    logit_scale: PositiveFloat = optional(1.0)
    logit_softcap: PositiveFloat | None = optional(None)
    head_bias: bool = optional(False)
    mtp_layers: Annotated[int, Field(ge=0)] = optional(0)
    mtp_kind: str | None = optional(None)
    mtp_loss_weight: Annotated[float, Field(ge=0)] = optional(0.0)
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
    def _sources_fit(self) -> ModelSpec:
        for number in range(self.num_layers):
            if self.kv_source(number) is None:
                raise JinguError(
                    f"layer {number} shares keys and values, and no layer before it has those of this attention.",
                    where="model.layer_pattern",
                    fix="Let a layer that differs from it in attention.shares_kv alone come first.",
                )
        if self.per_layer_inputs and (self.num_encoder_layers or any(self.prompts)):
            raise JinguError(
                "inputs of each layer need a model without encoder and without virtual tokens.",
                where="model.per_layer_inputs",
                fix="Choose another adapter, such as LoRA.",
            )
        return self

    @model_validator(mode="after")
    def _predictions_fit(self) -> ModelSpec:
        problem = None
        if self.mtp_loss_weight and not self.mtp_layers:
            problem = "mtp_loss_weight weighs layers that predict further tokens, and the model has none (mtp_layers)"
        elif self.mtp_layers and self.num_encoder_layers:
            problem = "layers that predict further tokens need a model without encoder"
        elif self.mtp_kind is not None and self.mtp_kind not in self.layer_kinds:
            problem = f"mtp_kind is {self.mtp_kind!r}, which layer_kinds does not describe"
        if problem is not None:
            raise JinguError(f"{problem}.", where="model.mtp_layers", fix="Change one of the two.")
        if self.head_bias and self.tie_word_embeddings:
            what = "a head that is tied to the embedding has no bias, and the model has one (head_bias)."
            raise JinguError(what, where="model.tie_word_embeddings", fix="Set it to false.")
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
        position = layer.position
        rotated_dims = position.rotated_dims(part.rotary_size) if isinstance(position, RotaryPositions) else 0
        if rotated_dims % 2:
            raise JinguError(
                f"rotary positions rotate pairs: {rotated_dims} of {part.rotary_size} dims of a head is an odd number.",
                where="model.head_dim",
                fix="Choose a hidden size and a number of heads whose quotient is even, or set model.head_dim.",
            )
        self._check_parts(layer)
        if isinstance(position, RelativeBias) and position.max_distance <= position.num_buckets // 2:
            raise JinguError(
                f"with {position.num_buckets} buckets, the largest distance must exceed {position.num_buckets // 2}; "
                f"it is {position.max_distance}.",
                where="model.position",
                fix=f"Choose a max_distance above {position.num_buckets // 2}.",
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
        has_sandwich = layer.norm_placement == "around" and layer.block_order == "sequential"
        problem = None
        if layer.block_order != "sequential" and (self.num_encoder_layers or layer.norm_placement != "before"):
            problem = "attention and feed-forward are parallel, which needs norms before both and no encoder"
        elif part.qk_norm_width != "head" and part.qk_norm_after_rotary:
            problem = "norms with weights for all heads must come before rotary positions"
        elif part.latent is not None and part.latent.rotary_dim >= part.head_dim:
            problem = f"{part.latent.rotary_dim} dims of a head of {part.head_dim} are rotated, which leaves none"
        elif part.latent is not None and part.num_kv_heads != part.num_heads:
            problem = f"latent attention has as many key-value heads as heads, not {part.num_kv_heads}"
        elif part.latent is not None and (part.qk_norm or self.num_encoder_layers or part.value_scale != 1.0):
            problem = "latent attention has no norm of queries and keys, no scale of values, and no encoder"
        elif part.latent is not None and (part.input_scale, part.key_scale, part.output_scale) != (1.0, 1.0, 1.0):
            problem = "latent attention has no scales of inputs, keys and outputs"
        elif layer.mixer is not None and (self.num_encoder_layers or isinstance(self.adapter, DeepPrompt)):
            problem = "a mixer needs a model without encoder and without a prompt of keys and values"
        elif layer.parallel_mixer and layer.state_mixer is None:
            problem = "parallel_mixer needs a mixer with a state"
        elif isinstance(layer.feed_forward, NoFeedForward) and (layer.mixer is not None and layer.state_mixer is None):
            problem = "a layer without mixer and feed-forward computes nothing"
        elif layer.block_order != "sequential" and isinstance(layer.feed_forward, NoFeedForward):
            problem = "attention and feed-forward are parallel, and there is no feed-forward"
        elif layer.shares_kv and (self.num_encoder_layers or isinstance(self.adapter, DeepPrompt)):
            problem = "layers that share keys and values need a model without encoder and without a prompt of these"
        elif part.latent is not None and (part.shares_kv or part.values_are_keys or part.value_norm):
            problem = "latent attention has keys and values of its own, without a norm"
        elif part.values_are_keys and part.value_size != part.head_dim:
            problem = f"values that are the keys cannot have another size ({part.value_size} and {part.head_dim})"
        elif layer.feed_forward.parallel_branch() is not None and not has_sandwich:
            problem = "a feed-forward beside the experts needs norms before and behind the branches"
        elif self.num_encoder_layers and layer.feed_forward.has_correction:
            problem = "the correction of a router needs a model without encoder"
        elif isinstance(layer.feed_forward, GatedFeedForward | Experts) and layer.feed_forward.activation == "xielu":
            problem = "xielu needs a feed-forward of the type plain"
        elif isinstance(position, RotaryPositions) and isinstance(position.scaling, LongropeScaling):
            pairs = position.rotated_dims(part.rotary_size) // 2
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
        if name.startswith("mtp."):
            return self.prediction_layer
        return self.layer(int(name.split(".", 2)[1])) if name.startswith("blocks.") else self.default_layer

    def kv_source(self, number: int) -> int | None:
        """Return the layer whose keys and values layer `number` attends to: itself, or the last one before it that has
        the same attention and positions. None: there is no such layer."""
        layer = self.layer(number)
        if not layer.shares_kv:
            return number
        owner = layer.with_own_kv()
        sources = [(self.layer(source), source) for source in range(number)]
        same = [
            source
            for each, source in sources
            if each.has_attention and (each.attention, each.position) == (owner.attention, owner.position)
        ]
        return max(same, default=None)

    @property
    def has_shared_kv(self) -> bool:
        """Whether some layers attend to keys and values of another one."""
        return any(layer.shares_kv for layer in self.kinds)

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
    def prediction_layer(self) -> LayerSpec:
        """What the layers of multi-token prediction are."""
        return self.layers[-1] if self.mtp_kind is None else self.kind(self.mtp_kind)

    @property
    def kinds(self) -> tuple[LayerSpec, ...]:
        """The distinct layers of the model, in order of their first use."""
        return _kinds(self)

    @property
    def experts(self) -> Experts | None:
        """The experts of the layers that have some; None if there are none."""
        return next((layer.feed_forward for layer in self.kinds if isinstance(layer.feed_forward, Experts)), None)

    @property
    def has_state(self) -> bool:
        """Whether some layers have a mixer with a state instead of attention."""
        return any(layer.state_mixer is not None for layer in self.kinds)

    def uniform(self, layer: LayerSpec, num_layers: int = 1) -> ModelSpec:
        """Return the spec of a model whose layers are all equal to `layer`."""
        fields = {field: getattr(layer, field) for field in LayerSpec.model_fields}
        encoder = {"num_encoder_layers": 1} if self.num_encoder_layers else {}
        pattern = {"layer_kinds": {}, "layer_pattern": (), "num_layers": num_layers, "mtp_kind": None}
        return self.model_copy(update={**fields, **encoder, **pattern})

    def without_predictions(self) -> ModelSpec:
        """Return the spec of the model without its layers of multi-token prediction."""
        return self.model_copy(update={"mtp_layers": 0, "mtp_loss_weight": 0.0})

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
