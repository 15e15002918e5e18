"""Generate families.md from the families' tables: `python docs/guides/families.py > docs/guides/families.md`."""

from __future__ import annotations

from collections.abc import Iterator

from jingu.formats.gguf_names import ARCHITECTURES, written_classes
from jingu.model.components import LayerSpec, RotaryPositions
from jingu.model.families import FAMILIES, Family
from jingu.model.families.name_map import TABLES
from jingu.model.feed_forward_specs import Experts
from jingu.model.spec import ModelSpec, flatten_fields

OPENING = """\
# Families

The families of models that jingu trains, imports, exports and serves. *Components*: how a family differs from Llama
(RMS norms before attention and feed-forward, rotary positions over whole heads in halves, gated feed-forwards with
silu, grouped queries, no biases). Options that the table does not name are read from the config; one that jingu does
not support is refused. *GGUF*: llama.cpp's name of the architecture, if such files are read and written.

`python docs/guides/families.py > docs/guides/families.md` generates this page from the tables in
`jingu/model/families/`; a test checks that it is up to date. [Add a family](add-a-family.md) shows how to add one.

A family whose layers differ can be trained from scratch with a pattern of its own: `model.layer_pattern` names the
kinds of its layers in order, and `model.mixer` has the sizes of mixers with a state.
[hybrid.yaml](../../examples/hybrid.yaml) is an example of minutes on two cores: three layers with the gated delta rule
for one with attention reach 1.603 ± 0.002 bits per byte, and a plain stack of as many parameters 1.712 ± 0.015 (three
seeds; [benchmarks](../benchmarks.md)). With `train.mixer_kernels: fla`, such layers train with the kernels of
the package flash-linear-attention, on CUDA in bf16 or fp16; no GPU has tried this yet, so PyTorch is the default.

| `family` | architecture | components | presets | GGUF |
|---|---|---|---|---|
"""
# Words for fields of a spec, by path and value. A value of None stands for any that is not the default.
WORDS: dict[tuple[str, object], str] = {
    ("num_encoder_layers", None): "encoder and decoder",
    ("norm.type", "layer"): "LayerNorm",
    ("norm.bias", False): "norms without bias",
    ("norm.offset", True): "norms that store w − 1",
    ("norm.has_weight", False): "norms without weight",
    ("norm_placement", "around"): "norms before and behind each branch",
    ("norm_placement", "behind"): "norms behind each branch",
    ("block_order", "parallel"): "parallel attention and feed-forward",
    ("block_order", "parallel_one_norm"): "parallel attention and feed-forward behind one norm",
    ("embedding_norm", True): "norm of the embedding",
    ("position.type", "alibi"): "ALiBi",
    ("position.type", "learned"): "learned positions",
    ("position.type", "relative_bias"): "relative position biases",
    ("position.interleaved", True): "rotary pairs of neighboring dims",
    ("position.partial_rotary_factor", None): "partial rotary positions",
    ("attention.qkv_bias", True): "biases of q, k and v",
    ("attention.output_bias", True): "bias of the output",
    ("attention.qk_norm", True): "normalized queries and keys",
    ("attention.qk_norm_width", "all_heads"): "one norm over all heads",
    ("attention.qk_norm_after_rotary", True): "that norm after rotary",
    ("attention.softcap", None): "soft cap on scores",
    ("attention.scale", None): "scale of scores",
    ("attention.scale_scores", False): "scores without scale",
    ("feed_forward.type", "plain"): "plain feed-forwards",
    ("feed_forward.type", "experts"): "experts",
    ("feed_forward.bias", True): "biases of the feed-forward",
    ("attention.latent.rank", None): "latent attention",
    ("attention.value_dim", None): "values of another size than keys",
    ("attention.value_scale", None): "scaled values",
    ("attention.sinks", True): "attention sinks",
    ("attention.output_gate", True): "gated output of attention",
    ("attention.output_gate_width", "head"): "a gate for each head",
    ("attention.value_norm", True): "normalized values",
    ("position.proportional", True): "proportional rotary positions",
    ("scale", True): "scaled layers",
    ("attention.input_scale", None): "scales of projections",
    ("parallel_mixer", True): "a mixer beside attention",
    ("feed_forward.gated", False): "experts without gates",
    ("feed_forward.latent_size", None): "experts in a latent space",
    ("feed_forward.clamped_gate.limit", None): "clamped gates",
    ("feed_forward.router.scores", "sigmoid"): "sigmoid scores",
    ("feed_forward.router.correction", True): "corrected choice of experts",
    ("feed_forward.router.weights_inputs", True): "weighted inputs of experts",
    ("feed_forward.shared_intermediate_size", None): "a shared expert",
    ("residual_scale", None): "scale of residuals",
    ("embedding_scale", None): "scale of the embedding",
    ("logit_scale", None): "scale of logits",
    ("logit_softcap", None): "soft cap on logits",
    ("scale_lm_head", True): "scaled hidden states before the head",
    ("normalize_lm_head", True): "normalized rows of the head",
    ("head_bias", True): "bias of the head",
}
ACTIVATIONS = {"gelu": "GELU", "gelu_tanh": "GELU (tanh)", "relu": "ReLU", "relu2": "relu²", "xielu": "xIELU"}
MIXERS = {
    "gated_delta": "the gated delta rule",
    "state_space": "a state space (Mamba-2)",
    "short_conv": "a short convolution",
}
# Words for the arguments of `rope` in the tables.
ROPE = {
    "has_alpha": "rotary base scaled by alpha",
    "names_original_context": "longrope",
    "has_query_scaling": "queries scaled by their positions",
}
# Words for flags of the tables.
FLAGS = {
    "parallel_experts": "experts beside a dense feed-forward",
    "per_layer_inputs": "embeddings for each layer",
}


