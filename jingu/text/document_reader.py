"""Read documents from corpus files: lines, rows, blocks or whole files. Every error names its location."""

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
from jingu.runtime.files import read_error
from jingu.runtime.log import log_warning
from jingu.tables import read_table
from jingu.text.corpus_file import CorpusFile, import_optional, is_misnamed, read_errors

# Kinds of files whose documents are located by row number instead of byte.
_ROW_KINDS = ("json", "parquet", "arrow", "reader")
# A part of the path to a field: the name of a field, or [*] for all items of a list.
_PATH_PART = re.compile(r"\[\*\]|[^.\[\]]+")
_TEXT_FIELD_FIX = "Set data.text_field to the field that holds the document."


@dataclass(frozen=True)
class CorpusDocument:
    """One text of the corpus."""

    text: str
    bytes: int  # length of `text` in UTF-8
    file: CorpusFile
    # The document's first byte in the file, or its row (from 1) in files of rows; -1: the document is the whole file.
    position: int
    hash: int = 0  # assigns the document to the training or validation split; 0: use the hash of its text


def format_location(path: str, position: int) -> str:
    """Return the location of a document for messages: file:byte N, file:row N, or only the file."""
    if position < 0:
        return path
    unit = "row" if CorpusFile(path, 0).kind in _ROW_KINDS else "byte"
    return f"{path}:{unit} {position}"


@dataclass(frozen=True)
class Span:
    """A part of a file: the documents that begin in its bytes [start, end)."""

    file: CorpusFile
    start: int
    end: int


@dataclass
class ReadCounts:
    """Numbers of documents that were read, left out or changed."""

    documents: int = 0
    empty: int = 0  # left out: no characters
    invalid: int = 0  # left out: not UTF-8
    replaced: int = 0  # read, with U+FFFD in place of bytes that are not UTF-8
    # Duplicates of earlier documents. If duplicates are kept, they are counted for supervised data only.
    copies: int = 0
    # A message for each document that was left out because of an error, if `data.on_error` is `skip`.
    skipped: list[str] = field(default_factory=list)
    # Number of rows of supervised data by category.
    rows: dict[str, int] = field(default_factory=dict)

    def count(self, category: str, number: int = 1) -> None:
        """Add to the number of rows of supervised data in a category."""
        self.rows[category] = self.rows.get(category, 0) + int(number)

    def add(self, part: ReadCounts) -> None:
        """Add the counts of another part of the corpus."""
        self.documents += part.documents
        self.empty += part.empty
        self.invalid += part.invalid
        self.replaced += part.replaced
        self.copies += part.copies
        self.skipped += part.skipped
        for category, number in part.rows.items():
            self.count(category, number)


def read_documents(spans: Iterable[Span], settings: DataSettings, counts: ReadCounts) -> Iterator[CorpusDocument]:
    """Yield the documents of `spans` in order, and add them to `counts`.

    Raises:
        JinguError: a file is damaged, an entry is not a document, or a text is not UTF-8 and `data.invalid_utf8` is
            `refuse`. If `data.on_error` is `skip`, these are left out and recorded in `counts.skipped` instead.
    """
    for span in spans:
        reader = _DocumentReader(span.file, settings, counts)
        try:
            yield from reader.documents(span)
        except _SkippedError:
            pass
        except read_errors() as error:
            problem = corpus_file_error(span.file, error, ", or set data.on_error=skip to keep what comes before")
            reader.refuse(problem)
            is_damaged = problem.what.startswith("the file is damaged")
            state = "is damaged or was truncated" if is_damaged else "cannot be read to its end"
            log_warning(f"{span.file.path} {state}; only what comes before the damage is read.")


# Plain explanations of what decoders say of files that are not damaged.
_DECODER_ERRORS: list[dict[str, Any]] = read_table(__file__, "decoder_errors.toml")["errors"]


def corpus_file_error(file: CorpusFile, error: Exception, alternative: str = "") -> JinguError:
    """Return the error for an exception that reading a file raised.

    Args:
        alternative: another fix if the file is damaged.
    """
    if isinstance(error, OSError) and error.strerror:
        return read_error(file.path, error)
    text = (str(error) or type(error).__name__).rstrip(".")
    if is_misnamed(file):
        what = f"its content is not of the format that its suffix names ({text})."
        return JinguError(what, where=file.path, fix="Rename it, or write it again in this format.")
    for entry in _DECODER_ERRORS:
        if any(message in text.lower() for message in entry["messages"]):
            return JinguError(entry["what"].format(error=text), where=file.path, fix=entry["fix"])
    what = f"the file is damaged, or was truncated while it was written or copied ({text})."
    return JinguError(what, where=file.path, fix=f"Download or copy it again{alternative}.")


