"""mT5 (Xue et al., 2021): T5 version 1.1 with a vocabulary for many languages. The head is never tied."""

from __future__ import annotations

from dataclasses import replace

from jingu.model.families.family import config_key
from jingu.model.families.t5 import SHARED_KEYS, T5, V1_1, feed_forward_key, v1_1_presets
from jingu.model.spec import replace_fields

_TEMPLATE = replace_fields(V1_1, family="mt5", vocab_size=250112, max_position_embeddings=1024)

MT5 = replace(
    T5,
    architectures=("MT5ForConditionalGeneration",),
    template=_TEMPLATE,
    keys=(
        *SHARED_KEYS,
        feed_forward_key("gated-gelu"),
        config_key("max_position_embeddings", "n_positions", default=1024),
    ),
    presets={f"mt5-{size}": spec for size, spec in v1_1_presets(_TEMPLATE).items()},
)
