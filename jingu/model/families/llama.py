"""Llama (Touvron et al., 2023): RMS norm, rotary positions, grouped heads, gated feed-forward."""

from __future__ import annotations

from typing import Any

from jingu.errors import JinguError
from jingu.model.families.family import (
    HF_ACTIVATIONS,
    Config,
    Family,
    activation,
    expect,
    required,
    unsupported,
)
from jingu.model.families.names import rule
from jingu.model.spec import Attention, GatedFeedForward, ModelSpec, RmsNorm, RotaryPositions


def _feed_forward_size(width: int) -> int:
    """8/3 of the width, so that three matrices weigh as much as two of 4 times the width; a multiple of 64."""
    return -(-8 * width // (3 * 64)) * 64


def _rope(config: Config) -> RotaryPositions:
    """The base, wherever this release of transformers keeps it; any scaling is refused."""
    parameters = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind != "default":
        raise unsupported("rope_scaling", kind, "only plain rotary positions are")
    expect({**config, **parameters}, {"partial_rotary_factor": (1, 1.0, None)})
    base = parameters.get("rope_theta", config.get("rope_theta"))
    return RotaryPositions(base=10000.0 if base is None else float(base))


def _spec_from_hf(config: Config) -> ModelSpec:
    expect(config, {"pretraining_tp": (1, None), "quantization_config": (None,)})
    heads, width = required(config, "num_attention_heads"), required(config, "hidden_size")
    bias = bool(config.get("attention_bias", False))
    return ModelSpec(
        family="llama",
        vocabulary=required(config, "vocab_size"),
        width=width,
        layers=required(config, "num_hidden_layers"),
        context=config.get("max_position_embeddings") or 2048,
        norm=RmsNorm(epsilon=config.get("rms_norm_eps", 1e-6)),
        position=_rope(config),
        attention=Attention(
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_size=config.get("head_dim") or width // heads,
            qkv_bias=bias,
            output_bias=bias,
        ),
        feed_forward=GatedFeedForward(
            size=required(config, "intermediate_size"),
            activation=activation(config, "hidden_act", "silu"),
            bias=bool(config.get("mlp_bias", False)),
        ),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        initial_std=config.get("initializer_range") or 0.02,
    )


def _hf_config(spec: ModelSpec) -> dict[str, Any]:
    heads = spec.attention
    assert isinstance(spec.position, RotaryPositions)
    if spec.width % heads.heads:
        raise JinguError(
            f"Hugging Face's Llama wants a width that {heads.heads} heads divide; it is {spec.width}.",
            where="model.width",
        )
    return {
        "model_type": "llama",
        "vocab_size": spec.vocabulary,
        "hidden_size": spec.width,
        "intermediate_size": spec.feed_forward.size,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": heads.heads,
        "num_key_value_heads": heads.kv_heads,
        "head_dim": heads.head_size,
        "hidden_act": HF_ACTIVATIONS[spec.feed_forward.activation],
        "max_position_embeddings": spec.context,
        "initializer_range": spec.initial_std,
        "rms_norm_eps": spec.norm.epsilon,
        "rope_theta": spec.position.base,
        "rope_scaling": None,
        # Releases of transformers from 5 on keep both in here.
        "rope_parameters": {"rope_type": "default", "rope_theta": spec.position.base},
        "attention_bias": heads.qkv_bias,
        "attention_dropout": 0.0,
        "mlp_bias": spec.feed_forward.bias,
        "tie_word_embeddings": spec.tied_embeddings,
        "use_cache": True,
    }


_LAYER, _BLOCK = "model.layers.{layer}.", "blocks.{layer}."
_PARTS = {
    "input_layernorm": "attention_norm",
    "self_attn.q_proj": "attention.q",
    "self_attn.k_proj": "attention.k",
    "self_attn.v_proj": "attention.v",
    "self_attn.o_proj": "attention.output",
    "post_attention_layernorm": "feed_forward_norm",
    "mlp.gate_proj": "feed_forward.gate",
    "mlp.up_proj": "feed_forward.up",
    "mlp.down_proj": "feed_forward.down",
}

LLAMA = Family(
    name="llama",
    architectures=("LlamaForCausalLM",),
    template=ModelSpec(
        family="llama",
        vocabulary=32000,
        width=384,
        layers=6,
        context=2048,
        norm=RmsNorm(epsilon=1e-5),
        position=RotaryPositions(base=10000.0),
        attention=Attention(heads=6, kv_heads=6, head_size=64),
        feed_forward=GatedFeedForward(size=1024, activation="silu"),
        tied_embeddings=False,
    ),
    feed_forward_size=_feed_forward_size,
    spec_from_hf=_spec_from_hf,
    hf_config=_hf_config,
    rules=(
        rule("model.embed_tokens.weight", "embedding.weight"),
        *(
            rule(f"{_LAYER}{theirs}.{kind}", f"{_BLOCK}{ours}.{kind}")
            for theirs, ours in _PARTS.items()
            for kind in ("weight", "bias")
        ),
        rule("model.norm.weight", "norm.weight"),
        rule("lm_head.weight", "head.weight"),
    ),
    ignored=(".rotary_emb.inv_freq",),
)
