"""Qwen2 and Qwen2.5 (Yang et al., 2024): Llama with biases on queries, keys and values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jingu.model.families.family import ConfigKeys, HFConfig, SpecValues, preset, unsupported_option
from jingu.model.families.llama import LLAMA, SHARED_KEYS
from jingu.model.families.rope import ROPE
from jingu.model.spec import ModelSpec, RmsNorm, RotaryPositions, replace_fields


def _read_window(config: HFConfig) -> SpecValues:
    """The window, where the config uses it in every layer."""
    if not config.get("use_sliding_window"):
        return {"attention.sliding_window": None}
    layers = config.get("num_hidden_layers") or 0
    first = config.get("max_window_layers", 28)
    kinds = config.get("layer_types") or ["sliding_attention" if i >= first else "full" for i in range(layers)]
    sliding = {kind == "sliding_attention" for kind in kinds}
    if len(sliding) > 1:
        raise unsupported_option("max_window_layers", first, "either all layers have the window, or none")
    return {"attention.sliding_window": config.get("sliding_window") if True in sliding else None}


def _write_window(spec: ModelSpec) -> dict[str, Any]:
    window = spec.attention.sliding_window
    return {
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "max_window_layers": 0 if window else spec.num_layers,
    }


WINDOW = ConfigKeys(_read_window, _write_window)
_TEMPLATE = replace_fields(
    LLAMA.template,
    family="qwen2",
    norm=RmsNorm(eps=1e-6),
    position=RotaryPositions(theta=1e6),
    **{"attention.qkv_bias": True},
)
_SMALL: dict[str, Any] = {
    "num_kv_heads": 2,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}
_LARGE: dict[str, Any] = {"vocab_size": 152064, "max_position_embeddings": 32768}

QWEN2 = replace(
    LLAMA,
    architectures=("Qwen2ForCausalLM",),
    template=_TEMPLATE,
    keys=(*SHARED_KEYS, ROPE, WINDOW),
    presets={
        "qwen2-0.5b": preset(_TEMPLATE, 24, 896, 14, 4864, **_SMALL),
        "qwen2-1.5b": preset(_TEMPLATE, 28, 1536, 12, 8960, **_SMALL),
        "qwen2-7b": preset(_TEMPLATE, 28, 3584, 28, 18944, num_kv_heads=4, **_LARGE),
        "qwen2-72b": preset(_TEMPLATE, 80, 8192, 64, 29568, num_kv_heads=8, **_LARGE),
        "qwen2.5-3b": preset(_TEMPLATE, 36, 2048, 16, 11008, **_SMALL),
        "qwen2.5-14b": preset(_TEMPLATE, 48, 5120, 40, 13824, num_kv_heads=8, **_LARGE),
        "qwen2.5-32b": preset(_TEMPLATE, 64, 5120, 40, 27648, num_kv_heads=8, **_LARGE),
    },
)
