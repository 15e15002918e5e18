"""The files of a user's code: all modules beside it that it imports, in whichever way, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from jingu.runtime.code_files import find_code_files


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("import helper", {"helper.py"}),
        ("import helper as h, json", {"helper.py"}),
        ("from helper import score", {"helper.py"}),
        ("from pack import part", {"pack/__init__.py", "pack/part.py", "helper.py"}),
        ("from pack.part import *", {"pack/__init__.py", "pack/part.py", "helper.py"}),
        ("import pack.part", {"pack/__init__.py", "pack/part.py", "helper.py"}),
        ("from . import helper", {"helper.py"}),
        ("from .pack import part", {"pack/__init__.py", "pack/part.py", "helper.py"}),
        ("def f():\n    if True:\n        from bare import deep", {"bare/deep.py"}),
        ("import importlib\nm = importlib.import_module('helper')", {"helper.py"}),
        ("import circle", {"circle.py"}),
        ("try:\n    import missing\nexcept ImportError:\n    import helper", {"helper.py"}),
        ("import json, os.path", set()),
        ("this is no Python", set()),
        ("x = 'import helper'  # import helper", set()),
    ],
)
def test_imports(code: str, names: set[str], tmp_path: Path) -> None:
    (tmp_path / "pack").mkdir()
    (tmp_path / "bare").mkdir()
    (tmp_path / "pack" / "__init__.py").touch()
    (tmp_path / "pack" / "part.py").write_text("import helper\nfrom .. import nothing")
    (tmp_path / "bare" / "deep.py").touch()
    (tmp_path / "helper.py").write_text("import json")
    (tmp_path / "circle.py").write_text("import main, circle")
    (tmp_path / "unused.py").touch()
    main = tmp_path / "main.py"
    main.write_text(code)
    first, *others = find_code_files(main)
    assert first == main
    assert {str(path.relative_to(tmp_path)) for path in others} == names
    assert len(others) == len(set(others))


def test_modules_in_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "main.py").write_text("import helper, code.other")
    (tmp_path / "code" / "other.py").touch()
    (tmp_path / "helper.py").touch()
    monkeypatch.chdir(tmp_path)
    assert [str(path) for path in find_code_files(Path("code/main.py"))] == [
        "code/main.py",
        "code/other.py",
        "helper.py",
    ]
