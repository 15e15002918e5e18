"""ChatGLM2 and 3 (Zeng et al., 2024): rotary positions that turn neighbours in half of each head, two groups of keys
and values, biases on q, k and v, and these and the gated feed-forward packed into one matrix each."""

from __future__ import annotations

from typing import Any

from jingu.model.families.family import Config, Family, expect, required, sized
from jingu.model.families.names import rule
from jingu.model.spec import Attention, GatedFeedForward, ModelSpec, RmsNorm, RotaryPositions, replaced


def _feed_forward_size(width: int) -> int:
    """107/32 of the width, as in the 6B model; a multiple of 64."""
    return -(-107 * width // (32 * 64)) * 64


def _positions(ratio: float) -> RotaryPositions:
    return RotaryPositions(base=10000.0 * ratio, share=0.5, interleaved=True)


def _spec_from_hf(config: Config) -> ModelSpec:
    expect(
        config,
        {
            "multi_query_attention": (True,),
            "rmsnorm": (True,),
            "post_layer_norm": (True,),
            "original_rope": (True,),
            "apply_residual_connection_post_layernorm": (False,),
            "pre_seq_len": (None, 0),
            "quantization_bit": (None, 0),
            "quantization_config": (None,),
        },
    )
    heads, width = required(config, "num_attention_heads"), required(config, "hidden_size")
    biases = bool(config.get("add_bias_linear", False))
    return replaced(
        _TEMPLATE,
        vocabulary=required(config, "padded_vocab_size"),
        width=width,
        layers=required(config, "num_layers"),
        context=required(config, "seq_length"),
        norm=RmsNorm(epsilon=config.get("layernorm_epsilon", 1e-5)),
        position=_positions(config.get("rope_ratio") or 1.0),
        attention=Attention(
            heads=heads,
            kv_heads=required(config, "multi_query_group_num"),
            head_size=config.get("kv_channels") or width // heads,
            qkv_bias=biases or bool(config.get("add_qkv_bias", False)),
            output_bias=biases,
        ),
        feed_forward=GatedFeedForward(size=required(config, "ffn_hidden_size"), bias=biases),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        initial_std=config.get("initializer_range") or 0.02,
    )


def _hf_config(spec: ModelSpec) -> dict[str, Any]:
    heads = spec.attention
    assert isinstance(spec.position, RotaryPositions)
    return {
        "model_type": "chatglm",
        "padded_vocab_size": spec.vocabulary,
        "vocab_size": spec.vocabulary,
        "hidden_size": spec.width,
        "num_layers": spec.layers,
        "seq_length": spec.context,
        "layernorm_epsilon": spec.norm.epsilon,
        "rope_ratio": spec.position.base / 10000.0,
        "original_rope": True,
        "num_attention_heads": heads.heads,
        "multi_query_attention": True,
        "multi_query_group_num": heads.kv_heads,
        "kv_channels": heads.head_size,
        "ffn_hidden_size": spec.feed_forward.size,
        "add_qkv_bias": heads.qkv_bias,
        "add_bias_linear": spec.feed_forward.bias,
        "rmsnorm": True,
        "post_layer_norm": True,
        "apply_residual_connection_post_layernorm": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "initializer_range": spec.initial_std,
        "tie_word_embeddings": spec.tied_embeddings,
        "use_cache": True,
    }


_LAYER, _BLOCK = "transformer.encoder.layers.{layer}.", "blocks.{layer}."
_PARTS: dict[str, tuple[str, ...]] = {
    "transformer.embedding.word_embeddings": ("embedding",),
    f"{_LAYER}input_layernorm": (f"{_BLOCK}attention_norm",),
    f"{_LAYER}self_attention.query_key_value": tuple(f"{_BLOCK}attention.{part}" for part in "qkv"),
    f"{_LAYER}self_attention.dense": (f"{_BLOCK}attention.output",),
    f"{_LAYER}post_attention_layernorm": (f"{_BLOCK}feed_forward_norm",),
    f"{_LAYER}mlp.dense_h_to_4h": (f"{_BLOCK}feed_forward.gate", f"{_BLOCK}feed_forward.up"),
    f"{_LAYER}mlp.dense_4h_to_h": (f"{_BLOCK}feed_forward.down",),
    "transformer.encoder.final_layernorm": ("norm",),
    "transformer.output_layer": ("head",),
}
_TEMPLATE = ModelSpec(
    family="chatglm3",
    vocabulary=65024,
    width=384,
    layers=6,
    context=8192,
    norm=RmsNorm(epsilon=1e-5),
    position=_positions(1.0),
    attention=Attention(heads=6, kv_heads=6, head_size=64, qkv_bias=True),
    feed_forward=GatedFeedForward(size=1344),
)

CHATGLM3 = Family(
    name="chatglm3",
    architectures=("ChatGLMModel", "ChatGLMForConditionalGeneration"),
    template=_TEMPLATE,
    feed_forward_size=_feed_forward_size,
    spec_from_hf=_spec_from_hf,
    hf_config=_hf_config,
    rules=tuple(
        rule(f"{theirs}.{kind}", *(f"{name}.{kind}" for name in ours))
        for theirs, ours in _PARTS.items()
        for kind in ("weight", "bias")
    ),
    base="transformer.",
    ignored=(".rotary_pos_emb.inv_freq",),
    presets={"chatglm3-6b": sized(_TEMPLATE, 28, 4096, 32, 13696, kv_heads=2)},
    replaces_code=True,
)
