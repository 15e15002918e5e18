"""Mistral (Jiang et al., 2023): Llama with grouped heads and a sliding window."""

from __future__ import annotations

from dataclasses import replace

from jingu.model.families.family import Keys, sized
from jingu.model.families.llama import LLAMA, SHARED_KEYS
from jingu.model.families.rope import ROPE
from jingu.model.spec import replaced

_TEMPLATE = replaced(LLAMA.template, family="mistral", **{"attention.window": 4096})
_WINDOW = Keys(
    # A config may say that there is none.
    lambda config: {"attention.window": config.get("sliding_window", 4096)},
    lambda spec: {"sliding_window": spec.attention.window},
)

MISTRAL = replace(
    LLAMA,
    architectures=("MistralForCausalLM",),
    template=_TEMPLATE,
    keys=(*SHARED_KEYS, ROPE, _WINDOW),
    presets={"mistral-7b": sized(_TEMPLATE, 32, 4096, 32, 14336, kv_heads=8, context=32768)},
)
