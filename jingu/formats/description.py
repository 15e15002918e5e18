"""What a Hugging Face folder says of a model beside its weights, and how a run keeps it from the model it starts from.

A run stores this in its folder when it starts, so that it is known when the initial model is gone:

- `huggingface/config.json`: the config of the initial model, with all its keys
- `huggingface/generation_config.json`: its generation settings. The tokens that end an answer of the trained chat
  template are added to its EOS tokens
- `tokenizer/`: the run's tokenizer, with the chat templates that the model is trained with
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from jingu.chat.chat_format import find_chat_format
from jingu.chat.template_sources import load_template
from jingu.config.schema import RunConfig
from jingu.config.sections.data import RowSettings
from jingu.config.sections.policies import RolloutSettings
from jingu.errors import JinguError
from jingu.formats.huggingface import find_family, read_model_json, write_json
from jingu.formats.stored_model import StoredModel
from jingu.model.families import FAMILIES
from jingu.model.spec import ModelSpec
from jingu.runtime.files import create_folder_atomically
from jingu.text.tokenizer import Tokenizer

FOLDER = "huggingface"
_CONFIG = "config.json"
_GENERATION_CONFIG = "generation_config.json"
# Keys that describe how the weights are stored, which an export decides, and code that is not copied.
_STORAGE_KEYS = ("quantization_config", "auto_map", "transformers_weights")


@dataclass(frozen=True)
class ModelDescription:
    """Attributes: as in `StoredModel`."""

    config: Mapping[str, Any] = field(default_factory=dict)
    generation_config: Mapping[str, Any] | None = None
    chat_templates: Mapping[str, str] | None = None

    def add_end_ids(self, end_ids: tuple[int, ...], eos_token_id: int) -> ModelDescription:
        """Return the description with further tokens that end an answer.

        Args:
            eos_token_id: the tokenizer's EOS token, for a model whose files define none.
        """
        settings = self.config if self.generation_config is None else self.generation_config
        ids = settings.get("eos_token_id")
        ids = self.config.get("eos_token_id", eos_token_id) if ids is None else ids
        known_ids = list(ids) if isinstance(ids, list) else [eos_token_id if ids is None else ids]
        merged_ids = list(dict.fromkeys((*known_ids, *end_ids)))
        if merged_ids == known_ids:
            return self
        generation_config = self.generation_config
        if generation_config is None:
            generation_config = {key: self.config[key] for key in self.config if key.endswith("_token_id")}
        eos = {"eos_token_id": merged_ids}
        return replace(self, config={**self.config, **eos}, generation_config={**generation_config, **eos})


def special_token_ids(tokenizer: Tokenizer, spec: ModelSpec) -> dict[str, Any]:
    """Return the special token ids of a model whose source defines none."""
    # EOS must not be the padding token too: transformers does not train the embedding of the padding token.
    ids = dict.fromkeys(("bos_token_id", "eos_token_id"), tokenizer.eos_token_id)
    if spec.num_encoder_layers is not None:
        start = tokenizer.decoder_start_token_id
        ids |= {"pad_token_id": start, "decoder_start_token_id": start}
    return ids


def build_config(spec: ModelSpec, source: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Return the config.json of a model that is computed from another one.

    If the model still is what the other one's config describes, all keys keep their values; otherwise only those keys
    change whose values would differ.

    Args:
        source: config.json of the other model, or only its special token ids.
        dtype: dtype of the written weights.

    Raises:
        JinguError: Hugging Face's class cannot represent the spec.
    """
    family = FAMILIES[spec.family]
    names = [name for name in ("torch_dtype", "dtype") if name in source]
    # transformers reads `torch_dtype` before release 5, and `dtype` since then.
    dtypes = dict.fromkeys(names or ("torch_dtype", "dtype"), str(dtype).removeprefix("torch."))
    is_config = "architectures" in source or "model_type" in source
    if is_config and find_family(source, Path(_CONFIG)) is family:
        plain = {key: value for key, value in source.items() if key not in _STORAGE_KEYS}
        config = _change_config(spec, plain)
        if config is not None:
            return {**config, **dtypes}
    ids = {key: value for key, value in source.items() if key.endswith("_token_id")}
    return {"architectures": [family.architectures[0]], **family.hf_config(spec), **ids, **dtypes}


