"""Rotary positions in a Hugging Face config.

The keys are `rope_theta` and `rope_scaling`, or since release 5 of transformers `rope_parameters`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import log, sqrt
from typing import Any, get_args

from jingu.model.components import AlphaScaling, DynamicScaling, LongropeScaling, RopeScaling, RotaryPositions
from jingu.model.families.family import ConfigKeys, HFConfig, SpecValues, unsupported_option
from jingu.model.families.latent_keys import mscale_weight
from jingu.model.part_spec import Component
from jingu.model.spec import ModelSpec

# Components of scaling by the value of `rope_type`.
_KINDS: tuple[type[Component], ...] = get_args(get_args(RopeScaling)[0])
# Keys of a config about the sizes that positions depend on.
_SIZES = ("rotary_dim", "head_dim", "hidden_size", "num_attention_heads", "max_position_embeddings")
SCALINGS = {kind.model_fields["type"].default: kind for kind in _KINDS if kind is not AlphaScaling}


def _read(config: HFConfig) -> SpecValues:
    """Read positions and context length, from the keys of any release. Raises JinguError for unknown scaling."""
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    nested = [name for name, value in rope.items() if isinstance(value, Mapping)]
    if nested:
        detail = "expected the same for all layers"
        raise unsupported_option("rope_parameters", {name: rope[name] for name in nested}, detail)
    if rope.get("llama_4_scaling_beta"):
        raise unsupported_option("llama_4_scaling_beta", rope["llama_4_scaling_beta"], "expected none")
    position, context = read_rope(rope, config)
    if position.partial_rotary_factor != 1.0:
        raise unsupported_option("partial_rotary_factor", position.partial_rotary_factor, "expected 1.0")
    return {"position": position, "max_position_embeddings": context}


def read_rope(rope: HFConfig, config: HFConfig) -> tuple[RotaryPositions, int]:
    """Return the positions that an object `rope_parameters` describes, and the context length."""
    base, context = rope.get("rope_theta") or config.get("rope_theta"), config.get("max_position_embeddings") or 2048
    share = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", *SCALINGS):
        raise unsupported_option("rope_scaling", kind, f"known are {', '.join(SCALINGS)}")
    if kind == "dynamic" and rope.get("alpha"):
        raise unsupported_option("rope_scaling.alpha", rope["alpha"], "expected none")
    scaling = None if kind == "default" else _scaling(kind, rope, config, context)
    fields = {"theta": float(base or 10000.0), "partial_rotary_factor": share, "scaling": scaling}
    position = RotaryPositions.model_validate(fields)
    # With dynamic scaling, the config has the original context length, and the model can handle a longer one.
    if isinstance(position.scaling, DynamicScaling):
        context = int(position.scaling.factor * context)
    return position, context


def _scaling(kind: str, rope: HFConfig, config: HFConfig, context: int) -> dict[str, Any]:
    """Return the fields of the scaling component `kind`, with the defaults of transformers."""
    original = config.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
    values = {
        **rope,
        # With dynamic scaling, transformers ignores original_max_position_embeddings.
        "original_max_position_embeddings": (original if kind != "dynamic" else None) or context,
    }
    if kind == "longrope":
        factor = rope.get("factor") or context / values["original_max_position_embeddings"]
        values["attention_factor"] = rope.get("attention_factor") or _longrope_factor(
            factor, values["original_max_position_embeddings"]
        )
    if kind == "yarn":
        values["factor"] = factor = rope.get("factor") or context / values["original_max_position_embeddings"]
        values["attention_factor"] = rope.get("attention_factor") or _attention_factor(factor, rope)
    fields = {name: values[name] for name in SCALINGS[kind].model_fields if values.get(name) is not None}
    return {**fields, "type": kind}


def _longrope_factor(factor: float, original: int) -> float:
    """Return √(1 + ln(factor) / ln(original context)) (LongRoPE, Ding et al., 2024)."""
    return sqrt(1 + log(factor) / log(original)) if factor > 1 else 1.0


def _attention_factor(factor: float, rope: HFConfig) -> float:
    """Return 0.1·ln(factor) + 1 (YaRN, Peng et al., 2023), or the quotient of two such values if `mscale` is set."""

    def scale(weight: float) -> float:
        return 0.1 * weight * log(factor) + 1.0 if factor > 1 else 1.0

    top, bottom = rope.get("mscale"), rope.get("mscale_all_dim")
    return scale(top) / scale(bottom) if top and bottom else scale(1.0)


def _write(spec: ModelSpec) -> dict[str, Any]:
    """Return the keys of all releases of transformers."""
    position, context = spec.position, spec.max_position_embeddings
    if not isinstance(position, RotaryPositions):
        return {}
    rope = write_rope(position)
    if isinstance(position.scaling, DynamicScaling):
        context = position.scaling.original_max_position_embeddings
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    return {
        "max_position_embeddings": context,
        "rope_theta": position.theta,
        "rope_scaling": scaling if position.scaling else None,
        "rope_parameters": rope,
    }


def write_rope(position: RotaryPositions) -> dict[str, Any]:
    """Return the object `rope_parameters` of positions."""
    scaling = {} if position.scaling is None else position.scaling.model_dump()
    scaling = {"rope_type": scaling.pop("type", "default"), **scaling}
    original = scaling.pop("original_max_position_embeddings", None)
    if original is not None and not isinstance(position.scaling, DynamicScaling):
        scaling["original_max_position_embeddings"] = original
    share = position.partial_rotary_factor
    if position.proportional:
        return {**scaling, "rope_type": "proportional", "rope_theta": position.theta, "partial_rotary_factor": share}
    return {**scaling, "rope_theta": position.theta, **({} if share == 1.0 else {"partial_rotary_factor": share})}


# Positions and context length. They are one conversion, because the context length depends on the scaling.
ROPE = ConfigKeys(_read, _write)


@dataclass(frozen=True)
class RopeDefaults:
    """What the rotary positions of a family are where its configs do not say it.

    Attributes:
        theta: base of a config without one.
        partial_rotary_factor: rotated share of a head in a config without one.
        interleaved: whether rotated pairs are neighbors, which no config says.
        has_alpha: whether `dynamic` scaling with `alpha` has a fixed base (Hunyuan).
        names_original_context: whether the original context of longrope is a key of the config itself, too (Phi-3).
        has_query_scaling: whether `llama_4_scaling_beta` scales queries by their positions.
        has_rotary_dim: whether `rotary_dim` is all that configs say of rotary positions (GPT-J).
        has_interleave_key: whether `rope_interleave` says if rotated pairs are neighbors.
        has_partial_rotary: whether configs say the rotated share, although a config without it rotates whole heads.
        has_proportional: whether `rope_type` may be `proportional`.
        scaled_partial_rotary_factor: that share where positions are scaled; None: the same (MiMo).
        has_mscales: whether scaled positions are those of longrope, and configs name the factors of cosines and sines
            in short and in long texts, which must be equal (Phi-3.5-MoE).
        has_share_of_head: whether that share is one of whole heads with latent attention, too (Mistral 4), instead of
            one of their rotated part.
    """

    theta: float = 10000.0
    partial_rotary_factor: float = 1.0
    interleaved: bool = False
    has_alpha: bool = False
    names_original_context: bool = False
    has_query_scaling: bool = False
    has_rotary_dim: bool = False
    has_interleave_key: bool = False
    has_partial_rotary: bool = False
    has_proportional: bool = False
    scaled_partial_rotary_factor: float | None = None
    has_share_of_head: bool = False
    has_mscales: bool = False

    def read(self, rope: HFConfig, config: HFConfig) -> tuple[RotaryPositions, int]:
        """Return the positions of an object `rope_parameters`, and the context length."""
        if self.has_rotary_dim:
            config = {key: config[key] for key in _SIZES if key in config}
            rope = {}
        rope = {"rope_theta": config.get("rope_theta") or self.theta, **rope}
        # `rotary_pct` is the name in old files of GPT-NeoX.
        named = config.get("partial_rotary_factor") or config.get("rotary_pct")
        if config.get("rotary_dim"):
            named = config["rotary_dim"] / (
                config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
            )
        named = rope.get("partial_rotary_factor") or named
        is_scaled = rope.get("rope_type", rope.get("type", "default")) != "default"
        share = named or (self.scaled_partial_rotary_factor if is_scaled else None) or self.partial_rotary_factor
        if "qk_rope_head_dim" in config:
            # Of latent attention, the rotated part of a head is a size of its own, with which a share must agree.
            rotary = config["qk_rope_head_dim"]
            size = rotary + config["qk_nope_head_dim"] if self.has_share_of_head else rotary
            if named is not None and int(size * named) != rotary:
                raise unsupported_option("partial_rotary_factor", named, f"expected {rotary / size:g}")
            share = 1.0
        rope["partial_rotary_factor"] = share
        proportional = self.has_proportional and rope.get("rope_type", rope.get("type")) == "proportional"
        if proportional:
            # The frequencies of proportional positions may have a factor.
            rope["rope_type"] = "default" if rope.get("factor", 1.0) == 1.0 else "linear"
        if share != 1.0 and not (proportional or self.has_partial_rotary or self.partial_rotary_factor != 1.0):
            raise unsupported_option("partial_rotary_factor", share, "expected 1.0")
        alpha = rope.get("alpha") if self.has_alpha and rope.get("rope_type", rope.get("type")) == "dynamic" else None
        if alpha:
            rope = {key: rope[key] for key in ("rope_theta", "partial_rotary_factor")}
        if self.names_original_context and rope.get("rope_type", rope.get("type")) in ("su", "yarn"):
            rope["rope_type"] = "longrope"  # names of early releases of Phi-3
        if self.has_mscales:
            rope = self._read_mscales(rope)
        position, context = read_rope(rope, config)
        scaling = AlphaScaling(alpha=alpha) if alpha else position.scaling
        interleaved = self.interleaved
        if self.has_interleave_key and config.get("rope_interleave") is not None:
            interleaved = bool(config["rope_interleave"])
        fields = {"interleaved": interleaved, "scaling": scaling, "proportional": proportional}
        return position.model_copy(update=fields), context

    @staticmethod
    def _read_mscales(rope: HFConfig) -> HFConfig:
        """Return an object `rope_parameters` with the factor that `short_mscale` and `long_mscale` name."""
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind == "default":
            return rope
        short, long = rope.get("short_mscale"), rope.get("long_mscale")
        if kind != "longrope":
            raise unsupported_option("rope_scaling", kind, "expected longrope")
        if short is None or short != long:
            raise unsupported_option("long_mscale", long, f"expected short_mscale, which is {short}")
        return {**rope, "attention_factor": short}

    def read_query_scaling(self, config: HFConfig) -> SpecValues:
        """Return the fields of queries that grow with the position."""
        rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
        beta = rope.get("llama_4_scaling_beta")
        if beta and not self.has_query_scaling:
            raise unsupported_option("llama_4_scaling_beta", beta, "expected none")
        if not self.has_query_scaling:
            return {}
        length = rope.get("original_max_position_embeddings") or config["max_position_embeddings"]
        return {"attention.query_scaling": {"beta": beta, "length": length} if beta else None}

    def write(self, spec: ModelSpec) -> dict[str, Any]:
        """Return the keys of the positions of a model."""
        position = spec.position
        assert isinstance(position, RotaryPositions)
        if self.has_rotary_dim:
            return {"rotary_dim": round(position.partial_rotary_factor * spec.attention.head_dim)}
        keys: dict[str, Any] = {"rope_parameters": write_rope(position)}
        if isinstance(position.scaling, AlphaScaling):
            scaling = {"rope_type": "dynamic", "alpha": position.scaling.alpha, "factor": 1.0}
            keys["rope_parameters"] = {"rope_theta": position.theta, **scaling}
        if self.partial_rotary_factor != 1.0:
            keys["rope_parameters"]["partial_rotary_factor"] = position.partial_rotary_factor
        if self.names_original_context and isinstance(position.scaling, LongropeScaling):
            keys["original_max_position_embeddings"] = position.scaling.original_max_position_embeddings
        if self.has_mscales and isinstance(position.scaling, LongropeScaling):
            factor = position.scaling.attention_factor
            keys["rope_parameters"] |= {"short_mscale": factor, "long_mscale": factor}
        if self.has_interleave_key:
            keys["rope_interleave"] = position.interleaved
        if spec.attention.latent is not None and (weight := mscale_weight(spec)):
            keys["rope_parameters"]["mscale_all_dim"] = weight
        if spec.attention.query_scaling is not None and self.has_query_scaling:
            keys["rope_parameters"]["llama_4_scaling_beta"] = spec.attention.query_scaling.beta
            keys["rope_parameters"].setdefault("original_max_position_embeddings", spec.attention.query_scaling.length)
        return keys
