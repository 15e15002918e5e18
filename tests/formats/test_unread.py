"""Architectures that jingu does not read: real configs of transformers, refused by their components."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import transformers

from jingu.errors import JinguError
from jingu.formats.gguf_names import ARCHITECTURES, METADATA
from jingu.formats.huggingface import open_hf
from jingu.formats.unread import COMPONENTS, UNREAD, find_unread
from jingu.model.families import FAMILIES

# Name of the config, class of the model, what the error says is missing, and the nearest family.
REFUSED = [
    ("Gemma3nTextConfig", "Gemma3nForCausalLM", "alternating updates", "gemma4_text"),
    ("Zamba2Config", "Zamba2ForCausalLM", "blocks that several layers share", "bamba"),
    ("JambaConfig", "JambaForCausalLM", "Mamba layers", "mixtral"),
    ("NemotronConfig", "NemotronForCausalLM", "LayerNorm whose stored weight is one less", "arcee"),
]


@pytest.mark.parametrize(("config", "architecture", "missing", "near"), REFUSED)
def test_the_error_names_components(config: str, architecture: str, missing: str, near: str, tmp_path: Path) -> None:
    getattr(transformers, config)(architectures=[architecture]).save_pretrained(tmp_path)
    with pytest.raises(JinguError, match=rf"architecture {architecture}\. Missing: .*{missing}.*\bare .*\b{near}\b"):
        open_hf(tmp_path)


@pytest.mark.parametrize("name", ["Gemma3nConfig", "MuseGlimmerConfig"])
def test_composite_models_name_components_too(name: str, tmp_path: Path) -> None:
    architecture = name.replace("Config", "ForConditionalGeneration")
    getattr(transformers, name)(architectures=[architecture]).save_pretrained(tmp_path)
    with pytest.raises(JinguError, match=rf"the decoder of {architecture}.* Missing: "):
        open_hf(tmp_path)


@pytest.mark.parametrize("name", ["Qwen9ForCausalLM", "GemmaForCausalML", "Something"])
def test_unknown_architectures_get_no_hint(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(f'{{"architectures": ["{name}"]}}')
    with pytest.raises(JinguError) as error:
        open_hf(tmp_path)
    assert error.value.fix == "`jingu model list` shows the families that it reads."
    assert "Missing" not in error.value.what


def test_each_architecture_of_llama_cpp_is_read_or_says_what_is_missing() -> None:
    names = {name for name in gguf.MODEL_ARCH_NAMES.values() if name != "unknown"}
    with_family = {name for entry in UNREAD.values() for name in entry.get("gguf", ())}
    assert names <= {*ARCHITECTURES, *with_family, *METADATA["unread"]}
    assert not set(METADATA["unread"]) & {*ARCHITECTURES, *with_family}


def test_the_table_is_about_families_that_are_not_read() -> None:
    """An entry goes when its family is read; names and components are spelled as elsewhere."""
    read = {name for family in FAMILIES.values() for name in family.architectures}
    for name, entry in UNREAD.items():
        assert name not in FAMILIES and not read & set(entry["architectures"]), name
        assert set(entry["near"]) <= set(FAMILIES), name
        assert set(entry["missing"]) <= set(COMPONENTS) and entry["missing"], name
        for each in entry.get("gguf", ()):
            assert each not in ARCHITECTURES and each in gguf.MODEL_ARCH_NAMES.values(), name
        assert find_unread([entry["architectures"][0]]) is entry
    assert {each for entry in UNREAD.values() for each in entry["missing"]} == set(COMPONENTS)
