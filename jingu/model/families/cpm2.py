"""CPM-2 (Zhang et al., 2021): T5 version 1.1 for Chinese and English. Its mixture-of-experts model has 32 experts in
every block; a frozen random projection chooses one of them for each token.

The names of tensors are those of the authors' code, whose shards of a tensor on several ranks are joined. There each
expert has a norm of its own; here all share the block's. The key `experts` of a config is the spec's component.
"""

from __future__ import annotations

from jingu.config.legacy import migrate_spec
from jingu.model.families.family import ConfigKeys, Family, config_key, constant_keys
from jingu.model.families.name_map import NameRule, name_rules
from jingu.model.families.t5 import CONTEXT, SHARED_KEYS, V1_1
from jingu.model.spec import Experts, replace_fields

_KEYS = (
    *SHARED_KEYS,
    config_key("max_position_embeddings", "n_positions", default=CONTEXT),
    ConfigKeys(
        lambda config: migrate_spec({"feed_forward": config["experts"]}) if config.get("experts") else {},
        lambda spec: {"experts": spec.feed_forward.model_dump() if isinstance(spec.feed_forward, Experts) else None},
    ),
    # The authors' configuration says relu, but their code ignores it.
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

CPM2 = Family(
    architectures=("EncDecModel",),
    template=_TEMPLATE,
    keys=_KEYS,
    rules=(*name_rules(_NAMES), *_ROUTERS),
    equivalent="t5",
)
