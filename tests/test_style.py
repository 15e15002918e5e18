"""The style of the code: size per room, length of functions, comments, names.

All checks read the syntax tree or the tokens of the source files; nothing is imported. The limits are the constants
below. `python -m tests.test_style` prints the figures of every room, the bounds that they would get, and the share of
names that say nothing.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "jingu"

# Code lines: lines that carry a token other than a comment or a docstring. A docstring is the first statement of a
# module, class or function; a text below an attribute counts as code. Bounds of rooms count them without imports.
BOUNDS = ROOT / "tests" / "room_bounds.toml"
LOG = ROOT / "docs" / "log.md"
BOUNDS_HEADING = "## Bounds of the rooms"

MAX_FUNCTION_LINES = 75
MAX_PUBLIC_PARAMETERS = 8
MIN_COMMENTS_PER_1000 = 30
# Densities of the code before the names were changed: saving lines by denser statements does not count.
MAX_TUPLE_ASSIGNMENTS_PER_1000 = 21
MAX_CONDITIONAL_EXPRESSIONS_PER_1000 = 43

# Names that say what happened to a value rather than what it is: words like "stored", and fillers.
FILLERS = frozenset({"own", "other", "others", "rest", "whole", "seen", "sent", "written", "shown", "found", "held"})
FILLERS |= {"kept", "given", "taken", "done", "left", "told", "made", "known", "begun", "drawn", "chosen"}
# Nouns and verbs that only look like participles.
NOT_PARTICIPLES = frozenset(["seed", "speed", "feed", "need", "embed"])
MAX_FILLER_SHARE = 0.008

# `getattr` with a constant name, by file and name, and why a plain attribute does not work there.
JUSTIFIED_GETATTR = {
    ("checkpoint/mapped_files.py", "file_region"): "an attribute that only tensors from a mapped file have",
    ("checkpoint/save_folder.py", "O_DIRECT"): "missing on some systems",
    ("cli.py", "__notes__"): "only exceptions with notes have it",
    ("compat/torch_distributed.py", "all_gather_single_autograd"): "the name since PyTorch 2.12",
    ("compat/torch_distributed.py", "reduce_scatter_single_autograd"): "the name since PyTorch 2.12",
    ("model/adapter_layers.py", "dropout_seeds"): "only some modules have it",
    ("model/sharding_table.py", "sharding"): "only modules with a sharding table have it",
    ("runtime/device.py", "mallopt"): "missing in other C libraries than glibc",
    ("serve/middleware.py", "fields"): "only log records of requests have it",
    ("training/optimizer.py", "decays"): "only some modules say whether they decay",
}

# Modules that may share a name, because they mean the same in every room.
SHARED_MODULE_NAMES = frozenset({"__init__", "__main__", "commands"})


@dataclass(frozen=True)
class Source:
    """A source file: its text and syntax tree."""

    path: Path
    text: str
    tree: ast.Module

    @property
    def name(self) -> str:
        """The path relative to the package."""
        return str(self.path.relative_to(PACKAGE))

    @property
    def room(self) -> str:
        """The room that the file belongs to."""
        parts = self.path.relative_to(PACKAGE).parts
        return parts[0] if len(parts) > 1 else "top level"


@cache
def sources() -> tuple[Source, ...]:
    """All source files of the package."""
    paths = sorted(PACKAGE.rglob("*.py"))
    texts = [path.read_text(encoding="utf-8") for path in paths]
    return tuple(Source(path, text, ast.parse(text)) for path, text in zip(paths, texts, strict=True))


# Counting lines


def docstring_lines(tree: ast.Module) -> set[int]:
    """Numbers of the lines of all docstrings."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        first = node.body[0] if node.body else None
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
            lines.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return lines


def count_lines(source: Source) -> tuple[int, int]:
    """Number of code lines and of lines with a comment."""
    layout = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    code: set[int] = set()
    comments: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
        if token.type == tokenize.COMMENT:
            comments.add(token.start[0])
        elif token.type not in layout:
            code.update(range(token.start[0], token.end[0] + 1))
    return len(code - docstring_lines(source.tree)), len(comments)


def import_lines(tree: ast.Module) -> set[int]:
    """Numbers of the lines of all imports."""
    return {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }


@dataclass
class RoomSize:
    """Lines of a room: with code, with imports (which are code, too), and with comments."""

    code: int = 0
    imports: int = 0
    comments: int = 0

    @property
    def counted(self) -> int:
        """What the bound of the room limits: lines of code without imports."""
        return self.code - self.imports


