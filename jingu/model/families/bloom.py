"""BLOOM (Scao et al., 2022): layer norms, one also after the embedding, ALiBi, plain feed-forward, biases, tied head.

In Hugging Face's files one matrix holds q, k and v, interleaved by head: [heads, 3, head size] rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jingu.model.families.family import Family, config_keys, load_template, supported_options
from jingu.model.families.name_map import INTERLEAVED_HEADS, name_rules

if TYPE_CHECKING:
    pass


BLOOM = Family(
    architectures=("BloomForCausalLM",),
    template=load_template("bloom"),
    keys=(supported_options(apply_residual_connection_post_layernorm=(False,)), *config_keys("bloom")),
    rules=(
        *name_rules("bloom"),
        *name_rules("bloom", table="interleaved_names", transform=INTERLEAVED_HEADS),
    ),
    base="transformer.",
)
