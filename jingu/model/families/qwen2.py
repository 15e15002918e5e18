"""Qwen2 and Qwen2.5 (Yang et al., 2024): Llama with biases on queries, keys and values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jingu.model.families.family import Config, Keys, Values, sized, unsupported
from jingu.model.families.llama import LLAMA, SHARED_KEYS
from jingu.model.families.rope import ROPE
from jingu.model.spec import ModelSpec, RmsNorm, RotaryPositions, replaced


def _read_window(config: Config) -> Values:
    """The window, where the config uses it in every layer."""
    if not config.get("use_sliding_window"):
        return {"attention.window": None}
    layers = config.get("num_hidden_layers") or 0
    first = config.get("max_window_layers", 28)
    kinds = config.get("layer_types") or ["sliding_attention" if i >= first else "full" for i in range(layers)]
    sliding = {kind == "sliding_attention" for kind in kinds}
    if len(sliding) > 1:
        raise unsupported("max_window_layers", first, "either all layers have the window, or none")
    return {"attention.window": config.get("sliding_window") if True in sliding else None}


def _write_window(spec: ModelSpec) -> dict[str, Any]:
    window = spec.attention.window
    return {
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "max_window_layers": 0 if window else spec.layers,
    }


WINDOW = Keys(_read_window, _write_window)
_TEMPLATE = replaced(
    LLAMA.template,
    family="qwen2",
    norm=RmsNorm(epsilon=1e-6),
    position=RotaryPositions(base=1e6),
    **{"attention.qkv_bias": True},
)
_SMALL: dict[str, Any] = {"kv_heads": 2, "vocabulary": 151936, "context": 32768, "tied_embeddings": True}
_LARGE: dict[str, Any] = {"vocabulary": 152064, "context": 32768}

QWEN2 = replace(
    LLAMA,
    architectures=("Qwen2ForCausalLM",),
    template=_TEMPLATE,
    keys=(*SHARED_KEYS, ROPE, WINDOW),
    presets={
        "qwen2-0.5b": sized(_TEMPLATE, 24, 896, 14, 4864, **_SMALL),
        "qwen2-1.5b": sized(_TEMPLATE, 28, 1536, 12, 8960, **_SMALL),
        "qwen2-7b": sized(_TEMPLATE, 28, 3584, 28, 18944, kv_heads=4, **_LARGE),
        "qwen2-72b": sized(_TEMPLATE, 80, 8192, 64, 29568, kv_heads=8, **_LARGE),
        "qwen2.5-3b": sized(_TEMPLATE, 36, 2048, 16, 11008, **_SMALL),
        "qwen2.5-14b": sized(_TEMPLATE, 48, 5120, 40, 13824, kv_heads=8, **_LARGE),
        "qwen2.5-32b": sized(_TEMPLATE, 64, 5120, 40, 27648, kv_heads=8, **_LARGE),
    },
)