def guide() -> str:
    """Return the page: a row for each family."""
    rows = [row(family) for _, family in sorted(FAMILIES.items())]
    return OPENING + "\n".join(rows) + "\n"


def row(family: Family) -> str:
    """Return the row of a family."""
    architectures = ", ".join(f"`{name}`" for name in family.architectures)
    presets = ", ".join(f"`{name}`" for name in family.presets)
    cells = (f"`{family.name}`", architectures, ", ".join(components(family)), presets, gguf_name(family))
    return f"| {' | '.join(cells)} |"


def gguf_name(family: Family) -> str:
    """Return llama.cpp's name of the family's architecture; empty if jingu has no GGUF for it."""
    names = [name for name, table in ARCHITECTURES.items() if family.architectures[0] in written_classes(table)]
    return ", ".join(f"`{name}`" for name in names)


def components(family: Family) -> Iterator[str]:
    """Yield in words how a family differs from Llama: by its template, and by what its configs may say beside that."""
    plain = FAMILIES["llama"].template
    spec = family.template
    table = TABLES.get(family.name, {}) if "architectures" in TABLES.get(family.name, {}) else {}
    yield from layer_components(spec)
    layers = table.get("layers", {})
    has_window = layers.get("window") == "uniform" or "default_window" in layers
    if has_window or (not spec.layer_kinds and spec.attention.sliding_window is not None):
        yield "windows"
    fields, usual = (flatten_fields(each) for each in (spec, plain))
    # Scales and caps that are neutral in the template, and keys of the config.
    keys = {
        place
        for place, entry in table.get("keys", {}).items()
        if entry and ("scale" in place or "cap" in place or place.endswith("qk_norm"))
    }
    for (path, value), words in WORDS.items():
        actual = fields.get(path)
        differs = actual != usual.get(path) and actual is not None
        if (differs and value in (None, actual)) or path in keys:
            yield words
    yield from (words for name, words in ROPE.items() if table.get("rope", {}).get(name))
    yield from (words for name, words in FLAGS.items() if table.get(name))
    if "shapes" in layers:
        yield "shared keys and values"
    activation = fields.get("feed_forward.activation", "silu")
    if activation != "silu":
        yield ACTIVATIONS[str(activation)]
    if spec.tie_word_embeddings:
        yield "tied head"


def layer_components(spec: ModelSpec) -> Iterator[str]:
    """Yield in words how the layers of a model differ from each other."""
    layers: tuple[LayerSpec, ...] = tuple(spec.layers)
    windows = [layer.attention.sliding_window for layer in layers]
    if spec.layer_kinds and any(windows):
        yield "layers with and without windows"
    mixers = {layer.state_mixer.type for layer in layers if layer.state_mixer is not None}
    yield from (f"layers with {words}" for name, words in MIXERS.items() if name in mixers)
    if any(layer.intermediate_size == 0 for layer in layers):
        yield "layers of one branch"
    rotary = [layer.position for layer in layers if isinstance(layer.position, RotaryPositions)]
    if spec.position.type == "none":
        yield "no positions"
    if rotary and len(rotary) < len(layers):
        yield "layers without positions"
    if len({layer.norm_placement for layer in layers}) > 1:
        yield "norms whose place depends on the layer"
    if len({layer.attention.head_dim for layer in layers}) > 1:
        yield "heads of different sizes"
    if len({position.theta for position in rotary}) > 1:
        yield "a rotary base for each kind of layer"
    if any(isinstance(layer.feed_forward, Experts) for layer in layers) and not isinstance(spec.feed_forward, Experts):
        yield "layers with experts"


if __name__ == "__main__":
    print(guide(), end="")
