"""Baichuan 2 (Yang et al., 2023): Llama with q, k and v in one matrix and a head whose rows have length 1; the 13B
model has ALiBi in place of rotary positions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jingu.model.families.family import Config, sized, unsupported
from jingu.model.families.llama import LLAMA, llama_config, llama_spec
from jingu.model.families.names import rule
from jingu.model.spec import AlibiPositions, ModelSpec, RmsNorm, RotaryPositions, replaced

_ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters")


def _spec_from_hf(config: Config) -> ModelSpec:
    if config.get("vocab_size") == 64000:
        raise unsupported("vocab_size", 64000, "that of the first Baichuan, whose head is another")
    # Their code has one base, and no scaling, whatever the config says.
    spec = llama_spec({key: value for key, value in config.items() if key not in _ROPE_KEYS}, "baichuan2")
    spec = replaced(spec, normalised_head=True)
    if "max_position_embeddings" in config:
        return spec
    return replaced(spec, position=AlibiPositions(), context=config.get("model_max_length") or 4096)


def _hf_config(spec: ModelSpec) -> dict[str, Any]:
    rotary = isinstance(spec.position, RotaryPositions)
    shared = llama_config(replaced(spec, position=RotaryPositions()), "baichuan", model_max_length=spec.context)
    dropped = _ROPE_KEYS if rotary else (*_ROPE_KEYS, "max_position_embeddings")
    return {key: value for key, value in shared.items() if key not in dropped}


_LAYER, _BLOCK = "model.layers.{layer}.self_attn.", "blocks.{layer}.attention."
_APART = tuple(f"{_LAYER}{part}_proj." for part in "qkv")
_TEMPLATE = replaced(LLAMA.template, family="baichuan2", norm=RmsNorm(epsilon=1e-6), normalised_head=True)
_ALL: dict[str, Any] = {"vocabulary": 125696, "context": 4096}

BAICHUAN2 = replace(
    LLAMA,
    name="baichuan2",
    architectures=("BaichuanForCausalLM",),
    template=_TEMPLATE,
    spec_from_hf=_spec_from_hf,
    hf_config=_hf_config,
    rules=(
        *(each for each in LLAMA.rules if not each.theirs.startswith(_APART)),
        rule(f"{_LAYER}W_pack.weight", *(f"{_BLOCK}{part}.weight" for part in "qkv")),
    ),
    presets={
        "baichuan2-7b": sized(_TEMPLATE, 32, 4096, 32, 11008, **_ALL),
        "baichuan2-13b": sized(_TEMPLATE, 40, 5120, 40, 13696, position=AlibiPositions(), **_ALL),
    },
    replaces_code=True,
)
