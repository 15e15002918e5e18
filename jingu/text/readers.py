"""Documents out of files: lines, rows, blocks or whole files, with a place for every mistake."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from itertools import count, groupby
from typing import IO, Any

from jingu.config.sections.data import DataSettings
from jingu.errors import JinguError
from jingu.runtime.files import unreadable
from jingu.text.storage import CorpusFile, damages, package

_ROWS = ("json", "parquet", "arrow")
"""Kinds of files whose documents are told apart by their row."""
_FIELD = "Set data.text_field to the field that holds the document."


@dataclass(frozen=True)
class Document:
    """One text of the corpus."""

    text: str
    bytes: int
    """Length of `text` in UTF-8."""
    file: CorpusFile
    place: int
    """Its first byte in the file, or its row from 1, as `place_in_words` tells; -1: the file is this document."""


def place_in_words(path: str, place: int) -> str:
    """A document's file, and where it is in it: file:byte N, or file:row N."""
    if place < 0:
        return path
    return f"{path}:{'row' if CorpusFile(path, 0).kind in _ROWS else 'byte'} {place}"


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
    copies: int = 0
    """Of earlier ones, left out or not; where they are kept, counted of supervised data only."""
    skipped: list[str] = field(default_factory=list)
    """Mistakes for which something was left out, in words, where `data.on_error` is `skip`."""
    rows: dict[str, int] = field(default_factory=dict)
    """What became of rows of supervised data, in words."""

    def count(self, what: str, number: int = 1) -> None:
        """Count rows."""
        self.rows[what] = self.rows.get(what, 0) + int(number)

    def add(self, other: Tally) -> None:
        self.documents += other.documents
        self.empty += other.empty
        self.invalid += other.invalid
        self.replaced += other.replaced
        self.copies += other.copies
        self.skipped += other.skipped
        for what, number in other.rows.items():
            self.count(what, number)


def read_documents(spans: Iterable[Span], settings: DataSettings, tally: Tally) -> Iterator[Document]:
    """The documents of `spans` in order, counted into `tally`.

    Raises JinguError for what is no document (`data.on_error: skip` leaves it out and counts it), and for text that
    is not UTF-8 where `data.invalid_utf8` is `refuse`.
    """
    for span in spans:
        reader = _Reader(span.file, settings, tally)
        try:
            yield from reader.documents(span)
        except _LeftOut:
            pass
        except damages() as error:
            reader.refuse(damaged(span.file, error, ", or set data.on_error=skip to take what comes before"))


def damaged(file: CorpusFile, error: Exception, otherwise: str = "") -> JinguError:
    """The words for what reading a file raised.

    Args:
        otherwise: what can be done instead of mending it.
    """
    if isinstance(error, OSError) and error.strerror:
        return unreadable(file.path, error)
    what = f"the file is damaged or was cut while it was written or copied ({error})."
    return JinguError(what, where=file.path, fix=f"Fetch it anew{otherwise}.")


class _LeftOut(Exception):  # noqa: N818 (not an error)
    """What is no document, and is counted already."""


