"""`tune.target_modules` by Hugging Face's names: the modules that peft would adapt."""

from __future__ import annotations

import pytest

from jingu.config.sections.model import ModelSettings
from jingu.model.resolve import expand_targets, spec_from_settings

CASES = [
    ("llama", "q_proj", ["blocks.*.attention.q"]),
    ("llama", "mlp.down_proj", ["blocks.*.feed_forward.down"]),
    ("llama", "layers.1.self_attn.v_proj", ["blocks.1.attention.v"]),
    ("llama", "proj", ["proj"]),
    ("llama", "blocks.*.attention.q", ["blocks.*.attention.q"]),
    ("llama", "all-linear", ["*attention.*", "*.feed_forward.*"]),
    ("qwen3_5_text", "all-linear", ["*attention.*", "*.mixer.*", "*.feed_forward.*"]),
    ("qwen3_5_text", "in_proj_z", ["blocks.*.mixer.gate"]),
    ("gpt2", "c_proj", ["blocks.*.attention.output", "blocks.*.feed_forward.down"]),
    ("gpt2", "c_attn", ["blocks.*.attention.q", "blocks.*.attention.k", "blocks.*.attention.v"]),
    ("mixtral", "w2", ["blocks.*.feed_forward.down"]),
    ("mixtral", "down_proj", ["down_proj"]),
    ("t5", "wi", ["encoder.blocks.*.feed_forward.up", "blocks.*.feed_forward.up"]),
    ("t5", "wi_0", ["wi_0"]),
    ("t5", "EncDecAttention.k", ["blocks.*.cross_attention.k"]),
    ("gpt2", "lm_head", ["head"]),
    ("llama", r"model\.layers\.1\..*\.(q|v)_proj", ["blocks.1.attention.q", "blocks.1.attention.v"]),
    ("llama", r".*down_proj", ["blocks.0.feed_forward.down", "blocks.1.feed_forward.down"]),
    ("gpt2", r".*\.1\.mlp\.c_\w+", ["blocks.1.feed_forward.up", "blocks.1.feed_forward.down"]),
    ("llama", r"(", ["("]),
    ("llama", r".*layers", [".*layers"]),
]


@pytest.mark.parametrize(("family", "target", "patterns"), CASES)
def test_targets_by_hugging_face_s_names(family: str, target: str, patterns: list[str]) -> None:
    spec = spec_from_settings(ModelSettings(family=family, num_layers=2), 60, 32)
    assert sorted(expand_targets([target], spec)) == sorted(patterns)
