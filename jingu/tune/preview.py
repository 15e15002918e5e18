"""`jingu tune preview`: show which tokens of the rows will be trained, before training."""

from __future__ import annotations

import html
import json
import sys
from collections.abc import Callable
from functools import partial
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import numpy as np

from jingu.chat.tokenization import TokenizedRow
from jingu.config.schema import RunConfig
from jingu.data.row_sources import pack_best_fit, split_long_documents
from jingu.data.shard_writer import UnitEncoder
from jingu.data.supervised import WEIGHT_SCALE
from jingu.data.task_pool import map_tasks
from jingu.errors import pluralize
from jingu.runtime.files import write_error, write_text_atomically
from jingu.text.document_reader import ReadCounts
from jingu.text.tokenizer import Tokenizer
from jingu.tune.prepare import (
    SUPERVISED,
    RowKind,
    RowTokenizer,
    Unit,
    check_columns,
    plan_encoding,
    plan_row_units,
    row_tokenizers,
    summarize,
)
from jingu.tune.rows import count_rows_before

# Maximum number of bad rows to print; the others are only counted.
MAX_BAD_ROWS = 5

# Formats the texts of consecutive tokens with the same weight (in hundredths).
Highlight = Callable[[list[str], int], str]


def preview(
    config: RunConfig, rows: int = 3, to: Path | None = None, as_json: bool = False, kind: RowKind = SUPERVISED
) -> None:
    """Print the first rows of each corpus, token by token, and counts of all rows.

    Args:
        rows: number of rows to show per corpus.
        to: HTML file to write the rows to; None: print them.
        as_json: print one JSON object per line: for each row its file, number, kind, and tokens (id, text and loss
            weight); for each corpus its path and the counts.

    Raises:
        JinguError: the settings are not usable, or a file cannot be read or written. Bad rows do not stop the preview.
    """
    highlight = _color if sys.stdout.isatty() else _bracket
    page = []
    # Skip bad rows, whatever `data.on_error` says; `_totals` lists them.
    config = config.model_copy(update={"data": config.data.model_copy(update={"on_error": "skip"})})
    corpora = list(row_tokenizers(config, kind))
    check_columns(corpora)
    for row_tokenizer in corpora:
        tokenizer = row_tokenizer.tokenizer
        spans = (span for unit in plan_row_units(row_tokenizer.data) for span in unit)
        # Lazy: only as many rows are read and tokenized as are shown.
        numbered_rows = (
            (s, number, row) for s in spans for number, row in row_tokenizer.tokenize_span(s, ReadCounts())
        )
        for span, number, row in islice(numbered_rows, rows):
            num_trained = int((row.weights[1:] != 0).sum())
            location = f"{Path(span.file.path).name}, row {count_rows_before(span) + number} ({row.kind})"
            title = f"{location}: {num_trained} of {len(row.ids)} tokens trained"
            page.append(f"<h2>{html.escape(title)}</h2><pre>{_format_row(row, tokenizer, _mark_up)}</pre>")
            if as_json:
                number_in_file = count_rows_before(span) + number
                print(json.dumps(_describe_row(row, tokenizer, span.file.path, number_in_file), ensure_ascii=False))
            elif to is None:
                print(f"{title}\n{_format_row(row, tokenizer, highlight)}\n")
        # Counts of all rows, for which the whole corpus is read.
        title = f"{row_tokenizer.data.path}:"
        lines = _totals(config, row_tokenizer)
        totals = "\n".join(f"  {line}" for line in lines)
        if as_json:
            path = str(row_tokenizer.data.path)
            print(json.dumps({"path": path, "totals": [line.strip() for line in lines]}, ensure_ascii=False))
        else:
            print(f"{title}\n{totals}")
        page.append(f"<h2>{html.escape(title)}</h2><pre>{html.escape(totals)}</pre>")
    if to is not None:
        try:
            template = Path(__file__).with_name("preview.html").read_text(encoding="utf-8")
            write_text_atomically(to, template.replace("{body}", "\n".join(page)))
        except OSError as error:
            raise write_error(error, to) from error
        if not as_json:
            print(f"Wrote {to}.")


def _describe_row(row: TokenizedRow, tokenizer: Tokenizer, file: str | Path, number: int) -> dict[str, Any]:
    """Return a row as a JSON object. The first token is never predicted, so its weight is 0.

    Args:
        number: number of the row in its file, from 1.
    """
    weights = [0.0, *(float(weight) / WEIGHT_SCALE for weight in row.weights[1:])]
    tokens = [
        {"id": token_id, "text": text, "weight": weight}
        for token_id, text, weight in zip(row.ids, _token_texts(row, tokenizer), weights, strict=True)
    ]
    return {"file": str(file), "row": number, "kind": row.kind, "tokens": tokens}