def _change_config(spec: ModelSpec, source: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return a config with the fewest changes such that it describes a spec; None if there is none.

    Args:
        source: a config of the same family.
    """
    family = FAMILIES[spec.family]
    original = family.spec_from_hf(family.complete(source, is_part=False))
    head = family.classifier if spec.score_head else family.architectures[0]
    # A model that was saved without its head has one now.
    known_architectures = (*family.architectures, family.classifier)
    has_head = not source.get("architectures") or source["architectures"][0] in known_architectures
    names = {"model_type": source.get("model_type") or family.model_type or family.name}
    if not has_head:
        names["architectures"] = [head]
    if original == spec:
        return {**source, **names}
    before = {"architectures": [family.architectures[0]], **family.hf_config(original)}
    after = {"architectures": [head], **family.hf_config(spec)}
    changes = {key: value for key, value in after.items() if key not in before or before[key] != value}
    obsolete = before.keys() - after.keys()
    if spec.num_layers != original.num_layers:
        # A list with an entry for each block is of no use for another number of blocks.
        obsolete |= {key for key, value in source.items() if isinstance(value, list) and len(value) > 1}
    kept_keys = {key: value for key, value in source.items() if key not in obsolete or key.endswith("_token_id")}
    for config in ({**kept_keys, **names, **changes}, {**kept_keys, **names, **after}):
        with suppress(JinguError):
            if family.spec_from_hf(family.complete(config, is_part=False)) == spec:
                return config
    return None


def describe_run(
    config: RunConfig, tokenizer: Tokenizer, spec: ModelSpec, initial: StoredModel | None
) -> ModelDescription:
    """Return the description of the model that a run trains.

    Args:
        tokenizer: the run's tokenizer.
        spec: spec of the run's model.
        initial: the model that the run starts from; None: random weights, or it is unknown.

    Raises:
        JinguError: the chat template cannot be loaded.
    """
    ids = special_token_ids(tokenizer, spec)
    description = ModelDescription(ids)
    if initial is not None and initial.config:
        description = ModelDescription(initial.config, initial.generation_config)
    elif initial is not None and initial.generation_config is not None:
        description = ModelDescription(ids, initial.generation_config)
    templates = _find_templates(config, tokenizer, initial)
    if templates and (isinstance(config.data.objective, RowSettings) or isinstance(config.task, RolloutSettings)):
        end_ids = find_end_ids(tokenizer.replace_chat_templates(templates))
        description = description.add_end_ids(end_ids, tokenizer.eos_token_id)
    return replace(description, chat_templates=templates if templates != tokenizer.chat_templates else None)


def find_end_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the token that ends an answer in a tokenizer's chat template; empty if no single token does."""
    # The path is not that of a run, so the template is that of the tokenizer.
    chat_format = find_chat_format(Path("/"), tokenizer)
    if chat_format is None:
        return ()
    return chat_format.eos_token_ids or tuple(
        tokenizer.added_tokens[text] for text in chat_format.stop if text in tokenizer.added_tokens
    )


def _find_templates(config: RunConfig, tokenizer: Tokenizer, initial: StoredModel | None) -> dict[str, str]:
    """Return the chat templates of the model that a run trains, by name; empty if it has none.

    These are the ones that it trains with. Runs that do not choose one keep those of their initial model.
    """
    objective, task = config.data.objective, config.task
    name = "auto"
    if isinstance(objective, RowSettings):
        name = objective.template
    elif isinstance(task, RolloutSettings):
        name = task.template
    if name != "auto":
        template = load_template(name, tokenizer)
        templates = {"default": template.source}
        if template.tools_source is not None:
            templates["tool_use"] = template.tools_source
        further = tokenizer.chat_templates if name in tokenizer.chat_templates else {}
        return {**{key: text for key, text in further.items() if key != "tool_use"}, **templates}
    if not isinstance(objective, RowSettings) and initial is not None and initial.tokenizer_folder is not None:
        inherited_templates = initial.chat_templates or Tokenizer.load(initial.tokenizer_folder).chat_templates
        return dict(inherited_templates) or tokenizer.chat_templates
    return tokenizer.chat_templates


def write_description(run: Path, description: ModelDescription) -> None:
    """Write a description into the folder of a run, unless the same one is there.

    Its chat templates are not written: `copy_tokenizer` does that.
    """
    files = {_CONFIG: description.config, _GENERATION_CONFIG: description.generation_config}
    if (run / FOLDER).is_dir() and read_description(run) == replace(description, chat_templates=None):
        return
    with create_folder_atomically(run / FOLDER) as folder:
        for name, content in files.items():
            if content is not None:
                write_json(folder / name, content)
        shutil.rmtree(run / FOLDER, ignore_errors=True)


def read_description(run: Path) -> ModelDescription:
    """Read the description that is stored in the folder of a run. Raises JinguError if a file is damaged."""
    folder = run / FOLDER
    generation_config = folder / _GENERATION_CONFIG
    return ModelDescription(
        read_model_json(folder / _CONFIG),
        read_model_json(generation_config) if generation_config.is_file() else None,
    )
