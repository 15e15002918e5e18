"""`jingu tune prepare`: tokenize rows of instruction data once, before any rank starts."""

from __future__ import annotations

import difflib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jingu.chat.messages import ConversationError, Row
from jingu.chat.templates import ChatTemplate
from jingu.chat.tokenization import LossOn, TokenizedRow, tokenize_row, tokenize_turns
from jingu.config.schema import RunConfig
from jingu.config.sections.data import DataSettings, RowSettings, SupervisedSettings
from jingu.data import build
from jingu.data.indexed_dataset import best_dtype
from jingu.data.open_sources import open_supervised
from jingu.data.shard_writer import EncodedDocuments, UnitEncoder, hash_document
from jingu.errors import JinguError, join_words, pluralize
from jingu.evaluate.task_mixture import render_mixture
from jingu.runtime.gpus import num_usable_cores
from jingu.text.corpus import find_files, plan_units, validate_sources
from jingu.text.document_reader import ReadCounts, Span
from jingu.text.identity import Identity, hash_value, identify_rows, load_inputs
from jingu.text.tokenizer import Tokenizer
from jingu.training.input_checks import load_training_template
from jingu.tune.row_fields import KNOWN_NAMES, is_missing
from jingu.tune.row_formats import parse_row
from jingu.tune.rows import BadRow, count_rows_before, raise_bad_row, read_rows

# The parts of files that one task of a process encodes.
Unit = tuple[Span, ...]

# Starting a process takes seconds, so it pays off only with several units per process.
MIN_UNITS_PER_WORKER = 2
# Maximum number of fields without effect to print.
MAX_CARRIED = 20

# Keys of `ReadCounts.rows`. READ_PREFIX is followed by the format of a row, CARRIED_PREFIX by the name of a field that
# has no effect, DROPPED_PREFIX by the reason to drop a row.
READ_PREFIX = "read: "
CARRIED_PREFIX = "carried: "
DROPPED_PREFIX = "dropped: "
TOKENIZED = "tokenized"
TOKENS = "tokens"
TRAINED_TOKENS = "trained tokens"
TRUNCATED = "truncated"
SPLIT = "split"
# Rows with special tokens that are tokenized as text.
MENTIONS_SPECIAL = "with special tokens as text"
WITHOUT_END = "without an end token"


