"""Qwen3 (Yang et al., 2025): Llama with normalised queries and keys, and heads of a size of their own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jingu.model.families.family import config_key, preset
from jingu.model.families.llama import ATTENTION_BIAS, LLAMA, SHARED_KEYS
from jingu.model.families.qwen2 import WINDOW
from jingu.model.families.rope import ROPE
from jingu.model.spec import RmsNorm, RotaryPositions, replace_fields

_TEMPLATE = replace_fields(
    LLAMA.template,
    family="qwen3",
    norm=RmsNorm(eps=1e-6),
    position=RotaryPositions(theta=1e6),
    **{"attention.qk_norm": True},
)
_ALL: dict[str, Any] = {"num_kv_heads": 8, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960}
_SMALL: dict[str, Any] = {**_ALL, "tie_word_embeddings": True}

QWEN3 = replace(
    LLAMA,
    architectures=("Qwen3ForCausalLM",),
    template=_TEMPLATE,
    keys=(*SHARED_KEYS, ROPE, ATTENTION_BIAS, WINDOW, config_key("attention.head_dim", "head_dim", default=128)),
    presets={
        "qwen3-0.6b": preset(_TEMPLATE, 28, 1024, 16, 3072, **_SMALL),
        "qwen3-1.7b": preset(_TEMPLATE, 28, 2048, 16, 6144, **_SMALL),
        "qwen3-4b": preset(_TEMPLATE, 36, 2560, 32, 9728, **_SMALL),
        "qwen3-8b": preset(_TEMPLATE, 36, 4096, 32, 12288, **_ALL),
        "qwen3-14b": preset(_TEMPLATE, 40, 5120, 40, 17408, **_ALL),
        "qwen3-32b": preset(_TEMPLATE, 64, 5120, 64, 25600, **_ALL),
    },
)
