"""`jingu tune prepare`: rows of instruction data to ids and their weights, once, before any rank starts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from pathlib import Path

import numpy as np

from jingu.config.schema import RunConfig
from jingu.config.sections.data import DataSettings, SupervisedSettings
from jingu.data.build import NOT_OF_THE_BUILD, Work, already_made, hash_of, load_once, make
from jingu.data.indexed import best_dtype
from jingu.data.supervised import NOT_MADE, open_supervised
from jingu.data.writing import Encode, Encoded
from jingu.errors import JinguError, counted
from jingu.runtime.devices import usable_cores
from jingu.text.corpus import checked_corpora, describe_files, find_files, plan_units
from jingu.text.readers import Span, Tally
from jingu.text.tokenizer import Tokenizer
from jingu.tune.rows import BadRow, Row, RowError, bad_row, read_rows, rows_before, stop_at
from jingu.tune.supervise import Supervised, supervise
from jingu.tune.templates import Template, find_template

Unit = tuple[Span, ...]
UNITS_A_WORKER = 2
"""Processes start only where there is work for them: each takes seconds to begin."""
READ, CUT, DIVIDED, KEPT, TOKENS, TRAINED, UNENDED = (
    *("read: ", "cut", "divided", "made", "tokens", "trained tokens"),
    "without an end",
)
LEFT_OUT = "left out: "
"""How counts of a tally begin; a kind of row or a reason follows."""


@dataclass(frozen=True)
class Maker:
    """How rows become ids."""

    data: DataSettings
    tokenizer: Tokenizer
    template: Template
    length: int
    """Ids that a row may have."""

    @property
    def objective(self) -> SupervisedSettings:
        found = self.data.objective
        assert isinstance(found, SupervisedSettings)
        return found

    def rows(self, span: Span, tally: Tally) -> Iterator[tuple[int, Supervised]]:
        """The rows of a span that are trained on, each with its number there (from 1); what becomes of the others is
        counted. Raises JinguError."""

        def bad(found: BadRow) -> None:
            if self.data.on_error == "stop":
                stop_at(found)
            tally.skipped.append(f"{found.file}: {found}")

        special, before = set(self.tokenizer.special_tokens.values()), cache(partial(rows_before, span))
        for number, row in read_rows(span, bad):
            tally.count(f"{READ}{row.kind}")
            try:
                made = self._fitting(row, tally)
            except RowError as error:
                bad(bad_row(span.file.path, before() + number, str(error), row))
                continue
            for one in made:
                trained = one.weights[1:].nonzero()[0]
                if not len(trained):
                    tally.count(f"{LEFT_OUT}without a trained token")
                    continue
                tally.count(KEPT)
                tally.count(TOKENS, len(one.ids))
                tally.count(TRAINED, len(trained))
                if one.ids[trained[-1] + 1] not in special and len(one.ids) < self.length:  # others may have been cut
                    tally.count(UNENDED)
                yield number, one

    def _fitting(self, row: Row, tally: Tally) -> list[Supervised]:
        """A row as ids that fit; several where it is divided, none where it is left out."""
        whole = self._supervised(row)
        if len(whole.ids) <= self.length:
            return [whole]
        if self.objective.longer == "drop":
            tally.count(f"{LEFT_OUT}too long")
            return []
        parts = [whole]
        if self.objective.longer == "split" and row.messages:
            parts = [self._supervised(part) for part in self._divided(row)]
            tally.count(DIVIDED, len(parts) > 1)
        tally.count(CUT, sum(len(part.ids) > self.length for part in parts))
        return [Supervised(part.kind, part.ids[: self.length], part.weights[: self.length]) for part in parts]

    def _supervised(self, row: Row) -> Supervised:
        return supervise(row, self.template, self.tokenizer, self.objective.train_on)

    def _divided(self, row: Row) -> Iterator[Row]:
        """Conversations of as many rounds as fit, each with the system's message; at least one round each."""
        system = row.messages[:1] if row.messages[0].role == "system" else ()
        rest = row.messages[len(system) :]
        while rest:
            # A round ends before the next question.
            ends = [n for n in range(1, len(rest)) if rest[n].role == "user"] + [len(rest)]
            end, *more = ends
            for longer in more:
                if len(self._supervised(replace(row, messages=system + rest[:longer])).ids) > self.length:
                    break
                end = longer
            yield replace(row, messages=system + rest[:end])
            rest = rest[end:]


def told(tally: Tally, *, drops: bool) -> list[str]:
    """What became of the rows, for people."""
    copies = tally.copies

    def several(start: str) -> str:
        found = {what.removeprefix(start): n for what, n in tally.rows.items() if what.startswith(start)}
        if start == LEFT_OUT:
            more = {"bad": len(tally.skipped), "copies": copies if drops else 0}
            found |= {what: n for what, n in more.items() if n}
        return ", ".join(f"{n:,} {what}" for what, n in sorted(found.items(), key=lambda item: -item[1])) or "none"

    count = {what: tally.rows.get(what, 0) for what in (KEPT, TOKENS, TRAINED, CUT, DIVIDED, UNENDED)}
    cut = f"{count[CUT]:,} cut" + (", which teach no end" if count[CUT] else "")
    lines = [
        f"rows: {several(READ)}",
        f"made: {count[KEPT]:,} of {count[TOKENS]:,} tokens, {count[TRAINED]:,} of them trained "
        f"({count[TRAINED] / max(count[TOKENS], 1):.0%})",
        f"too long: {count[DIVIDED]:,} divided, {cut}",
        f"left out: {several(LEFT_OUT)}",
    ]
    if copies and not drops:
        lines.append(f"warning: {copies:,} are copies of earlier ones (data.duplicates=drop leaves them out)")
    if count[UNENDED]:
        lines.append(
            f"warning: in {count[UNENDED]:,} the last trained token is no special one, so that no end is learned"
        )
    return lines


