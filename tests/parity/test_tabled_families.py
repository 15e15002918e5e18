"""Families that are tables, through files: transformers' folder read, and ours read by transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from jingu.errors import JinguError
from jingu.formats.export import export_hf
from jingu.formats.huggingface import open_hf
from jingu.formats.stored_model import load_model
from jingu.text.tokenizer import Tokenizer
from jingu.text.tokenizer_training import train_tokenizer
from tests.parity import test_components as components
from tests.parity.fp64 import randomize
from tests.parity.test_layer_kinds import smollm3

CONFIGS: dict[str, Callable[[], Any]] = {
    "gemma3_text": lambda: components.gemma3()[0],
    "olmo3": lambda: components.olmo3()[0],
    "cohere2": lambda: components.cohere2()[0],
    "smollm3": lambda: smollm3()[0],
}
EACH = pytest.mark.parametrize("name", CONFIGS)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer: Tokenizer = train_tokenizer(iter(["some text"]), 290, ["<|endoftext|>"])
    tokenizer.save(folder)
    return folder


def written(name: str, folder: Path) -> Any:
    """Write transformers' model with random parameters to a folder, and return it."""
    torch.manual_seed(len(name))
    model = AutoModelForCausalLM.from_config(CONFIGS[name](), attn_implementation="eager", dtype=torch.float32)
    model = randomize(model, torch.float32, 0.1)
    model.save_pretrained(folder)
    return model


@EACH
def test_logits_through_files_both_ways(name: str, tokenizer: Path, tmp_path: Path) -> None:
    theirs = written(name, tmp_path / "theirs")
    ids = components.sample()
    with torch.no_grad():
        expected = theirs(ids).logits
        stored = open_hf(tmp_path / "theirs")
        ours = load_model(stored, torch.float32).eval()
        assert stored.spec.family == name
        components.close(ours.logits(ours(ids)), expected)
        # Back to files: transformers reads the same model, and so do we, to the bit.
        export_hf(stored.spec, stored.read, tokenizer, tmp_path / "ours")
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", attn_implementation="eager")
        components.close(again(ids).logits, expected)
    back = open_hf(tmp_path / "ours")
    assert back.spec == stored.spec
    for key in ours.state_dict():
        assert torch.equal(back.read(key), stored.read(key)), key


def change(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def test_old_keys_say_the_same(tmp_path: Path) -> None:
    """Files before release 5 of transformers have a pattern and two bases instead of objects by type."""
    folder = tmp_path / "model"
    written("gemma3_text", folder)
    new = open_hf(folder).spec
    old = {"rope_theta": 700.0, "rope_local_base_freq": 50.0, "rope_scaling": {"rope_type": "linear", "factor": 3.0}}
    change(folder, rope_parameters=None, **old)
    assert open_hf(folder).spec == new
    change(folder, layer_types=None, sliding_window_pattern=2)
    assert open_hf(folder).spec.layer_pattern == tuple(
        "full_attention" if (layer + 1) % 2 == 0 else "sliding_attention" for layer in range(5)
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["full_attention"] * 4}, "names 4 layers, and num_hidden_layers is 5"),
        ({"layer_types": ["full_attention"] * 4 + ["linear_attention"]}, "linear_attention"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ],
)
def test_configs_that_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    written("gemma3_text", folder)
    change(folder, **changes)
    with pytest.raises(JinguError, match=message):
        open_hf(folder)
