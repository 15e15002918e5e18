"""A transformers configuration of a Llama, given its size in jingu's terms."""

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
    """Return the configuration of a Llama.

    Args:
        size: dimensions by jingu's names.
        vocabulary: entries of the vocabulary.
        context: maximum sequence length.
        more: further fields of transformers' `LlamaConfig`.
    """
    from transformers import LlamaConfig

    sizes = {NAMES.get(name, name): value for name, value in size.items()}
    return LlamaConfig(vocab_size=vocabulary, max_position_embeddings=context, **sizes, **more)