def _totals(config: RunConfig, row_tokenizer: RowTokenizer) -> list[str]:
    """Return lines of text with the counts of all rows of a corpus, and the first bad rows."""
    counts = ReadCounts()
    rows_seen = set[int]()
    drops_duplicates = row_tokenizer.data.duplicates == "drop"
    # Lengths of the rows that will be in the data set.
    lengths: list[int] = []
    encode, units, workers = plan_encoding(config, row_tokenizer)
    for unit_counts, hashes, unit_lengths in map_tasks(partial(_count_unit, encode), units, workers):
        counts.add(unit_counts)
        # Copies of rows in this unit or in earlier units.
        counts.copies += len(hashes) - len(set(hashes) - rows_seen)
        for row_hash, length in zip(hashes, unit_lengths, strict=True):
            if not (drops_duplicates and row_hash in rows_seen):
                lengths.append(length)
            rows_seen.add(row_hash)
    lines = summarize(counts, drops_duplicates=drops_duplicates)
    lines += _describe_packing(lengths, config, row_tokenizer)
    lines += [f"  bad: {line}" for line in counts.skipped[:MAX_BAD_ROWS]]
    hidden = len(counts.skipped) - MAX_BAD_ROWS
    if hidden > 0:
        command = row_tokenizer.objective.BUILD_COMMAND
        lines.append(f"  and {hidden:,} more; `jingu {command}` with data.on_error=skip lists all of them")
    return lines


def _describe_packing(lengths: list[int], config: RunConfig, row_tokenizer: RowTokenizer) -> list[str]:
    """Return a line about the packed sequences of rows with these lengths; empty if the rows are not packed."""
    if not lengths or row_tokenizer.objective.packing != "packed":
        return []
    sequence_length = config.batch.sequence_length
    sizes = split_long_documents(np.array(lengths), sequence_length)[:, 1]
    num_sequences = int(pack_best_fit(sizes, sequence_length).max()) + 1
    padding = 1 - int(sizes.sum()) / (num_sequences * sequence_length)
    return [
        f"packed: {pluralize(num_sequences, 'sequence')} of {sequence_length:,} tokens, {padding:.1%} of them padding"
    ]


def _count_unit(encode: UnitEncoder, unit: Unit) -> tuple[ReadCounts, list[int], list[int]]:
    """Return the counts of a unit, and for its rows with trained tokens the `copy_hashes` and lengths."""
    counts = ReadCounts()
    hashes: list[int] = []
    lengths: list[int] = []
    for documents in encode(unit, counts):
        hashes += documents.copy_hashes()
        lengths += documents.lengths.tolist()
    return counts, hashes, lengths


def _format_row(row: TokenizedRow, tokenizer: Tokenizer, highlight: Highlight) -> str:
    """Return a row's text with its trained tokens highlighted."""
    # The first token is never predicted, so its weight does not count.
    weights = [0, *row.weights[1:].tolist()]
    tokens = zip(_token_texts(row, tokenizer), weights, strict=True)
    parts = []
    for weight, group in groupby(tokens, key=lambda token: token[1]):
        parts.append(highlight([text for text, _ in group if text], weight))
    return "".join(parts)


def _token_texts(row: TokenizedRow, tokenizer: Tokenizer) -> list[str]:
    """Return the text of each token. If several tokens make up one character, the last one gets it, the others none."""
    texts = []
    pending: list[int] = []
    for token_id in row.ids:
        pending.append(token_id)
        text = tokenizer.decode(pending, keep_special_tokens=True)
        if text.endswith("\ufffd"):
            texts.append("")
        else:
            texts.append(text)
            pending = []
    return texts


def _color(texts: list[str], weight: int) -> str:
    """Highlight for terminals: weight 0 is faint, 1 green, any other yellow; bars separate tokens."""
    if weight == 0:
        style = "2"
    else:
        style = "30;42" if weight == WEIGHT_SCALE else "30;43"
    return f"\x1b[{style}m{'│'.join(texts)}\x1b[0m"


def _bracket(texts: list[str], weight: int) -> str:
    """Highlight for plain text: trained tokens are in brackets, after their weight if it is not 1."""
    text = "│".join(texts)
    if weight == 0:
        return text
    factor = "" if weight == WEIGHT_SCALE else f"{weight / WEIGHT_SCALE:.2g}:"
    return f"⟦{factor}{text}⟧"


def _mark_up(texts: list[str], weight: int) -> str:
    """Highlight for the HTML page (preview.html)."""
    frames = "".join(f"<i>{html.escape(text)}</i>" for text in texts).replace("\n", "<s>↵</s>\n")
    if weight == 0:
        return frames
    if weight == WEIGHT_SCALE:
        return f"<b>{frames}</b>"
    return f'<b class="other" title="{weight / WEIGHT_SCALE:.2g}">{frames}</b>'
