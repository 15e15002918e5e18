"""BLOOM (Scao et al., 2022): layer norms, one also after the embedding, ALiBi, plain feed-forward, biases, tied head.

In Hugging Face's files one matrix holds q, k and v, interleaved by head: [heads, 3, head size] rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jingu.model.families.family import Family, config_keys, load_template, supported_options
from jingu.model.families.name_map import Transform, name_rules
from jingu.model.spec import ModelSpec

if TYPE_CHECKING:
    from torch import Tensor


def _to_jingu(tensor: Tensor, spec: ModelSpec) -> Tensor:
    """Rearrange rows from [heads, 3, head size] to [3, heads, head size]: q, k and v are then separate."""
    heads = spec.attention
    return tensor.unflatten(0, (heads.num_heads, 3, heads.head_dim)).transpose(0, 1).flatten(0, 2)


def _to_hf(tensor: Tensor, spec: ModelSpec) -> Tensor:
    """The inverse of `_to_jingu`."""
    heads = spec.attention
    return tensor.unflatten(0, (3, heads.num_heads, heads.head_dim)).transpose(0, 1).flatten(0, 2)


BLOOM = Family(
    architectures=("BloomForCausalLM",),
    template=load_template("bloom"),
    keys=(supported_options(apply_residual_connection_post_layernorm=(False,)), *config_keys("bloom")),
    rules=(
        *name_rules("bloom"),
        *name_rules("bloom", table="interleaved_names", transform=Transform(_to_jingu, _to_hf)),
    ),
    base="transformer.",
)
