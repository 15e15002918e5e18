"""No module but `jingu.compat` uses private names of libraries, and every function of `jingu.compat` has a test."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import jingu

ROOT = Path(jingu.__file__).parent
COMPAT = ROOT / "compat"
DOCUMENTED = {"os._exit"}
DOCUMENTED_METHODS = {"_replace", "_asdict", "_fields"}
"""Public in spite of their underscore; the second ones of named tuples."""
PRIVATE_MODULE = re.compile(r"\b[a-z0-9]+(\.\w+)*\._[a-z]\w*")


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def own_names(tree: ast.AST) -> set[str]:
    """Private names that a module defines: functions, classes, variables, and attributes that it assigns."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            names.add(node.attr)
    return names


def private_uses(source: str) -> Iterator[tuple[int, str]]:
    """Lines and names of what a module uses that is private to a library."""
    tree = ast.parse(source)
    own = own_names(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in own:
            if ast.unparse(node) not in DOCUMENTED and node.attr not in DOCUMENTED_METHODS:
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            prefix = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names:
                if any(map(is_private, f"{prefix}{alias.name}".split("."))):
                    yield node.lineno, f"{prefix}{alias.name}"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and PRIVATE_MODULE.fullmatch(node.value):
            yield node.lineno, node.value
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "setattr", "hasattr"):
            name = node.args[1]
            if isinstance(name, ast.Constant) and is_private(str(name.value)) and name.value not in own:
                yield node.lineno, ast.unparse(node)


def test_private_names_of_libraries_are_used_in_compat_only() -> None:
    uses = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in sorted(ROOT.rglob("*.py"))
        if COMPAT not in path.parents
        for line, name in private_uses(path.read_text(encoding="utf-8"))
    ]
    assert not uses, "these belong into jingu/compat: " + "; ".join(uses)


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("import torch\ntorch._foreach_add_(a, b)", ["torch._foreach_add_"]),
        ("from torch.utils import _pytree", ["torch.utils._pytree"]),
        ("import torch._dynamo", ["torch._dynamo"]),
        ("from torch._inductor.config import triton", ["torch._inductor.config.triton"]),
        ("mesh._flatten('x')", ["mesh._flatten"]),
        ("'torch._dynamo' in sys.modules", ["torch._dynamo"]),
        ("getattr(model, '_modules')", ["getattr(model, '_modules')"]),
        ("class A(B):\n    def f(self): return self._of_the_library", ["self._of_the_library"]),
        ("class A:\n    def __init__(self): self._own = 1\n    def f(self, other): return other._own", []),
        ("from __future__ import annotations\nos._exit(1)\nx.__dict__\npoint._replace(x=1)", []),
    ],
)
def test_what_counts_as_private(source: str, names: list[str]) -> None:
    assert [name for _, name in private_uses(source)] == names


@pytest.mark.parametrize("module", sorted(path.stem for path in COMPAT.glob("*.py") if path.stem != "__init__"))
def test_every_function_of_compat_is_tested(module: str) -> None:
    tree = ast.parse((COMPAT / f"{module}.py").read_text(encoding="utf-8"))
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and not is_private(node.name)}
    tests = (Path(__file__).parent / f"test_{module}.py").read_text(encoding="utf-8")
    untested = sorted(name for name in functions if not re.search(rf"\bcompat\.{name}\(|_compat\.{name}\(", tests))
    assert functions and not untested, f"tests/compat/test_{module}.py has no test of {', '.join(untested)}"
