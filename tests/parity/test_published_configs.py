"""Configs as they are published: each is the model that transformers makes of it, or is refused by name."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from jingu.errors import JinguError
from jingu.formats.huggingface import spec_from_config
from jingu.model.decoder import parameter_shapes
from jingu.model.families import FAMILIES
from tests.parity.published_configs import CONFIGS

REFUSED = {
    "opt-350m": "do_layer_norm_before to False",
    "stablelm-2-12b": "qk_layernorm to True",
}
READ = [name for name in CONFIGS if name not in REFUSED]


def their_config(name: str) -> Any:
    """Return transformers' config of a decoder; InternLM3 has the class of Llama."""
    config = CONFIGS[name].get("text_config", CONFIGS[name])
    architecture = FAMILIES[spec_family(config)].architectures[0].replace("InternLM3", "Llama")
    keys = {key: value for key, value in config.items() if key not in ("architectures", "auto_map", "model_type")}
    return getattr(transformers, architecture), getattr(transformers, architecture).config_class(**keys)


def spec_family(config: dict[str, Any]) -> str:
    name = config["model_type"]
    return name if name in FAMILIES else "deepseek_v3"


def written(name: str, folder: Path) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(CONFIGS[name]))
    return path


@pytest.mark.parametrize("name", READ)
def test_it_describes_the_model_of_transformers(name: str, tmp_path: Path) -> None:
    spec = spec_from_config(written(name, tmp_path))
    _, theirs = their_config(name)
    family = FAMILIES[spec.family]
    again = family.spec_from_hf(family.complete(theirs.to_dict(), is_part=False))
    assert again.model_copy(update={"tie_word_embeddings": spec.tie_word_embeddings}) == spec


@pytest.mark.slow
@pytest.mark.parametrize("name", READ)
def test_it_has_as_many_parameters(name: str, tmp_path: Path) -> None:
    spec = spec_from_config(written(name, tmp_path)).model_copy(update={"mtp_layers": 0})
    model, config = their_config(name)
    with torch.device("meta"):
        numbers = [parameter.numel() for parameter in model(config).parameters()]
    # Corrections of router scores are buffers there.
    ours = {key: shape for key, shape in parameter_shapes(spec).items() if not key.endswith("correction.weight")}
    assert sum(map(prod, ours.values())) == sum(numbers)


@pytest.mark.parametrize("name", REFUSED)
def test_an_option_is_refused_by_name(name: str, tmp_path: Path) -> None:
    with pytest.raises(JinguError, match=REFUSED[name]):
        spec_from_config(written(name, tmp_path))


def test_code_of_another_model_type_is_not_replaced(tmp_path: Path) -> None:
    path = written("falcon-7b", tmp_path)
    path.write_text(json.dumps({**CONFIGS["falcon-7b"], "model_type": "RefinedWebModel"}))
    with pytest.raises(JinguError, match="auto_map"):
        spec_from_config(path)
