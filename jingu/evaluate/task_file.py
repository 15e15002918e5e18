"""Task files: evaluation tasks and groups in the YAML format of lm-evaluation-harness."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache, cached_property, partial
from pathlib import Path
from types import BuiltinFunctionType, FunctionType
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, ValidationError
from pydantic_core import PydanticCustomError

from jingu.errors import JinguError, join_words
from jingu.runtime.code_files import find_code_files
from jingu.runtime.files import read_text

CATALOGUE = Path(__file__).with_name("catalogue")
OutputType = Literal["multiple_choice", "loglikelihood", "loglikelihood_rolling", "generate_until"]
# A column, a Jinja template, a constant, or a function of the document.
Template = str | int | list[str] | dict[str, str] | Callable[..., Any] | None
Options = dict[str, Any]
# Callables that have a name; partial functions and callable objects have none.
_NAMED = (FunctionType, BuiltinFunctionType, type)

# The name of a task or group, to index files without parsing them.
_NAME = re.compile(r"^(?:task|group):[ \t]*['\"]?([^\s'\"#]+)", re.MULTILINE)
# Keys of a task that `fewshot_config` may override for shots.
_SHOT_KEYS = (
    *("process_docs", "doc_to_text", "doc_to_choice", "doc_to_target"),
    *("gen_prefix", "fewshot_delimiter", "target_delimiter"),
)


def _check_metric(metric: Options) -> Options:
    if "metric" not in metric:
        raise PydanticCustomError("metric", "it has no `metric`, the name")
    return metric


def _check_data(options: Options) -> Options:
    """Check `dataset_kwargs`: `data_files` has a path, several paths, or these by split."""
    files = options.get("data_files", [])
    for paths in files.values() if isinstance(files, dict) else [files]:
        if not isinstance(paths, str) and not _are_texts(paths):
            raise PydanticCustomError("data_files", "data_files should be paths, or paths by split")
    return options


def _check_unsafe(is_unsafe: bool) -> bool:
    if is_unsafe:
        raise PydanticCustomError("unsafe_code", "its code may run what a model writes; only pass@k does that")
    return is_unsafe


def _check_metadata(metadata: Options) -> Options:
    templates = metadata.get("templates", {})
    changes = [*templates.values()] if isinstance(templates, dict) else [None]
    if not all(isinstance(keys, dict) and _are_texts([*keys]) for keys in changes):
        raise PydanticCustomError("templates", "templates should be keys of the task by the name of a template")
    for key in ("related_clusters", "sources"):
        if not _are_texts(metadata.get(key, [])):
            raise PydanticCustomError("metadata", "{key} should be a list of texts", {"key": key})
    return metadata


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


class FilterSettings(BaseModel):
    """A filter: its name, and its steps, each with a `function` and options."""

    model_config = ConfigDict(frozen=True, extra="allow", arbitrary_types_allowed=True)

    name: str
    filter: list[Options]


class GenerationSettings(BaseModel):
    """How answers are generated, `generation_kwargs`. A null means what it means in lm-evaluation-harness.

    Attributes:
        until: texts at which an answer ends; null: none.
        max_gen_toks, max_new_tokens, max_tokens, max_completion_tokens: the most tokens of an answer; the first one
            that is not null counts.
        do_sample: null: if the temperature is above 0.
        top_k, top_p: null: all tokens; so does 0 for `top_k`.
    """

    # Keys that jingu does not read are reported where they matter: for tasks that generate.
    model_config = ConfigDict(frozen=True, extra="allow", allow_inf_nan=False)

    until: str | list[str] | None = None
    max_gen_toks: PositiveInt | None = None
    max_new_tokens: PositiveInt | None = None
    max_tokens: PositiveInt | None = None
    max_completion_tokens: PositiveInt | None = None
    temperature: float = Field(0.0, ge=0)
    do_sample: bool | None = None
    top_k: NonNegativeInt | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    num_beams: int | None = None


class TaskSettings(BaseModel):
    """A task, with the keys of lm-evaluation-harness.

    jingu reads these keys of `metadata`, which the harness ignores:

    - `licence`, `description`, `language`
    - `leave_out`: a template, such as `{{label == '-'}}`; documents for which it is `True` are left out
    - `cluster`: a column; documents with equal values in it are correlated, for clustered standard errors
    - `templates`: by name, values that override keys of the task; `inverted: true` if it is for training only
    - `chat`: whether prompts are messages in the model's chat template
    - `task_cluster`, `related_clusters`, `sources`: relations between tasks; related tasks must not be divided between
      training and held-out tasks
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    task: str
    task_alias: str | None = None
    tag: str | list[str] | None = None
    dataset_path: str | None = None
    dataset_name: str | None = None
    dataset_kwargs: Annotated[Options, AfterValidator(_check_data)] = {}
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
    fewshot_config: Options = {}
    num_fewshot: int = Field(0, ge=0)
    metric_list: list[Annotated[Options, AfterValidator(_check_metric)]] = []
    output_type: OutputType = "generate_until"
    generation_kwargs: GenerationSettings = GenerationSettings()
    repeats: int = Field(1, ge=1)
    filter_list: list[FilterSettings] = []
    should_decontaminate: bool = False
    doc_to_decontamination_query: Template = None
    unsafe_code: Annotated[bool, AfterValidator(_check_unsafe)] = False
    gen_prefix: str | None = None
    metadata: Annotated[Options, AfterValidator(_check_metadata)] = {}
    file: Path = Path()

    @property
    def evaluation_split(self) -> str | None:
        """The split that is evaluated."""
        return self.test_split or self.validation_split

    @property
    def shots(self) -> Options:
        """Settings of shots: `fewshot_config`, which overrides the task's own values."""
        shot_settings = {key: value for key, value in self if key in _SHOT_KEYS}
        return {
            "sampler": "default",
            "split": self.fewshot_split,
            "samples": None,
            **shot_settings,
            **self.fewshot_config,
        }

    def error(self, what: str, fix: str) -> JinguError:
        """Return an error that names this task and its file."""
        return JinguError(what, where=f"{self.task} ({self.file})", fix=fix)

    def call(self, key: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return the result of a function of a trusted file. Raise JinguError for whatever it raises.

        Args:
            key: what the function computes, for the message.
        """
        try:
            return function(*arguments)
        except JinguError:
            raise
        except (Exception, SystemExit) as error:
            fix = "Correct that function, or the data that it reads."
            raise self.error(f"the code of its {key} fails: {describe_failure(error)}.", fix) from error


def function_name(function: Callable[..., Any]) -> str:
    """Return the name of a function, or of the one inside a partial function or a callable object."""
    inner = function.func if isinstance(function, partial) else function
    return inner.__name__ if isinstance(inner, _NAMED) else type(inner).__name__


def describe_function(function: Callable[..., Any]) -> str:
    """Return a text that is the same in each process: the function's name, and the arguments of a partial function."""
    if isinstance(function, partial):
        arguments = ", ".join(map(str, [*function.args, *sorted(function.keywords.items())]))
        return f"{describe_function(function.func)}({arguments})"
    return function.__qualname__ if isinstance(function, _NAMED) else type(function).__qualname__


def describe_failure(error: BaseException) -> str:
    """Return the kind of an exception of foreign code, and its first line."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__


@dataclass(frozen=True)
class TaskGroup:
    """A group of tasks.

    Attributes:
        members: names of all its tasks, including those of subgroups.
        metrics: means over its tasks, each with the options `metric`, `weight_by_size` and `filter_list`.
    """

    name: str
    members: tuple[str, ...]
    metrics: Sequence[Options]


@dataclass(frozen=True)
class FunctionReference:
    """`!function module.name` in a task file: a function of a Python file in the same folder."""

    file: Path
    name: str

    def load(self, trusted_files: frozenset[Path], task_file: Path) -> Any:
        """Import the function. Raise JinguError unless its file is trusted."""
        if self.file.resolve() not in trusted_files:
            fix = f"Read that code. If you trust it, add --trust {self.file}."
            raise JinguError(f"this task runs code ({self.name} of {self.file.name}).", where=task_file, fix=fix)
        names = _import_names(self.file)
        if self.name not in names:
            raise JinguError(f"it has no function {self.name}.", where=self.file, fix="Check the task's !function.")
        return names[self.name]


@cache
def _import_names(file: Path) -> Options:
    """Import a Python file and return its names."""
    spec = importlib.util.spec_from_file_location(f"jingu_task_{file.stem}", file)
    if spec is None or spec.loader is None or not file.is_file():
        raise JinguError("there is no such Python file.", where=file, fix="Check the task's !function.")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except ImportError as error:
        raise JinguError(f"it needs a package that is missing ({error}).", where=file, fix="Install it.") from None
    except (Exception, SystemExit) as error:
        what = f"it fails while it is imported: {describe_failure(error)}."
        raise JinguError(what, where=file, fix="Correct it, or install what it needs.") from error
    return vars(module)


def _package_file(path: str) -> Path | None:
    """Return the Python file of an installed package, without importing it; None if there is none."""
    package, _, file_name = path.partition("/")
    spec = importlib.util.find_spec(package) if file_name and package.isidentifier() else None
    places = [*(spec.submodule_search_locations or ())] if spec is not None else []
    return next((file for place in places if (file := Path(place) / file_name).is_file()), None)


class _TaskLoader(yaml.SafeLoader):
    """Loads safe YAML with references to functions.

    Attributes:
        folder: folder of the YAML file.
    """

    folder = Path()

    def construct_function(self, node: yaml.ScalarNode) -> FunctionReference:
        """Construct the value of `!function module.name`."""
        module, _, name = str(self.construct_scalar(node)).rpartition(".")
        path = f"{module.replace('.', '/')}.py"
        beside = self.folder / path
        return FunctionReference(beside if beside.is_file() else _package_file(path) or beside, name)


_TaskLoader.add_constructor("!function", _TaskLoader.construct_function)


def _read_yaml(file: Path, including: Sequence[Path] = ()) -> Options:
    """Return the settings of a file, which override those of the files that it includes. A null means the default.

    Args:
        including: the chain of files that include this file.

    Raises:
        JinguError: a file cannot be read, is no YAML with settings, or includes itself.
    """
    if file.resolve() in including:
        raise JinguError("the task file includes itself.", where=file, fix="Remove an include.")
    settings, included_files = _parse_yaml(file)
    settings_tree: Options = {}
    for path in included_files:
        settings_tree |= _read_yaml(path, (*including, file.resolve()))
    settings_tree |= settings
    return {key: value for key, value in settings_tree.items() if value is not None}


def find_task_files(file: Path) -> list[Path]:
    """Return all files that a task depends on, but for its data: its own, those that it includes, and its code.

    Raises:
        JinguError: a file cannot be read, or is no YAML with settings.
    """
    files: dict[Path, None] = {}
    pending = [file]
    while pending:
        current = pending.pop(0)
        if current in files:
            continue
        files[current] = None
        settings, includes = _parse_yaml(current)
        pending += includes
        for reference in _find_references(settings):
            if reference.file.is_file():
                files |= dict.fromkeys(find_code_files(reference.file))
    return [*files]


def _find_references(value: Any) -> Iterator[FunctionReference]:
    """Yield the references to functions in settings."""
    if isinstance(value, FunctionReference):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _find_references(item)


def _parse_yaml(file: Path) -> tuple[Options, list[Path]]:
    """Return the settings of a file, and the files that it includes.

    Raises:
        JinguError: the file cannot be read, or is no YAML with settings.
    """
    try:
        loader = _TaskLoader(read_text(file))
        loader.folder = file.parent
        settings = loader.get_single_data()
    except yaml.YAMLError as error:
        message = " ".join(str(error).split())
        raise JinguError(f"the task file is not YAML: {message}.", where=file, fix="Correct it.") from None
    if not isinstance(settings, dict):
        raise JinguError("the task file holds no settings.", where=file, fix="Write keys such as `task: NAME`.")
    if wrong := [key for key in settings if not isinstance(key, str)]:
        # A plain on, off, yes or no is a boolean.
        what = f"the task file has a key that YAML reads as {wrong[0]!r}, not as text."
        raise JinguError(what, where=file, fix="Remove it, or correct it.")
    includes = settings.pop("include", None) or []
    names = [includes] if isinstance(includes, str) else includes
    if not _are_texts(names) or not all(Path(name).name for name in names):
        fix = "Name a file, or a list of files."
        raise JinguError(f"the task file includes {includes!r}, which is no file.", where=file, fix=fix)
    paths = []
    for name in names:
        beside = file.parent / name
        # Files of the catalogue can be included by their name alone.
        paths.append(beside if beside.is_file() else next(CATALOGUE.rglob(Path(name).name), beside))
    return settings, paths


class TaskIndex:
    """The tasks and groups in some folders, by name.

    Args:
        folders: folders to search, including subfolders, before jingu's own catalogue.
        trusted: Python files that tasks may run.

    Attributes:
        tasks: the tasks that have been loaded.
        groups: the groups that have been loaded.
    """

    def __init__(self, folders: Sequence[Path] = (), trusted: Sequence[Path] = ()) -> None:
        self._folders = [*folders, CATALOGUE]
        self._trusted_files = frozenset(path.resolve() for path in trusted)
        self.tasks: dict[str, TaskSettings] = {}
        self.groups: dict[str, TaskGroup] = {}
        # The groups that are being loaded, each a member of the one before it.
        self._open_groups: list[str] = []
        for folder in folders:
            if not folder.is_dir():
                raise JinguError("there is no such folder of tasks.", where=folder, fix="Check --include.")

    @cached_property
    def files(self) -> dict[str, Path]:
        """Task files by the name of their task or group."""
        files: dict[str, Path] = {}
        for file in (file for folder in self._folders for file in sorted(folder.rglob("*.yaml"))):
            if match := _NAME.search(read_text(file)):
                files.setdefault(match[1], file)
        return files

    @cached_property
    def tags(self) -> dict[str, list[str]]:
        """Names of tasks by their tags."""
        tags: dict[str, list[str]] = {}
        for name, file in self.files.items():
            tag = _read_yaml(file).get("tag", [])
            words = [tag] if isinstance(tag, str) else tag
            # A wrong tag is reported when its task is loaded.
            for word in words if _are_texts(words) else ():
                tags.setdefault(word, []).append(name)
        return tags

    @cached_property
    def task_clusters(self) -> dict[str, list[str]]:
        """Names of tasks by their task clusters."""
        clusters: dict[str, list[str]] = {}
        for name, file in self.files.items():
            metadata = _read_yaml(file).get("metadata")
            cluster = metadata.get("task_cluster") if isinstance(metadata, dict) else None
            if isinstance(cluster, str):
                clusters.setdefault(cluster, []).append(name)
        return clusters

    def load(self, name: str) -> list[str]:
        """Load a task, a group, the tasks of a tag, or a file; return the names of the tasks.

        NAME@TEMPLATE:SHOTS:chat selects a template of the task ("default" is its own, and "*" selects all that can be
        evaluated), a number of shots, and prompts in the model's chat template. The last two are optional.
        """
        name, _, template = name.partition("@")
        names = self._load_name(name)
        return [variant for task in names for variant in self._add_templates(task, template)] if template else names

    def _add_templates(self, name: str, template: str) -> list[str]:
        """Add variants of a task with one of its templates, or with all of them (*); return their names."""
        # 1. Parse the template and the options.
        task = self.tasks[name]
        templates: dict[str, Options] = {"default": {}, **task.metadata.get("templates", {})}
        template, *options = template.split(":")
        keys = [template]
        if template == "*":
            keys = [key for key, changes in templates.items() if not changes.get("inverted")]
        elif template not in templates:
            raise task.error(f"it has no template {template}.", f"It has {join_words([*templates, '*'], 'and')}.")
        # 2. Add a task for each template, with the changes of the template and of the options.
        names = []
        for key in keys:
            settings = {option: value for option, value in task if option in task.model_fields_set} | templates[key]
            settings.pop("inverted", None)
            for option in options:
                changes = {"metadata": {**task.metadata, "chat": True}} if option == "chat" else {"num_fewshot": option}
                settings |= changes
            names += self._add({**settings, "task": ":".join([f"{name}@{key}", *options])}, task.file)
        return names

    def _load_name(self, name: str) -> list[str]:
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

    def _add(self, settings: Options, file: Path) -> list[str]:
        """Add a task, or a group with its tasks; return the names of the tasks."""
        if isinstance(settings.get("task"), list) or "group" in settings:
            return self._add_group(settings, file)
        try:
            task = TaskSettings.model_validate({**_load_functions(settings, self._trusted_files, file), "file": file})
        except ValidationError as error:
            problems = [f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in error.errors()]
            fix = "Correct the task file; jingu reads the harness's keys for text."
            raise JinguError(f"this is not a task: {'; '.join(problems)}.", where=file, fix=fix) from None
        unknown = set(task.fewshot_config) - {*_SHOT_KEYS, "sampler", "split", "samples", "fewshot_indices"}
        samples = task.shots["samples"]
        is_wrong = unknown or not (samples is None or callable(samples) or isinstance(samples, list))
        if is_wrong or task.shots["sampler"] not in ("default", "first_n"):
            raise task.error(f"its fewshot_config is wrong: {task.fewshot_config}.", "Correct it.")
        self.tasks[task.task] = task
        return [task.task]

    def _add_group(self, settings: Options, file: Path) -> list[str]:
        """Add a group with its tasks; return the names of the tasks."""
        group = str(settings.get("group", file.stem))
        members = settings.get("task", [])
        metrics = settings.get("aggregate_metric_list", [])
        metrics = [metrics] if isinstance(metrics, dict) else metrics
        where = f"{group} ({file})"
        if not isinstance(members, list):
            raise JinguError(f"the tasks of this group are {members!r}.", where=where, fix="Write them as a list.")
        if not isinstance(metrics, list) or not all(isinstance(item, dict) and "metric" in item for item in metrics):
            fix = "Such as `- metric: acc`."
            raise JinguError("an item of its aggregate_metric_list has no `metric`.", where=where, fix=fix)
        if group in self._open_groups:
            raise JinguError("this group is a member of itself.", where=where, fix="Remove it from its tasks.")
        self._open_groups.append(group)
        try:
            names = [name for member in members for name in self._add_member(member, file)]
        finally:
            self._open_groups.pop()
        self.groups[group] = TaskGroup(group, tuple(dict.fromkeys(names)), metrics)
        return names

    def _add_member(self, member: Any, file: Path) -> list[str]:
        """Add a member of a group: a name, or settings that override those of the task that they name."""
        if isinstance(member, str):
            return self.load(member)
        if not isinstance(member, dict):
            fix = "Name a task, or write settings such as `- task: NAME`."
            raise JinguError(f"a member of the group is {member!r}, which is no task.", where=file, fix=fix)
        base: Options = {}
        if isinstance(member.get("task"), str) and member["task"] in self.files:
            file = self.files[member["task"]]
            base = _read_yaml(file)
        return self._add(base | member, file)


def _load_functions(value: Any, trusted_files: frozenset[Path], file: Path) -> Any:
    """Replace references to functions with the functions themselves."""
    if isinstance(value, dict):
        return {key: _load_functions(item, trusted_files, file) for key, item in value.items()}
    if isinstance(value, list):
        return [_load_functions(item, trusted_files, file) for item in value]
    return value.load(trusted_files, file) if isinstance(value, FunctionReference) else value
