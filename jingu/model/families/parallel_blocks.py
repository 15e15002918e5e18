"""Keys and names of Falcon (Almazrouei et al., 2023), whose generations order attention and feed-forward differently.

- Falcon-7B: parallel blocks of one norm, and one key-value head (`multi_query`).
- Falcon-40B and 180B (`new_decoder_architecture`): parallel blocks of two norms, and several key-value heads.
- Falcon-11B: the same with one norm (`num_ln_in_parallel_attn`).
- Falcon-RW: blocks whose branches follow each other.
"""

from __future__ import annotations

from typing import Any

from jingu.model.components import BlockOrder
from jingu.model.families.family import ConfigKeys, HFConfig, SpecValues
from jingu.model.families.name_map import rules_of_names
from jingu.model.spec import ModelSpec


def _read(config: HFConfig) -> SpecValues:
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_kv_heads") or heads
    norms = config.get("num_ln_in_parallel_attn")
    order: BlockOrder = "parallel_one_norm"
    if config.get("new_decoder_architecture"):
        order = "parallel" if norms in (None, 2) else order
    else:
        kv_heads = 1 if config.get("multi_query", True) else heads
        order = order if config.get("parallel_attn", True) else "sequential"
    return {"attention.num_kv_heads": kv_heads, "block_order": order}


def _write(spec: ModelSpec) -> dict[str, Any]:
    kv_heads, order = spec.attention.num_kv_heads, spec.block_order
    is_old = order == "sequential" or (order != "parallel" and kv_heads == 1)
    return {
        "new_decoder_architecture": not is_old,
        "num_ln_in_parallel_attn": None if is_old else 1 + (order == "parallel"),
        "multi_query": is_old and kv_heads == 1,
        "parallel_attn": order != "sequential",
        "num_kv_heads": kv_heads,
    }


PARALLEL_BLOCKS = ConfigKeys(_read, _write)
_NORMS = "blocks.*.{attention,feed_forward}_norm"
PARALLEL_BLOCK_RULES = (
    *rules_of_names({"transformer.h.*.ln_{attn,mlp}": _NORMS}, when=lambda spec: spec.block_order == "parallel"),
    *rules_of_names(
        {"transformer.h.*.{input,post_attention}_layernorm": _NORMS},
        when=lambda spec: spec.block_order != "parallel",
    ),
)
