"""Baichuan 2 (Yang et al., 2023): Llama with q, k and v in one matrix and a head whose rows have length 1; the 13B
model has ALiBi in place of rotary positions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jingu.model.families.family import ConfigKeys, HFConfig, SpecValues, preset, unsupported_option
from jingu.model.families.llama import LLAMA, NAMES, SHARED_KEYS
from jingu.model.families.name_map import name_rules
from jingu.model.spec import AlibiPositions, ModelSpec, RmsNorm, RotaryPositions, replace_fields


def _read_positions(config: HFConfig) -> SpecValues:
    """Their code has one base, and no scaling, whatever the config says."""
    if config.get("vocab_size") == 64000:
        raise unsupported_option("vocab_size", 64000, "that of the first Baichuan, whose head is another")
    if "max_position_embeddings" in config:
        return {"position": RotaryPositions(), "max_position_embeddings": config["max_position_embeddings"] or 2048}
    return {"position": AlibiPositions(), "max_position_embeddings": config.get("model_max_length") or 4096}


def _write_positions(spec: ModelSpec) -> dict[str, Any]:
    names = ["model_max_length", *["max_position_embeddings"] * isinstance(spec.position, RotaryPositions)]
    return dict.fromkeys(names, spec.max_position_embeddings)


_NAMES = {
    **{hf_name: jingu_name for hf_name, jingu_name in NAMES.items() if "{q,k,v" not in jingu_name},
    "model.layers.*.self_attn.W_pack": "blocks.*.attention.{q,k,v}",
    "model.layers.*.self_attn.o_proj": "blocks.*.attention.output",
}
_TEMPLATE = replace_fields(LLAMA.template, family="baichuan2", norm=RmsNorm(eps=1e-6), normalize_lm_head=True)
_ALL: dict[str, Any] = {"vocab_size": 125696, "max_position_embeddings": 4096}

BAICHUAN2 = replace(
    LLAMA,
    architectures=("BaichuanForCausalLM",),
    model_type="baichuan",
    template=_TEMPLATE,
    keys=(*SHARED_KEYS, ConfigKeys(_read_positions, _write_positions)),
    rules=name_rules(_NAMES),
    presets={
        "baichuan2-7b": preset(_TEMPLATE, 32, 4096, 32, 11008, **_ALL),
        "baichuan2-13b": preset(_TEMPLATE, 40, 5120, 40, 13696, position=AlibiPositions(), **_ALL),
    },
    replaces_code=True,
)
