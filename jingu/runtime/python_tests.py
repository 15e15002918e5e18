"""Read the tests of a program: what they call, and whether they can run apart from it."""

from __future__ import annotations

import ast
import builtins
from dataclasses import asdict, dataclass
from typing import Any

from jingu.runtime.sandbox_guest import MODULES

# Names and attributes of tests that need the process of the program: they inspect it, capture its output, share files
# or random numbers with it, or run a text that it returns.
_PROCESS_NAMES = frozenset(
    """
    eval exec compile globals locals vars open input __import__ breakpoint redirect_stdout redirect_stderr stdin stdout
    stderr mock patch MagicMock monkeypatch capsys getsource signature seed __dict__ __class__ __name__ __doc__
    """.split()  # noqa: SIM905
)
_BUILTINS = frozenset(vars(builtins))
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom, ast.Assign, ast.Pass)


@dataclass(frozen=True)
class PythonTests:
    """Tests of a program: statements that raise no exception if it is right.

    Attributes:
        code: the statements.
        names: what they may take from the program.
        called: those of the names that they call.
        modules: modules that they use without importing them.
        is_weak: whether they must run in the process of the program, which can then inspect and deceive them.
    """

    code: str
    names: tuple[str, ...]
    called: tuple[str, ...]
    modules: tuple[str, ...]
    is_weak: bool

    def describe(self) -> dict[str, Any]:
        """Return them as JSON."""
        return asdict(self)


def parse_tests(code: str) -> PythonTests:
    """Return the tests in a text.

    Raises:
        ValueError: it is no Python, or tests nothing.
    """
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"the tests are not Python: {error}") from error
    if tree.body and all(isinstance(node, _DEFINITIONS) or _is_text(node) for node in tree.body):
        raise ValueError("the tests define functions, but call none: add a line such as check(f)")
    nodes = list(ast.walk(tree))
    names_read = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    bound = _bound_names(nodes)
    names = names_read - _BUILTINS
    if not names - bound:
        names = names_read - bound  # a program may define a function of the name of a builtin
    if not names:
        raise ValueError("the tests use nothing of a program")
    names_called = {node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    modules = (names & MODULES) - bound - names_called
    return PythonTests(
        code=code,
        names=tuple(sorted(names - modules)),
        called=tuple(sorted(names_called & names)),
        modules=tuple(sorted(modules)),
        is_weak=any(_needs_process(node) for node in nodes),
    )


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _bound_names(nodes: list[ast.AST]) -> set[str]:
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            names.add(node.id)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.ExceptHandler):
            names |= {node.name} if node.name else set()
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    return names


def _needs_process(node: ast.AST) -> bool:
    """Return whether a part of tests works only in the process of the program."""
    if isinstance(node, ast.Name):
        return node.id in _PROCESS_NAMES
    if isinstance(node, ast.Attribute):
        return node.attr in _PROCESS_NAMES
    if isinstance(node, ast.Import):
        return any(alias.name.partition(".")[0] not in MODULES for alias in node.names)
    if isinstance(node, ast.ImportFrom):
        return node.level > 0 or (node.module or "").partition(".")[0] not in MODULES
    # A class could inherit from one of the program, and its objects would be passed to the program.
    return isinstance(node, ast.ClassDef | ast.Await | ast.AsyncFor | ast.AsyncWith)
