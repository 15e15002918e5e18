"""The files of a user's Python code: the one that is named, and the modules beside it that it imports."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path


def find_code_files(file: Path) -> list[Path]:
    """Return a Python file and the files of all modules that it imports from its own folder or the working directory.

    The code is read, not run, so imports inside functions count as well. Installed packages do not.

    Returns:
        The file itself, and the others in order of their paths.
    """
    files = {file.absolute(): file}
    pending = [file]
    while pending:
        current = pending.pop()
        for module_file in _find_imports(current, {current.parent, file.parent, Path()}):
            if module_file.absolute() not in files:
                files[module_file.absolute()] = module_file
                pending.append(module_file)
    return [file, *sorted(path for path in files.values() if path != file)]


def _find_imports(file: Path, folders: set[Path]) -> Iterator[Path]:
    """Yield the files of the modules that a file imports, with those of the packages around them.

    Args:
        folders: where modules are searched.
    """
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return  # importing it says what is wrong
    for node in ast.walk(tree):
        for folder, name in _list_imports(node, file, folders):
            parts = name.split(".") if name else []
            for count in range(len(parts) + 1):
                module = folder.joinpath(*parts[:count])
                candidates = [module / "__init__.py", *([module.with_suffix(".py")] if count else [])]
                # The folder itself is a package only for a relative import.
                if count or isinstance(node, ast.ImportFrom):
                    yield from (path for path in candidates if path.is_file())


def _list_imports(node: ast.AST, file: Path, folders: set[Path]) -> Iterator[tuple[Path, str]]:
    """Yield the folders in which a statement looks for modules, and the dotted names of these modules."""
    if isinstance(node, ast.Import):
        yield from ((folder, alias.name) for alias in node.names for folder in folders)
    elif isinstance(node, ast.ImportFrom):
        # A name that is imported may be a module, too.
        names = [".".join(filter(None, (node.module, alias.name))) for alias in node.names if alias.name != "*"]
        places = {file.parents[node.level - 1]} if 0 < node.level <= len(file.parents) else folders
        yield from ((folder, name) for name in names or [node.module or ""] for folder in places)
    elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("import_module", "importlib.import_module"):
        names = [item.value for item in node.args[:1] if isinstance(item, ast.Constant) and isinstance(item.value, str)]
        yield from ((folder, name) for name in names if not name.startswith(".") for folder in folders)
