"""ChatGLM2 and 3 (Zeng et al., 2024): rotary positions that turn neighbours in half of each head, two groups of keys
and values, biases on q, k and v, and these and the gated feed-forward packed into one matrix each."""

from __future__ import annotations

from jingu.model.families.family import FOLLOWS, Config, Family, Keys, Values, at, key, only, sized, written
from jingu.model.families.names import rules
from jingu.model.spec import Attention, GatedFeedForward, ModelSpec, RmsNorm, RotaryPositions


def _feed_forward_size(width: int) -> int:
    """107/32 of the width, as in the 6B model; a multiple of 64."""
    return -(-107 * width // (32 * 64)) * 64


def _biases(config: Config) -> Values:
    linear = bool(config.get("add_bias_linear"))
    qkv = linear or bool(config.get("add_qkv_bias"))
    return {"attention.qkv_bias": qkv, "attention.output_bias": linear, "feed_forward.bias": linear}


_KEYS = (
    only(
        multi_query_attention=(True,),
        rmsnorm=(True,),
        post_layer_norm=(True,),
        original_rope=(True,),
        apply_residual_connection_post_layernorm=(False,),
        pre_seq_len=(None, 0),
        quantization_bit=(0, None),
    ),
    key("vocabulary", "padded_vocab_size"),
    key("width", "hidden_size"),
    key("layers", "num_layers"),
    key("context", "seq_length"),
    key("norm.epsilon", "layernorm_epsilon", default=1e-5),
    Keys(
        lambda config: {"position.base": 10000.0 * (config.get("rope_ratio") or 1.0)},
        lambda spec: {"rope_ratio": at(spec, "position.base") / 10000.0},
    ),
    key("attention.heads", "num_attention_heads"),
    key("attention.kv_heads", "multi_query_group_num"),
    key("attention.head_size", "kv_channels", default=FOLLOWS),
    key("feed_forward.size", "ffn_hidden_size"),
    Keys(_biases, lambda spec: {"add_qkv_bias": spec.attention.qkv_bias, "add_bias_linear": spec.feed_forward.bias}),
    key("tied_embeddings", "tie_word_embeddings", default=False),
    key("initial_std", "initializer_range", default=0.02),
    Keys(write=lambda spec: {"vocab_size": spec.vocabulary}),
    written(attention_dropout=0.0, hidden_dropout=0.0, use_cache=True),
)
_NAMES = {
    "transformer.embedding.word_embeddings": "embedding",
    "transformer.encoder.layers.*.{input,post_attention}_layernorm": "blocks.*.{attention,feed_forward}_norm",
    "transformer.encoder.layers.*.self_attention.query_key_value": "blocks.*.attention.{q,k,v}",
    "transformer.encoder.layers.*.self_attention.dense": "blocks.*.attention.output",
    "transformer.encoder.layers.*.mlp.dense_h_to_4h": "blocks.*.feed_forward.{gate,up}",
    "transformer.encoder.layers.*.mlp.dense_4h_to_h": "blocks.*.feed_forward.down",
    "transformer.encoder.final_layernorm": "norm",
    "transformer.output_layer": "head",
}
_TEMPLATE = ModelSpec(
    family="chatglm3",
    vocabulary=65024,
    width=384,
    layers=6,
    context=8192,
    norm=RmsNorm(epsilon=1e-5),
    position=RotaryPositions(base=10000.0, share=0.5, interleaved=True),
    attention=Attention(heads=6, kv_heads=6, head_size=64, qkv_bias=True),
    feed_forward=GatedFeedForward(size=1344),
)

CHATGLM3 = Family(
    architectures=("ChatGLMModel", "ChatGLMForConditionalGeneration"),
    model_type="chatglm",
    template=_TEMPLATE,
    feed_forward_size=_feed_forward_size,
    keys=_KEYS,
    rules=rules(_NAMES),
    base="transformer.",
    ignored=(".rotary_pos_emb.inv_freq",),
    presets={"chatglm3-6b": sized(_TEMPLATE, 28, 4096, 32, 13696, kv_heads=2)},
    replaces_code=True,
)
