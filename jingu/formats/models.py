"""Open a model in any format: a run, a step of it, a Hugging Face folder, a GGUF file, a peft folder."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from jingu.checkpoint.manifest import MANIFEST
from jingu.checkpoint.remote import CheckpointPath
from jingu.checkpoint.resume import complete_steps, newest_complete, run_checkpoints, run_config, step_folder
from jingu.checkpoint.store import CheckpointReader
from jingu.config.load import load_stored_config
from jingu.config.sections.data import PrefixLmSettings
from jingu.errors import JinguError, join_words, pluralize
from jingu.formats.gguf import open_gguf
from jingu.formats.huggingface import open_hf, spec_from_config
from jingu.formats.packaged_models import PACKAGED_MODELS, packaged_model
from jingu.formats.peft import ADAPTER_CONFIG, base_model_path, read_adapters
from jingu.formats.run_inputs import BASE, RunInputs, open_base, record_model
from jingu.formats.stored_model import StoredModel, apply_adapters, compare_shapes
from jingu.model.decoder import parameter_shapes
from jingu.model.parameter_table import is_trained
from jingu.model.spec import ModelSpec
from jingu.runtime.checksums import digest_records
from jingu.runtime.log import log_warning


def open_model(path: Path) -> StoredModel:
    """Open a run (its newest checkpoint), a step, a Hugging Face folder, a GGUF file or a packaged model.

    Adapters, of a run or in a peft folder, are opened together with their base model.

    Args:
        path: the folder or file. If it does not exist, it may be the name of a packaged model.

    Raises:
        JinguError: there is no model at the path, or it is damaged.
    """
    if str(path) in PACKAGED_MODELS and not path.exists():
        path = packaged_model(str(path))
    if path.is_file() and path.suffix == ".gguf":
        return open_gguf(path)
    if not path.is_dir():
        raise _no_model(path)
    # The files of a folder show its format.
    if (path / ADAPTER_CONFIG).is_file():
        base = open_model(base_model_path(path))
        return apply_adapters(read_adapters(path, base), base)
    if (path / MANIFEST).is_file() or (path / "model.json").is_file():
        model, run = _open_run(path)
        return model if model.spec.adapter is None else apply_adapters(model, _open_base(run)[0])
    return open_hf(path)


def _no_model(path: Path) -> JinguError:
    """Return the error for a path that is neither a folder nor a GGUF file."""
    steps = [step_folder(path.parent, step).name for step in complete_steps(path.parent)]
    if steps and not path.exists():
        return JinguError("the run has no such checkpoint.", where=path, fix=f"It has {join_words(steps, 'and')}.")
    return JinguError(
        "a model is a folder or a .gguf file." if path.exists() else "there is no such model folder.",
        where=path,
        fix="Give a run (runs/NAME), a step of one (runs/NAME/checkpoints/step-00000100), a Hugging Face folder "
        "or a .gguf file; or the name of a packaged model: " + ", ".join(PACKAGED_MODELS) + ".",
    )


def read_spec(path: Path) -> ModelSpec | None:
    """Return the spec in a run's model.json or in a config.json, without looking at weights; None if both are missing.

    Args:
        path: a run, a step of one, or a Hugging Face folder.
    """
    for folder in (path, path.absolute().parent.parent):
        if (folder / "model.json").is_file():
            return ModelSpec.from_json((folder / "model.json").read_bytes(), folder / "model.json")
    return spec_from_config(path / "config.json") if (path / "config.json").is_file() else None


# Runs


def _open_run(path: Path) -> tuple[StoredModel, Path]:
    """Open the newest checkpoint of a run, or the one at `path`; also return the run's folder."""
    if (path / MANIFEST).is_file():
        step: CheckpointPath = path
        run = path.absolute().parent.parent
    else:
        step = newest_complete(run_checkpoints(path), path)
        run = path
    if not (run / "model.json").is_file():
        raise JinguError(
            "this checkpoint is outside of its run, and so without the run's model.json.",
            where=step,
            fix="Move it back to runs/NAME/checkpoints/.",
        )
    spec = ModelSpec.from_json((run / "model.json").read_bytes(), run / "model.json")
    reader = CheckpointReader(step)
    # Leave out everything that matters only to training.
    ignored = ("model/score.weight",) if spec.value_head else ()
    spec = spec.model_copy(update={"frozen_parameters": (), "value_head": False})
    stored = {
        name.removeprefix("model/"): torch.Size(tensor.shape)
        for name, tensor in reader.manifest.tensors.items()
        if name.startswith("model/") and name not in ignored
    }
    # Checkpoints of a run that trained adapters contain only the trained parameters.
    expected = {name: shape for name, shape in parameter_shapes(spec).items() if is_trained(name, spec)}
    compare_shapes(expected, stored, step)
    config = run_config(run)
    is_prefix_lm = config is not None and isinstance(config.data.objective, PrefixLmSettings)

    def read(name: str, expert: int | None = None) -> Tensor:
        name = f"model/{name}"
        return reader.read(name) if expert is None else reader.read_expert(name, expert)

    tokenizer = run / "tokenizer" if (run / "tokenizer").is_dir() else None
    return StoredModel(spec, read, tokenizer, step, is_prefix_lm=is_prefix_lm), run


