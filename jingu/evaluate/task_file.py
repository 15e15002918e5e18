"""Task files: evaluation tasks and groups in lm-evaluation-harness's YAML."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from jingu.errors import JinguError, join_words
from jingu.runtime.files import read_error

CATALOGUE = Path(__file__).with_name("catalogue")
OutputType = Literal["multiple_choice", "loglikelihood", "loglikelihood_rolling", "generate_until"]
Template = str | int | list[str] | dict[str, str] | Callable[..., Any] | None
"""A column, a Jinja template, a constant, or a function of the document."""

# Names of tasks and groups, found without parsing the file.
_NAME = re.compile(r"^(?:task|group):[ \t]*['\"]?([^\s'\"#]+)", re.MULTILINE)


class _Settings(BaseModel):
    """A section of a task file."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)


_S = TypeVar("_S", bound=_Settings)


class _OpenSettings(BaseModel):
    """A section with options of its own for each kind of it."""

    model_config = ConfigDict(frozen=True, extra="allow", arbitrary_types_allowed=True)

    @property
    def options(self) -> dict[str, Any]:
        """The options of this kind."""
        return dict(self.__pydantic_extra__ or {})


class MetricSettings(_OpenSettings):
    """A metric of a task."""

    metric: str
    aggregation: str | None = None
    higher_is_better: bool | None = None


class FilterStep(_OpenSettings):
    """One step of a filter."""

    function: str


class FilterSettings(_Settings):
    """A filter: what is extracted from an answer before it is measured."""

    name: str
    filter: list[FilterStep]


class ShotSettings(_Settings):
    """How the examples in a prompt (shots) are drawn and rendered; None: as the task renders its documents."""

    sampler: Literal["default", "first_n"] = "default"
    split: str | None = None
    process_docs: Callable[..., Any] | None = None
    fewshot_indices: list[int] | None = None
    samples: list[dict[str, Any]] | Callable[..., Any] | None = None
    doc_to_text: Template = None
    doc_to_choice: Template = None
    doc_to_target: Template = None
    gen_prefix: str | None = None
    fewshot_delimiter: str | None = None
    target_delimiter: str | None = None


class TaskMetadata(_OpenSettings):
    """What the harness ignores. `cluster` is ours: a column whose equal values mark documents that belong together."""

    version: str | int | float | None = None
    cluster: str | None = None
    licence: str | None = None
    description: str | None = None


class TaskSettings(_Settings):
    """A task, by the harness's keys."""

    task: str
    task_alias: str | None = None
    tag: str | list[str] | None = None
    dataset_path: str | None = None
    dataset_name: str | None = None
    dataset_kwargs: dict[str, Any] | None = None
    training_split: str | None = None
    validation_split: str | None = None
    test_split: str | None = None
    fewshot_split: str | None = None
    process_docs: Callable[..., Any] | None = None
    doc_to_text: Template = None
    doc_to_target: Template = None
    doc_to_choice: Template = None
    process_results: Callable[..., Any] | None = None
    description: str = ""
    target_delimiter: str = " "
    fewshot_delimiter: str = "\n\n"
    fewshot_config: ShotSettings = ShotSettings()
    num_fewshot: int | None = Field(None, ge=0)
    metric_list: list[MetricSettings] | None = None
    output_type: OutputType = "generate_until"
    generation_kwargs: dict[str, Any] | None = None
    repeats: int = Field(1, ge=1)
    filter_list: list[FilterSettings] | None = None
    should_decontaminate: bool = False
    doc_to_decontamination_query: str | None = None
    unsafe_code: Literal[False] = False
    gen_prefix: str | None = None
    metadata: TaskMetadata = TaskMetadata()
    file: Path = Path()
    """The task's file."""

    @property
    def evaluation_split(self) -> str | None:
        """The split that is evaluated."""
        return self.test_split or self.validation_split

    @property
    def shots(self) -> ShotSettings:
        """`fewshot_config`, with the task's own values where it has none."""
        inherited = {
            "split": self.fewshot_split,
            **{key: getattr(self, key) for key in ShotSettings.model_fields if key in TaskSettings.model_fields},
        }
        return self.fewshot_config.model_copy(
            update={key: value for key, value in inherited.items() if key not in self.fewshot_config.model_fields_set}
        )


