"""T5 (Raffel et al., 2020): an encoder-decoder with biases of relative positions, attention that is not scaled, RMS
norm and no biases. Version 1.0 has a plain feed-forward and ties the head, scaled, to the embedding; version 1.1 has a
gated one and a head of its own, and so have those after it, which share what is here."""

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
    sized,
)
from jingu.model.families.names import Rule, rule
from jingu.model.spec import (
    Attention,
    Experts,
    GatedFeedForward,
    ModelSpec,
    PlainFeedForward,
    RelativeBias,
    RmsNorm,
    replaced,
)

CONTEXT = 512
"""Tokens of a source or a target in the published models' training; positions as such have no limit."""


def t5_spec(config: Config, family: str, feed_forward: str, *, tied: bool) -> ModelSpec:
    """The spec of a config with T5's keys; `feed_forward` is the default of `feed_forward_proj`."""
    expect(config, {"quantization_config": (None,)})
    heads, layers = required(config, "num_heads"), required(config, "num_layers")
    name = config.get("feed_forward_proj") or feed_forward
    gate, _, function = name.rpartition("-")
    expect({"feed_forward_proj": gate}, {"feed_forward_proj": ("", "gated")})
    # "gated-gelu" has always meant the approximation.
    names = {"act": "gelu_new" if name == "gated-gelu" else function}
    kind = GatedFeedForward if gate else PlainFeedForward
    return ModelSpec(
        family=family,
        vocabulary=required(config, "vocab_size"),
        width=required(config, "d_model"),
        layers=config.get("num_decoder_layers") or layers,
        encoder_layers=layers,
        context=config.get("n_positions") or CONTEXT,
        norm=RmsNorm(epsilon=config.get("layer_norm_epsilon", 1e-6)),
        position=RelativeBias(
            buckets=config.get("relative_attention_num_buckets", 32),
            max_distance=config.get("relative_attention_max_distance", 128),
        ),
        attention=Attention(heads=heads, kv_heads=heads, head_size=required(config, "d_kv"), scaled=False),
        feed_forward=kind(size=required(config, "d_ff"), activation=activation(names, "act", "relu")),
        tied_embeddings=tied,
        scaled_head=tied,
        initial_std=config.get("initial_std") or 0.02,
    )


def t5_config(spec: ModelSpec, model_type: str, **more: Any) -> dict[str, Any]:
    """The config's keys that T5 and those after it share, and `more`."""
    part, bias = spec.feed_forward, spec.position
    assert isinstance(bias, RelativeBias)
    if isinstance(part, Experts) and "experts" not in more:
        raise JinguError(
            f"Hugging Face's {model_type} has no mixture of experts.",
            where="model.experts",
            fix="Such a model is used as a run; it cannot be exported.",
        )
    gated = _gated(spec)
    # The gated kind has a name of its own for the approximation of gelu that it began with.
    function = "gelu" if gated and part.activation == "gelu_tanh" else HF_ACTIVATIONS[part.activation]
    return {
        "model_type": model_type,
        "is_encoder_decoder": True,
        "vocab_size": spec.vocabulary,
        "d_model": spec.width,
        "d_kv": spec.attention.head_size,
        "d_ff": part.size,
        "num_layers": spec.encoder_layers,
        "num_decoder_layers": spec.layers,
        "num_heads": spec.attention.heads,
        "n_positions": spec.context,
        "relative_attention_num_buckets": bias.buckets,
        "relative_attention_max_distance": bias.max_distance,
        "feed_forward_proj": f"{'gated-' if gated else ''}{function}",
        "layer_norm_epsilon": spec.norm.epsilon,
        "initial_std": spec.initial_std,
        "dropout_rate": 0.0,
        "tie_word_embeddings": spec.tied_embeddings,
        "use_cache": True,
        **more,
    }


def _spec_from_hf(config: Config) -> ModelSpec:
    # Release 5 of transformers calls every head tied that it saves; whether it is scaled tells the versions apart.
    scaled = config.get("scale_decoder_outputs", config.get("tie_word_embeddings", True) is not False)
    return t5_spec(config, "t5", "relu", tied=bool(scaled))


def _gated(spec: ModelSpec) -> bool:
    return isinstance(spec.feed_forward, GatedFeedForward)