class _SkippedError(Exception):
    """A document, or the rest of a span, is left out. It is counted already."""


class _DocumentReader:
    """Reads the documents of one file according to the settings, and counts them.

    Positions are those of `CorpusDocument`: a byte of the file, or a row (from 1) in files of rows; -1: the whole file.
    """

    def __init__(self, file: CorpusFile, settings: DataSettings, counts: ReadCounts) -> None:
        self.file = file
        self.kind = file.kind
        self.settings = settings
        self.counts = counts

    def documents(self, span: Span) -> Iterator[CorpusDocument]:
        """Yield the documents that begin in the span."""
        for value, position in self._read_values(span):
            try:
                text = self._parse_text(value, position)
            except _SkippedError:
                continue
            if text:
                self.counts.documents += 1
                yield CorpusDocument(text, len(text.encode()), self.file, position)
            else:
                self.counts.empty += 1

    def refuse(self, error: JinguError) -> None:
        """Raise the error; if `data.on_error` is `skip`, record it instead."""
        if self.settings.on_error == "stop":
            raise error
        self.counts.skipped.append(f"{error.where}: {error.what}")

    def _skip(self, position: int, what: str, fix: str) -> _SkippedError:
        """Report an error at a position by `refuse`; if that returns, return the exception that skips the document."""
        self.refuse(JinguError(what, where=self._locate(position), fix=fix))
        return _SkippedError()

    def _read_values(self, span: Span) -> Iterator[tuple[Any, int]]:
        """Yield each document before it is parsed, as bytes or as the value of a row, and its position."""
        kind = self.kind
        unit = self.settings.documents
        max_bytes = self.settings.max_document_bytes
        if kind in ("parquet", "arrow"):
            yield from _read_column(self.file, self.settings.text_field, span)
            return
        with closing(self.file.open()) as stream:
            # Read one byte more than allowed, so that `_decode` notices a text that is too long.
            if kind == "reader":
                try:
                    yield from zip(self.file.read_texts(stream), count(1), strict=False)
                except JinguError as error:
                    self.refuse(error)
            elif kind == "json":
                rows = self._parse_json(stream.read(max_bytes + 1), -1)
                yield from zip(rows if isinstance(rows, list) else [rows], count(1))
            elif kind == "lines" or unit == "line":
                for line, position in read_lines(stream, span, max_bytes):
                    if not _is_blank(line) or len(line) > max_bytes:
                        yield line, position
            elif unit == "block":
                yield from self._read_blocks(stream, span)
            else:
                yield stream.read(max_bytes + 1), -1

    def _parse_text(self, value: Any, position: int) -> str:
        """Return the text of a document that `_read_values` yielded."""
        kind = self.kind
        if kind == "reader":
            return self._decode(self._check_string(value, position).encode(), position)
        if kind == "text":
            text = self._decode(value, position)
            if position >= 0:
                text = text.rstrip("\r\n")
            return text.replace("<n>", "\n") if self.settings.escaped_newlines else text
        if kind == "lines":
            value = self._parse_json(value, position)
        return self._check_string(self._get_field(value, position), position)

    def _read_blocks(self, stream: IO[bytes], span: Span) -> Iterator[tuple[bytes, int]]:
        """Yield the blocks (runs of lines that are not blank) that begin in the span, and their positions."""
        position = seek_first_line(stream, span)
        max_bytes = self.settings.max_document_bytes
        # A block that began before the span belongs to an earlier unit of work.
        begins_here = position == 0 or _is_blank(_previous_line(stream, position))
        if position:
            stream.seek(position)
        lines = _read_lines_from(stream, position, max_bytes)
        for is_blank, group in groupby(lines, key=lambda item: _is_blank(item[0])):
            start = position
            block: list[bytes] = []
            size = 0
            for line, position in group:
                # The span ends before this line: only a block that has already begun continues.
                if _is_past_span(position, span) and (not block or not begins_here):
                    return
                if not block:
                    start = position
                # Lines past the limit are not kept: the block is refused anyway.
                if size <= max_bytes:
                    block.append(line)
                size += len(line)
            if not is_blank and begins_here:
                yield b"".join(block), start
            begins_here = True

    def _parse_json(self, data: bytes, position: int) -> Any:
        """Parse a line of JSON, or a JSON file."""
        try:
            return json.loads(self._decode(data, position).rstrip())
        except (ValueError, RecursionError) as error:
            if self.kind == "lines":
                subject = "this line"
                fix = "A .jsonl file holds one JSON object a line."
            else:
                subject = "the file"
                fix = "A .json file holds a list of objects; one object a line is .jsonl."
            raise self._skip(position, f"{subject} is not JSON ({describe_json_error(error)}).", fix) from None

    def _get_field(self, row: object, position: int) -> Any:
        """Return the text field of a line or row: by its name, or by a path such as `meta.paragraphs[*].text`."""
        name = self.settings.text_field
        subject = "line" if self.kind == "lines" else "row"
        if not isinstance(row, dict):
            what = f"this {subject} is JSON but not an object: it is {_describe_type(row)}."
            raise self._skip(position, what, f'Each {subject} must look like {{"{name}": "…"}}.')
        try:
            return row[name] if name in row else _select(row, _PATH_PART.findall(name))
        except (KeyError, TypeError):
            what = f'this {subject} has no field "{name}"; its fields: {_quote(row)}.'
            raise self._skip(position, what, _TEXT_FIELD_FIX) from None

    def _check_string(self, value: object, position: int) -> str:
        r"""Return a value that must be a string with a UTF-8 form; invalid characters are replaced if that is allowed.

        JSON can contain half a surrogate pair ("\ud800"), which UTF-8 cannot encode.
        """
        if not isinstance(value, str):
            what = f'the field "{self.settings.text_field}" is {_describe_type(value)}, not a string.'
            raise self._skip(position, what, _TEXT_FIELD_FIX)
        try:
            value.encode()
            return value
        except UnicodeEncodeError as error:
            what = f"the escape \\u{ord(value[error.start]):04x} is half a character, which is not UTF-8."
            fix = 'Set data.invalid_utf8 to "replace" or "skip", or correct the line.'
            return self._handle_invalid(position, what, fix, re.sub("[\ud800-\udfff]", "\ufffd", value))

    def _decode(self, data: bytes, position: int) -> str:
        """Decode UTF-8, without a byte order mark. Refuse, skip or replace text that is too long or not UTF-8."""
        max_bytes = self.settings.max_document_bytes
        if len(data) > max_bytes:
            what = f"a document here is longer than {max_bytes:,} bytes (data.max_document_bytes)."
            fix = "Split it (data.documents takes lines or blocks of a text file), or raise the limit if memory allows."
            raise self._skip(position, what, fix)
        if b"\0" in data:
            what = f"byte {max(position, 0) + data.index(0)} is a NUL: the text is UTF-16 or UTF-32, or it is not text."
            fix = 'Convert the file to UTF-8, or set data.invalid_utf8 to "replace" (U+FFFD for each) or "skip".'
            text = data.decode(errors="replace").removeprefix("\ufeff").replace("\0", "\ufffd")
            return self._handle_invalid(position or -1, what, fix, text)
        try:
            return data.decode().removeprefix("\ufeff")
        except UnicodeDecodeError as error:
            what = f"byte {max(position, 0) + error.start} (0x{data[error.start]:02x}) is not UTF-8."
            fix = (
                'Convert the file to UTF-8, or set data.invalid_utf8 to "replace" (U+FFFD for the bad bytes) '
                'or "skip" (leave the document out).'
            )
            return self._handle_invalid(position or -1, what, fix, data.decode(errors="replace").removeprefix("\ufeff"))

    def _handle_invalid(self, position: int, what: str, fix: str, replaced_text: str) -> str:
        """Refuse, skip or replace a text that is not UTF-8, according to `data.invalid_utf8`."""
        if self.settings.invalid_utf8 == "refuse":
            raise self._skip(position, what, fix)
        if self.settings.invalid_utf8 == "skip":
            self.counts.invalid += 1
            raise _SkippedError
        self.counts.replaced += 1
        return replaced_text

    def _locate(self, position: int) -> str:
        """Return the file and the line or row of a position. Slow, as it counts lines: use it only for messages."""
        if position < 0 or self.kind in _ROW_KINDS:
            return format_location(self.file.path, position)
        line = 1
        remaining = position
        with closing(self.file.open()) as stream:
            while remaining > 0 and (chunk := stream.read(min(remaining, 1 << 20))):
                line += chunk.count(b"\n")
                remaining -= len(chunk)
        return f"{self.file.path}:{line}"


