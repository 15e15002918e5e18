"""Documents out of files: lines, rows, blocks or whole files, with a place for every mistake."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import IO, Any

from jingu.config.sections.data import DataSettings
from jingu.errors import JinguError
from jingu.runtime.files import unreadable
from jingu.text.storage import CorpusFile, damages, package


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
    return f"{path}:{'row' if CorpusFile(path, 0).kind in ('json', 'parquet', 'arrow') else 'byte'} {place}"


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
        except damages() as error:
            reader.wrong(_broken(span.file, error))


def _broken(file: CorpusFile, error: Exception) -> JinguError:
    """The words for a file that cannot be read to its end."""
    if isinstance(error, OSError) and error.strerror:
        return unreadable(file.path, error)
    what = f"the file is damaged or was cut while it was written or copied ({error})."
    return JinguError(what, where=file.path, fix="Fetch it anew, or set data.on_error=skip to take what comes before.")


class _Reader:
    """Reads the documents of one file as the settings say, and counts them."""

    def __init__(self, file: CorpusFile, settings: DataSettings, tally: Tally) -> None:
        self.file, self.path = file, file.path
        self.settings = settings
        self.tally = tally

    def documents(self, span: Span) -> Iterator[Document]:
        """Those that begin in the span."""
        kind = self.file.kind
        if kind in ("parquet", "arrow"):
            yield from self._rows(span)
            return
        with closing(self.file.open()) as stream:
            if kind == "json":
                yield from self._json(stream)
            elif kind == "lines" or self.settings.documents == "line":
                yield from self._lines(stream, span, is_json=kind == "lines")
            elif self.settings.documents == "block":
                yield from self._blocks(stream, span)
            else:
                yield from self._whole(stream)

    def wrong(self, mistake: JinguError) -> None:
        """Raise the mistake, or note it where they are skipped."""
        if self.settings.on_error == "stop":
            raise mistake
        self.tally.skipped.append(f"{mistake.where}: {mistake.what}")

    def _whole(self, stream: IO[bytes]) -> Iterator[Document]:
        data = stream.read(self.settings.largest_document + 1)
        if self._fits(data, self.path):
            yield from self._counted(self._unescaped(self._decoded(data, 0)), -1)

    def _json(self, stream: IO[bytes]) -> Iterator[Document]:
        """A list of objects, or one of them."""
        data = stream.read(self.settings.largest_document + 1)
        text = self._decoded(data, 0) if self._fits(data, self.path) else None
        if text is None:
            return
        try:
            found = json.loads(text)
        except (ValueError, RecursionError) as error:
            fix = "A .json file holds a list of objects; one object a line is .jsonl."
            self.wrong(JinguError(f"the file is not JSON ({_reason(error)}).", where=self.path, fix=fix))
            return
        for number, row in enumerate(found if isinstance(found, list) else [found], start=1):
            text = self._field(row, place_in_words(self.path, number), "this row")
            yield from self._counted(text, number)

    def _lines(self, stream: IO[bytes], span: Span, *, is_json: bool) -> Iterator[Document]:
        """The lines that begin in the span, each a document, or a JSON object with one; blank lines are nothing."""
        most, position = self.settings.largest_document, _first_line(stream, span)
        while position < span.end or not self.file.splits:
            line = stream.readline(most + 1)
            if not line:
                return
            if len(line) > most:
                self._fits(line, position)
                while line and not line.endswith(b"\n"):
                    position += len(line)
                    line = stream.readline(most + 1)
            elif line.strip():
                row = self._decoded(line, position)
                text = self._unescaped(row.rstrip("\r\n")) if row and not is_json else None
                if row is not None and is_json:
                    text = self._object(row, position)
                yield from self._counted(text, position)
            position += len(line)

    def _blocks(self, stream: IO[bytes], span: Span) -> Iterator[Document]:
        """The stretches of lines between blank ones that begin in the span."""
        most, position = self.settings.largest_document, _first_line(stream, span)
        begins = position == 0 or not _previous_line(stream, position).strip()
        stream.seek(position) if position else None
        block, size, start = list[bytes](), 0, position
        while line := stream.readline(most + 1):
            if not line.strip():
                yield from self._block(block, start)
                block, size, begins = [], 0, True
            elif block or begins:
                if not block:
                    if self.file.splits and position >= span.end:
                        return
                    start = position
                if size <= most:
                    block.append(line)
                size += len(line)
            position += len(line)
            if not block and self.file.splits and position >= span.end:
                return
        yield from self._block(block, start)

    def _block(self, lines: list[bytes], start: int) -> Iterator[Document]:
        if lines and self._fits(block := b"".join(lines), start):
            text = self._decoded(block, start)
            yield from self._counted(self._unescaped(text and text.rstrip("\r\n")), start)

    def _rows(self, span: Span) -> Iterator[Document]:
        """The rows of a .parquet's row groups, or of an .arrow file as `datasets` saves it."""
        number = 0
        for batch, first in _row_batches(self.file, self.settings.text_field, span):
            number = number if first is None else first
            for value in batch:
                number += 1
                if isinstance(value, str):
                    yield from self._counted(value, number)
                else:
                    place = place_in_words(self.path, number)
                    what = f'the field "{self.settings.text_field}" is {_kind(value)}, not a string.'
                    self.wrong(JinguError(what, where=place, fix="Set data.text_field to the field of the document."))

    def _counted(self, text: str | None, place: int) -> Iterator[Document]:
        if text:
            self.tally.documents += 1
            yield Document(text, len(text.encode()), self.file, place)
        elif text is not None:
            self.tally.empty += 1

    def _fits(self, data: bytes, place: str | int) -> bool:
        """Whether a document is not too long."""
        if len(data) <= self.settings.largest_document:
            return True
        what = f"a document here is longer than {self.settings.largest_document:,} bytes (data.largest_document)."
        fix = "Split it (data.documents takes lines or blocks of a text file), or raise that, as far as memory allows."
        self.wrong(JinguError(what, where=self._where(place), fix=fix))
        return False

    def _unescaped(self, text: str | None) -> str | None:
        return text.replace("<n>", "\n") if text and self.settings.escaped_newlines else text

    def _decoded(self, data: bytes, position: int) -> str | None:
        """UTF-8 to text, or what the setting says: None leaves the document out."""
        try:
            return data.decode().removeprefix("\ufeff")
        except UnicodeDecodeError as error:
            if self.settings.invalid_utf8 == "refuse":
                mistake = JinguError(
                    f"byte {position + error.start} (0x{data[error.start]:02x}) is not UTF-8.",
                    where=self._place(position) if position else self.path,
                    fix='Convert the file to UTF-8, or set data.invalid_utf8 to "replace" (U+FFFD for the bad bytes) '
                    'or "skip" (leave the document out).',
                )
                self.wrong(mistake)
                return None
            return self._replaced(data.decode(errors="replace").removeprefix("\ufeff"))

    def _whole_characters(self, text: str, place: str | int) -> str | None:
        r"""JSON can hold half a character ("\ud800"), which has no UTF-8; it is treated as invalid UTF-8."""
        try:
            text.encode()
            return text
        except UnicodeEncodeError as error:
            if self.settings.invalid_utf8 == "refuse":
                what = f"the escape \\u{ord(text[error.start]):04x} is half a character, which is not UTF-8."
                fix = 'Set data.invalid_utf8 to "replace" or "skip", or mend the line.'
                self.wrong(JinguError(what, where=self._where(place), fix=fix))
                return None
            return self._replaced(re.sub("[\ud800-\udfff]", "\ufffd", text))

    def _replaced(self, text: str) -> str | None:
        """Text with U+FFFD for what was not UTF-8, where such documents are taken."""
        if self.settings.invalid_utf8 == "skip":
            self.tally.invalid += 1
            return None
        self.tally.replaced += 1
        return text

    def _object(self, line: str, position: int) -> str | None:
        """The text of one line of JSON."""
        try:
            row = json.loads(line.rstrip())
        except (ValueError, RecursionError) as error:
            what, fix = f"this line is not JSON ({_reason(error)}).", "A .jsonl file holds one JSON object a line."
            self.wrong(JinguError(what, where=self._place(position), fix=fix))
            return None
        return self._field(row, position, "this line")

    def _field(self, row: object, place: str | int, it: str) -> str | None:
        """The text field of one JSON object; `place` is a byte offset or in words."""
        name = self.settings.text_field
        fix = "Set data.text_field to the field that holds the document."
        if not isinstance(row, dict):
            what = f"{it} is JSON but not an object: it is {_kind(row)}."
            fix = f'Each {it.removeprefix("this ")} must look like {{"{name}": "…"}}.'
        elif name not in row:
            present = ", ".join(f'"{key}"' for key in row) or "none"
            what = f'{it} has no field "{name}"; its fields: {present}.'
        elif isinstance(text := row[name], str):
            return self._whole_characters(text, place)
        else:
            what = f'the field "{name}" is {_kind(text)}, not a string.'
        self.wrong(JinguError(what, where=self._where(place), fix=fix))
        return None

    def _where(self, place: str | int) -> str:
        """A place in words, or a byte offset in words."""
        return place if isinstance(place, str) else self._place(place)

    def _place(self, position: int) -> str:
        """file:line of a byte offset; counts the lines before it, so only for messages."""
        line = 1
        with closing(self.file.open()) as stream:
            while position > 0 and (chunk := stream.read(min(position, 1 << 20))):
                line += chunk.count(b"\n")
                position -= len(chunk)
        return f"{self.path}:{line}"