def units_of(data: DataSettings) -> list[Unit]:
    """Units of work of a corpus of rows. Raises JinguError where there are other files."""
    files = find_files(data)
    for file in files:
        if file.kind not in ("lines", "json"):
            fix = "Name .json and .jsonl files in data.input."
            raise JinguError("rows are read from JSON, as a list or a row a line.", where=file.path, fix=fix)
    # Each part of a list is so much of its rows.
    return plan_units([replace(file, splits=file.splits or file.kind == "json") for file in files])


def makers(config: RunConfig) -> Iterator[Maker]:
    """For each corpus of the run, how its rows become ids. Raises JinguError."""
    objective = config.data.objective
    if not isinstance(objective, SupervisedSettings):
        raise JinguError(
            f"the run's data is for {objective.type}, and only supervised data is made of rows.",
            where="data.objective.type",
            fix="Set it to supervised.",
        )
    tokenizer = Tokenizer.load(Path(config.tokenizer.path))
    for source in checked_corpora(config.data):
        if source.input or not config.data.sources:
            yield make_maker(config.data.of(source), tokenizer, config.batch.sequence_length + 1)


def make_maker(data: DataSettings, tokenizer: Tokenizer, length: int) -> Maker:
    """A maker with the template that the settings choose. Raises JinguError."""
    assert isinstance(data.objective, SupervisedSettings)
    template = find_template(data.objective.template, tokenizer, obey_special=data.objective.obey_special)
    return Maker(data, tokenizer, template, length)


def prepare(config: RunConfig) -> None:
    """Prepare the data set of each corpus of the run in its `path`, unless the very same is there already."""
    for maker in makers(config):
        data, path = maker.data, Path(maker.data.path)
        settings = data.model_dump(mode="json", exclude=NOT_OF_THE_BUILD)
        settings |= {
            "objective": maker.objective.model_dump(mode="json", exclude=NOT_MADE),
            "corpus": describe_files(find_files(data)),
            "tokenizer": maker.tokenizer.fingerprint(),
            "sequence_length": config.batch.sequence_length,
        }
        if not already_made(path, settings):
            _prepare(config, maker, settings)


def _prepare(config: RunConfig, maker: Maker, settings: dict[str, object]) -> None:
    data, path = maker.data, Path(maker.data.path)
    encode, units, workers = encoder(config, maker)
    sizes = [sum(span.end - span.start for span in unit) for unit in units]
    began = time.monotonic()
    manifest, tally = make(Work(data, maker.tokenizer, settings, encode, units, sizes, workers))
    print(f"tune: prepared in {path} in {time.monotonic() - began:.1f} s by {counted(workers, 'process')}.")
    for line in told(tally, drops=data.duplicates == "drop"):
        print(f"  {line}")
    length = config.batch.sequence_length
    sequences = open_supervised(path, "train", maker.objective, config.batch, config.seed)
    full = (manifest.train.tokens - manifest.train.documents) / (len(sequences) * length)
    print(
        f"  train: {counted(manifest.train.documents, 'row')} in {counted(len(sequences), 'sequence')}, {full:.1%} full"
    )
    print(f"  held out: {counted(manifest.held_out.documents, 'row')}")


def encoder(config: RunConfig, maker: Maker) -> tuple[Encode, list[Unit], int]:
    """What encodes a unit of a corpus; the units; and how many processes should work at them."""
    data, tokenizer = maker.data, maker.tokenizer
    units = units_of(data)
    most = usable_cores() if data.workers == "auto" else data.workers
    workers = max(1, min(most, len(units) // UNITS_A_WORKER))
    encode = partial(_encode, Path(config.tokenizer.path), tokenizer.fingerprint(), data, maker.length)
    return encode, units, workers


@lru_cache(maxsize=1)
def _maker(tokenizer: Path, fingerprint: str, data: str, length: int) -> Maker:
    """A process's maker, made at its first unit."""
    return make_maker(DataSettings.model_validate_json(data), load_once(tokenizer, fingerprint), length)


def _encode(
    tokenizer: Path, fingerprint: str, data: DataSettings, length: int, unit: Unit, tally: Tally
) -> Iterator[Encoded]:
    """The rows of a unit as ids and weights."""
    maker = _maker(tokenizer, fingerprint, data.model_dump_json(), length)
    dtype = best_dtype(maker.tokenizer.vocabulary)
    ids, weights, hashes = [], [], []
    rows = (row for span in unit for _, row in maker.rows(span, tally))
    for row in rows:  # lists of numbers are large, and let go of at once
        ids.append(np.array(row.ids, dtype))
        weights.append(row.weights)
        hashes.append(hash_of(ids[-1].tobytes()))
    tally.documents = len(ids)
    if ids:
        yield Encoded(
            ids=np.concatenate(ids),
            lengths=np.array([len(each) for each in ids]),
            text_bytes=np.zeros(len(ids), np.int64),
            hashes=np.array(hashes, np.uint64),
            beside=np.concatenate(weights),
        )