class _Reader:
    """Reads the documents of one file as the settings say, and counts them.

    A place is a byte of the file, or a row from 1 in files of rows; -1 is the file as a whole.
    """

    def __init__(self, file: CorpusFile, settings: DataSettings, tally: Tally) -> None:
        self.file, self.settings, self.tally = file, settings, tally

    def documents(self, span: Span) -> Iterator[Document]:
        """Those that begin in the span."""
        for value, place in self._values(span):
            try:
                text = self._text(value, place)
            except _LeftOut:
                continue
            if text:
                self.tally.documents += 1
                yield Document(text, len(text.encode()), self.file, place)
            else:
                self.tally.empty += 1

    def refuse(self, mistake: JinguError) -> None:
        """Raise the mistake, or note it where they are skipped."""
        if self.settings.on_error == "stop":
            raise mistake
        self.tally.skipped.append(f"{mistake.where}: {mistake.what}")

    def _wrong(self, place: int, what: str, fix: str) -> _LeftOut:
        """What to raise for what is at a place, where `refuse` does not."""
        self.refuse(JinguError(what, where=self._where(place), fix=fix))
        return _LeftOut()

    def _values(self, span: Span) -> Iterator[tuple[Any, int]]:
        """What stands for each document, and its place: bytes, or what a row holds."""
        kind, documents, most = self.file.kind, self.settings.documents, self.settings.largest_document
        if kind in ("parquet", "arrow"):
            yield from _rows(self.file, self.settings.text_field, span)
            return
        with closing(self.file.open()) as stream:
            if kind == "json":
                rows = self._json(stream.read(most + 1), -1)
                yield from zip(rows if isinstance(rows, list) else [rows], count(1))
            elif kind == "lines" or documents == "line":
                lines = lines_of(stream, span, most)
                yield from ((line, place) for line, place in lines if not _blank(line) or len(line) > most)
            elif documents == "block":
                yield from self._blocks(stream, span)
            else:
                yield stream.read(most + 1), -1

    def _text(self, value: Any, place: int) -> str:
        """The text of a document."""
        if self.file.kind == "text":
            text = self._decoded(value, place)
            text = text.rstrip("\r\n") if place >= 0 else text
            return text.replace("<n>", "\n") if self.settings.escaped_newlines else text
        if self.file.kind == "lines":
            value = self._json(value, place)
        return self._string(self._field(value, place) if self.file.kind in ("lines", "json") else value, place)

    def _blocks(self, stream: IO[bytes], span: Span) -> Iterator[tuple[bytes, int]]:
        """The stretches of lines between blank ones that begin in the span."""
        position, most = first_line(stream, span), self.settings.largest_document
        begins = position == 0 or _blank(_previous_line(stream, position))
        stream.seek(position) if position else None
        for blank, lines in groupby(_numbered(stream, position, most), key=lambda each: _blank(each[0])):
            start, block, size = position, list[bytes](), 0
            for line, position in lines:
                if _beyond(position, span) and (not block or not begins):
                    return
                start = start if block else position
                if size <= most:
                    block.append(line)
                size += len(line)
            if not blank and begins:
                yield b"".join(block), start
            begins = True

    def _json(self, data: bytes, place: int) -> Any:
        """What a line of JSON holds, or a file of it."""
        try:
            return json.loads(self._decoded(data, place).rstrip())
        except (ValueError, RecursionError) as error:
            if self.file.kind == "lines":
                it, fix = "this line", "A .jsonl file holds one JSON object a line."
            else:
                it, fix = "the file", "A .json file holds a list of objects; one object a line is .jsonl."
            raise self._wrong(place, f"{it} is not JSON ({json_reason(error)}).", fix) from None

    def _field(self, row: object, place: int) -> Any:
        """The text field of one JSON object, a line or a row."""
        name, it = self.settings.text_field, "line" if self.file.kind == "lines" else "row"
        if not isinstance(row, dict):
            fix = f'Each {it} must look like {{"{name}": "…"}}.'
            raise self._wrong(place, f"this {it} is JSON but not an object: it is {_kind(row)}.", fix)
        if name not in row:
            raise self._wrong(place, f'this {it} has no field "{name}"; its fields: {_quoted(row)}.', _FIELD)
        return row[name]

    def _string(self, value: object, place: int) -> str:
        r"""A string. JSON can hold half a character ("\ud800"), which has no UTF-8; it is treated as invalid UTF-8."""
        if not isinstance(value, str):
            what = f'the field "{self.settings.text_field}" is {_kind(value)}, not a string.'
            raise self._wrong(place, what, _FIELD)
        try:
            value.encode()
            return value
        except UnicodeEncodeError as error:
            what = f"the escape \\u{ord(value[error.start]):04x} is half a character, which is not UTF-8."
            fix = 'Set data.invalid_utf8 to "replace" or "skip", or mend the line.'
            return self._invalid(place, what, fix, re.sub("[\ud800-\udfff]", "\ufffd", value))

    def _decoded(self, data: bytes, place: int) -> str:
        """UTF-8 to text, where it is not too long."""
        most = self.settings.largest_document
        if len(data) > most:
            what = f"a document here is longer than {most:,} bytes (data.largest_document)."
            ways = "Split it (data.documents takes lines or blocks of a text file), or raise that"
            raise self._wrong(place, what, f"{ways}, as far as memory allows.")
        try:
            return data.decode().removeprefix("\ufeff")
        except UnicodeDecodeError as error:
            what = f"byte {max(place, 0) + error.start} (0x{data[error.start]:02x}) is not UTF-8."
            fix = (
                'Convert the file to UTF-8, or set data.invalid_utf8 to "replace" (U+FFFD for the bad bytes) '
                'or "skip" (leave the document out).'
            )
            return self._invalid(place or -1, what, fix, data.decode(errors="replace").removeprefix("\ufeff"))

    def _invalid(self, place: int, what: str, fix: str, replaced: str) -> str:
        """What the setting makes of a text that is not UTF-8."""
        if self.settings.invalid_utf8 == "refuse":
            raise self._wrong(place, what, fix)
        if self.settings.invalid_utf8 == "skip":
            self.tally.invalid += 1
            raise _LeftOut
        self.tally.replaced += 1
        return replaced

    def _where(self, place: int) -> str:
        """The file, and its line or row; counts the lines before, so only for messages."""
        if place < 0 or self.file.kind in _ROWS:
            return place_in_words(self.file.path, place)
        line = 1
        with closing(self.file.open()) as stream:
            while place > 0 and (chunk := stream.read(min(place, 1 << 20))):
                line += chunk.count(b"\n")
                place -= len(chunk)
        return f"{self.file.path}:{line}"