@cache
def room_sizes() -> dict[str, RoomSize]:
    """Size of every room."""
    sizes: dict[str, RoomSize] = defaultdict(RoomSize)
    for source in sources():
        code, comments = count_lines(source)
        sizes[source.room].code += code
        sizes[source.room].comments += comments
        sizes[source.room].imports += len(import_lines(source.tree))
    return dict(sizes)


def total_size() -> RoomSize:
    """Size of the package."""
    sizes = room_sizes().values()
    return RoomSize(
        sum(size.code for size in sizes), sum(size.imports for size in sizes), sum(size.comments for size in sizes)
    )


def read_bounds() -> dict[str, dict[str, int]]:
    """The tables of `room_bounds.toml`: `first`, which stays, and `bounds`, which hold today."""
    tables: dict[str, dict[str, int]] = tomllib.loads(BOUNDS.read_text(encoding="utf-8"))
    return tables


def logged_raises() -> dict[str, int]:
    """Lines by which the table of the log has raised each room's bound. Raises for a row that names no capability."""
    _, _, section = LOG.read_text(encoding="utf-8").partition(f"{BOUNDS_HEADING}\n")
    raises: dict[str, int] = defaultdict(int)
    for line in section.partition("\n## ")[0].splitlines():
        row = re.fullmatch(r"\| ([a-z ]+) \| \+([\d,]+) \| (.*) \|", line)
        if row is not None:
            assert len(row[3].split()) >= 3, f"Say in {LOG.name} which capability the lines buy: {line}"
            raises[row[1]] += int(row[2].replace(",", ""))
    return raises


