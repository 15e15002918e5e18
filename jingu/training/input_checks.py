"""What a run reads from outside its folder: compared before it starts or resumes, and recorded once it has."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jingu.chat.chat_format import find_chat_format
from jingu.chat.template_sources import load_template
from jingu.chat.templates import ChatTemplate
from jingu.checkpoint.resume import checkpoints_path, complete_steps
from jingu.config.schema import RunConfig
from jingu.config.sections.data import DataSettings, RowSettings, SupervisedSettings
from jingu.config.sections.policies import RolloutSettings
from jingu.config.sections.rewards import ModelReward, PythonReward
from jingu.config.sections.tune import FullSettings
from jingu.data.dataset_manifest import MANIFEST_NAME, DatasetManifest
from jingu.errors import JinguError
from jingu.evaluate.task_mixture import describe_mixture, find_mixture
from jingu.formats.models import open_model
from jingu.formats.run_inputs import BASE, RunInput, RunInputs, record_model
from jingu.runtime.checksums import Records, digest_records, record_file
from jingu.runtime.code_files import find_code_files
from jingu.text.corpus import find_files
from jingu.text.identity import Identity, hash_value, identify_documents, identify_rows, load_inputs, settings_for
from jingu.text.tokenizer import Tokenizer
from jingu.text.tokenizer_files import TEMPLATE

# Prepared data


def check_data(config: RunConfig, tokenizer: Tokenizer, records: Records) -> None:
    """Compare each data set of a run with what its settings would prepare now.

    A source without `input` names no corpus: only settings with other values than the default are compared. A corpus
    that is not on this machine is not compared either, but `input` must be as it was. Other tools leave no record.

    Args:
        records: records of files that need not be read while they are unchanged.

    Raises:
        JinguError: settings or contents have changed.
    """
    if isinstance(config.task, RolloutSettings):
        return
    for source in config.data.all_sources:
        path = Path(source.path)
        manifest = DatasetManifest.load(path) if (path / MANIFEST_NAME).is_file() else None
        if manifest is None or not manifest.settings:
            continue
        command = "data build"
        if isinstance(config.data.objective, RowSettings):
            command = config.data.objective.BUILD_COMMAND
        data, data_settings = config.data.for_source(source), manifest.settings
        mixture = data_settings.get("mixture")
        if (file := find_mixture(data, as_text=command == "data build")) is not None:
            # Rendering all rows again takes long. The files of the mixture tell whether they would be the same.
            data = data.model_copy(update={"input": data_settings.get("input", []), "text_field": "text"})
            mixture = {**(mixture or {}), "files": describe_mixture(file)}
        identity = _identify(config, data, tokenizer, {**load_inputs(path), **records}, mixture)
        _check_template(config, data_settings, identity, path)
        identity.refuse_changes(
            data_settings,
            "the data set here was built",
            path,
            f"Restore what has changed; or delete the folder and run `jingu {command}`; or, to train on what was "
            "built, set data.input=[] (or leave out the input of the source), and these settings to what they were.",
        )


def _check_template(config: RunConfig, settings: dict[str, Any], identity: Identity, path: Path) -> None:
    """Raise JinguError if the file of the chat template has changed since a data set was prepared with it."""
    name = config.data.objective.template if isinstance(config.data.objective, RowSettings) else ""
    old = settings.get("template_text")
    is_same_name = (settings.get("objective") or {}).get("template") == name
    if old in (None, identity.settings.get("template_text")) or not is_same_name or not Path(name).is_file():
        return
    copy = Path(config.runs_dir) / config.name / "tokenizer" / TEMPLATE
    has_copy = copy.is_file() and hash_value([copy.read_text(encoding="utf-8")]) == old
    raise JinguError(
        f"the chat template {name} has changed since the data set {path} was prepared with it.",
        where="data.objective.template",
        fix=f"Restore the file{f' (the run has a copy, {copy})' if has_copy else ''}; or delete the folder {path}, "
        "prepare it again, and start a new run (name=...).",
    )


def _identify(
    config: RunConfig, data: DataSettings, tokenizer: Tokenizer, records: Records, mixture: dict[str, Any] | None
) -> Identity:
    """Return the identity of the data set that the settings would prepare, as far as it is known here."""
    files = None
    if data.input and mixture is None:
        try:
            files = find_files(data)
        except JinguError:
            # The corpus is not here. If it never was what the settings name, `input` shows it.
            files = None
    if isinstance(data.objective, RowSettings):
        try:
            template = load_training_template(data.objective, tokenizer)
        except JinguError as error:
            copy = Path(config.runs_dir) / config.name / "tokenizer" / TEMPLATE
            if not copy.is_file():
                raise
            fix = f"Restore the file from the run's copy, {copy}."
            raise JinguError(error.what, where=error.where, fix=fix) from error
        length = config.batch.sequence_length
        identity = identify_rows(data, tokenizer, files, records, template.sources, length, mixture)
    else:
        identity = identify_documents(data, tokenizer, files, records, mixture)
    if data.input:
        return identity
    # Nothing says from what the data set was built. Other values than the defaults were meant, and texts are known. Of
    # several sources, they may have been meant for others.
    defaults = DataSettings().model_dump(mode="json")
    names = {"template_text", "special_names", "objective", "sequence_length"}
    if not config.data.sources:
        names |= {name for name in settings_for("documents", "data") if identity.settings.get(name) != defaults[name]}
    return identity.only(names)


def load_training_template(objective: RowSettings, tokenizer: Tokenizer) -> ChatTemplate:
    """Return the chat template with which rows are prepared. Raises JinguError if it cannot be loaded."""
    # Answers that are compared with each other begin where the model begins to generate them.
    skips_empty_reasoning = isinstance(objective, SupervisedSettings) and not objective.train_empty_reasoning
    return load_template(
        objective.template,
        tokenizer,
        parse_special_tokens=objective.parse_special_tokens,
        train_empty_reasoning=not skips_empty_reasoning,
    )


# What else a run reads


def find_template_text(config: RunConfig, tokenizer: Tokenizer) -> str | None:
    """Return the text of the chat template that a run trains with; None for the tokenizer's own, or none."""
    text = None
    if isinstance(config.task, RolloutSettings):
        template = None if config.task.template == "auto" else config.task.template
        model = Path(config.initialize.from_ or config.task.prompts)
        chat_format = find_chat_format(model, tokenizer, template)
        text = None if chat_format is None else chat_format.template.source
    elif isinstance(config.data.objective, RowSettings):
        name = config.data.objective.template
        text = None if name == "auto" else load_template(name, tokenizer).source
    return None if text == tokenizer.chat_template else text


