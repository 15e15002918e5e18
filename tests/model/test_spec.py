"""The spec: JSON both ways, dimensions that fit, settings to spec."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from jingu.config.sections.model import MixerSettings, ModelSettings
from jingu.errors import JinguError
from jingu.model.components import LearnedPositions, RotaryPositions
from jingu.model.families import FAMILIES
from jingu.model.feed_forward_specs import GatedFeedForward
from jingu.model.mixer_specs import StateSpace
from jingu.model.norm_specs import RmsNorm
from jingu.model.resolve import spec_from_settings
from jingu.model.spec import ModelSpec, repeat_pattern, replace_fields


def test_llama_from_settings() -> None:
    spec = spec_from_settings(ModelSettings(), vocabulary=1234, context=512)
    assert (spec.family, spec.vocab_size, spec.max_position_embeddings, spec.hidden_size, spec.num_layers) == (
        "llama",
        1234,
        512,
        384,
        6,
    )
    assert spec.norm == RmsNorm(eps=1e-5)
    assert spec.position == RotaryPositions(theta=10000.0)
    assert spec.feed_forward == GatedFeedForward(intermediate_size=1024, activation="silu")
    assert (spec.attention.num_heads, spec.attention.num_kv_heads, spec.attention.head_dim) == (6, 6, 64)
    assert not spec.tie_word_embeddings


def test_gpt2_from_settings() -> None:
    spec = spec_from_settings(ModelSettings(family="gpt2", hidden_size=30, num_heads=3), vocabulary=7, context=9)
    assert isinstance(spec.position, LearnedPositions)
    assert spec.feed_forward.intermediate_size == 120
    assert spec.attention.qkv_bias and spec.attention.output_bias and spec.feed_forward.bias
    assert spec.tie_word_embeddings


@pytest.mark.parametrize(("width", "size"), [(48, 128), (384, 1024), (512, 1408), (4096, 10944), (1, 64)])
def test_llama_feed_forward_is_a_multiple_of_64(width: int, size: int) -> None:
    assert FAMILIES["llama"].feed_forward_size(width) == size


def test_settings_override_the_habits() -> None:
    settings = ModelSettings(
        hidden_size=60,
        num_heads=4,
        num_kv_heads=2,
        head_dim=10,
        intermediate_size=77,
        vocab_size=500,
        max_position_embeddings=99,
        tie_word_embeddings=True,
        rope_theta=5e5,
        norm_eps=1e-6,
        initializer_range=0.01,
    )
    spec = spec_from_settings(settings, vocabulary=300, context=64)
    assert (spec.attention.num_kv_heads, spec.attention.head_dim, spec.feed_forward.intermediate_size) == (2, 10, 77)
    assert (spec.vocab_size, spec.max_position_embeddings, spec.tie_word_embeddings) == (500, 99, True)
    assert spec.position == RotaryPositions(theta=5e5)
    assert (spec.norm.eps, spec.initializer_range) == (1e-6, 0.01)


MISTAKES: list[tuple[dict[str, Any], str]] = [
    (
        {"family": "lama"},
        "model.family: there is no family 'lama'. The nearest are llama, bamba; `jingu model list` shows all.",
    ),
    (
        {"hidden_size": 100, "num_heads": 6},
        "model.num_heads: a hidden size of 100 is not divisible by 6 heads. Use a hidden size of 96 or 102, another "
        "number of heads, or set model.head_dim.",
    ),
    (
        {"num_kv_heads": 4},
        "model.num_kv_heads: 6 attention heads cannot share 4 key-value heads evenly. Choose a divisor of 6: 1, 2, "
        "3, 6.",
    ),
    (
        {"hidden_size": 18},
        "model.head_dim: rotary positions rotate pairs: 3 of 3 dims of a head is an odd number. Choose a hidden "
        "size and a number of heads whose quotient is even, or set model.head_dim.",
    ),
    (
        {"vocab_size": 256},
        "model.vocab_size: the model has 256 embedding rows, but the tokenizer has 300 entries. Use auto, or at "
        "least 300.",
    ),
    (
        {"max_position_embeddings": 32},
        "model.max_position_embeddings: the model is made for 32 tokens, but the batch has sequences of 64. Raise "
        "model.max_position_embeddings to "
        "64 or more, or shorten batch.sequence_length.",
    ),
    (
        {"family": "gpt2", "rope_theta": 1e4},
        "model.rope_theta: the family 'gpt2' has no rotary positions. Leave it out, or choose a family that has them "
        "(llama).",
    ),
    (
        {"family": "mamba2", "num_heads": 4},
        "model.num_heads: the family 'mamba2' has no attention. Leave it out, or choose a family that has it (llama).",
    ),
    (
        {"family": "mamba2", "intermediate_size": 64},
        "model.intermediate_size: the family 'mamba2' has no feed-forward. Leave it out, or choose a family that has "
        "one (llama).",
    ),
    (
        {"layer_pattern": ["full_attention"]},
        "model.layer_pattern: all layers of llama are equal. Leave it out, or choose a family whose layers differ, "
        "such as qwen3_5_text.",
    ),
    (
        {"family": "lfm2", "layer_pattern": ["conv", "mamba"]},
        "model.layer_pattern: the kinds of layers of lfm2 are full_attention, conv, not mamba. Name some of these.",
    ),
    (
        {"mixer": MixerSettings(num_taps=3)},
        "model.mixer.num_taps: the family 'llama' has no mixer with a state. Leave it out, or choose a family that has "
        "one, such as qwen3_5_text.",
    ),
    (
        {"family": "bamba", "mixer": MixerSettings(key_head_dim=3)},
        "model.mixer.key_head_dim: the mixer of bamba (state_space) has no key_head_dim. It has num_heads, num_groups, "
        "head_dim, state_size, num_taps.",
    ),
]


def test_settings_of_hybrids() -> None:
    """The pattern repeats; heads of mixers follow the hidden size, and the config can be exported."""
    pattern = ["linear_attention", "full_attention", "linear_attention"]
    mixer = MixerSettings(head_dim=32, num_groups=2, num_taps=3)
    settings = ModelSettings(
        family="bamba", hidden_size=192, num_heads=3, num_layers=5, norm_eps=1e-6, layer_pattern=pattern, mixer=mixer
    )
    spec = spec_from_settings(settings, vocabulary=300, context=64)
    assert spec.layer_pattern == (*pattern, *pattern[:2])
    part = StateSpace(num_heads=12, num_groups=2, head_dim=32, state_size=64, num_taps=3, eps=1e-6)
    assert [layer.mixer for layer in spec.layers] == [part, None, part, part, None]
    config = FAMILIES["bamba"].hf_config(spec)
    assert (config["mamba_expand"], config["attn_layer_indices"]) == (2, [1, 4])


@pytest.mark.parametrize(
    ("settings", "words"), MISTAKES, ids=lambda value: "-".join(value) if isinstance(value, dict) else ""
)
def test_mistakes_are_told_in_words(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(JinguError) as error:
        spec_from_settings(ModelSettings(**settings), vocabulary=300, context=64)
    assert str(error.value) == words


@given(
    family=st.sampled_from(sorted(FAMILIES)),
    kv_heads=st.integers(1, 5),
    group=st.integers(1, 4),
    half=st.integers(1, 20),
    layers=st.integers(1, 90),
    std=st.floats(1e-9, 10),
)
def test_json_round_trip(family: str, kv_heads: int, group: int, half: int, layers: int, std: float) -> None:
    template = FAMILIES[family].template
    has_attention = any(layer.has_attention for layer in template.kinds)
    settings = ModelSettings(
        family=family,
        num_layers=layers,
        num_heads=kv_heads * group if has_attention else None,
        num_kv_heads=kv_heads if has_attention and template.attention.latent is None else None,
        hidden_size=kv_heads * group * half * 24,  # some families rotate a quarter or a third of a head
        initializer_range=std,
    )
    spec = spec_from_settings(settings, vocabulary=10, context=20)
    assert ModelSpec.from_json(spec.to_json()) == spec


# Llama 4's layers that attend within chunks have norms and scales that its config derives from the others, and Gemma 4
# ends with a layer without a window.
@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - {"llama4_text", "gemma4_text", "gemma4_unified_text"}))
def test_fewer_layers_than_the_pattern_are_exported(family: str) -> None:
    """All layers may then be of one kind."""
    for layers in (1, 2, 3):
        encoder = layers if FAMILIES[family].template.num_encoder_layers else None
        spec = spec_from_settings(ModelSettings(family=family, num_layers=layers, num_encoder_layers=encoder), 300, 64)
        config = FAMILIES[family].hf_config(spec)
        assert FAMILIES[family].spec_from_hf(config).layers == spec.layers


def test_damaged_json_names_the_field() -> None:
    text = (
        spec_from_settings(ModelSettings(), 10, 20).to_json().replace('"num_layers": 6', '"num_layers": 0, "lairs": 6')
    )
    with pytest.raises(JinguError, match=r"layers: .*greater than or equal to 1.*lairs: Extra inputs"):
        ModelSpec.from_json(text)


WINDOW = {"attention.sliding_window": 5, "position": {"type": "none"}}


def mixed(**changes: Any) -> ModelSpec:
    template = FAMILIES["llama"].template
    values = {
        "num_layers": 3,
        "layer_kinds": {"window": WINDOW, "full": {}},
        "layer_pattern": ("window", "full", "full"),
    }
    return replace_fields(template, **{**values, **changes})


def test_a_pattern_says_what_each_layer_is() -> None:
    spec = mixed()
    assert [layer.attention.sliding_window for layer in spec.layers] == [5, None, None]
    assert [layer.position.type for layer in spec.layers] == ["none", "rope", "rope"]
    assert spec.layer(1) == spec.default_layer == spec.layer_of("blocks.2.attention.q.weight")
    assert spec.kinds == (spec.layer(0), spec.layer(1))
    assert ModelSpec.from_json(spec.to_json()) == spec
    # A change of a model's field reaches the kinds that do not set it.
    assert replace_fields(spec, **{"attention.num_kv_heads": 2}).layer(0).attention.num_kv_heads == 2
    assert [layer.position.type for layer in spec.select_layers([2, 0, 0]).layers] == ["rope", "none", "none"]


def test_models_of_one_kind_have_the_json_they_had() -> None:
    keys = set(json.loads(FAMILIES["llama"].template.to_json()))
    assert not keys & {"layer_kinds", "layer_pattern"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_pattern": ("window", "full")}, "layer_pattern names 2 layers, and the model has 3"),
        ({"layer_pattern": ("window", "full", "wide")}, "wide"),
        ({"layer_pattern": ()}, "layer_pattern has the kinds none"),
        ({"layer_kinds": {"window": {"heads": 2}, "full": {}}}, "heads"),
        ({"layer_kinds": {"window": {"attention.heads": 2}, "full": {}}}, "attention.heads"),
        ({"layer_kinds": {"window": {"attention.num_kv_heads": 4}, "full": {}}}, "cannot share 4 key-value heads"),
        ({"layer_kinds": {"window": {"position": {"type": "learned"}}, "full": {}}}, "shared by all layers"),
    ],
)
def test_layers_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises((JinguError, ValidationError), match=re.escape(message)):
        mixed(**changes)


def test_a_pattern_continues_its_period() -> None:
    assert repeat_pattern(("a", "a", "b", "a", "a", "b"), 8) == tuple("aabaabaa")
    assert repeat_pattern(("a", "b", "b"), 2) == ("a", "b")
    assert repeat_pattern((), 4) == ()