def _first_line(stream: IO[bytes], span: Span) -> int:
    """Go to the first line that begins in the span; its byte."""
    if span.start == 0:
        return 0
    stream.seek(span.start - 1)
    return span.start - 1 + len(stream.readline())


def _previous_line(stream: IO[bytes], position: int) -> bytes:
    """The end of the line before the one that begins at a byte."""
    stream.seek(max(position - 4096, 0))
    return stream.read(min(position, 4096))[:-1].rpartition(b"\n")[2]


def _row_batches(file: CorpusFile, name: str, span: Span) -> Iterator[tuple[list[Any], int | None]]:
    """Values of a column, some at a time; with the number of rows before, where that is not the sum of those given."""
    with closing(file.open()) as stream:
        if file.kind == "arrow":
            try:
                reader = package("pyarrow.ipc", "reading .arrow files", file.path).open_stream(stream)
                _check_column(reader.schema.names, name, file.path)
                for batch in reader:
                    yield batch.column(name).to_pylist(), None
            except ValueError as error:  # pyarrow's own errors are ValueErrors and OSErrors
                raise EOFError(str(error).splitlines()[0]) from error
            return
        parquet = package("pyarrow.parquet", "reading .parquet files", file.path)
        try:
            table = parquet.ParquetFile(stream)
        except ValueError as error:
            raise EOFError(str(error).splitlines()[0]) from error
        _check_column(table.schema_arrow.names, name, file.path)
        before = 0
        for number in range(table.num_row_groups):
            group = table.metadata.row_group(number)
            pages = group.column(0)
            start = min(filter(None, [pages.dictionary_page_offset, pages.data_page_offset]))
            if span.start <= start < span.end or not file.splits:
                first: int | None = before
                for batch in table.iter_batches(batch_size=1024, row_groups=[number], columns=[name]):
                    yield batch.column(0).to_pylist(), first
                    first = None
            before += group.num_rows


def _check_column(names: list[str], name: str, path: str) -> None:
    if name not in names:
        present = ", ".join(f'"{each}"' for each in names) or "none"
        what, fix = f'there is no column "{name}"; there are: {present}.', "Set data.text_field to one of them."
        raise JinguError(what, where=path, fix=fix)


def _reason(error: Exception) -> str:
    return f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
