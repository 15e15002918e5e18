"""Mistral (Jiang et al., 2023): Llama with grouped heads and a sliding window."""

from __future__ import annotations

from dataclasses import replace

from jingu.model.families.family import ConfigKeys, preset
from jingu.model.families.llama import LLAMA, SHARED_KEYS
from jingu.model.families.rope import ROPE
from jingu.model.spec import replace_fields

_TEMPLATE = replace_fields(LLAMA.template, family="mistral", **{"attention.sliding_window": 4096})
_WINDOW = ConfigKeys(
    # A config may say that there is none.
    lambda config: {"attention.sliding_window": config.get("sliding_window", 4096)},
    lambda spec: {"sliding_window": spec.attention.sliding_window},
)

MISTRAL = replace(
    LLAMA,
    architectures=("MistralForCausalLM",),
    template=_TEMPLATE,
    keys=(*SHARED_KEYS, ROPE, _WINDOW),
    presets={"mistral-7b": preset(_TEMPLATE, 32, 4096, 32, 14336, num_kv_heads=8, max_position_embeddings=32768)},
)