def _select(value: Any, path: list[str]) -> Any:
    """Return the value at a path in a row. The texts of a list ([*]) are joined by newlines.

    Raises:
        KeyError, TypeError: the row has no such field.
    """
    for index, part in enumerate(path):
        if part == "[*]":
            texts = [_select(item, path[index + 1 :]) for item in value]
            non_texts = [text for text in texts if not isinstance(text, str)]
            return non_texts[0] if non_texts else "\n".join(texts)
        value = value[part]
    return value


def _is_blank(line: bytes) -> bool:
    return not line.strip()


def read_lines(stream: IO[bytes], span: Span, max_bytes: int) -> Iterator[tuple[bytes, int]]:
    """Yield the lines that begin in the span, each with the position of its first byte.

    A line longer than `max_bytes` is truncated to `max_bytes` + 1 bytes, which shows the caller that it is too long.
    """
    for line, position in _read_lines_from(stream, seek_first_line(stream, span), max_bytes):
        if _is_past_span(position, span):
            return
        yield line, position


def _read_lines_from(stream: IO[bytes], position: int, max_bytes: int) -> Iterator[tuple[bytes, int]]:
    """Yield all lines from the stream's current position on, like `read_lines`. `position` is that position."""
    while line := stream.readline(max_bytes + 1):
        yield line, position
        position += len(line)
        # Read and discard the rest of a truncated line.
        while len(line) > max_bytes and not line.endswith(b"\n"):
            line = stream.readline(max_bytes + 1)
            position += len(line)


