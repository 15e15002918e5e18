"""CPM-2 (Zhang et al., 2021): T5 version 1.1 for Chinese and English.

Its mixture-of-experts model has 32 experts in every block, and a frozen random projection selects one of them per
token. In the authors' code each expert has its own norm; here all experts share the norm of the block.

Tensors have the names of the authors' code, but tensors that were sharded over ranks are whole. The key `experts` of a
config holds the `Experts` component of the spec.
"""

from __future__ import annotations

from jingu.model.families.family import ConfigKeys, Family, config_key
from jingu.model.families.name_map import NameRule, name_rules
from jingu.model.families.t5 import SHARED_KEYS, V1_1
from jingu.model.feed_forward_specs import Experts
from jingu.model.spec import replace_fields

_ROUTERS = (
    NameRule("encoder.blocks.*.ff.expert_centroids", ("encoder.blocks.*.feed_forward.router.weight",)),
    NameRule("decoder.blocks.*.ff.expert_centroids", ("blocks.*.feed_forward.router.weight",)),
)

CPM2 = Family(
    architectures=("EncDecModel",),
    template=replace_fields(V1_1, family="cpm2", vocab_size=26240),
    keys=(
        *SHARED_KEYS,
        config_key("max_position_embeddings", "n_positions", default=V1_1.max_position_embeddings),
        ConfigKeys(
            lambda config: {"feed_forward": config["experts"]} if config.get("experts") else {},
            lambda spec: {
                "experts": spec.feed_forward.model_dump() if isinstance(spec.feed_forward, Experts) else None
            },
        ),
        # The authors' configuration says relu, but their code ignores it and computes a gated gelu.
        ConfigKeys(write=lambda spec: {"feed_forward_proj": "gated-gelu"}),
    ),
    rules=(*name_rules("cpm2"), *_ROUTERS),
    equivalent="t5",
)