def size_table() -> str:
    """Sizes of all rooms as text, with the bounds that today's sizes would get: the next multiple of 10."""
    bounds = read_bounds()["bounds"]
    total = {"total": total_size()}
    lines = [f"{'room':12} {'code':>7} {'imports':>8} {'counted':>8} {'bound':>7} {'proposed':>9} {'comments':>9}"]
    for room, size in [*sorted(room_sizes().items()), *total.items()]:
        bound = sum(bounds.values()) if room == "total" else bounds.get(room, 0)
        proposed = -(-size.counted // 10) * 10
        lines.append(
            f"{room:12} {size.code:7,} {size.imports:8,} {size.counted:8,} {bound:7,} {proposed:9,} {size.comments:9,}"
        )
    return "\n".join(lines)


def test_no_room_grows_unseen() -> None:
    bounds = read_bounds()["bounds"]
    assert bounds.keys() == room_sizes().keys(), f"Give each room a bound in {BOUNDS.name}."
    excess = {room: size.counted - bounds[room] for room, size in room_sizes().items() if size.counted > bounds[room]}
    assert not excess, (
        f"Lines of code over the bounds of rooms: {excess}. Simplify; or raise the bound in {BOUNDS.name}, with a row"
        f' below "{BOUNDS_HEADING}" in docs/log.md that says what capability the lines buy.'
    )


def test_bounds_are_close_to_the_sizes() -> None:
    """A bound that is much too large lets a room grow unseen; lowering one needs no row in the log."""
    bounds = read_bounds()["bounds"]
    loose = {room: bounds[room] - size.counted for room, size in room_sizes().items()}
    loose = {room: lines for room, lines in loose.items() if lines > max(100, bounds[room] // 10)}
    assert not loose, f"Lower these bounds in {BOUNDS.name}; `python -m tests.test_style` proposes some: {loose}"


def test_the_log_says_what_raised_a_bound() -> None:
    tables = read_bounds()
    raises = logged_raises()
    unknown = raises.keys() - tables["bounds"].keys()
    assert not unknown, f"Rows for rooms without a bound: {unknown}"
    for room, bound in tables["bounds"].items():
        allowed = tables["first"].get(room, 0) + raises.get(room, 0)
        assert bound <= allowed, (
            f'The bound of {room} is {bound:,}, with rows below "{BOUNDS_HEADING}" in docs/log.md for {allowed:,}.'
        )


def test_comments_help_the_reader() -> None:
    size = total_size()
    minimum = MIN_COMMENTS_PER_1000 * size.code // 1000
    assert size.comments >= minimum, f"{size.comments:,} lines of comments in {size.code:,} of code, under {minimum:,}."


def test_statements_are_not_dense() -> None:
    tuples = conditionals = 0
    for source in sources():
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
                tuples += any(isinstance(target, ast.Tuple) for target in node.targets)
            conditionals += isinstance(node, ast.IfExp)
    code = total_size().code
    per_1000 = {"tuple assignments": 1000 * tuples / code, "conditional expressions": 1000 * conditionals / code}
    assert per_1000["tuple assignments"] <= MAX_TUPLE_ASSIGNMENTS_PER_1000, per_1000
    assert per_1000["conditional expressions"] <= MAX_CONDITIONAL_EXPRESSIONS_PER_1000, per_1000


# Functions


def functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """All functions and methods with their qualified names; those inside of functions too."""

    def visit(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{prefix}{child.name}", child
                yield from visit(child, f"{prefix}{child.name}.<locals>.")
            elif isinstance(child, ast.ClassDef):
                yield from visit(child, f"{prefix}{child.name}.")
            else:
                yield from visit(child, prefix)

    return visit(tree, "")


def is_public(name: str) -> bool:
    """Whether a qualified name is visible to other modules."""
    return not any(part.startswith(("_", "<")) and not part.endswith("__") for part in name.split("."))


def test_functions_are_short() -> None:
    long = []
    for source in sources():
        for name, function in functions(source.tree):
            lines = (function.end_lineno or function.lineno) - function.lineno + 1
            if lines > MAX_FUNCTION_LINES:
                long.append(f"{source.name}:{function.lineno} {name}: {lines} lines")
    assert not long, f"Functions with more than {MAX_FUNCTION_LINES} lines:\n" + "\n".join(long)


def test_public_functions_have_few_parameters() -> None:
    wide = []
    for source in sources():
        for name, function in functions(source.tree):
            arguments = function.args
            parameters = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
            count = sum(parameter.arg not in ("self", "cls") for parameter in parameters)
            if is_public(name) and count > MAX_PUBLIC_PARAMETERS:
                wide.append(f"{source.name}:{function.lineno} {name}: {count} parameters")
    assert not wide, f"Public functions with more than {MAX_PUBLIC_PARAMETERS} parameters:\n" + "\n".join(wide)


# Names


def bound_names(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Every name that the code binds, with its line: variables, parameters, attributes, functions and classes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node.lineno


def is_filler(name: str) -> bool:
    """Whether a name is one word that says nothing of what a value is."""
    word = name.strip("_")
    return word in FILLERS or (re.fullmatch("[a-z]+ed", word) is not None and word not in NOT_PARTICIPLES)


def filler_names() -> tuple[int, dict[str, list[str]]]:
    """The number of names bound, and the places of those that are fillers."""
    total = 0
    places: dict[str, list[str]] = defaultdict(list)
    for source in sources():
        for name, line in bound_names(source.tree):
            total += 1
            if is_filler(name):
                places[name].append(f"{source.name}:{line}")
    return total, places


def test_names_say_what_a_value_is() -> None:
    total, places = filler_names()
    count = sum(map(len, places.values()))
    report = "\n".join(f"{name}: {', '.join(lines)}" for name, lines in sorted(places.items()))
    assert count <= MAX_FILLER_SHARE * total, f"{count} of {total:,} names bound ({count / total:.2%}):\n{report}"


def test_no_two_classes_have_the_same_name() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for source in sources():
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{source.name}:{node.lineno}")
    twice = {name: lines for name, lines in places.items() if len(lines) > 1}
    assert not twice, "\n".join(f"{name}: {', '.join(lines)}" for name, lines in sorted(twice.items()))


def test_no_two_modules_have_the_same_name() -> None:
    counts = Counter(source.path.stem for source in sources())
    twice = {name: count for name, count in counts.items() if count > 1 and name not in SHARED_MODULE_NAMES}
    places = {name: [source.name for source in sources() if source.path.stem == name] for name in twice}
    assert not twice, "\n".join(f"{name}: {', '.join(paths)}" for name, paths in sorted(places.items()))


def test_attributes_are_accessed_plainly() -> None:
    """`getattr(x, "name")` hides an attribute from type checkers and from a search."""
    calls = []
    for source in sources():
        for node in ast.walk(source.tree):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr"):
                continue
            name = node.args[1]
            if isinstance(name, ast.Constant) and (source.name, str(name.value)) not in JUSTIFIED_GETATTR:
                calls.append(f"{source.name}:{node.lineno} {ast.unparse(node)}")
    assert not calls, "Use a plain attribute, or add a reason to JUSTIFIED_GETATTR:\n" + "\n".join(calls)


def test_every_exception_is_needed() -> None:
    used = {
        (source.name, str(node.args[1].value))
        for source in sources()
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "getattr"
        and isinstance(node.args[1], ast.Constant)
    }
    assert set(JUSTIFIED_GETATTR) <= used, f"Delete from JUSTIFIED_GETATTR: {set(JUSTIFIED_GETATTR) - used}"


if __name__ == "__main__":
    print(size_table())
    names, filler_places = filler_names()
    print(f"fillers: {sum(map(len, filler_places.values())) / names:.2%} of {names:,} names bound")
