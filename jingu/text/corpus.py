"""The corpus: files, folders and patterns read as documents, in an order and in units fixed by the input alone."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jingu.config.schema import DataSettings
from jingu.errors import JinguError
from jingu.runtime.files import unreadable

UNIT_BYTES = 1 << 20
"""A unit of work holds about this many bytes: several small files, or a piece of a large .jsonl."""
SAMPLE_BYTES = 256 << 10
"""Pieces in which a corpus is sampled."""


@dataclass(frozen=True)
class Document:
    """One text of the corpus."""

    text: str
    bytes: int
    """Length of `text` in UTF-8."""
    source: str
    """The file, or file:byte N of the line of a .jsonl."""


@dataclass(frozen=True)
class CorpusFile:
    """A file of the corpus and its size in bytes."""

    path: str
    size: int

    @property
    def lines(self) -> bool:
        """Whether it holds a document a line, rather than being one document."""
        return self.path.lower().endswith(".jsonl")


@dataclass(frozen=True)
class Span:
    """The documents that begin in bytes [start, end) of a file."""

    file: CorpusFile
    start: int
    end: int


@dataclass
class Tally:
    """Documents read, left out and changed."""

    documents: int = 0
    empty: int = 0
    """Left out: no characters at all."""
    invalid: int = 0
    """Left out: not UTF-8."""
    replaced: int = 0
    """Taken, with U+FFFD for what was not UTF-8."""

    def add(self, other: Tally) -> None:
        self.documents += other.documents
        self.empty += other.empty
        self.invalid += other.invalid
        self.replaced += other.replaced


def find_files(settings: DataSettings) -> list[CorpusFile]:
    """Every file of `data.input`, each once: inputs in the given order, a folder's or pattern's files sorted.

    A folder is read recursively and gives the files with one of `data.suffixes`; a file named directly or
    by a pattern (`*`, `?`, `[…]`, `**`) is taken whatever its ending.
    """
    given = [source.input for source in settings.corpora]
    inputs = [name for each in given for name in ([each] if isinstance(each, str) else each)]
    if not inputs:
        fix = "Name text files, .jsonl files, folders or patterns."
        raise JinguError("no corpus is given.", where="data.input", fix=fix)
    files = []
    for path in dict.fromkeys(path for name in inputs for path in _expand(name, settings.suffixes)):
        try:
            files.append(CorpusFile(path, Path(path).stat().st_size))
        except OSError as error:
            raise unreadable(path, error) from error
    return files


def describe_files(files: list[CorpusFile]) -> dict[str, Any]:
    """What tells this corpus from another without reading it: number, bytes, and a hash of names and sizes."""
    digest = hashlib.blake2b(digest_size=8)
    for file in files:
        digest.update(f"{Path(file.path).name}\0{file.size}\0".encode("utf-8", "surrogateescape"))
    return {"files": len(files), "bytes": sum(file.size for file in files), "listing": digest.hexdigest()}


def plan_units(files: list[CorpusFile], unit_bytes: int = UNIT_BYTES) -> list[tuple[Span, ...]]:
    """Cut the corpus into units of about `unit_bytes`; they depend on the files alone."""
    units: list[tuple[Span, ...]] = []
    unit: list[Span] = []
    size = 0
    for file in files:
        step = unit_bytes if file.lines else max(file.size, 1)
        for start in range(0, max(file.size, 1), step):
            end = min(start + step, file.size)
            unit.append(Span(file, start, end))
            size += end - start
            if size >= unit_bytes:
                units.append(tuple(unit))
                unit, size = [], 0
    if unit:
        units.append(tuple(unit))
    return units


def read_documents(spans: Iterable[Span], settings: DataSettings, tally: Tally) -> Iterator[Document]:
    """The documents of `spans` in order, counted into `tally`.

    Raises JinguError for a line that is not a JSON object with the text field, and for text that is not
    UTF-8 where `data.invalid_utf8` is `refuse`.
    """
    for span in spans:
        reader = _Reader(span.file.path, settings, tally)
        try:
            yield from reader.lines(span) if span.file.lines else reader.whole()
        except OSError as error:
            raise unreadable(span.file.path, error) from error


def sample_texts(files: list[CorpusFile], settings: DataSettings, sample_bytes: int) -> Iterator[tuple[str, int]]:
    """About `sample_bytes` of the corpus spread evenly over its bytes, as (text, bytes of input passed so far).

    Long text files are taken in pieces, so that no more than a piece is in memory.
    """
    total = sum(file.size for file in files)
    seen = taken = 0
    for file in files:
        for start in range(0, file.size, SAMPLE_BYTES):
            span = Span(file, start, min(start + SAMPLE_BYTES, file.size))
            wanted = taken * total < sample_bytes * (seen + span.end - start)
            seen += span.end - start
            if not wanted:
                continue
            taken += span.end - start
            if file.lines or file.size <= SAMPLE_BYTES:
                for document in read_documents([span], settings, Tally()):
                    yield document.text, seen
            else:
                yield _piece(span), seen


def _expand(name: str, suffixes: list[str]) -> list[str]:
    """The files that one entry of `data.input` stands for."""
    path = Path(name).expanduser()
    if path.is_dir():
        return _walk(path, suffixes)
    if path.exists():
        return [str(path)]
    found = sorted(glob.glob(str(path), recursive=True))  # noqa: PTH207 (keeps absolute patterns simple)
    if not found:
        what = (
            f'no file matches the pattern "{name}".'
            if glob.has_magic(name)
            else f'there is no file or folder "{name}".'
        )
        fix = f"It was looked for at {path.absolute()}; check the spelling and the folder you are in."
        raise JinguError(what, where="data.input", fix=fix)
    return [file for match in found for file in (_walk(Path(match), suffixes) if Path(match).is_dir() else [match])]


def _walk(folder: Path, suffixes: list[str]) -> list[str]:
    """The folder's files with one of the suffixes, sorted; links are followed, each folder once."""
    endings = tuple(suffix.lower() for suffix in suffixes)
    found: list[str] = []
    others: Counter[str] = Counter()
    visited = set()
    for place, folders, names in os.walk(folder, followlinks=True):
        if os.path.realpath(place) in visited:
            folders.clear()
            continue
        visited.add(os.path.realpath(place))
        folders.sort()
        for name in names:
            if name.lower().endswith(endings):
                found.append(str(Path(place, name)))
            else:
                others[Path(name).suffix or "(no ending)"] += 1
    if not found:
        there = ", ".join(f"{count} {ending}" for ending, count in others.most_common(5)) or "no files at all"
        raise JinguError(
            f"no file in this folder ends in {' or '.join(suffixes)}; there are {there}.",
            where=folder,
            fix="Set data.suffixes to the endings of your files.",
        )
    return sorted(found)