class GroupMetric(_Settings):
    """A metric of a group: the mean of its tasks' values."""

    metric: str
    aggregation: Literal["mean"] = "mean"
    weight_by_size: bool = True
    filter_list: str | list[str] | None = None


class TaskGroup(_Settings):
    """A group of tasks."""

    group: str
    group_alias: str | None = None
    task: list[str | dict[str, Any]] | str
    aggregate_metric_list: list[GroupMetric] | GroupMetric | None = None
    metadata: dict[str, Any] | None = None
    tag: str | list[str] | None = None
    file: Path = Path()
    """The group's file."""
    members: tuple[str, ...] = ()
    """Names of all its tasks, also those of its subgroups."""

    @property
    def metrics(self) -> list[GroupMetric]:
        """The metrics that are averaged over its tasks."""
        metrics = self.aggregate_metric_list or []
        return [metrics] if isinstance(metrics, GroupMetric) else metrics


@dataclass(frozen=True)
class FunctionReference:
    """`!function module.name` in a file: a function of a Python file beside it."""

    file: Path
    name: str

    def load(self, trusted: Iterable[Path], task_file: Path) -> Callable[..., Any]:
        """Import the function. Raises JinguError unless its file is trusted."""
        if self.file.resolve() not in {path.resolve() for path in trusted}:
            fix = f"Read that code. If you trust it, add --trust {self.file}."
            raise JinguError(f"this task runs code ({self.name} of {self.file.name}).", where=task_file, fix=fix)
        spec = importlib.util.spec_from_file_location(f"jingu_task_{self.file.stem}", self.file)
        if spec is None or spec.loader is None or not self.file.is_file():
            raise JinguError("there is no such Python file.", where=self.file, fix="Check the task's !function.")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        function = vars(module).get(self.name)
        if not callable(function):
            raise JinguError(f"it has no function {self.name}.", where=self.file, fix="Check the task's !function.")
        return function


class _TaskLoader(yaml.SafeLoader):
    """Safe YAML, with references to functions.

    Attributes:
        folder: of the file.
    """

    folder = Path()

    def construct_function(self, node: yaml.ScalarNode) -> FunctionReference:
        """`!function module.name`."""
        module, _, name = str(self.construct_scalar(node)).rpartition(".")
        return FunctionReference(self.folder / f"{module.replace('.', '/')}.py", name)


_TaskLoader.add_constructor("!function", _TaskLoader.construct_function)


def _read_yaml(file: Path) -> dict[str, Any]:
    """Return the settings of a file, over those of the files that it includes."""

    try:
        loader = _TaskLoader(file.read_text(encoding="utf-8"))
        loader.folder = file.parent
        settings = loader.get_single_data()
    except OSError as error:
        raise read_error(file, error) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        message = " ".join(str(error).split())
        raise JinguError(f"the task file is not YAML: {message}.", where=file, fix="Correct it.") from None
    if not isinstance(settings, dict):
        raise JinguError("the task file holds no settings.", where=file, fix="Write keys such as `task: NAME`.")
    included = settings.pop("include", [])
    merged: dict[str, Any] = {}
    for name in [included] if isinstance(included, str) else included:
        merged |= _read_yaml(file.parent / name)
    return merged | settings