def load_run_template(config: RunConfig, tokenizer: Tokenizer) -> ChatTemplate:
    """Return the chat template of the model that a run trains. Raises JinguError if there is none."""
    text = find_template_text(config, tokenizer)
    if text is None:
        return load_template("auto", tokenizer, where="evaluation.tasks")
    return ChatTemplate(text, tokenizer, "of the run")


def check_inputs(config: RunConfig, folder: Path, tokenizer: Tokenizer, allow: tuple[str, ...]) -> None:
    """Compare what a run reads with what it read when it was started, if it has a checkpoint to resume from.

    Args:
        allow: keys and sections whose contents may have changed (`--allow`).

    Raises:
        JinguError: something has changed.
    """
    start = RunInputs.load(folder)
    if not start.inputs or not complete_steps(checkpoints_path(folder, config)):
        return
    for key, read in _readers(config, tokenizer):
        # "task.rewards[0].function" belongs to the section task.rewards.
        is_allowed = f"{key}.".replace("[", ".").startswith(tuple(f"{name}." for name in allow))
        if key in start.inputs and not is_allowed:
            current = RunInputs(files=dict(start.files))
            now = read(current, folder)
            if now.content != start.inputs[key].content and not _names_one_file(start.inputs[key], now, current):
                changes = _describe_changes(start, start.inputs[key], current, now)
                raise JinguError(
                    f"{now.path} is not what the run was started with: its contents have changed{changes}.",
                    where=key,
                    fix="Restore it, start a new run (name=...), or, if the change is intended, resume with --allow "
                    f"{key.partition('[')[0]}.",
                )


def _names_one_file(old: RunInput, now: RunInput, current: RunInputs) -> bool:
    """Return whether an input was recorded before the modules that its file imports were, and the file is the same."""
    return not old.files and len(now.files) > 1 and digest_records([current.files[now.files[0]]]) == old.content


