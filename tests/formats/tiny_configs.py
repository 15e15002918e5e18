"""Sizes of tiny models in the words of transformers' configurations."""

SIZES = {
    "vocab_size": 64,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 48,
}
MOE = {"num_key_value_heads": 2, "head_dim": 8, "num_experts_per_tok": 2}