def _is_past_span(position: int, span: Span) -> bool:
    """Return whether a line at a position belongs to a later span of the file."""
    return span.file.splits and position >= span.end


def seek_first_line(stream: IO[bytes], span: Span) -> int:
    """Move the stream to the first line that begins in the span, and return the position of its first byte."""
    if span.start == 0:
        return 0
    # Start one byte earlier: if that byte is a newline, a line begins exactly at the span's start.
    stream.seek(span.start - 1)
    return span.start - 1 + len(stream.readline())


def _previous_line(stream: IO[bytes], position: int) -> bytes:
    """Return the line before the one that begins at a position, or the last 4 KiB of it."""
    stream.seek(max(position - 4096, 0))
    return stream.read(min(position, 4096))[:-1].rpartition(b"\n")[2]


def _read_column(file: CorpusFile, field: str, span: Span) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield the rows of a .parquet file, or of an .arrow file that `datasets` saved, and their numbers from 1.

    Rows have only the column that contains the field. From a .parquet file, the row groups that begin in the span are
    read; an .arrow file is read whole.

    Raises:
        EOFError: the file is damaged.
        JinguError: there is no such column, or pyarrow is not installed.
    """
    try:
        with closing(file.open()) as stream:
            if file.kind == "arrow":
                reader = import_optional("pyarrow.ipc", "reading .arrow files", file.path).open_stream(stream)
                name = _find_column(reader.schema.names, field, file.path)
                yield from zip(_rows(name, (batch.column(name) for batch in reader)), count(1))
                return
            parquet = import_optional("pyarrow.parquet", "reading .parquet files", file.path)
            table = parquet.ParquetFile(stream)
            name = _find_column(table.schema_arrow.names, field, file.path)
            rows_before = 0
            for number in range(table.num_row_groups):
                group = table.metadata.row_group(number)
                # A row group begins with its first column: with that column's dictionary if it has one.
                pages = group.column(0)
                start = min(filter(None, [pages.dictionary_page_offset, pages.data_page_offset]))
                if span.start <= start < span.end or not file.splits:
                    batches = table.iter_batches(batch_size=1024, row_groups=[number], columns=[name])
                    yield from zip(_rows(name, (batch.column(0) for batch in batches)), count(rows_before + 1))
                rows_before += group.num_rows
    except (ValueError, NotImplementedError, MemoryError) as error:  # pyarrow's own errors are also OSErrors
        raise EOFError((str(error) or "not enough memory").splitlines()[0]) from error


def _rows(name: str, columns: Iterable[Any]) -> Iterator[dict[str, Any]]:
    return ({name: value} for column in columns for value in column.to_pylist())


def _find_column(names: list[str], field: str, path: str) -> str:
    """Return the column that contains a field: the column of that name, or the one that its path begins with.

    Raises:
        JinguError: there is no such column.
    """
    first = _PATH_PART.findall(field)[:1]
    for name in (field, *first):
        if name in names:
            return name
    what = f'there is no column "{field}"; there are: {_quote(names)}.'
    raise JinguError(what, where=path, fix="Set data.text_field to one of them.")


def _quote(names: Iterable[str]) -> str:
    return ", ".join(f'"{name}"' for name in names) or "none"


def describe_json_error(error: Exception) -> str:
    """Return why a text is not JSON."""
    return f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)


def _describe_type(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
