"""Models and data sets by their name on a hub: Hugging Face's, or ModelScope's.

A name is `ORG/NAME`, `ORG/NAME@REVISION` (a branch, a tag or a commit) or `ORG/NAME/FILE.gguf`. With the prefix `hf:`
or `modelscope:`, it is a name even if a local path looks the same. A data set may be followed by `:SPLIT` or
`:CONFIG:SPLIT`. The libraries of the hubs download, resume and cache. They read tokens, mirrors and offline mode from
their variables (HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE, HF_HOME).
"""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date, time
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn
from uuid import uuid4

from jingu.errors import JinguError, join_words
from jingu.tables import read_table

_NAME = re.compile(
    r"(?:(?P<service>hf|modelscope):)?(?P<repository>[A-Za-z0-9][\w.-]*/[\w.-]+)(?:/(?P<file>[^@:]+))?"
    r"(?P<parts>(?::[\w.-]+){0,2})(?:@(?P<revision>[\w./-]+))?"
)
# The files of a repository that jingu reads. Pickles are never downloaded.
CONFIG_FILES = ("*config.json",)
TOKENIZER_FILES = ("*.json", "*.jinja", "*.model", "*.tiktoken", "merges.txt", "vocab.txt")
MODEL_FILES = (*TOKENIZER_FILES, "*.safetensors", "README.md")
# Weights for other frameworks, and copies of a model in formats that no library of this package reads.
_IGNORED_FILES = ("onnx/*", "openvino/*", "coreml/*", "original/*", "metal/*", "*.msgpack", "*.onnx", "consolidated*")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
# Paths like these are outputs of commands or files beside them, not repositories.
_LOCAL_FOLDERS = "runs data models checkpoints build dist out output outputs exports tmp".split()  # noqa: SIM905
_ERRORS = read_table(__file__, "hub_errors.toml")


@dataclass(frozen=True)
class HubName:
    """A name on a hub.

    Attributes:
        service: `hf` or `modelscope`.
        repository: ORG/NAME.
        file: a file in the repository; None: all that jingu reads.
        parts: of a data set: split, or configuration and split.
        revision: branch, tag or commit; None: the default branch.
    """

    service: str
    repository: str
    file: str | None = None
    parts: tuple[str, ...] = ()
    revision: str | None = None

    def __str__(self) -> str:
        prefix = "modelscope:" if self.service == "modelscope" else ""
        file = "" if self.file is None else f"/{self.file}"
        revision = "" if self.revision is None else f"@{self.revision}"
        return f"{prefix}{self.repository}{file}{''.join(f':{part}' for part in self.parts)}{revision}"


def parse_name(text: str) -> HubName | None:
    """Return the name on a hub that a text is; None if it is a path, a URL or something else.

    Without a prefix, a path that exists is a path, and so is one below a folder that exists.
    """
    match = _NAME.fullmatch(text)
    if match is None or ".." in text:
        return None
    if match["service"] is None:
        folder = text.partition("/")[0]
        if Path(text).exists() or Path(folder).exists() or folder in _LOCAL_FOLDERS:
            return None
        # One name and a file of a known type is a path that does not exist.
        if match["file"] is None and Path(match["repository"]).suffix in (".json", ".jsonl", ".yaml", ".gguf", ".txt"):
            return None
    parts = tuple(match["parts"].split(":")[1:])
    return HubName(match["service"] or "hf", match["repository"], match["file"], parts, match["revision"])


def local_path(path: Path | str, files: tuple[str, ...] = MODEL_FILES) -> Path:
    """Return the local folder or file of a model: the path itself, or where the model that it names was downloaded.

    Args:
        files: patterns of the files that are needed.

    Raises:
        JinguError: the model cannot be downloaded.
    """
    name = None if Path(path).exists() else parse_name(str(path))
    return Path(path) if name is None else _download(name, files)


def local_rows(path: Path | str) -> Path:
    """Return the local file of rows: the path itself, or the JSON Lines of the data set that it names.

    Raises:
        JinguError: the data set cannot be downloaded.
    """
    name = None if Path(path).exists() else parse_name(str(path))
    return Path(path) if name is None else download_rows(name)


