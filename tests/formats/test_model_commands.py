"""`jingu model list | inspect`: their counts, and the problems that they report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.flop_counter
from safetensors.torch import load_file, save_file

from jingu.config.sections.model import ModelSettings
from jingu.errors import JinguError
from jingu.formats.export import export_hf
from jingu.formats.model_commands import inspect_model, list_models
from jingu.model.count import flops_per_token, generation_flops
from jingu.model.decoder import Decoder, build_model, parameter_shapes
from jingu.model.families import FAMILIES
from jingu.model.inputs import Inputs
from jingu.model.resolve import spec_from_settings
from jingu.model.spec import replace_fields
from jingu.model.weight_init import init_weights
from jingu.text.tokenizer_training import train_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    spec = spec_from_settings(
        ModelSettings(hidden_size=12, num_heads=3, num_kv_heads=1, num_layers=2, vocab_size=301), 257, 16
    )
    model = Decoder(spec)
    init_weights(model, spec, 3)
    train_tokenizer(iter(["some text"]), 257, ["<|endoftext|>"]).save(tmp_path / "tokenizer")
    export_hf(spec, model.state_dict().__getitem__, tmp_path / "tokenizer", tmp_path / "out")
    return tmp_path / "out"


def inspect_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    inspect_model(folder, as_json=True)
    facts: dict[str, Any] = json.loads(capsys.readouterr().out)
    return facts


def test_every_family_and_preset_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    list_models()
    out = capsys.readouterr().out
    lines = [line.split() for line in out.split("\n")]
    assert ["llama", "llama-2-7b", "6,738,415,616", "32", "4096", "32", "4096"] in lines
    assert ["t5", "t5-v1.1-small", "76,961,152", "8+8", "512", "6", "512"] in lines
    assert {line[0] for line in lines if line} >= set(FAMILIES)


def test_a_whole_model(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = inspect_json(folder, capsys)
    stored = load_file(folder / "model.safetensors")
    total = sum(tensor.numel() for tensor in stored.values())
    assert facts["parameters"] == {"total": total, "active": total, "embedding": 301 * 12}
    assert facts["bytes"] == {"in_bf16": 2 * total, "in_fp32": 4 * total}
    assert (facts["family"], facts["max_position_embeddings"], facts["dimensions"]["num_kv_heads"]) == ("llama", 16, 1)
    assert facts["tokenizer"] == {"vocab_size": 257, "eos_token_id": 0}
    assert facts["problems"] == []
    assert facts["tensors"] == {"missing": [], "unexpected": [], "of_the_wrong_shape": []}
    inspect_model(folder)
    lines = [line.split() for line in capsys.readouterr().out.split("\n")]
    assert ["parameters", "total", f"{total:,}"] in lines and ["problems", "none"] in lines


def test_missing_and_extra_tensors_are_reported(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.norm.weight"]
    save_file({**tensors, "model.more": torch.zeros(1)}, path)
    (folder / "tokenizer.json").unlink()
    facts = inspect_json(folder, capsys)
    assert facts["parameters"]["embedding"] == 301 * 12
    assert facts["problems"] == [
        "the weights are not those that the model's config describes (1 missing, 1 unexpected).",
        "there is no tokenizer.",
    ]
    wrong = {"missing": ["model.norm.weight"], "unexpected": ["model.more"], "of_the_wrong_shape": []}
    assert facts["tensors"] == wrong
    inspect_model(folder)
    assert [line.split() for line in capsys.readouterr().out.splitlines()[-3:]] == [
        ["tensor", "problem"],
        ["model.norm.weight", "missing"],
        ["model.more", "unexpected"],
    ]


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JinguError, match="this is no model"):
        inspect_model(tmp_path)


def test_flops_equal_those_that_torch_counts() -> None:
    """FLOPs of the matrix products of a forward pass; torch does not count causal attention as half."""
    for family, tied in (("llama", False), ("gpt2", True), ("baichuan2", False)):
        spec = spec_from_settings(
            ModelSettings(family=family, hidden_size=24, num_heads=3, tie_word_embeddings=tied), 101, 16
        )
        with torch.device("meta"):
            model, tokens = Decoder(spec), torch.zeros(1, 16, dtype=torch.int64)
            with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
                model.logits(model(tokens))
        attention = 4 * spec.num_layers * 16 * 16 * 24
        shapes = parameter_shapes(spec)
        assert flops_per_token(spec, shapes, 16) * 16 == 3 * (counter.get_total_flops() - attention / 2)
        assert generation_flops(spec, shapes, 16) * 16 == counter.get_total_flops()


def test_flops_of_an_encoder_equal_those_that_torch_counts() -> None:
    """A source of 24 tokens beside 16; only what the decoder sees of itself is causal."""
    for family in ("t5", "mt5"):
        spec = spec_from_settings(ModelSettings(family=family, hidden_size=24, num_heads=3, num_layers=2), 101, 24)
        spec = replace_fields(spec, num_encoder_layers=3)
        with torch.device("meta"):
            model = build_model(spec)
            source, tokens = (torch.zeros(1, count, dtype=torch.int64) for count in (24, 16))
            with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
                model.logits(model(Inputs(tokens, source=Inputs(source))))
        own = 4 * spec.num_layers * 16 * 16 * 24
        shapes = parameter_shapes(spec)
        measured = counter.get_total_flops()
        assert flops_per_token(spec, shapes, 16, 24) * 16 == pytest.approx(3 * (measured - own / 2))
        read = 3 * (
            2 * 24 * (4 * 24 * 24 + (2 + (family == "mt5")) * 24 * spec.feed_forward.intermediate_size)
            + 4 * 24 * 24 * 24
        )
        read += 2 * 2 * 24 * 2 * 24 * 24  # of the encoder's blocks; and the keys and values made of its states
        assert generation_flops(spec, shapes, 16, 24) * 16 == pytest.approx(measured - read)
