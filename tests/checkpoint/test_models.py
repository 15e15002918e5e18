"""`jingu model list | inspect`: what they count and what they find wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.flop_counter
from safetensors.torch import load_file, save_file

from jingu.checkpoint.export import export_hf
from jingu.checkpoint.models import inspect, list_models
from jingu.config.sections.model import ModelSettings
from jingu.errors import JinguError
from jingu.model.build import spec_from_settings
from jingu.model.count import flops_per_token, generation_flops
from jingu.model.decoder import Decoder, make_model, parameter_shapes
from jingu.model.families import FAMILIES
from jingu.model.initialise import initialise
from jingu.model.spec import replaced
from jingu.text.training import train_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    spec = spec_from_settings(ModelSettings(width=12, heads=3, kv_heads=1, layers=2, vocabulary=301), 257, 16)
    model = Decoder(spec)
    initialise(model, spec, 3)
    train_tokenizer(iter(["some text"]), 257, ["<|endoftext|>"]).save(tmp_path / "tokenizer")
    export_hf(spec, model.state_dict().__getitem__, tmp_path / "tokenizer", tmp_path / "out")
    return tmp_path / "out"


def found(folder: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    inspect(folder, as_json=True)
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
    facts = found(folder, capsys)
    stored = load_file(folder / "model.safetensors")
    total = sum(tensor.numel() for tensor in stored.values())
    assert facts["parameters"] == {"total": total, "active": total, "embedding": 301 * 12}
    assert facts["bytes"] == {"in_bf16": 2 * total, "in_fp32": 4 * total}
    assert (facts["family"], facts["context"], facts["dimensions"]["kv_heads"]) == ("llama", 16, 1)
    assert facts["tokenizer"] == {"entries": 257, "end_id": 0}
    assert facts["faults"] == []
    assert facts["tensors"] == {"missing": [], "left_over": [], "of_the_wrong_shape": []}
    inspect(folder)
    lines = [line.split() for line in capsys.readouterr().out.split("\n")]
    assert ["parameters", "total", f"{total:,}"] in lines and ["faults", "none"] in lines


def test_what_is_missing_or_extra_is_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.norm.weight"]
    save_file({**tensors, "model.more": torch.zeros(1)}, path)
    (folder / "tokenizer.json").unlink()
    facts = found(folder, capsys)
    assert facts["parameters"]["embedding"] == 301 * 12
    assert facts["faults"] == [
        "the weights are not those that the model's config describes (1 missing, 1 left over).",
        "there is no tokenizer.",
    ]
    wrong = {"missing": ["model.norm.weight"], "left_over": ["model.more"], "of_the_wrong_shape": []}
    assert facts["tensors"] == wrong
    inspect(folder)
    assert [line.split() for line in capsys.readouterr().out.splitlines()[-3:]] == [
        ["tensor", "is"],
        ["model.norm.weight", "missing"],
        ["model.more", "left", "over"],
    ]


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JinguError, match="this is no model"):
        inspect(tmp_path)


def test_operations_are_those_torch_counts() -> None:
    """Of matrix products forward; the causal half of attention is counted whole by torch."""
    for family, tied in (("llama", False), ("gpt2", True), ("baichuan2", False)):
        spec = spec_from_settings(ModelSettings(family=family, width=24, heads=3, tied_embeddings=tied), 101, 16)
        with torch.device("meta"):
            model, tokens = Decoder(spec), torch.zeros(1, 16, dtype=torch.int64)
            with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
                model.logits(model(tokens))
        attention = 4 * spec.layers * 16 * 16 * 24
        shapes = parameter_shapes(spec)
        assert flops_per_token(spec, shapes, 16) * 16 == 3 * (counter.get_total_flops() - attention / 2)
        assert generation_flops(spec, shapes, 16) * 16 == counter.get_total_flops()


def test_operations_of_an_encoder_are_those_torch_counts() -> None:
    """A source of 24 tokens beside 16; only what the decoder sees of itself is causal."""
    for family in ("t5", "mt5"):
        spec = spec_from_settings(ModelSettings(family=family, width=24, heads=3, layers=2), 101, 24)
        spec = replaced(spec, encoder_layers=3)
        with torch.device("meta"):
            model = make_model(spec)
            source, tokens = (torch.zeros(1, count, dtype=torch.int64) for count in (24, 16))
            with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
                model.logits(model(tokens, source_BS=source))
        own = 4 * spec.layers * 16 * 16 * 24
        shapes = parameter_shapes(spec)
        measured = counter.get_total_flops()
        assert flops_per_token(spec, shapes, 16, 24) * 16 == pytest.approx(3 * (measured - own / 2))
        read = 3 * (2 * 24 * (4 * 24 * 24 + (2 + (family == "mt5")) * 24 * spec.feed_forward.size) + 4 * 24 * 24 * 24)
        read += 2 * 2 * 24 * 2 * 24 * 24  # of the encoder's blocks; and the keys and values made of its states
        assert generation_flops(spec, shapes, 16, 24) * 16 == pytest.approx(measured - read)
