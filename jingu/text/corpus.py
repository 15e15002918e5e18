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
    inputs = [settings.input] if isinstance(settings.input, str) else settings.input
    if not inputs:
        raise JinguError(
            "no corpus is given.", where="data.input", fix="Name text files, .jsonl files, folders or patterns."
        )
    paths: dict[str, None] = {}
    for name in inputs:
        paths.update(dict.fromkeys(_expand(name, settings.suffixes)))
    files = []
    for path in paths:
        try:
            files.append(CorpusFile(path, Path(path).stat().st_size))
        except OSError as error:
            raise _unreadable(path, error) from error
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
        try:
            yield from _lines(span, settings, tally) if span.file.lines else _whole(span, settings, tally)
        except OSError as error:
            raise _unreadable(span.file.path, error) from error


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


def _expand(name: str, suffixes: list[str]) -> Iterator[str]:
    """The files that one entry of `data.input` stands for."""
    path = Path(name).expanduser()
    if path.is_dir():
        yield from _walk(path, suffixes)
    elif path.exists():
        yield str(path)
    elif glob.has_magic(name):
        found = sorted(glob.glob(str(path), recursive=True))  # noqa: PTH207 (keeps absolute patterns simple)
        if not found:
            raise JinguError(f'no file matches the pattern "{name}".', where="data.input", fix=_looked(path))
        for match in found:
            yield from _walk(Path(match), suffixes) if Path(match).is_dir() else [match]
    else:
        raise JinguError(f'there is no file or folder "{name}".', where="data.input", fix=_looked(path))


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


def _looked(path: Path) -> str:
    return f"It was looked for at {path.absolute()}; check the spelling and the folder you are in."


def _whole(span: Span, settings: DataSettings, tally: Tally) -> Iterator[Document]:
    """A file that is one document."""
    source = span.file.path
    text = _decode(Path(source).read_bytes(), source, 0, settings, tally)
    if text is not None:
        yield from _counted(text.removeprefix("\ufeff"), source, tally)


def _lines(span: Span, settings: DataSettings, tally: Tally) -> Iterator[Document]:
    """The lines of a .jsonl that begin in the span; blank lines are nothing."""
    path = span.file.path
    with open(path, "rb") as stream:  # noqa: PTH123 (Path.open costs the same; this is the plain word)
        position = max(span.start - 1, 0)
        stream.seek(position)
        if span.start > 0:
            position += len(stream.readline())
        while position < span.end:
            line = stream.readline()
            if not line:
                break
            text = _decode(line, path, position, settings, tally) if line.strip() else None
            if text is not None:
                document = _field(text.removeprefix("\ufeff"), path, position, settings)
                checked = _without_surrogates(document, path, position, settings, tally)
                if checked is not None:
                    yield from _counted(checked, f"{path}:byte {position}", tally)
            position += len(line)


def _counted(text: str, source: str, tally: Tally) -> Iterator[Document]:
    if text:
        tally.documents += 1
        yield Document(text, len(text.encode()), source)
    else:
        tally.empty += 1


def _decode(data: bytes, path: str, position: int, settings: DataSettings, tally: Tally) -> str | None:
    """UTF-8 to text, or what the setting says: None leaves the document out."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        if settings.invalid_utf8 == "refuse":
            raise JinguError(
                f"byte {position + error.start} (0x{data[error.start]:02x}) is not UTF-8.",
                where=path if position == 0 else _line_number(path, position),
                fix='Convert the file to UTF-8, or set data.invalid_utf8 to "replace" (U+FFFD for the bad bytes) '
                'or "skip" (leave the document out).',
            ) from error
        if settings.invalid_utf8 == "skip":
            tally.invalid += 1
            return None
        tally.replaced += 1
        return data.decode(errors="replace")


def _without_surrogates(text: str, path: str, position: int, settings: DataSettings, tally: Tally) -> str | None:
    r"""JSON can hold half a character ("\ud800"), which has no UTF-8; it is treated as invalid UTF-8."""
    try:
        text.encode()
        return text
    except UnicodeEncodeError as error:
        if settings.invalid_utf8 == "refuse":
            raise JinguError(
                f"the escape \\u{ord(text[error.start]):04x} is half a character, which is not UTF-8.",
                where=_line_number(path, position),
                fix='Set data.invalid_utf8 to "replace" or "skip", or mend the line.',
            ) from error
        if settings.invalid_utf8 == "skip":
            tally.invalid += 1
            return None
        tally.replaced += 1
        return re.sub("[\ud800-\udfff]", "\ufffd", text)


def _field(line: str, path: str, position: int, settings: DataSettings) -> str:
    """The text field of one JSON line."""
    name = settings.text_field
    try:
        value = json.loads(line.rstrip())
    except (ValueError, RecursionError) as error:
        reason = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
        raise JinguError(
            f"this line is not JSON ({reason}).",
            where=_line_number(path, position),
            fix="A .jsonl file holds one JSON object a line.",
        ) from error
    if not isinstance(value, dict):
        raise JinguError(
            f"this line is JSON but not an object: it is {_kind(value)}.",
            where=_line_number(path, position),
            fix=f'Each line must look like {{"{name}": "…"}}.',
        )
    if name not in value:
        present = ", ".join(f'"{key}"' for key in value) or "none"
        raise JinguError(
            f'this line has no field "{name}"; its fields: {present}.',
            where=_line_number(path, position),
            fix="Set data.text_field to the field that holds the document.",
        )
    if not isinstance(value[name], str):
        raise JinguError(
            f'the field "{name}" is {_kind(value[name])}, not a string.',
            where=_line_number(path, position),
            fix="Set data.text_field to the field that holds the document.",
        )
    text: str = value[name]
    return text


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def _line_number(path: str, position: int) -> str:
    """file:line of a byte offset; counts the lines before it, so only for messages."""
    line = 1
    with open(path, "rb") as stream:  # noqa: PTH123
        while position > 0 and (chunk := stream.read(min(position, 1 << 20))):
            line += chunk.count(b"\n")
            position -= len(chunk)
    return f"{path}:{line}"


def _piece(span: Span) -> str:
    """A piece of a long text file; characters cut at its ends, and bytes that are not UTF-8, fall away."""
    try:
        with open(span.file.path, "rb") as stream:  # noqa: PTH123
            stream.seek(span.start)
            return stream.read(span.end - span.start).decode(errors="ignore")
    except OSError as error:
        raise _unreadable(span.file.path, error) from error


def _unreadable(path: str, error: OSError) -> JinguError:
    return JinguError(
        f"the file cannot be read ({error.strerror}).", where=path, fix="Check its permissions and its disk."
    )
