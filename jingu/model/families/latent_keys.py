"""Keys of a Hugging Face config that describe latent attention (DeepSeek-V2 and later models)."""

from __future__ import annotations

from math import log
from typing import Any

from jingu.model.components import RotaryPositions, YarnScaling
from jingu.model.families.family import ConfigKeys, HFConfig, SpecValues
from jingu.model.spec import ModelSpec


def _read(config: HFConfig) -> SpecValues:
    """Read the sizes of latent attention, and the scale of its scores."""
    rotary, plain = config["qk_rope_head_dim"], config["qk_nope_head_dim"]
    latent = {"rank": config["kv_lora_rank"], "rotary_dim": rotary, "query_rank": config.get("q_lora_rank")}
    heads, size = config["num_attention_heads"], plain + rotary
    values: SpecValues = {
        "attention.latent": latent,
        "attention.head_dim": size,
        "attention.num_kv_heads": heads,
        "attention.value_dim": config["v_head_dim"],
    }
    # YaRN multiplies the scores once more, if a weight is given.
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    weight = rope.get("mscale_all_dim") or 0.0
    if rope.get("rope_type", rope.get("type", "default")) != "default" and weight:
        factor = rope["factor"]
        scale = 0.1 * weight * log(factor) + 1.0 if factor > 1 else 1.0
        values["attention.scale"] = size**-0.5 * scale * scale
    return values


def _write(spec: ModelSpec) -> dict[str, Any]:
    part = spec.attention
    assert part.latent is not None
    return {
        "kv_lora_rank": part.latent.rank,
        "q_lora_rank": part.latent.query_rank,
        "qk_rope_head_dim": part.latent.rotary_dim,
        "qk_nope_head_dim": part.head_dim - part.latent.rotary_dim,
        "v_head_dim": part.value_size,
        "num_key_value_heads": part.num_heads,
    }


def mscale_weight(spec: ModelSpec) -> float:
    """Return `mscale_all_dim`, with which YaRN's scale of the scores becomes that of the model; 0: it has none."""
    part, position = spec.attention, spec.position
    scaling = position.scaling if isinstance(position, RotaryPositions) else None
    if part.scale is None or not isinstance(scaling, YarnScaling) or scaling.factor <= 1:
        return 0.0
    scale = (part.scale * part.head_dim**0.5) ** 0.5
    return round((scale - 1.0) / (0.1 * log(scaling.factor)), 9)


LATENT_KEYS = ConfigKeys(_read, _write)
