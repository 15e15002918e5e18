"""The guide to adding a family: its tables and its line of the tests' list, applied as they stand."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from jingu.model.families import FAMILIES, family, map_tensors, tabled
from jingu.text.tokenizer_training import train_tokenizer
from tests.model import test_presets
from tests.parity import test_components as components
from tests.parity import test_tabled_families as tests_of_tables

GUIDE = (Path(__file__).parents[1] / "docs" / "guides" / "add-a-family.md").read_text(encoding="utf-8")


@pytest.fixture
def name(monkeypatch: pytest.MonkeyPatch) -> str:
    """The family of the guide: append its tables to jingu's, and its line to the list of the tests."""
    table, presets = (
        tomllib.loads(block) for block in re.findall(r"^```toml\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL)
    )
    figure, line = re.findall(r"^```python\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL)
    (name,) = table
    assert name not in FAMILIES, "jingu has this family: choose another one for the guide"
    published = {**family._published_models(), name: presets[name]["models"]}
    sizes = {key: value for key, value in presets[name].items() if key not in ("family", "models")}
    published[name] = {model: {**sizes, **values} for model, values in published[name].items()}
    monkeypatch.setattr(family, "_published_models", lambda: published)
    monkeypatch.setitem(tabled.TABLES, name, table[name])
    monkeypatch.setitem(FAMILIES, name, tabled.tabled_families()[-1])
    names: dict[str, Any] = {"components": components}
    exec(f"configs = {{{line}}}", names)
    configs = names["configs"]
    assert list(configs) == [name]
    monkeypatch.setitem(tests_of_tables.CONFIGS, name, configs[name])
    for preset, billions in ast.literal_eval(f"{{{figure}}}").items():
        monkeypatch.setitem(test_presets.ROUNDED, preset, billions)
    return name


def test_the_family_passes_the_test_of_families(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "tokenizer"
    train_tokenizer(iter(["some text"]), 290, ["<|endoftext|>"]).save(folder)
    tests_of_tables.test_logits_through_files_both_ways(name, folder, tmp_path)


def test_the_preset_has_the_parameters_of_transformers(name: str) -> None:
    theirs = tests_of_tables.CONFIGS[name]()
    for preset in FAMILIES[name].presets.values():
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(type(theirs)())
        expected = sum(parameter.numel() for parameter in model.parameters())
        assert sum(mapping.shape.numel() for mapping in map_tensors(preset)) == expected


def test_the_preset_passes_the_tests_of_presets(name: str) -> None:
    test_presets.test_every_family_has_a_preset()
    test_presets.test_presets_have_as_many_parameters_as_rounded_figures_say()


def test_absent_keys_have_the_values_of_transformers(name: str) -> None:
    theirs = type(tests_of_tables.CONFIGS[name]())
    family = FAMILIES[name]
    assert family.spec_from_hf(family.complete({}, is_part=True)) == family.spec_from_hf(theirs().to_dict())
