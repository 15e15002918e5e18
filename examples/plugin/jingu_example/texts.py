"""A metric and a filter of evaluations, and a reader of a corpus."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import IO


def same_first_word(gold: str, text: str) -> float:
    """A metric: whether the right answer and the text begin with the same word."""
    return float(gold.split()[:1] == text.split()[:1])


def last_line(answers: list[str]) -> list[str]:
    """A filter: the last line of each answer that is not empty."""
    return [next((line for line in reversed(text.splitlines()) if line.strip()), "") for text in answers]


def read_subtitles(stream: IO[bytes]) -> Iterator[str]:
    """A reader of .srt files: one document, the spoken lines without their numbers and times."""
    text = stream.read().decode("utf-8-sig")
    lines = []
    for block in re.split(r"\n\s*\n", text.replace("\r\n", "\n").strip()):
        number, time, *spoken = block.split("\n")
        if not (number.strip().isdecimal() and "-->" in time):
            raise ValueError(f"expected a number and a time, not {number[:40]!r}")
        lines += spoken
    yield "\n".join(lines)
