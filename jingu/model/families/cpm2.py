"""CPM-2 (Zhang et al., 2021): Chinese and English, in the shape of T5 version 1.1; and its mixture of 32 experts in
every block, one a token, chosen by a frozen random projection.

The names of tensors are those of the code that its makers publish, with the parts of a tensor that they keep on
several ranks put together. Their experts have a norm each; here they share the block's. What a config says of experts
is the spec's component as it is.
"""

from __future__ import annotations

from jingu.model.families.family import Family, Keys, key, sized, written
from jingu.model.families.names import Rule, rule
from jingu.model.families.t5 import CONTEXT, SHARED_KEYS, T5, V1_1
from jingu.model.spec import Experts, ModelSpec, RandomProjection, replaced

_KEYS = (
    *SHARED_KEYS,
    key("context", "n_positions", default=CONTEXT),
    Keys(
        lambda config, _: {"feed_forward": config["experts"]} if config.get("experts") else {},
        lambda spec: {"experts": spec.feed_forward.model_dump() if _mixed(spec) else None},
    ),
    # Their own configuration names relu, and their code does not ask it.
    written(model_type="cpm2", feed_forward_proj="gated-gelu"),
)


def _mixed(spec: ModelSpec) -> bool:
    return isinstance(spec.feed_forward, Experts)


def _dense(spec: ModelSpec) -> bool:
    return not _mixed(spec)


def _rules() -> tuple[Rule, ...]:
    rules = [rule("word_embeds.weight", "embedding.weight")]
    for side, stack in (("encoder", "encoder."), ("decoder", "")):
        theirs, ours = f"{side}.blocks.{{layer}}", f"{stack}blocks.{{layer}}"
        own, cross = f"{theirs}.self_attn.self_attn", f"{theirs}.cross_attn.cross_attn"
        bias = f"{side}.blocks.0.self_attn.self_attn.relative_attention_bias.weight"
        norms = {"self_attn": "attention", "cross_attn": "cross_attention", "ff": "feed_forward"}
        rules += [
            rule(bias, f"{stack}relative_bias.weight"),
            *(rule(f"{theirs}.{part}.layer_norm.weight", f"{ours}.{norms[part]}_norm.weight") for part in norms),
            rule(f"{own}.project.weight", *(f"{ours}.attention.{part}.weight" for part in "qkv")),
            rule(f"{own}.dense.weight", f"{ours}.attention.output.weight"),
            rule(f"{cross}.project_q.weight", f"{ours}.cross_attention.q.weight"),
            rule(f"{cross}.project_kv.weight", *(f"{ours}.cross_attention.{part}.weight" for part in "kv")),
            rule(f"{cross}.dense.weight", f"{ours}.cross_attention.output.weight"),
            rule(f"{theirs}.ff.expert_centroids", f"{ours}.feed_forward.router.weight"),
        ]
        for name, part in {"wi_0": "gate", "wi_1": "up", "wo": "down"}.items():
            matrix, inner = (f"{ours}.feed_forward.{part}.weight",), f"dense_relu_dense.{name}.weight"
            rules.append(Rule(f"{theirs}.ff.{inner}", matrix, when=_dense))
            rules.append(Rule(f"{theirs}.ff.expert_network.{{expert}}.{inner}", matrix, when=_mixed))
        rules.append(rule(f"{side}.final_layernorm.weight", f"{stack}norm.weight"))
    return (*rules, rule("lm_head.weight", "head.weight"))


_TEMPLATE = replaced(V1_1, family="cpm2", vocabulary=26240)
_11B = sized(_TEMPLATE, 24, 4096, 64, 10240, encoder_layers=24)

CPM2 = Family(
    name="cpm2",
    architectures=("EncDecModel",),
    template=_TEMPLATE,
    feed_forward_size=T5.feed_forward_size,
    keys=_KEYS,
    rules=_rules(),
    presets={
        "cpm2-11b": _11B,
        "cpm2-moe-198b": replaced(
            _11B,
            feed_forward=Experts(number=32, active=1, size=10240, activation="gelu_tanh", router=RandomProjection()),
        ),
    },
    replaces_code=True,
)
