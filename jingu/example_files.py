"""`jingu example` and `jingu quickstart`: the files of examples/, which are part of the package."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path

from jingu.config.load import load_config
from jingu.errors import JinguError
from jingu.formatting import print_table

_KINDS = (".yaml", ".py", ".ipynb", ".jinja", ".toml", ".md", ".jsonl")


def examples_folder() -> Path:
    """Return the folder of the examples: in an installed package beside its modules, in a clone beside the package."""
    package = Path(__file__).parent
    return next(
        folder
        for folder in (package / "examples", package.parent / "examples")
        if (folder / "quickstart.yaml").exists()
    )


def example(name: str | None = None, to: Path = Path()) -> None:
    """List the examples, or write the files of one.

    Args:
        name: name of the example, such as quickstart; None: list them.
        to: the folder in which the folder `examples` is created.

    Raises:
        JinguError: there is no such example, or a file exists with other contents.
    """
    folder = examples_folder()
    if name is None:
        # Not the scripts and data that other examples use.
        main_files = [file for file in _files(folder) if file.suffix in (".yaml", ".ipynb", ".toml")]
        names = sorted({_name(folder, file) for file in main_files})
        print_table(("example", "contents"), [(each, _describe(folder, each)) for each in names], right=())
        print("\n`jingu example NAME` writes the files of an example into ./examples.")
        return
    for file in write_example(folder, name, to):
        print(file)


def write_example(folder: Path, name: str, to: Path, *, keep: bool = False) -> list[Path]:
    """Write the files of an example, and those that they mention; return them.

    Args:
        folder: the folder of the examples.
        keep: whether files that exist stay as they are, whatever they contain.
    """
    sources = find_example(folder, name)
    targets = {source: to / "examples" / source.relative_to(folder) for source in sources}
    for source, target in targets.items():
        if target.exists() and not keep and target.read_bytes() != source.read_bytes():
            fix = "Rename or delete it, or name another folder with --to."
            raise JinguError("this file exists, with other contents.", where=target, fix=fix)
    for source, target in targets.items():
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
    return list(targets.values())


def find_example(folder: Path, name: str) -> list[Path]:
    """Return the files of an example, and those of the examples that they mention as `examples/...`.

    Raises:
        JinguError: there is no such example.
    """
    names = _names(folder)
    if name not in names:
        near = get_close_matches(name, names, n=3)
        fix = f"The nearest are {', '.join(near)}." if near else "`jingu example` lists them."
        raise JinguError(f"there is no example {name}.", fix=fix)
    pending = [file for file in _files(folder) if _name(folder, file) == name]
    files: list[Path] = []
    while pending:
        file = pending.pop()
        files.append(file)
        mentions = re.findall(r"examples/([\w./-]+\.\w+)", file.read_text(encoding="utf-8"))
        known = {*files, *pending}
        pending += [path for path in (folder / mention for mention in mentions) if path.is_file() and path not in known]
    return sorted(files)


def _files(folder: Path) -> Iterable[Path]:
    return sorted(file for file in folder.rglob("*") if file.suffix in _KINDS and "__pycache__" not in file.parts)


def _name(folder: Path, file: Path) -> str:
    """Return the name of the example to which a file belongs: its path without suffix; a package is one example."""
    parts = file.relative_to(folder).with_suffix("").parts
    return parts[0] if (folder / parts[0] / "pyproject.toml").exists() else "/".join(parts)


def _names(folder: Path) -> set[str]:
    return {_name(folder, file) for file in _files(folder)}


def _describe(folder: Path, name: str) -> str:
    """Return the first sentence of an example's first file."""
    files = [file for file in _files(folder) if _name(folder, file) == name]
    text = min(files, key=lambda file: _KINDS.index(file.suffix)).read_text(encoding="utf-8")
    if text.startswith("{"):  # a notebook, whose first cell begins with a title
        text = "".join(re.findall(r'"# ([^"\\]+)', text)[:1])
    words = " ".join(text[:400].split()).replace("# ", "").replace('"""', "")
    sentence = re.split(r"(?<=\w)(?:\.| ·)(?:\s|$)", words)[0]
    return textwrap.shorten(sentence, 100, placeholder=" …")


def quickstart(overrides: list[str]) -> int:
    """Run the quickstart in the current folder; return its exit code.

    Args:
        overrides: settings of the run to override.

    Raises:
        JinguError: a setting does not exist, or has a wrong value.
    """
    write_example(examples_folder(), "quickstart", Path(), keep=True)
    # The script is a process of its own: mistakes in the settings are found here.
    load_config(Path("examples/quickstart.yaml"), overrides)
    try:
        return subprocess.run([sys.executable, "examples/quickstart.py", *overrides], check=False).returncode
    except KeyboardInterrupt:
        return 130
