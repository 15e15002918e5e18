"""Qwen3 (Yang et al., 2025): Llama with normalised queries and keys, and heads of a size of their own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jingu.model.families.family import Config, sized
from jingu.model.families.llama import LLAMA, llama_config, llama_spec
from jingu.model.families.qwen2 import window_from_hf, window_to_hf
from jingu.model.spec import ModelSpec, RmsNorm, RotaryPositions, replaced


def _spec_from_hf(config: Config) -> ModelSpec:
    bias = bool(config.get("attention_bias", False))
    size = config.get("head_dim") or 128
    window = window_from_hf(config)
    return llama_spec(config, "qwen3", head_size=size, qkv_bias=bias, output_bias=bias, qk_norm=True, window=window)


def _hf_config(spec: ModelSpec) -> dict[str, Any]:
    return llama_config(spec, "qwen3", attention_bias=spec.attention.qkv_bias, **window_to_hf(spec))


_TEMPLATE = replaced(
    LLAMA.template,
    family="qwen3",
    norm=RmsNorm(epsilon=1e-6),
    position=RotaryPositions(base=1e6),
    attention=LLAMA.template.attention.model_copy(update={"qk_norm": True}),
)
_ALL: dict[str, Any] = {"kv_heads": 8, "head_size": 128, "vocabulary": 151936, "context": 40960}
_SMALL: dict[str, Any] = {**_ALL, "tied_embeddings": True}

QWEN3 = replace(
    LLAMA,
    name="qwen3",
    architectures=("Qwen3ForCausalLM",),
    template=_TEMPLATE,
    spec_from_hf=_spec_from_hf,
    hf_config=_hf_config,
    presets={
        "qwen3-0.6b": sized(_TEMPLATE, 28, 1024, 16, 3072, **_SMALL),
        "qwen3-1.7b": sized(_TEMPLATE, 28, 2048, 16, 6144, **_SMALL),
        "qwen3-4b": sized(_TEMPLATE, 36, 2560, 32, 9728, **_SMALL),
        "qwen3-8b": sized(_TEMPLATE, 36, 4096, 32, 12288, **_ALL),
        "qwen3-14b": sized(_TEMPLATE, 40, 5120, 40, 17408, **_ALL),
        "qwen3-32b": sized(_TEMPLATE, 64, 5120, 64, 25600, **_ALL),
    },
)