def _open_base(run: Path) -> tuple[StoredModel, Path]:
    """Open the model from which a run started; also return its path."""
    base = load_stored_config(run / "config.yaml").initialize.from_
    assert base is not None
    return open_base(run, base, open_model)


# Adapters


def open_adapter_run(path: Path) -> tuple[StoredModel, StoredModel, Path]:
    """Open a run that trained adapters, or a step of it; return the adapters, their base model and that model's path.

    Raises:
        JinguError: the run trained no adapters, or it or its base model cannot be opened.
    """
    adapters, run = _open_run(path)
    _check_has_adapters(adapters, path)
    return adapters, *_open_base(run)


def _check_has_adapters(adapters: StoredModel, path: Path) -> None:
    if adapters.spec.adapter is None:
        raise JinguError("this run trained no adapters.", where=path, fix="`jingu export` writes its model.")


def _warn_of_other_base(run: Path, base: StoredModel) -> None:
    """Warn if adapters of a run are put on another model than the one that they were trained for."""
    inputs = RunInputs.load(run)
    expected = inputs.inputs.get(BASE)
    if expected is not None and digest_records(record_model(base, inputs.files)) != expected.content:
        log_warning(f"{base.where} is not the model for which the adapters in {run} were trained ({expected.path}).")


def load_adapters(path: Path, base: StoredModel, *, is_merged: bool = False) -> StoredModel:
    """Open adapters, from a run or a peft folder, for a model.

    Args:
        base: the model that the adapters will be applied to. If it is not the one that they were trained for, a warning
            says so.
        is_merged: whether the adapters are merged into this model already.

    Raises:
        JinguError: there are no adapters; those of a run are for a model of another depth; or those in a peft folder do
            not fit the model, or also change parameters that only a merged model can change.
    """
    if (path / ADAPTER_CONFIG).is_file():
        adapters = read_adapters(path, base)
        if adapters.updates:
            raise JinguError(
                f"these adapters also change {', '.join(adapters.updates)}, which only a merged model can have.",
                where=path,
                fix="Merge them into the model with `jingu tune merge --base`.",
            )
        return adapters
    if not path.is_dir():
        fix = "Give a run that trained adapters, or a folder of peft."
        raise JinguError("there is no such folder of adapters.", where=path, fix=fix)
    adapters, run = _open_run(path)
    _check_has_adapters(adapters, path)
    if not is_merged:
        _warn_of_other_base(run, base)
    depth, base_depth = ((spec.num_encoder_layers or 0) + spec.num_layers for spec in (adapters.spec, base.spec))
    if depth != base_depth:
        what = f"these adapters are for a model of {pluralize(depth, 'block')}, and this one has {base_depth:,}."
        raise JinguError(what, where=path, fix="Choose another base model.")
    return adapters


def load_matching_adapters(path: Path, base: StoredModel, spec: ModelSpec) -> StoredModel:
    """Open adapters for a model, like `load_adapters`. Raises JinguError unless their names and shapes match `spec`."""
    adapters = load_adapters(path, base)
    expected = {name: shape for name, shape in parameter_shapes(spec).items() if is_trained(name, spec)}
    names = {name for name in parameter_shapes(adapters.spec) if is_trained(name, adapters.spec)}
    if names != set(expected) or any(adapters.read(name).shape != shape for name, shape in expected.items()):
        raise JinguError(
            "the initial adapters are of another kind or size, or for another model.",
            where=path,
            fix="Use the same settings under `tune` that they were trained with.",
        )
    return adapters
