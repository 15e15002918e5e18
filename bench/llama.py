"""A Llama as transformers has it, of a size in jingu's words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import LlamaConfig

NAMES = {
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
}


def llama_config(size: Mapping[str, int], vocabulary: int, context: int, **more: Any) -> LlamaConfig:
    """Return the configuration of a Llama; `more` are fields of transformers."""
    from transformers import LlamaConfig

    sizes = {NAMES.get(name, name): value for name, value in size.items()}
    return LlamaConfig(vocab_size=vocabulary, max_position_embeddings=context, **sizes, **more)