def _plain(spec: ModelSpec) -> bool:
    return not _gated(spec)


def _rules() -> tuple[Rule, ...]:
    rules = [rule("shared.weight", "embedding.weight")]
    for side, ours, stack in (("encoder", "encoder.blocks.{layer}", "encoder."), ("decoder", "blocks.{layer}", "")):
        theirs = f"{side}.block.{{layer}}.layer"
        kinds = [("SelfAttention", "attention"), ("EncDecAttention", "cross_attention")][: 1 + (side == "decoder")]
        bias = f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        rules.append(rule(bias, f"{stack}relative_bias.weight"))
        for number, (kind, part) in enumerate(kinds):
            rules.append(rule(f"{theirs}.{number}.layer_norm.weight", f"{ours}.{part}_norm.weight"))
            for letter, name in {"q": "q", "k": "k", "v": "v", "o": "output"}.items():
                rules.append(rule(f"{theirs}.{number}.{kind}.{letter}.weight", f"{ours}.{part}.{name}.weight"))
        last, feed_forward = f"{theirs}.{len(kinds)}", f"{ours}.feed_forward"
        rules += [
            rule(f"{last}.layer_norm.weight", f"{feed_forward}_norm.weight"),
            Rule(f"{last}.DenseReluDense.wi.weight", (f"{feed_forward}.up.weight",), when=_plain),
            rule(f"{last}.DenseReluDense.wi_0.weight", f"{feed_forward}.gate.weight"),
            Rule(f"{last}.DenseReluDense.wi_1.weight", (f"{feed_forward}.up.weight",), when=_gated),
            rule(f"{last}.DenseReluDense.wo.weight", f"{feed_forward}.down.weight"),
            rule(f"{side}.final_layer_norm.weight", f"{stack}norm.weight"),
        ]
    return (*rules, rule("lm_head.weight", "head.weight"))


V1_0 = ModelSpec(
    family="t5",
    vocabulary=32128,
    width=512,
    layers=6,
    encoder_layers=6,
    context=CONTEXT,
    norm=RmsNorm(epsilon=1e-6),
    position=RelativeBias(),
    attention=Attention(heads=8, kv_heads=8, head_size=64, scaled=False),
    feed_forward=PlainFeedForward(size=2048, activation="relu"),
    tied_embeddings=True,
    scaled_head=True,
)
V1_1 = replaced(
    V1_0,
    feed_forward=GatedFeedForward(size=1024, activation="gelu_tanh"),
    tied_embeddings=False,
    scaled_head=False,
)

T5 = Family(
    name="t5",
    architectures=("T5ForConditionalGeneration", "T5WithLMHeadModel"),
    template=V1_0,
    feed_forward_size=lambda width: 4 * width,
    spec_from_hf=_spec_from_hf,
    hf_config=lambda spec: t5_config(spec, "t5"),
    rules=_rules(),
    ignored=("coder.embed_tokens.weight", "EncDecAttention.relative_attention_bias.weight"),
    # Layers, width, heads, feed-forward. Flan-T5 has the dimensions of version 1.1.
    presets={
        "t5-small": sized(V1_0, 6, 512, 8, 2048),
        "t5-base": sized(V1_0, 12, 768, 12, 3072, encoder_layers=12),
        "t5-large": sized(V1_0, 24, 1024, 16, 4096, encoder_layers=24),
        "t5-3b": sized(V1_0, 24, 1024, 32, 16384, head_size=128, encoder_layers=24),
        "t5-11b": sized(V1_0, 24, 1024, 128, 65536, head_size=128, encoder_layers=24),
        "t5-v1.1-small": sized(V1_1, 8, 512, 6, 1024, head_size=64, encoder_layers=8),
        "t5-v1.1-base": sized(V1_1, 12, 768, 12, 2048, encoder_layers=12),
        "t5-v1.1-large": sized(V1_1, 24, 1024, 16, 2816, encoder_layers=24),
        "t5-v1.1-xl": sized(V1_1, 24, 2048, 32, 5120, encoder_layers=24),
        "t5-v1.1-xxl": sized(V1_1, 24, 4096, 64, 10240, encoder_layers=24),
    },
)
