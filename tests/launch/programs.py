"""Programs that stand in for those of a cluster."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from textwrap import dedent

import pytest


def install(monkeypatch: pytest.MonkeyPatch, folder: Path, name: str, code: str) -> Path:
    """Write a program of Python, and put it on the PATH. Returns the file in which it can leave its arguments."""
    folder.mkdir(exist_ok=True)
    record = folder / f"{name}.json"
    file = folder / name
    heading = f"#!{sys.executable}\nimport json, os, signal, subprocess, sys\nRECORD = {str(record)!r}\n"
    file.write_text(heading + dedent(code))
    file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return record