def _blank(line: bytes) -> bool:
    return not line.strip()


def lines_of(stream: IO[bytes], span: Span, most: int) -> Iterator[tuple[bytes, int]]:
    """The lines that begin in the span, each with its byte; one longer than `most` bytes is cut to one byte more."""
    for line, position in _numbered(stream, first_line(stream, span), most):
        if _beyond(position, span):
            return
        yield line, position


def _numbered(stream: IO[bytes], position: int, most: int) -> Iterator[tuple[bytes, int]]:
    """The lines from a byte on, likewise."""
    while line := stream.readline(most + 1):
        yield line, position
        position += len(line)
        while len(line) > most and not line.endswith(b"\n"):
            line = stream.readline(most + 1)
            position += len(line)


def _beyond(position: int, span: Span) -> bool:
    """Whether what begins there belongs to a later part of the file."""
    return span.file.splits and position >= span.end


def first_line(stream: IO[bytes], span: Span) -> int:
    """Go to the first line that begins in the span; its byte."""
    if span.start == 0:
        return 0
    stream.seek(span.start - 1)
    return span.start - 1 + len(stream.readline())


def _previous_line(stream: IO[bytes], position: int) -> bytes:
    """The end of the line before the one that begins at a byte."""
    stream.seek(max(position - 4096, 0))
    return stream.read(min(position, 4096))[:-1].rpartition(b"\n")[2]


def _rows(file: CorpusFile, name: str, span: Span) -> Iterator[tuple[Any, int]]:
    """Values of a column of a .parquet's row groups, or of an .arrow file as `datasets` saves it; and their numbers."""
    try:
        with closing(file.open()) as stream:
            if file.kind == "arrow":
                reader = package("pyarrow.ipc", "reading .arrow files", file.path).open_stream(stream)
                _check_column(reader.schema.names, name, file.path)
                yield from zip(_flat(batch.column(name) for batch in reader), count(1))
                return
            table = package("pyarrow.parquet", "reading .parquet files", file.path).ParquetFile(stream)
            _check_column(table.schema_arrow.names, name, file.path)
            before = 0
            for number in range(table.num_row_groups):
                group = table.metadata.row_group(number)
                pages = group.column(0)
                start = min(filter(None, [pages.dictionary_page_offset, pages.data_page_offset]))
                if span.start <= start < span.end or not file.splits:
                    batches = table.iter_batches(batch_size=1024, row_groups=[number], columns=[name])
                    yield from zip(_flat(batch.column(0) for batch in batches), count(before + 1))
                before += group.num_rows
    except ValueError as error:  # pyarrow's own errors are ValueErrors and OSErrors
        raise EOFError(str(error).splitlines()[0]) from error


def _flat(columns: Iterable[Any]) -> Iterator[Any]:
    return (value for column in columns for value in column.to_pylist())


def _check_column(names: list[str], name: str, path: str) -> None:
    if name not in names:
        what, fix = f'there is no column "{name}"; there are: {_quoted(names)}.', "Set data.text_field to one of them."
        raise JinguError(what, where=path, fix=fix)


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f'"{name}"' for name in names) or "none"


def json_reason(error: Exception) -> str:
    """Why a line is not JSON."""
    return f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
