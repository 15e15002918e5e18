"""Nothing in the product runs what it reads: no pickle on disk or on the wire, no eval, no shell."""

import ast
from pathlib import Path

import pytest

import jingu

MODULES = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}
OBJECT_COLLECTIVES = {
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
}
ON_TORCH = {"save", "load"}
BUILT_IN = {"eval", "exec"}
YAML_UNSAFE = {
    "load",
    "load_all",
    "full_load",
    "full_load_all",
    "unsafe_load",
    "unsafe_load_all",
    "Loader",
    "FullLoader",
    "UnsafeLoader",
    "CLoader",
    "CFullLoader",
    "CUnsafeLoader",
}


def violations(source: str) -> list[str]:
    """Every forbidden thing in a module, as `line: what`."""
    tree = ast.parse(source)
    aliases = _aliases(tree)
    found = []
    for node in ast.walk(tree):
        for what in _of_node(node, aliases):
            found.append(f"{getattr(node, 'lineno', 0)}: {what}")
    return found


def _aliases(tree: ast.AST) -> dict[str, str]:
    """What each imported name stands for, as a dotted path."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for item in node.names:
                names[item.asname or item.name.split(".")[0]] = item.name if item.asname else item.name.split(".")[0]
        elif isinstance(node, ast.ImportFrom) and node.module:
            for item in node.names:
                names[item.asname or item.name] = f"{node.module}.{item.name}"
    return names


def _dotted(node: ast.expr, aliases: dict[str, str]) -> str:
    if isinstance(node, ast.Name):
        return aliases.get(node.id, node.id)
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value, aliases)}.{node.attr}"
    return ""


def _of_node(node: ast.AST, aliases: dict[str, str]) -> list[str]:
    if isinstance(node, ast.Import):
        return [item.name for item in node.names if _is_forbidden_import(item.name)]
    if isinstance(node, ast.ImportFrom):
        paths = [f"{node.module}.{item.name}" for item in node.names]
        return [path for path in paths if _is_forbidden_import(path) or _is_forbidden_name(path)]
    if isinstance(node, ast.Attribute):
        path = _dotted(node, aliases)
        return [path] if _is_forbidden_name(path) or _is_forbidden_import(path) else []
    if isinstance(node, ast.Call):
        return _of_call(node, aliases)
    return []


def _is_forbidden_import(path: str) -> bool:
    # torch.distributed.checkpoint writes its .metadata with pickle.
    return path.split(".")[0] in MODULES or path.startswith("torch.distributed.checkpoint")


def _is_forbidden_name(path: str) -> bool:
    first, _, last = path.rpartition(".")
    return (
        (first in ("torch", "torch.serialization", "torch.jit") and last in ON_TORCH)
        or last in OBJECT_COLLECTIVES
        or (first == "yaml" and last in YAML_UNSAFE)
        or (first == "builtins" and last in BUILT_IN)
        or path == "os.system"
    )


def _of_call(node: ast.Call, aliases: dict[str, str]) -> list[str]:
    path = _dotted(node.func, aliases)
    found = [path] if path in BUILT_IN else []
    if path == "__import__" or path == "importlib.import_module":
        named = [a.value for a in node.args[:1] if isinstance(a, ast.Constant) and isinstance(a.value, str)]
        found += [name for name in named if _is_forbidden_import(name)]
    for keyword in node.keywords:
        is_off = isinstance(keyword.value, ast.Constant) and not keyword.value.value
        if keyword.arg in ("shell", "allow_pickle") and not is_off:
            found.append(f"{keyword.arg}=")
        if keyword.arg == "weights_only":
            found.append("weights_only=")
    return found


FILES = sorted(Path(jingu.__file__).parent.rglob("*.py"))


def test_there_are_files_to_look_at():
    assert {"store.py", "cli.py"} <= {path.name for path in FILES}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(Path(jingu.__file__).parent).as_posix())
def test_no_file_of_the_product_breaks_the_rule(path):
    # Code that a model wrote runs in the sandbox, and nowhere else.
    allowed = {"exec"} if path.name == "sandbox_guest.py" else set()
    lines = violations(path.read_text(encoding="utf-8"))
    assert [line for line in lines if line.partition(": ")[2] not in allowed] == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import pickle as p",
        "from pickle import loads",
        "import dill.source",
        "from cloudpickle import dumps",
        "def f():\n    import shelve",
        "import marshal",
        "__import__('pickle')",
        "import importlib\nimportlib.import_module('pickle')",
        "import torch\ntorch.save({}, 'x')",
        "import torch as t\nt.load('x')",
        "from torch import load",
        "import torch\nf = torch.save",
        "import torch\ntorch.serialization.load('x')",
        "from torch.serialization import save as s",
        "import torch.distributed as dist\ndist.all_gather_object([], 1)",
        "import torch\ntorch.distributed.broadcast_object_list([1])",
        "from torch.distributed import gather_object",
        "import torch.distributed as d\nd.scatter_object_list([], [])",
        "import torch.distributed as d\nd.send_object_list([])",
        "import torch.distributed as d\nd.recv_object_list([])",
        "import torch.distributed.checkpoint as dcp",
        "from torch.distributed import checkpoint",
        "from torch.distributed.checkpoint import save",
        "import torch.distributed as d\nd.checkpoint.save({})",
        "eval('1')",
        "exec('1')",
        "import builtins\nbuiltins.eval('1')",
        "import subprocess\nsubprocess.run('ls', shell=True)",
        "import subprocess as s\ns.Popen('ls', shell=flag)",
        "import os\nos.system('ls')",
        "import yaml\nyaml.load(text)",
        "import yaml\nyaml.load(text, Loader=yaml.SafeLoader)",
        "from yaml import unsafe_load",
        "import yaml\nclass L(yaml.Loader): pass",
        "import yaml\nyaml.full_load(text)",
        "import numpy as np\nnp.load('x', allow_pickle=True)",
        "import numpy\nnumpy.load('x', allow_pickle=maybe)",
    ],
)
def test_the_walker_sees_each_planted_example(source):
    assert violations(source) != []


@pytest.mark.parametrize(
    "source",
    [
        "import numpy as np\nnp.load('x', allow_pickle=False)",
        "import subprocess\nsubprocess.run(['ls'], shell=False)",
        "import yaml\nyaml.safe_load(text)\nclass L(yaml.SafeLoader): pass",
        "import json\njson.load(file)",
        "from jingu.checkpoint.store import load, save\nload(folder, {})",
        "model.eval()",
        "import torch.distributed as dist\ndist.all_gather([], x)",
    ],
)
def test_the_walker_lets_good_code_be(source):
    assert violations(source) == []
