"""What jingu says about mistakes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from jingu.errors import JinguError


def explain_mistake(read: Callable[[Path], object], file: Path, text: str) -> str:
    """Write a text to a file, and return the error of the function that reads it."""
    file.write_text(text, encoding="utf-8")
    with pytest.raises(JinguError) as caught:
        read(file)
    return str(caught.value)