def is_available(path: Path | str) -> bool:
    """Return whether a path exists, or is the name of a model on a hub."""
    return Path(path).exists() or parse_name(str(path)) is not None


def pinned_name(path: str) -> str:
    """Return the name of a model on a hub with the commit that `local_path` returns; anything else as it is."""
    if Path(path).exists() or parse_name(path) is None:
        return path
    return str(hub_name_of(local_path(path)) or path)


def hub_name_of(path: Path) -> HubName | None:
    """Return the name and commit of a folder in the cache of Hugging Face's hub; None for any other folder."""
    match = re.search(r"/models--([^/]+)--([^/]+)/snapshots/([0-9a-f]{40})(?:/|$)", path.absolute().as_posix())
    return None if match is None else HubName("hf", f"{match[1]}/{match[2]}", revision=match[3])


# One process uses one version of a repository, even if a new one appears meanwhile.
@lru_cache(maxsize=64)
def _download(name: HubName, files: tuple[str, ...]) -> Path:
    """Download files of a repository, unless the cache has them; return its folder, or the file that the name names."""
    if name.parts:
        raise JinguError("a model has no split.", where=str(name), fix=f"Write {name.repository}.")
    is_on_modelscope = name.service == "modelscope"
    library = _import("modelscope", "modelscope", name) if is_on_modelscope else import_module("huggingface_hub")
    patterns = [*files] if name.file is None else [name.file]
    options = {"revision": name.revision, "allow_patterns": patterns, "ignore_patterns": [*_IGNORED_FILES]}
    with explain_hub_errors(name):
        folder = Path(library.snapshot_download(name.repository, **options))
    if name.file is not None:
        return _existing_file(folder, name)
    if files == MODEL_FILES and not list(folder.glob("*.safetensors")):
        _refuse_without_weights(name, folder)
    return folder


def _existing_file(folder: Path, name: HubName) -> Path:
    assert name.file is not None
    if not (folder / name.file).is_file():
        files = [file for file in _list_files(name) if file.endswith((".gguf", ".safetensors"))]
        fix = f"It has {join_words(files, 'and')}." if files else "Check its page."
        raise JinguError(f"the repository has no file {name.file}.", where=str(name), fix=fix)
    return folder / name.file


def _refuse_without_weights(name: HubName, folder: Path) -> None:
    """Raise JinguError if a repository has no weights that jingu reads, unless it holds only a tokenizer."""
    files = _list_files(name)
    pickles = [file for file in files if file.endswith(_PICKLES)]
    gguf_files = [file for file in files if file.endswith(".gguf")]
    if gguf_files:
        raise JinguError(
            "this repository has GGUF files; one of them has to be named.",
            where=str(name),
            fix=f"Write {name.repository}/{gguf_files[0]}, or another of: {', '.join(gguf_files)}.",
        )
    if pickles:
        raise JinguError(
            f"this repository has its weights only as pickles ({pickles[0]}), which can run code when they are opened.",
            where=str(name),
            fix="Choose a repository or a revision with .safetensors files; many have one as the branch refs/pr/N.",
        )
    if not any((folder / file).is_file() for file in ("config.json", "tokenizer.json", "tokenizer.model")):
        raise JinguError(
            "this repository has no model that jingu reads.",
            where=str(name),
            fix="A model is a repository with config.json and .safetensors files, or a .gguf file in one.",
        )


def _list_files(name: HubName) -> list[str]:
    """Return the files of a repository; none if its hub cannot be asked."""
    if name.service == "modelscope":
        api = _import("modelscope.hub.api", "modelscope", name).HubApi()
        with explain_hub_errors(name):
            return sorted(file["Path"] for file in api.get_model_files(name.repository, revision=name.revision))
    from huggingface_hub import list_repo_files
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    try:
        return sorted(list_repo_files(name.repository, revision=name.revision))
    except (HfHubHTTPError, OfflineModeIsEnabled, OSError):
        return []


# Data sets