@dataclass(frozen=True)
class RowTokenizer:
    """Tokenizes the rows of one corpus.

    Attributes:
        data: settings of the corpus.
        objective: the objective among these settings.
        max_length: maximum number of token ids per row.
        mixture: receipt of the mixture of tasks that the rows come from; None if they do not come from one.
    """

    data: DataSettings
    objective: RowSettings
    tokenizer: Tokenizer
    template: ChatTemplate
    max_length: int
    mixture: dict[str, Any] | None = None

    @property
    def contents(self) -> str:
        """A hash of what the tokenizer and the template have read from files."""
        return hash_value([self.tokenizer.identity(), *self.template.sources])

    def tokenize_span(self, span: Span, counts: ReadCounts) -> Iterator[tuple[int, TokenizedRow]]:
        """Yield the rows of a span that have trained tokens, each with its number in the span (from 1).

        A row that is split yields several parts with the same number.

        Args:
            counts: receives the counts of all rows and tokens, and the bad rows.

        Raises:
            JinguError: a row cannot be used and `data.on_error` is `stop`.
        """

        def handle(bad: BadRow) -> None:
            if self.data.on_error == "stop":
                raise_bad_row(bad)
            counts.skipped.append(f"{bad.file}: {bad}")

        special_ids = set(self.tokenizer.special_tokens.values())
        rows_before = cache(partial(count_rows_before, span))
        for number, row in read_rows(span, handle, parse=self.parse):
            # 1. Tokenize the row. One that cannot be tokenized is a bad row.
            counts.count(f"{READ_PREFIX}{row.kind}")
            for name in row.carried:
                counts.count(f"{CARRIED_PREFIX}{name}")
            try:
                parts = self.tokenize(row, counts)
            except ConversationError as error:
                start = row.messages[0].content if row.messages else row.segments[0][0]
                handle(BadRow(span.file.path, rows_before() + number, str(error), start))
                continue
            # 2. Count and yield its parts, except those without a trained token.
            if any(part.mentions_special for part in parts):
                counts.count(MENTIONS_SPECIAL)
            for part in parts:
                # The first token is never predicted, so its weight does not count.
                trained_positions = part.weights[1:].nonzero()[0] + 1
                if not len(trained_positions):
                    counts.count(f"{DROPPED_PREFIX}without a trained token")
                    continue
                counts.count(TOKENIZED)
                counts.count(TOKENS, len(part.ids))
                counts.count(TRAINED_TOKENS, len(trained_positions))
                # A row of maximum length may have lost its end token to truncation, which `tokenize` counts.
                if part.ids[trained_positions[-1]] not in special_ids and len(part.ids) < self.max_length:
                    counts.count(WITHOUT_END)
                yield number, part

    def parse(self, value: Any) -> Any:
        """Convert the JSON value of a row. Raises ConversationError if that is not possible."""
        return parse_row(value, self.objective.columns)

    def tokenize(self, row: Any, counts: ReadCounts) -> Sequence[TokenizedRow]:
        """Tokenize a row so that it fits `max_length`.

        Returns:
            One row; several if the row is split, or if its answers are trained in texts of their own; none if it is
            dropped.

        Raises:
            ConversationError: the row cannot be used.
        """
        assert isinstance(self.objective, SupervisedSettings)
        parts = self._tokenize(row)
        if all(len(part.ids) <= self.max_length for part in parts):
            return parts
        if self.objective.overflow == "drop":
            fitting = [part for part in parts if len(part.ids) <= self.max_length]
            counts.count(f"{DROPPED_PREFIX}too long", len(parts) - len(fitting))
            return fitting
        if self.objective.overflow == "split" and row.messages:
            conversations = list(self._split(row))
            parts = [part for conversation in conversations for part in self._tokenize(conversation)]
            counts.count(SPLIT, len(conversations) > 1)
        counts.count(TRUNCATED, sum(len(part.ids) > self.max_length for part in parts))
        end = self.max_length
        return [replace(part, ids=part.ids[:end], weights=part.weights[:end]) for part in parts]

    def _tokenize(self, row: Row) -> list[TokenizedRow]:
        assert isinstance(self.objective, SupervisedSettings)
        parses = self.objective.parse_special_tokens
        return tokenize_turns(
            row,
            self.template,
            self.tokenizer,
            self.objective.loss_on,
            self.objective.turns,
            parse_special_tokens=parses,
        )

    def tokenize_conversation(self, row: Row, loss_on: LossOn) -> TokenizedRow:
        """Return the ids of a row in one text, of any length. Raises ConversationError if the row cannot be used."""
        parses = self.objective.parse_special_tokens
        return tokenize_row(row, self.template, self.tokenizer, loss_on, parse_special_tokens=parses)

    def _split(self, row: Row) -> Iterator[Row]:
        """Yield parts of a conversation, each with the system message and as many rounds as fit, but at least one.

        A round is a question with everything up to the next question.
        """
        system = row.messages[:1] if row.messages[0].role == "system" else ()
        remaining_messages = row.messages[len(system) :]
        while remaining_messages:
            # Take one round, then further rounds while the part fits.
            ends = [index for index in range(1, len(remaining_messages)) if remaining_messages[index].role == "user"]
            end, *longer_ends = [*ends, len(remaining_messages)]
            for longer_end in longer_ends:
                candidate = replace(row, messages=system + remaining_messages[:longer_end])
                if any(len(part.ids) > self.max_length for part in self._tokenize(candidate)):
                    break
                end = longer_end
            yield replace(row, messages=system + remaining_messages[:end])
            remaining_messages = remaining_messages[end:]


class RowKind(NamedTuple):
    """A kind of rows: supervised, or preference rows.

    Attributes:
        objective: class of the objective that trains on these rows.
        row_tokenizer: class that tokenizes these rows.
    """

    objective: type[RowSettings]
    row_tokenizer: type[RowTokenizer]


SUPERVISED = RowKind(SupervisedSettings, RowTokenizer)


def build_row_tokenizer(kind: RowKind, data: DataSettings, tokenizer: Tokenizer, max_length: int) -> RowTokenizer:
    """Return a row tokenizer with the chat template of the settings. Raises JinguError if it cannot be loaded."""
    objective = data.objective
    assert isinstance(objective, RowSettings)
    return kind.row_tokenizer(data, objective, tokenizer, load_training_template(objective, tokenizer), max_length)


def row_tokenizers(config: RunConfig, kind: RowKind = SUPERVISED) -> Iterator[RowTokenizer]:
    """Yield a row tokenizer for each corpus of the run. A mixture of tasks is rendered to rows first.

    Raises:
        JinguError: the run's data is not of this kind, or a template cannot be loaded.
    """
    objective = config.data.objective
    if not isinstance(objective, kind.objective):
        name = kind.objective.model_fields["type"].default
        raise JinguError(
            f"this command is for {name} data, but this run's objective is {objective.type}.",
            where="data.objective.type",
            fix=f"Set it to {name}.",
        )
    tokenizer = Tokenizer.load(Path(config.tokenizer.path))
    for source in validate_sources(config.data):
        if source.input or not config.data.sources:
            data, mixture = render_mixture(config.data.for_source(source))
            # A row may have one id more than a sequence has tokens, because its last id is only a label.
            rows = build_row_tokenizer(kind, data, tokenizer, config.batch.sequence_length + 1)
            yield replace(rows, mixture=mixture)