def _describe_changes(start: RunInputs, old: RunInput, current: RunInputs, now: RunInput) -> str:
    """Return the files of an input that have changed, to end a sentence; empty if they are not known."""
    changes = []
    for path in dict.fromkeys([*old.files, *now.files]):
        before = start.files[path].xxh3 if path in old.files and path in start.files else ""
        after = current.files[path].xxh3 if path in now.files else ""
        if before != after:
            note = "" if before else " is new"
            changes.append(f"{Path(path).name}{note if after else ' is missing'}")
    return f" ({', '.join(changes)})" if old.files and changes else ""


def record_inputs(config: RunConfig, folder: Path, tokenizer: Tokenizer) -> RunInputs:
    """Return the contents of what a run reads. Files that have not changed since an earlier start are not read."""
    inputs = RunInputs(files=dict(RunInputs.load(folder).files))
    for key, read in _readers(config, tokenizer):
        inputs.inputs[key] = read(inputs, folder)
    return inputs


class _InputReader:
    """Reads one input: `reader(inputs, run)` adds the records of its files to `inputs`, and returns the input."""

    def __init__(self, path: Path, *, is_model: bool = False, files: tuple[Path, ...] = (), content: str = "") -> None:
        self.path, self.is_model, self.files, self.content = path, is_model, files, content

    def __call__(self, inputs: RunInputs, run: Path) -> RunInput:
        if self.content:
            return RunInput(str(self.path.absolute()), "", self.content)
        if self.is_model:
            model = open_model(self.path)
            records = record_model(model, inputs.files)
            return inputs.add(model.where if not model.parts else self.path, records, run)
        records = [record_file(file, inputs.files) for file in self.files or (self.path,)]
        return inputs.add(self.path, records, run)


def _readers(config: RunConfig, tokenizer: Tokenizer) -> Iterator[tuple[str, _InputReader]]:
    """Yield the settings of `inputs.toml` that a run compares, each with a reader of its contents."""
    path = Path(config.tokenizer.path)
    yield "tokenizer.path", _InputReader(path, content=hash_value([tokenizer.fingerprint(), tokenizer.special_names]))
    if not isinstance(config.tune, FullSettings) and config.initialize.from_ is not None:
        yield BASE, _InputReader(Path(config.initialize.from_), is_model=True)
    if not isinstance(config.task, RolloutSettings):
        for number, source in enumerate(config.data.all_sources):
            key = f"data.sources[{number}].path" if config.data.sources else "data.path"
            if files := _foreign_files(Path(source.path)):
                yield key, _InputReader(Path(source.path), files=files)
        return
    text = find_template_text(config, tokenizer) or tokenizer.chat_template
    if text is not None:
        yield "task.template", _InputReader(Path(config.task.template), content=hash_value(text))
    for number, reward in enumerate(config.task.rewards):
        if isinstance(reward, PythonReward) and (file := _code_file(reward.function)):
            yield f"task.rewards[{number}].function", _InputReader(file, files=tuple(find_code_files(file)))
        if isinstance(reward, ModelReward):
            yield f"task.rewards[{number}].model", _InputReader(Path(reward.model), is_model=True)
    environment = config.task.environment
    for name in [] if environment is None else [environment.path, *environment.tools]:
        if name is not None and (file := _code_file(name)):
            yield f"task.environment[{name}]", _InputReader(file, files=tuple(find_code_files(file)))


def _code_file(name: str) -> Path | None:
    """Return the file of `file.py:name` or `module:name`; None for a method, or a module that is not below this folder
    (an installed package)."""
    place = name.rpartition(":")[0]
    if not place:
        return None
    module = Path(*place.split("."))
    candidates = [Path(place)] if place.endswith(".py") else [module.with_suffix(".py"), module / "__init__.py"]
    return next(filter(Path.is_file, candidates), None)


def _foreign_files(path: Path) -> tuple[Path, ...]:
    """Return the files of a data set that another tool wrote: PATH.bin, PATH_context.bin and so on."""
    if (path / MANIFEST_NAME).is_file() or not path.parent.is_dir():
        return ()
    names = sorted(file for file in path.parent.glob(f"{path.name}*") if file.suffix in (".bin", ".idx"))
    return tuple(file for file in names if file.stem == path.name or file.stem.startswith(f"{path.name}_"))
