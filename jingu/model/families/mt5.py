"""mT5 (Xue et al., 2021): T5 version 1.1 with a vocabulary for many languages. The head is never tied."""

from __future__ import annotations

from jingu.model.families.family import Family, key, sized, written
from jingu.model.families.t5 import SHARED_KEYS, T5, V1_1, feed_forward_key
from jingu.model.spec import replaced

_TEMPLATE = replaced(V1_1, family="mt5", vocabulary=250112, context=1024)

MT5 = Family(
    name="mt5",
    architectures=("MT5ForConditionalGeneration",),
    template=_TEMPLATE,
    feed_forward_size=T5.feed_forward_size,
    keys=(
        *SHARED_KEYS,
        feed_forward_key("gated-gelu"),
        key("context", "n_positions", default=1024),
        written(model_type="mt5"),
    ),
    rules=T5.rules,
    ignored=T5.ignored,
    # Layers, width, heads, feed-forward.
    presets={
        "mt5-small": sized(_TEMPLATE, 8, 512, 6, 1024, head_size=64, encoder_layers=8),
        "mt5-base": sized(_TEMPLATE, 12, 768, 12, 2048, encoder_layers=12),
        "mt5-large": sized(_TEMPLATE, 24, 1024, 16, 2816, encoder_layers=24),
        "mt5-xl": sized(_TEMPLATE, 24, 2048, 32, 5120, encoder_layers=24),
        "mt5-xxl": sized(_TEMPLATE, 24, 4096, 64, 10240, encoder_layers=24),
    },
)
