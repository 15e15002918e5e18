"""The style of the code: size per room, length of functions, comments, names.

All checks read the syntax tree or the tokens of the source files; nothing is imported. The limits are the constants
below. `python -m tests.test_style` prints the figures of every room.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "jingu"

# Code lines: lines that carry a token other than a comment or a docstring. A docstring is the first statement of a
# module, class or function; a text below an attribute counts as code.
MISSION_LINES = 24_000
TODAY_LINES = 21_700
SHARES = {
    "top level": 580,
    "serve": 1_980,
    "report": 420,
    "align": 900,
    "tune": 630,
    "training": 2_380,
    "infer": 2_030,
    "chat": 390,
    "formats": 1_310,
    "checkpoint": 1_390,
    "parallel": 1_220,
    "model": 2_900,
    "data": 1_960,
    "text": 1_350,
    "runtime": 530,
    "config": 1_470,
    "compat": 180,
}
SHARES_TO_COME = {"evaluate": 900, "plan": 620, "launch": 530, "watch": 250}

MAX_FUNCTION_LINES = 75
MAX_PUBLIC_PARAMETERS = 8
MIN_COMMENTS_PER_1000 = 30
# Densities of the code before the names were changed: saving lines by denser statements does not count.
MAX_TUPLE_ASSIGNMENTS_PER_1000 = 21
MAX_CONDITIONAL_EXPRESSIONS_PER_1000 = 43

# Names that say what happened to a value rather than what it is.
OUTLAWED_NAMES = frozenset(
    [
        "found",
        "held",
        "told",
        "given",
        "made",
        "kept",
        "taken",
        "wanted",
        "asked",
        "known",
        "loaded",
        "opened",
        "begun",
        "left",
        "drawn",
        "chosen",
        "there",
        "here",
        "ours",
        "theirs",
        "each",
    ]
)
MAX_OUTLAWED_SHARE = 0.002

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


@cache
def room_sizes() -> dict[str, tuple[int, int]]:
    """Code lines and comment lines of every room."""
    sizes: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for source in sources():
        code, comments = count_lines(source)
        sizes[source.room][0] += code
        sizes[source.room][1] += comments
    return {room: (code, comments) for room, (code, comments) in sizes.items()}


def size_table() -> str:
    """Sizes of all rooms as text."""
    lines = [f"{'room':12} {'lines':>7} {'share':>7} {'comments':>9} {'per 1,000':>10}"]
    for room, (code, comments) in sorted(room_sizes().items()):
        share = {**SHARES, **SHARES_TO_COME}.get(room, 0)
        lines.append(f"{room:12} {code:7,} {share:7,} {comments:9,} {1000 * comments / code:10.1f}")
    code, comments = (sum(size[index] for size in room_sizes().values()) for index in (0, 1))
    lines.append(f"{'total':12} {code:7,} {MISSION_LINES:7,} {comments:9,} {1000 * comments / code:10.1f}")
    return "\n".join(lines)


@pytest.mark.xfail(strict=True, reason="every room is still over its share")
def test_rooms_stay_within_their_share(capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        print(f"\n{size_table()}")
    shares = {**SHARES, **SHARES_TO_COME}
    unknown = sorted(set(room_sizes()) - set(shares))
    assert not unknown, f"Give these rooms a share in SHARES: {', '.join(unknown)}."
    excess = {room: code - shares[room] for room, (code, _) in room_sizes().items() if code > shares[room]}
    assert not excess, f"Rooms with more code lines than their share: {excess}. Simplify, or take lines from another."


def test_shares_add_up_to_the_mission() -> None:
    assert sum(SHARES.values()) <= TODAY_LINES
    assert sum(SHARES.values()) + sum(SHARES_TO_COME.values()) <= MISSION_LINES


@pytest.mark.xfail(strict=True, reason="21,700 lines are the target; the rooms are over it")
def test_todays_rooms_stay_small() -> None:
    lines = sum(code for room, (code, _) in room_sizes().items() if room in SHARES)
    assert lines <= TODAY_LINES, f"Today's rooms have {lines:,} code lines, {lines - TODAY_LINES:,} too many."


def test_comments_help_the_reader() -> None:
    code, comments = (sum(size[index] for size in room_sizes().values()) for index in (0, 1))
    needed = MIN_COMMENTS_PER_1000 * code // 1000
    assert comments >= needed, f"{comments:,} comment lines in {code:,} code lines; at least {needed:,} are needed."


def test_statements_are_not_dense() -> None:
    tuples = conditionals = 0
    for source in sources():
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
                tuples += any(isinstance(target, ast.Tuple) for target in node.targets)
            conditionals += isinstance(node, ast.IfExp)
    code = sum(size for size, _ in room_sizes().values())
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


def test_names_say_what_a_value_is() -> None:
    total = 0
    places: dict[str, list[str]] = defaultdict(list)
    for source in sources():
        for name, line in bound_names(source.tree):
            total += 1
            if name.strip("_") in OUTLAWED_NAMES:
                places[name].append(f"{source.name}:{line}")
    count = sum(map(len, places.values()))
    report = "\n".join(f"{name}: {', '.join(lines)}" for name, lines in sorted(places.items()))
    assert count <= MAX_OUTLAWED_SHARE * total, f"{count} of {total:,} names bound ({count / total:.2%}):\n{report}"


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