def check_columns(corpora: Sequence[RowTokenizer]) -> None:
    """Check the setting `columns`: every name on the left is one of jingu's, and some row has the field on the right.

    Reads the corpora up to the first row with the last of these fields.

    Raises:
        JinguError: a name is unknown, or no row has a value in its field.
    """
    if not corpora:
        return
    columns = corpora[0].objective.columns
    where = "data.objective.columns"
    for name, column in columns.items():
        if column and name not in KNOWN_NAMES:
            similar = difflib.get_close_matches(name, KNOWN_NAMES, 1) or ["messages, instruction, output or system"]
            what = f"{name} is not a name that jingu gives to a field of rows."
            raise JinguError(what, where=where, fix=f"Use one such as {similar[0]}, followed by the name in the rows.")
    # An empty name leaves out a field, whether rows have it or not.
    missing = set(columns.values()) - {""}
    names: dict[str, None] = {}
    spans = (span for rows in corpora for unit in plan_row_units(rows.data) for span in unit)
    while missing and (span := next(spans, None)) is not None:
        for _, value in read_rows(span, lambda bad: None, parse=lambda value: value):
            if isinstance(value, dict):
                present = {name: None for name, item in value.items() if not is_missing(item)}
                names |= present
                missing -= present.keys()
            if not missing:
                break
    if missing:
        raise JinguError(
            f"no row has a value in the field {join_words(sorted(missing))}; rows have the fields "
            f"{', '.join(sorted(names)[:MAX_CARRIED]) or 'none'}.",
            where=where,
            fix="Correct the name, or leave it out.",
        )


def plan_row_units(data: DataSettings) -> list[Unit]:
    """Divide a corpus of rows into units of work. Raises JinguError for files that are neither JSON Lines nor JSON."""
    files = find_files(data)
    for file in files:
        if file.kind not in ("lines", "json"):
            raise JinguError(
                "rows are read from JSON Lines, or from JSON that holds a list.",
                where=file.path,
                fix="Name .json and .jsonl files in data.input.",
            )
    # A JSON list can be split too: a span of the file stands for the same fraction of its rows.
    return plan_units([replace(file, splits=file.splits or file.kind == "json") for file in files])


def prepare(config: RunConfig, kind: RowKind = SUPERVISED) -> None:
    """Build the data set of each corpus of the run in its `path`, unless the same data set is already there.

    Raises:
        JinguError: the settings or the files are not usable, or `path` holds another data set.
    """
    all_rows = list(row_tokenizers(config, kind))
    check_columns(all_rows)
    for rows in all_rows:
        path = Path(rows.data.path)
        identity = identify_rows(
            rows.data,
            rows.tokenizer,
            find_files(rows.data),
            load_inputs(path),
            rows.template.sources,
            config.batch.sequence_length,
            rows.mixture,
        )
        if not build.is_already_built(path, identity):
            _build(config, rows, identity)


def _build(config: RunConfig, rows: RowTokenizer, identity: Identity) -> None:
    """Build the data set of one corpus, and print the counts of its rows.

    Args:
        identity: all that the content depends on, to store with the data set.
    """
    path = Path(rows.data.path)
    command, _ = rows.objective.BUILD_COMMAND.split()
    encode, units, workers = plan_encoding(config, rows)
    sizes = [sum(span.end - span.start for span in unit) for unit in units]
    start = time.monotonic()
    manifest, counts = build.run_build(
        build.BuildJob(rows.data, rows.tokenizer, identity, encode, units, sizes, workers)
    )
    print(f"{command}: prepared in {path} in {time.monotonic() - start:.1f} s by {pluralize(workers, 'process')}.")
    for line in summarize(counts, drops_duplicates=rows.data.duplicates == "drop"):
        print(f"  {line}")
    sequences = open_supervised(path, "train", rows.objective, config.batch, config.seed)
    # The last id of each row is only a label, so it takes no place in a sequence.
    tokens = manifest.train.tokens - manifest.train.documents
    fill = tokens / (len(sequences) * config.batch.sequence_length)
    documents = pluralize(manifest.train.documents, "row")
    print(f"  train: {documents} in {pluralize(len(sequences), 'sequence')}, {fill:.1%} full")
    print(f"  validation: {pluralize(manifest.validation.documents, 'row')}")


