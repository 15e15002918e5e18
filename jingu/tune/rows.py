"""Read rows of instruction data from files.

A file is JSON Lines, or a JSON list. Its rows may have different formats (`jingu.tune.row_formats`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any

from jingu.chat.messages import ConversationError
from jingu.errors import JinguError
from jingu.text.corpus_file import CorpusFile, is_url, read_errors
from jingu.text.document_reader import Span, corpus_file_error, describe_json_error, read_lines, seek_first_line
from jingu.tune.row_formats import parse_row

# A longer row is treated as a mistake in the data.
MAX_ROW_BYTES = 10_000_000
_READ_BYTES = 1 << 24


@dataclass(frozen=True)
class BadRow:
    """A row that cannot be used.

    Attributes:
        file: path of the file.
        number: number of the row in the file, from 1.
        reason: what is wrong with the row.
        start: beginning of the row's text.
    """

    file: str
    number: int
    reason: str
    start: str

    def __str__(self) -> str:
        start = " ".join(self.start[:80].split())
        text = f"row {self.number}: {self.reason}. It begins: {start}{'…' if len(self.start) > 80 else ''}"
        # JSON can contain halves of characters, which cannot be printed.
        return text.encode(errors="backslashreplace").decode()


def raise_bad_row(bad: BadRow) -> None:
    """Raise a JinguError for a bad row: the callback of `read_rows` if bad rows are not to be skipped."""
    raise JinguError(
        f"{bad}.", where=bad.file, fix="Correct the row, or set data.on_error=skip to skip and list such rows."
    )


def count_rows_before(span: Span) -> int:
    """Return the number of rows before a span in its file. In JSON Lines, each line counts as a row."""
    if span.file.kind == "json":
        return _slice_of_list(len(_load_list(span.file)), span)[0]
    with closing(span.file.open()) as stream:
        remaining = seek_first_line(stream, span)
        if remaining:
            # Count the lines before the span. Streams that cannot seek have a single span, with nothing before it.
            stream.seek(0)
        count = 0
        while remaining and (block := stream.read(min(remaining, _READ_BYTES))):
            count += block.count(b"\n")
            remaining -= len(block)
    return count


def read_rows(
    span: Span,
    on_bad_row: Callable[[BadRow], None],
    max_bytes: int = MAX_ROW_BYTES,
    parse: Callable[[Any], Any] = parse_row,
) -> Iterator[tuple[int, Any]]:
    """Yield the valid rows of a span, each with its number in the span (from 1).

    Args:
        on_bad_row: receives each row that is not valid.
        max_bytes: maximum size of a row; a longer one is not valid.
        parse: converts the JSON value of a row, or raises ConversationError.

    Raises:
        JinguError: the file cannot be read; or a .json file is not a JSON list.
    """
    # Counting reads the file, so it is done only when a row is bad.
    rows_before = cache(partial(count_rows_before, span))
    values = _read_list(span, max_bytes) if span.file.kind == "json" else _read_lines(span, max_bytes)
    try:
        for number, text, value in values:
            try:
                if isinstance(value, ConversationError):
                    raise value
                if isinstance(value, ValueError):
                    raise ConversationError(f"it is not JSON ({describe_json_error(value)})")
                row = parse(value)
            except ConversationError as error:
                if text is None:
                    text = json.dumps(value, ensure_ascii=False)
                on_bad_row(BadRow(span.file.path, rows_before() + number, str(error), text[:100]))
            else:
                yield number, row
    except read_errors() as error:
        raise corpus_file_error(span.file, error) from error


def _read_lines(span: Span, max_bytes: int) -> Iterator[tuple[int, str | None, Any]]:
    """Yield the number, text and value of each line. The value is an exception if the text is not a row."""
    with closing(span.file.open()) as stream:
        for number, (line, position) in enumerate(read_lines(stream, span, max_bytes), start=1):
            value: Any = None
            try:
                # Only the first line of a file may begin with a byte order mark.
                text = line.decode("utf-8-sig" if position == 0 else "utf-8")
            except UnicodeDecodeError as error:
                text = line.decode(errors="replace")
                value = ConversationError(f"it is not UTF-8 ({error.reason} at byte {error.start} of it)")
            if len(line) > max_bytes:
                value = _too_long(max_bytes)
            if value is None:
                if not text.strip():
                    continue
                value = _parse_json(text.rstrip())
            yield number, text, value


def _read_list(span: Span, max_bytes: int) -> Iterator[tuple[int, str | None, Any]]:
    """Yield the number, text and value of each row in a span of a JSON list, as `_read_lines` does.

    The text is None unless the length of rows has to be checked.
    """
    rows = _load_list(span.file)
    start, end = _slice_of_list(len(rows), span)
    must_check = span.file.size > max_bytes or span.file.compression
    for number, value in enumerate(rows[start:end], start=1):
        text = json.dumps(value, ensure_ascii=False) if must_check else None
        too_long = text is not None and len(text) > max_bytes
        yield number, text, _too_long(max_bytes) if too_long else value


def _too_long(max_bytes: int) -> ConversationError:
    return ConversationError(f"it is longer than {max_bytes:,} bytes, which is treated as a mistake")


def _slice_of_list(rows: int, span: Span) -> tuple[int, int]:
    """Return the range of rows of a JSON list that belong to a span: the same fraction as the span is of the file.

    Args:
        rows: number of rows in the list.
    """
    size = max(span.file.size, 1)
    return rows * span.start // size, rows * span.end // size


def _load_list(file: CorpusFile) -> list[Any]:
    """Return the rows of a JSON file. Raises JinguError if it does not hold a list of rows."""
    return _load_list_once(file, 0 if is_url(file.path) else Path(file.path).stat().st_mtime_ns)


@lru_cache(maxsize=1)
def _load_list_once(file: CorpusFile, _modified_ns: int) -> list[Any]:
    """Return the rows of a JSON file, from a cache for all spans of the same version of a file."""
    try:
        with closing(file.open()) as stream:
            text = stream.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise JinguError(f"the file is not UTF-8 ({error.reason} at byte {error.start}).", where=file.path) from error
    value = _parse_json(text)
    if isinstance(value, ValueError):
        value = _parse_json(strip_comments(text))
    if isinstance(value, list):
        return value
    problem = (
        f"the file is not JSON ({value})" if isinstance(value, ValueError) else "the file does not hold a list of rows"
    )
    raise JinguError(
        f"{problem}.", where=file.path, fix="It should hold [row, row, ...]; name it .jsonl if each line is a row."
    )


def _parse_json(text: str) -> Any:
    """Return the value of JSON text, or the ValueError that says why it is not JSON."""
    try:
        return json.loads(text)
    except ValueError as error:
        return error
    except RecursionError:
        return ValueError("it is nested too deeply")


_STRING_OR_COMMENT = re.compile(
    r'("(?:[^"\\]|\\.)*")|//[^\n]*|/\*.*?\*/|(,)(?=(?:\s|//[^\n]*|/\*.*?\*/)*[\]}])', re.DOTALL
)


def strip_comments(text: str) -> str:
    """Return JSON without comments and trailing commas; line numbers stay the same."""
    return _STRING_OR_COMMENT.sub(lambda match: match[1] or "\n" * match[0].count("\n"), text)