class TaskIndex:
    """The tasks and groups in some folders, by name.

    Args:
        folders: searched with their subfolders; the catalogue comes last.
        trusted: Python files that tasks may run.
    """

    def __init__(self, folders: Sequence[Path] = (), trusted: Sequence[Path] = ()) -> None:
        self._folders = [*folders, CATALOGUE]
        self._trusted = trusted
        self.tasks: dict[str, TaskSettings] = {}
        self.groups: dict[str, TaskGroup] = {}
        for folder in folders:
            if not folder.is_dir():
                raise JinguError("there is no such folder of tasks.", where=folder, fix="Check --include.")

    @cached_property
    def files(self) -> dict[str, Path]:
        """Files by the task or group in them."""
        files: dict[str, Path] = {}
        for folder in self._folders:
            for file in sorted(folder.rglob("*.yaml")):
                match = _NAME.search(file.read_text(encoding="utf-8"))
                if match:
                    files.setdefault(match[1], file)
        return files

    @cached_property
    def tags(self) -> dict[str, list[str]]:
        """Names of tasks by their tags."""
        tags: dict[str, list[str]] = {}
        for name, file in self.files.items():
            tag = _read_yaml(file).get("tag") or []
            for word in [tag] if isinstance(tag, str) else tag:
                tags.setdefault(word, []).append(name)
        return tags

    def load(self, name: str) -> list[str]:
        """Read a task, a group, the tasks of a tag, or a file; return the names of its tasks."""
        path = Path(name)
        if path.suffix in (".yaml", ".yml"):
            self._folders.insert(0, path.parent)
            return self._add(_read_yaml(path), path)
        if name in self.files:
            return self._add(_read_yaml(self.files[name]), self.files[name])
        if name in self.tags:
            return [task for member in self.tags[name] for task in self.load(member)]
        close = get_close_matches(name, [*self.files, *self.tags], n=1)
        fix = f"Did you mean {close[0]}?" if close else "`jingu evaluate list` lists them."
        raise JinguError(f"there is no task {name}.", fix=f"{fix} A path to a task's .yaml file works too.")

    def _add(self, settings: dict[str, Any], file: Path) -> list[str]:
        """Add a task, or a group with its tasks; return the names of the tasks."""
        if isinstance(settings.get("task"), list) or "group" in settings:
            group = validate(TaskGroup, {**settings, "file": file}, file)
            members = []
            for member in [group.task] if isinstance(group.task, str) else group.task:
                members += self._add_member(member, file)
            self.groups[group.group] = group.model_copy(update={"members": tuple(dict.fromkeys(members))})
            return members
        resolved = _load_functions(settings, self._trusted, file)
        task = validate(TaskSettings, {**_without_none(resolved), "file": file}, file)
        self.tasks[task.task] = task
        return [task.task]

    def _add_member(self, member: str | dict[str, Any], file: Path) -> list[str]:
        if isinstance(member, str):
            return self.load(member)
        base: dict[str, Any] = {}
        if isinstance(member.get("task"), str) and member["task"] in self.files:
            file = self.files[member["task"]]
            base = _read_yaml(file)
        return self._add(base | member, file)


def _without_none(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings without those that are null, which mean the default."""
    return {key: value for key, value in settings.items() if value is not None}


def _load_functions(value: Any, trusted: Iterable[Path], file: Path) -> Any:
    """Replace references to functions by the functions."""
    if isinstance(value, dict):
        return {key: _load_functions(item, trusted, file) for key, item in value.items()}
    if isinstance(value, list):
        return [_load_functions(item, trusted, file) for item in value]
    return value.load(trusted, file) if isinstance(value, FunctionReference) else value


def validate(kind: type[_S], settings: dict[str, Any], file: Path) -> _S:
    """Return settings of a kind. Raises JinguError that names all keys at fault."""
    try:
        return kind(**settings)
    except ValidationError as error:
        problems = []
        for problem in error.errors():
            key = ".".join(str(part) for part in problem["loc"] if part in settings or not isinstance(part, str))
            key = key or str(problem["loc"][0])
            unknown = problem["type"] == "extra_forbidden"
            problems.append(f"{key} is not a key that jingu reads" if unknown else f"{key}: {problem['msg']}")
        what = f"{join_words(list(dict.fromkeys(problems)), 'and')}."
        raise JinguError(what, where=file, fix="Correct the task file.") from None
