"""GPT-2 (Radford et al., 2019): layer norm, learned positions, plain feed-forward, biases, tied head.

Hugging Face's files store matrices transposed ([inputs, outputs], `Conv1D`), with q, k and v in one matrix.
"""

from __future__ import annotations

from jingu.model.families.family import (
    ConfigKeys,
    Family,
    activation_key,
    config_keys,
    load_template,
    supported_options,
)
from jingu.model.families.name_map import TRANSPOSE, name_rules

GPT2 = Family(
    architectures=("GPT2LMHeadModel",),
    template=load_template("gpt2"),
    keys=(
        supported_options(
            scale_attn_weights=(True,), scale_attn_by_inverse_layer_idx=(False,), add_cross_attention=(False,)
        ),
        *config_keys("gpt2"),
        activation_key("activation_function", "gelu_new"),
        ConfigKeys(write=lambda spec: {"n_ctx": spec.max_position_embeddings}),
    ),
    rules=(*name_rules("gpt2"), *name_rules("gpt2", table="transposed_names", transform=TRANSPOSE)),
    base="transformer.",
    ignored=(".attn.bias", ".attn.masked_bias"),
)
