"""Rotary positions in a Hugging Face config.

The keys are `rope_theta` and `rope_scaling`, or since release 5 of transformers `rope_parameters`.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import log
from typing import Any, get_args

from jingu.model.families.family import ConfigKeys, HFConfig, SpecValues, unsupported_option
from jingu.model.spec import (
    AlphaScaling,
    Component,
    DynamicScaling,
    LongropeScaling,
    ModelSpec,
    RopeScaling,
    RotaryPositions,
)

# Components of scaling by the value of `rope_type`.
_KINDS: tuple[type[Component], ...] = get_args(get_args(RopeScaling)[0])
SCALINGS = {kind.model_fields["type"].default: kind for kind in _KINDS if kind not in (AlphaScaling, LongropeScaling)}


def _read(config: HFConfig) -> SpecValues:
    """Read positions and context length, from the keys of any release. Raises JinguError for unknown scaling."""
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    nested = [name for name, value in rope.items() if isinstance(value, Mapping)]
    if nested:
        detail = "expected the same for all layers"
        raise unsupported_option("rope_parameters", {name: rope[name] for name in nested}, detail)
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
    if kind == "yarn":
        values["factor"] = factor = rope.get("factor") or context / values["original_max_position_embeddings"]
        values["attention_factor"] = rope.get("attention_factor") or _attention_factor(factor, rope)
    fields = {name: values[name] for name in SCALINGS[kind].model_fields if values.get(name) is not None}
    return {**fields, "type": kind}


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
    return {**scaling, "rope_theta": position.theta, **({} if share == 1.0 else {"partial_rotary_factor": share})}


# Positions and context length. They are one conversion, because the context length depends on the scaling.
ROPE = ConfigKeys(_read, _write)