def summarize(counts: ReadCounts, *, drops_duplicates: bool) -> list[str]:
    """Return lines of text about the rows that were read, tokenized, split, truncated and dropped."""

    def list_counts(prefix: str, more: dict[str, int], limit: int | None = None) -> str:
        """Return the counts whose keys have a prefix, and further ones, by descending number; at most `limit`."""
        numbers = {key.removeprefix(prefix): n for key, n in counts.rows.items() if key.startswith(prefix)} | more
        sorted_items = [item for item in sorted(numbers.items(), key=lambda item: -item[1]) if item[1]]
        hidden = ["…"] if limit is not None and len(sorted_items) > limit else []
        return ", ".join([f"{number:,} {name}" for name, number in sorted_items[:limit]] + hidden) or "none"

    rows = counts.rows.get(TOKENIZED, 0)
    tokens = counts.rows.get(TOKENS, 0)
    num_trained = counts.rows.get(TRAINED_TOKENS, 0)
    num_truncated = counts.rows.get(TRUNCATED, 0)
    endless = counts.rows.get(WITHOUT_END, 0)
    mentions = counts.rows.get(MENTIONS_SPECIAL, 0)
    note = ", so the model does not learn where they end" if num_truncated else ""
    more = {"bad": len(counts.skipped), "duplicates": counts.copies if drops_duplicates else 0}
    lines = [
        f"read: {list_counts(READ_PREFIX, {})}",
        f"tokenized: {rows:,} with {tokens:,} tokens, {num_trained:,} of them trained"
        f" ({num_trained / max(tokens, 1):.0%})",
        f"too long: {counts.rows.get(SPLIT, 0):,} split, {num_truncated:,} truncated{note}",
        f"dropped: {list_counts(DROPPED_PREFIX, more)}",
        f"fields without effect: {list_counts(CARRIED_PREFIX, {}, MAX_CARRIED)}",
    ]
    if counts.copies and not drops_duplicates:
        lines.append(f"warning: {counts.copies:,} are duplicates (data.duplicates=drop removes them)")
    if endless:
        lines.append(
            f"warning: {endless:,} do not end in a special token, so the model does not learn to end its answers"
        )
    if mentions:
        lines.append(
            f"warning: {mentions:,} contain special tokens, which are tokenized as text (if a template wrote them, set "
            "data.objective.parse_special_tokens=true)"
        )
    return lines


def plan_encoding(config: RunConfig, rows: RowTokenizer) -> tuple[UnitEncoder, list[Unit], int]:
    """Return the function that encodes a unit of a corpus, the units, and the number of processes to use."""
    units = plan_row_units(rows.data)
    limit = num_usable_cores() if rows.data.num_workers == "auto" else rows.data.num_workers
    workers = max(1, min(limit, len(units) // MIN_UNITS_PER_WORKER))
    tokenizer_path = Path(config.tokenizer.path)
    kind = RowKind(type(rows.objective), type(rows))
    encode = partial(_encode_unit, kind, tokenizer_path, rows.contents, rows.data, rows.max_length)
    return encode, units, workers


@lru_cache(maxsize=1)
def _worker_row_tokenizer(kind: RowKind, tokenizer: Path, contents: str, data: str, max_length: int) -> RowTokenizer:
    """Return the row tokenizer of this process, created with the first unit.

    Args:
        contents: `RowTokenizer.contents`.
        data: the data settings as JSON, because arguments of a cached function must be hashable.
    """
    settings = DataSettings.model_validate_json(data)
    rows = build_row_tokenizer(kind, settings, Tokenizer.load(tokenizer), max_length)
    if rows.contents != contents:
        what = "the tokenizer or the chat template changed while the rows were read."
        raise JinguError(what, where=tokenizer, fix="Run the command again.")
    return rows


def _encode_unit(
    kind: RowKind,
    tokenizer: Path,
    contents: str,
    data: DataSettings,
    max_length: int,
    unit: Unit,
    counts: ReadCounts,
) -> Iterator[EncodedDocuments]:
    """Yield all rows of a unit as one object: ids, loss weights, and hashes for the validation split."""
    rows = _worker_row_tokenizer(kind, tokenizer, contents, data.model_dump_json(), max_length)
    dtype = best_dtype(rows.tokenizer.vocab_size)
    ids = []
    sidecars = []
    hashes = []
    for span in unit:
        for _, row in rows.tokenize_span(span, counts):
            # Convert each row immediately: a list of Python integers takes far more memory.
            ids.append(np.array(row.ids, dtype))
            sidecars.append(row.sidecar)
            split_ids = ids[-1] if row.split_ids is row.ids else np.array(row.split_ids, dtype)
            hashes.append(hash_document(split_ids.tobytes()))
    counts.documents = len(ids)
    if ids:
        yield EncodedDocuments(
            ids=np.concatenate(ids),
            lengths=np.array([len(row_ids) for row_ids in ids]),
            text_bytes=np.zeros(len(ids), np.int64),
            hashes=np.array(hashes, np.uint64),
            sidecar=np.concatenate(sidecars),
        )