class _Reader:
    """Reads the documents of one file as the settings say, and counts them."""

    def __init__(self, path: str, settings: DataSettings, tally: Tally) -> None:
        self.path = path
        self.settings = settings
        self.tally = tally

    def whole(self) -> Iterator[Document]:
        """The file as one document."""
        text = self._decoded(Path(self.path).read_bytes(), 0)
        if text is not None:
            yield from self._counted(text, self.path)

    def lines(self, span: Span) -> Iterator[Document]:
        """The lines of a .jsonl that begin in the span; blank lines are nothing."""
        with open(self.path, "rb") as stream:  # noqa: PTH123 (Path.open costs the same; this is the plain word)
            position = max(span.start - 1, 0)
            stream.seek(position)
            if span.start > 0:
                position += len(stream.readline())
            while position < span.end and (line := stream.readline()):
                row = self._decoded(line, position) if line.strip() else None
                text = None if row is None else self._whole_characters(self._field(row, position), position)
                if text is not None:
                    yield from self._counted(text, f"{self.path}:byte {position}")
                position += len(line)

    def _counted(self, text: str, source: str) -> Iterator[Document]:
        if text:
            self.tally.documents += 1
            yield Document(text, len(text.encode()), source)
        else:
            self.tally.empty += 1

    def _decoded(self, data: bytes, position: int) -> str | None:
        """UTF-8 to text, or what the setting says: None leaves the document out."""
        try:
            return data.decode().removeprefix("\ufeff")
        except UnicodeDecodeError as error:
            if self.settings.invalid_utf8 == "refuse":
                raise JinguError(
                    f"byte {position + error.start} (0x{data[error.start]:02x}) is not UTF-8.",
                    where=self._place(position) if position else self.path,
                    fix='Convert the file to UTF-8, or set data.invalid_utf8 to "replace" (U+FFFD for the bad bytes) '
                    'or "skip" (leave the document out).',
                ) from error
            return self._replaced(data.decode(errors="replace").removeprefix("\ufeff"))

    def _whole_characters(self, text: str, position: int) -> str | None:
        r"""JSON can hold half a character ("\ud800"), which has no UTF-8; it is treated as invalid UTF-8."""
        try:
            text.encode()
            return text
        except UnicodeEncodeError as error:
            if self.settings.invalid_utf8 == "refuse":
                raise JinguError(
                    f"the escape \\u{ord(text[error.start]):04x} is half a character, which is not UTF-8.",
                    where=self._place(position),
                    fix='Set data.invalid_utf8 to "replace" or "skip", or mend the line.',
                ) from error
            return self._replaced(re.sub("[\ud800-\udfff]", "\ufffd", text))

    def _replaced(self, text: str) -> str | None:
        """Text with U+FFFD for what was not UTF-8, where such documents are taken."""
        if self.settings.invalid_utf8 == "skip":
            self.tally.invalid += 1
            return None
        self.tally.replaced += 1
        return text

    def _field(self, line: str, position: int) -> str:
        """The text field of one JSON line."""
        name = self.settings.text_field
        fix = "Set data.text_field to the field that holds the document."
        try:
            row = json.loads(line.rstrip())
        except (ValueError, RecursionError) as error:
            reason = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
            what, fix = f"this line is not JSON ({reason}).", "A .jsonl file holds one JSON object a line."
        else:
            if not isinstance(row, dict):
                what = f"this line is JSON but not an object: it is {_kind(row)}."
                fix = f'Each line must look like {{"{name}": "…"}}.'
            elif name not in row:
                present = ", ".join(f'"{key}"' for key in row) or "none"
                what = f'this line has no field "{name}"; its fields: {present}.'
            elif isinstance(text := row[name], str):
                return text
            else:
                what = f'the field "{name}" is {_kind(text)}, not a string.'
        raise JinguError(what, where=self._place(position), fix=fix)

    def _place(self, position: int) -> str:
        """file:line of a byte offset; counts the lines before it, so only for messages."""
        line = 1
        with open(self.path, "rb") as stream:  # noqa: PTH123
            while position > 0 and (chunk := stream.read(min(position, 1 << 20))):
                line += chunk.count(b"\n")
                position -= len(chunk)
        return f"{self.path}:{line}"


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def _piece(span: Span) -> str:
    """A piece of a long text file; characters cut at its ends, and bytes that are not UTF-8, fall away."""
    try:
        with open(span.file.path, "rb") as stream:  # noqa: PTH123
            stream.seek(span.start)
            return stream.read(span.end - span.start).decode(errors="ignore")
    except OSError as error:
        raise unreadable(span.file.path, error) from error
