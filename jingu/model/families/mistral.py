"""Mistral (Jiang et al., 2023): Llama with grouped heads and a sliding window."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jingu.model.families.family import Config, sized
from jingu.model.families.llama import LLAMA, llama_config, llama_spec
from jingu.model.spec import ModelSpec, replaced


def _spec_from_hf(config: Config) -> ModelSpec:
    return llama_spec(config, "mistral", window=config.get("sliding_window", 4096))


def _hf_config(spec: ModelSpec) -> dict[str, Any]:
    return llama_config(spec, "mistral", sliding_window=spec.attention.window)


_TEMPLATE = replaced(
    LLAMA.template, family="mistral", attention=LLAMA.template.attention.model_copy(update={"window": 4096})
)

MISTRAL = replace(
    LLAMA,
    name="mistral",
    architectures=("MistralForCausalLM",),
    template=_TEMPLATE,
    spec_from_hf=_spec_from_hf,
    hf_config=_hf_config,
    presets={"mistral-7b": sized(_TEMPLATE, 32, 4096, 32, 14336, kv_heads=8, window=4096, context=32768)},
)
