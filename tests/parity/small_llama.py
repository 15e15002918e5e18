"""The configuration of a small Llama as transformers has it, which tests change in what they are about."""

from __future__ import annotations

SMALL_LLAMA = {
    "vocab_size": 317,
    "hidden_size": 48,
    "intermediate_size": 88,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
