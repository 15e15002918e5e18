"""CPM-2 (Zhang et al., 2021): Chinese and English, in the shape of T5 version 1.1; and its mixture of 32 experts in
every block, one a token, chosen by a frozen random projection.

The names of tensors are those of the code that its makers publish, with the parts of a tensor that they keep on
several ranks put together. Their experts have a norm each; here they share the block's. What a config says of experts
is the spec's component as it is.
"""

from __future__ import annotations

from jingu.config.legacy import migrate_spec
from jingu.model.families.family import ConfigKeys, Family, config_key, constant_keys
from jingu.model.families.name_map import NameRule, name_rules
from jingu.model.families.t5 import CONTEXT, SHARED_KEYS, V1_1, v1_1_presets
from jingu.model.spec import Experts, RandomProjectionRouter, replace_fields

_KEYS = (
    *SHARED_KEYS,
    config_key("max_position_embeddings", "n_positions", default=CONTEXT),
    ConfigKeys(
        lambda config: migrate_spec({"feed_forward": config["experts"]}) if config.get("experts") else {},
        lambda spec: {"experts": spec.feed_forward.model_dump() if isinstance(spec.feed_forward, Experts) else None},
    ),
    # Their own configuration names relu, and their code does not ask it.
    constant_keys(feed_forward_proj="gated-gelu"),
)
_INNER, _PARTS = "dense_relu_dense.{wi_0,wi_1,wo}", "feed_forward.{gate,up,down}"
_NAMES = {
    "word_embeds": "embedding",
    "encoder.blocks.0.self_attn.self_attn.relative_attention_bias": "encoder.relative_bias",
    "encoder.blocks.*.{self_attn,ff}.layer_norm": "encoder.blocks.*.{attention,feed_forward}_norm",
    "encoder.blocks.*.self_attn.self_attn.project": "encoder.blocks.*.attention.{q,k,v}",
    "encoder.blocks.*.self_attn.self_attn.dense": "encoder.blocks.*.attention.output",
    f"encoder.blocks.*.ff.{_INNER}": f"encoder.blocks.*.{_PARTS}",
    f"encoder.blocks.*.ff.expert_network.*.{_INNER}": f"encoder.blocks.*.{_PARTS}",
    "encoder.final_layernorm": "encoder.norm",
    "decoder.blocks.0.self_attn.self_attn.relative_attention_bias": "relative_bias",
    "decoder.blocks.*.{self_attn,cross_attn,ff}.layer_norm": "blocks.*.{attention,cross_attention,feed_forward}_norm",
    "decoder.blocks.*.self_attn.self_attn.project": "blocks.*.attention.{q,k,v}",
    "decoder.blocks.*.self_attn.self_attn.dense": "blocks.*.attention.output",
    "decoder.blocks.*.cross_attn.cross_attn.project_q": "blocks.*.cross_attention.q",
    "decoder.blocks.*.cross_attn.cross_attn.project_kv": "blocks.*.cross_attention.{k,v}",
    "decoder.blocks.*.cross_attn.cross_attn.dense": "blocks.*.cross_attention.output",
    f"decoder.blocks.*.ff.{_INNER}": f"blocks.*.{_PARTS}",
    f"decoder.blocks.*.ff.expert_network.*.{_INNER}": f"blocks.*.{_PARTS}",
    "decoder.final_layernorm": "norm",
    "lm_head": "head",
}
_ROUTERS = (
    NameRule("encoder.blocks.*.ff.expert_centroids", ("encoder.blocks.*.feed_forward.router.weight",)),
    NameRule("decoder.blocks.*.ff.expert_centroids", ("blocks.*.feed_forward.router.weight",)),
)
_TEMPLATE = replace_fields(V1_1, family="cpm2", vocab_size=26240)
_11B = v1_1_presets(_TEMPLATE)["xxl"]

CPM2 = Family(
    architectures=("EncDecModel",),
    template=_TEMPLATE,
    keys=_KEYS,
    rules=(*name_rules(_NAMES), *_ROUTERS),
    presets={
        "cpm2-11b": _11B,
        "cpm2-moe-198b": replace_fields(
            _11B,
            feed_forward=Experts(
                num_experts=32,
                num_experts_per_token=1,
                intermediate_size=10240,
                activation="gelu_tanh",
                router=RandomProjectionRouter(),
            ),
        ),
    },
    replaces_code=True,
)
