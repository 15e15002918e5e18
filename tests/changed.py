"""`python -m tests.changed [BASE]`: files of tests that a change since BASE (default: main) reaches, one per line.

A change of a module reaches the modules that import it, directly or not, and the tests that import one of these or
start a command that does. Imports inside of functions count; those for type checkers do not. What is no module of the
package counts as follows: a data file as all modules of its folder, a file of tests as itself and those that import it,
and a file that everything depends on as everything. `ALWAYS` is added to every change.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path, PurePosixPath

import grimp

ROOT = Path(__file__).parents[1]
ALWAYS = ("tests/parity", "tests/dist/test_layouts.py", "tests/e2e/test_spine.py", "tests/config")
ALWAYS += ("tests/test_style.py", "tests/test_docs.py", "tests/test_skips.py")
# A change of these reaches every test.
EVERYTHING = frozenset({"pyproject.toml", "constraints.txt", "Makefile", "tests/conftest.py", "tests/rank_pool.py"})


def module_name(path: Path) -> str:
    """Name of the module at a path relative to the repository."""
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def read_commands() -> dict[str, str]:
    """The module that runs each command, by the command's name."""
    table = json.loads((ROOT / "jingu" / "commands.json").read_text(encoding="utf-8"))
    return {name: f"jingu.{command['run'].partition(':')[0]}" for name, command in table["commands"].items()}


@cache
def import_graph() -> grimp.ImportGraph:
    """The imports of the package's modules."""
    return grimp.build_graph("jingu", exclude_type_checking_imports=True, cache_dir=None)


@cache
def imported_names(path: Path) -> tuple[set[str], set[str]]:
    """Names that a file imports, with those that may be attributes of a module, and its texts."""
    names: set[str] = set()
    texts: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            texts.update(node.value.split())
    return names, texts


def reached_modules(graph: grimp.ImportGraph, changed: Iterable[str]) -> set[str]:
    """Modules of the package that a change reaches; a changed data file as `room/folder/name.json`."""
    reached: set[str] = set()
    for name in changed:
        path = Path(name)
        if path.parts[0] != "jingu":
            continue
        starts = [module_name(path)]
        if path.suffix != ".py":
            folder = next(parent for parent in path.parents if (ROOT / parent / "__init__.py").exists())
            starts = [module_name(file.relative_to(ROOT)) for file in (ROOT / folder).glob("*.py")]
        for start in starts:
            if start in graph.modules:
                reached |= {start, *graph.find_downstream_modules(start)}
    return reached


def reached_tests(changed: Iterable[str]) -> list[str]:
    """Files of tests that a change of these files (relative to the repository) reaches."""
    changed = set(changed)
    if changed & EVERYTHING:
        return ["tests"]
    reached = reached_modules(import_graph(), changed)
    commands = read_commands()
    # Helpers of tests reach the files that import them, as other modules do.
    files = sorted((ROOT / "tests").rglob("*.py"))
    imports = {path: imported_names(path) for path in files}
    affected = {path for path in files if path.relative_to(ROOT).as_posix() in changed}
    size = -1
    while size != len(affected):
        size = len(affected)
        helpers = {module_name(path.relative_to(ROOT)) for path in affected}
        for path, (names, texts) in imports.items():
            targets = {commands[text] for text in texts & commands.keys()}
            uses_command_line = any(name.startswith("jingu.cli") for name in names) or "jingu" in texts
            if names & (reached | helpers) or (uses_command_line and (targets or set(commands.values())) & reached):
                affected.add(path)
    # Files outside of both: benchmarks by their imports, the rest by their folder's name in the tests' texts.
    for name in changed:
        first = PurePosixPath(name).parts[0]
        if first in ("bench", "examples", "docs") or first.startswith("README"):
            word = first.partition(".")[0]
            affected |= {
                path for path, (names, texts) in imports.items() if any(word in text for text in names | texts)
            }
    tests = {path.relative_to(ROOT).as_posix() for path in affected if path.name.startswith("test_")}
    folders = tuple(f"{place}/" for place in ALWAYS)
    return sorted({*ALWAYS, *(test for test in tests if not test.startswith(folders))})


def changed_files(base: str) -> list[str]:
    """Files that differ from where this branch left `base`, with those that are not committed yet."""
    commands = (["diff", "--name-only", "--merge-base", base], ["ls-files", "--others", "--exclude-standard"])
    outputs = [
        subprocess.run(["git", *command], cwd=ROOT, check=True, capture_output=True, text=True).stdout
        for command in commands
    ]
    return [line for output in outputs for line in output.splitlines()]


if __name__ == "__main__":
    print("\n".join(reached_tests(changed_files(sys.argv[1] if len(sys.argv) > 1 else "main"))))
