"""The start of a command on several nodes: everything that a node needs to know, as one JSON object."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from jingu.errors import JinguError, join_words
from jingu.launch.hosts import read_environment
from jingu.version import __version__

# Commands that run on ranks.
COMMANDS = ("train", "align", "evaluate", "serve", "generate", "doctor")
# The environment variable with which a Slurm script or a container passes the start.
START_VARIABLE = "JINGU_START"
# The name becomes part of host names on clusters, whose length is limited.
_MAX_NAME = 40
_SUFFIXES = (".yaml", ".yml")
_OVERRIDE = re.compile(r"[a-z]\w*(\.\w+)*=.*", re.DOTALL)


@dataclass(frozen=True)
class Start:
    """A command to start on several nodes.

    Attributes:
        words: the command; the word `{config}` stands for the file of the run or of the stages.
        name: name of the run, or of the command, in a form that clusters accept.
        config: the text of that file; None if the command takes none.
        environment: environment variables for the ranks.
        slots: slots of each node.
        master: address and port of the rendezvous.
        versions: versions of Python, jingu and torch, which must be equal on all nodes.
    """

    words: list[str]
    name: str = "jingu"
    config: str | None = None
    environment: dict[str, str] = field(default_factory=dict)
    slots: list[list[int]] = field(default_factory=list)
    master: tuple[str, int] = ("", 0)
    versions: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Start:
        return Start(**json.loads(text))


def prepare_start(words: Sequence[str], environment: Path | None = None) -> Start:
    """Parse the command and load the file that it names, so that mistakes are reported before anything starts.

    Args:
        words: such as `train run.yaml optimizer.lr=1e-3` or `align stages.yaml`; without a command, `train`.
        environment: file with variables for the ranks.

    Raises:
        JinguError: the command cannot run on ranks, or its configuration is wrong.
    """
    words = strip_separator(words)
    if words and words[0].endswith(_SUFFIXES):
        words = ["train", *words]
    if not words or words[0] not in COMMANDS:
        what = f"{words[0]} does not run on several nodes." if words else "the command to launch is missing."
        raise JinguError(what, fix=f"Name one of {join_words(COMMANDS)}, such as `train run.yaml`.")
    words, name, config = _read_file(words) if words[0] in ("train", "align") else (words, words[0], None)
    variables = read_environment(environment) if environment is not None else {}
    return Start(words, _clean_name(name), config, variables, versions=installed_versions())


def _clean_name(name: str) -> str:
    """Return a name that clusters accept: lowercase letters, digits and dashes, starting with a letter."""
    name = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    name = name if name[:1].isalpha() else f"jingu-{name}"
    return name[:_MAX_NAME].rstrip("-")


def strip_separator(words: Sequence[str]) -> list[str]:
    """Return a command without the `--` that may stand before it."""
    return list(words[1:] if words[:1] == ["--"] else words)


def _read_file(words: list[str]) -> tuple[list[str], str, str | None]:
    """Load the file of a run or of stages.

    Returns:
        The words with `{config}` in place of the file and without overrides, the name of the run, and the text.
    """
    from jingu.config.load import dump_yaml, load_config, load_stages  # slow to import, and nodes do not need it

    overrides = [word for word in words[1:] if _OVERRIDE.fullmatch(word)]
    plain = [word for word in words[1:] if not word.startswith("-") and word not in overrides]
    file = next((word for word in plain if word.endswith(_SUFFIXES)), next(iter(plain), None))
    if file is None:
        noun = "a run" if words[0] == "train" else "stages"
        raise JinguError(f"{words[0]} needs the file of {noun}.", fix=f"Write `{words[0]} FILE.yaml`.")
    path = Path(file).expanduser()
    if words[0] == "align":
        load_stages(path)
        return ["{config}" if word == file else word for word in words], path.stem, path.read_text(encoding="utf-8")
    config = load_config(path, overrides)
    words = ["{config}" if word == file else word for word in words if word not in overrides]
    return words, config.name, dump_yaml(config)


def check_versions(versions: dict[str, dict[str, str]]) -> None:
    """Raise JinguError unless all nodes have the same versions."""
    for error in compare_versions(versions).values():
        raise error


def compare_versions(versions: dict[str, dict[str, str]]) -> dict[str, JinguError]:
    """Return an error for each node with other versions than the first one."""
    first_host, first = next(iter(versions.items()))
    errors = {}
    for host, host_versions in versions.items():
        differences = [
            f"{name} {host_versions[name]} ({first[name]} on {first_host})"
            for name in host_versions
            if host_versions[name] != first[name]
        ]
        if differences:
            fix = "Install the same versions on all nodes."
            errors[host] = JinguError(f"the node has {join_words(differences, 'and')}.", where=host, fix=fix)
    return errors


def installed_versions() -> dict[str, str]:
    """Return the versions that must be the same on all nodes. Does not import torch."""
    return {
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "jingu": __version__,
        "torch": importlib.metadata.version("torch"),
    }