@lru_cache(maxsize=64)
def download_rows(name: HubName) -> Path:
    """Download one split of a data set, unless the cache has it; return its rows as JSON Lines.

    `datasets` reads the repository, whatever its format, without running its code. The rows are written beside what it
    caches.

    Raises:
        JinguError: the data set cannot be downloaded, it has several configurations or no split `train` and none is
            named, or its rows are not text.
    """
    if name.service == "modelscope":
        what = "data sets are read from Hugging Face's hub only."
        raise JinguError(what, where=str(name), fix="Download the data set, and name its files.")
    library = _import("datasets", "hub", name)
    config, split = _split_parts(name)
    with explain_hub_errors(name):
        try:
            rows = library.load_dataset(name.repository, config, revision=name.revision)
        except ValueError:  # also if no configuration is named, or one that does not exist
            configs = library.get_dataset_config_names(name.repository, revision=name.revision)
            if len(configs) > 1 or config not in (None, *configs):
                _refuse_choice(name, "configurations", configs, f"{name.repository}:CONFIG:{split}")
            raise
        if split not in rows:
            _refuse_choice(name, "splits", [*rows], f"{name.repository}:{f'{config}:' if config else ''}SPLIT")
        return _write_rows(name, rows[split])


def _split_parts(name: HubName) -> tuple[str | None, str]:
    """Return the configuration and the split that a name says; the split is `train` if it says none."""
    if len(name.parts) == 2:
        return name.parts[0], name.parts[1]
    return None, name.parts[0] if name.parts else "train"


def _write_rows(name: HubName, rows: Any) -> Path:
    """Write the rows of a split beside the first file of its cache, unless they are there; return the file."""
    cache_file = Path(rows.cache_files[0]["filename"])
    file = cache_file.with_suffix(".rows.jsonl")
    if not file.is_file():
        partial = file.with_name(f".{file.name}.{uuid4().hex}")
        try:
            with partial.open("w", encoding="utf-8") as stream:
                for row in rows:
                    stream.write(json.dumps(row, ensure_ascii=False, default=_to_json) + "\n")
            partial.replace(file)
        except TypeError as error:
            what = f"its rows have values that are not text ({error})."
            raise JinguError(what, where=str(name), fix="Choose a data set of text.") from error
        finally:
            partial.unlink(missing_ok=True)
    return file


def _to_json(value: Any) -> str:
    """Return a date or time as text, for `json.dumps`. Raises TypeError for other types."""
    if isinstance(value, date | time):
        return value.isoformat()
    raise TypeError(type(value).__name__)


def _refuse_choice(name: HubName, what: str, choices: Sequence[str], form: str) -> NoReturn:
    raise JinguError(
        f"one of its {what} has to be named.", where=str(name), fix=f"Write {form}. It has {', '.join(choices)}."
    )


# Errors


def _import(module: str, extra: str, name: HubName) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise JinguError(
            f"this needs the package {module}, which is not installed.",
            where=str(name),
            fix=f"Install it: `pip install 'jingu[{extra}]'`.",
        ) from error


@contextmanager
def explain_hub_errors(name: HubName) -> Iterator[None]:
    """Turn the errors of the libraries of a hub into JinguError with what to do."""
    try:
        yield
    except JinguError:
        raise
    except Exception as error:  # `modelscope` and `datasets` raise many unrelated types
        raise _explain(error, name) from error


def _explain(error: Exception, name: HubName) -> JinguError:
    """Return the error that a person sees for an error of a hub's library."""
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        folder = "MODELSCOPE_CACHE" if name.service == "modelscope" else "HF_HOME"
        fix = f"Free space where {folder} is, or set it to a folder with more space. What has arrived is kept."
        return JinguError("the disk is full.", where=str(name), fix=fix)
    from huggingface_hub.errors import HfHubHTTPError

    # Some releases of modelscope raise an error of `requests` from their own.
    errors = [error] if error.__cause__ is None else [error, error.__cause__]
    kinds = {kind.__name__ for each in errors for kind in type(each).mro()}
    status = error.response.status_code if isinstance(error, HfHubHTTPError) else 0
    causes = _ERRORS[name.service]
    cause = next(row for row in causes if kinds & {*row["errors"]} and status in row.get("status", [status]))
    page = f"https://huggingface.co/{name.repository}"
    texts = {"page": page, "revision": name.revision, "error": f"{type(error).__name__}: {error}"}
    return JinguError(cause["what"].format(**texts), where=str(name), fix=cause["fix"].format(**texts))
