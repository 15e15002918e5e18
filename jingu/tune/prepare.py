"""`jingu tune prepare`: rows of instruction data to packed sequences, once, before any rank starts."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from jingu.config.schema import DataSettings, RunConfig, SupervisedSettings
from jingu.data.build import NOT_OF_THE_BUILD, refuse_other
from jingu.data.indexed import best_dtype
from jingu.data.manifest import Manifest, Split, SplitName, print_summary
from jingu.data.supervised import open_supervised, write_supervised
from jingu.data.writing import SKIPPED
from jingu.errors import JinguError
from jingu.runtime.files import new_folder
from jingu.text.corpus import checked_corpora, describe_files, find_files
from jingu.text.tokenizer import Tokenizer
from jingu.tune.rows import BadRow, Row, RowError, bad_row, read_rows, stop_at
from jingu.tune.supervise import Supervised, supervise
from jingu.tune.templates import Template, find_template


@dataclass
class Tally:
    """What became of the rows."""

    kinds: Counter[str] = field(default_factory=Counter)
    rows: int = 0
    """Rows kept; of a divided one, each part."""
    tokens: int = 0
    trained: int = 0
    cut: int = 0
    """Rows whose end was cut."""
    divided: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    """Rows that are not kept, by the reason."""
    unended: int = 0
    """Rows whose last trained token is no special one: nothing teaches the model to stop."""
    copies: int = 0
    bad: list[BadRow] = field(default_factory=list)

    def lines(self) -> list[str]:
        """For people."""
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in self.kinds.most_common())
        share = self.trained / max(self.tokens, 1)
        lines = [
            f"rows read: {self.kinds.total():,} ({kinds})",
            f"kept: {self.rows:,} of {self.tokens:,} tokens, {self.trained:,} of them trained ({share:.0%})",
            f"too long: {self.cut:,} cut, {self.divided:,} divided",
        ]
        left_out = self.left_out + Counter({"bad": len(self.bad)} if self.bad else {})
        lines.append("left out: " + (", ".join(f"{n:,} {why}" for why, n in left_out.items()) or "none"))
        if self.copies:
            lines.append(f"warning: {self.copies:,} are copies of earlier ones (data.duplicates=drop leaves them out)")
        if self.unended:
            lines.append(
                f"warning: in {self.unended:,} the last trained token is no special one, so that no end is learned"
            )
        return lines


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

    def rows(self, tally: Tally) -> Iterator[tuple[Path, int, Supervised]]:
        """Rows that are trained on, each with its file and number. Raises JinguError."""
        bad = tally.bad.append if self.data.on_error == "skip" else stop_at
        special = set(self.tokenizer.special_tokens.values())
        seen: set[bytes] = set()
        for file, number, row in read_rows(_files(self.data), bad):
            tally.kinds[row.kind] += 1
            try:
                made = self._fitting(row, tally)
            except RowError as error:
                bad(bad_row(file, number, str(error), row))
                continue
            for one in made:
                if not any(one.trained[1:]):
                    tally.left_out["without a trained token"] += 1
                    continue
                key = _hash(one.ids)
                if key in seen:
                    tally.copies += 1
                    if self.data.duplicates == "drop":
                        tally.left_out["copies"] += 1
                        continue
                seen.add(key)
                tally.rows += 1
                tally.tokens += len(one.ids)
                tally.trained += sum(one.trained[1:])
                last = len(one.ids) - 1 - one.trained[::-1].index(True)
                tally.unended += one.ids[last] not in special
                yield file, number, one

    def _fitting(self, row: Row, tally: Tally) -> list[Supervised]:
        """A row as ids that fit; several where it is divided, none where it is left out."""
        whole = self._supervised(row)
        if len(whole.ids) <= self.length:
            return [whole]
        if self.objective.longer == "drop":
            tally.left_out["too long"] += 1
            return []
        parts = [whole]
        if self.objective.longer == "split" and row.messages:
            parts = [self._supervised(part) for part in self._divided(row)]
            tally.divided += len(parts) > 1
        tally.cut += sum(len(part.ids) > self.length for part in parts)
        return [replace(part, ids=part.ids[: self.length], trained=part.trained[: self.length]) for part in parts]

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


def _files(data: DataSettings) -> list[Path]:
    files = [Path(file.path) for file in find_files(data)]
    for file in files:
        if file.suffix not in (".json", ".jsonl"):
            raise JinguError(
                "rows are read from .json and .jsonl files.", where=file, fix="Name such files in data.input."
            )
    return files


def _hash(ids: list[int]) -> bytes:
    return hashlib.blake2b(np.array(ids, "<i4").tobytes(), digest_size=8, key=b"jingu held out").digest()


def makers(config: RunConfig) -> Iterator[tuple[DataSettings, Maker]]:
    """For each corpus of the run, its settings and how its rows become ids. Raises JinguError."""
    objective = config.data.objective
    if not isinstance(objective, SupervisedSettings):
        raise JinguError(
            f"the run's data is for {objective.type}, and only supervised data is made of rows.",
            where="data.objective.type",
            fix="Set it to supervised.",
        )
    tokenizer = Tokenizer.load(Path(config.tokenizer.path))
    template = find_template(objective.template, tokenizer, obey_special=objective.obey_special)
    for source in checked_corpora(config.data):
        if source.input or not config.data.sources:
            data = config.data.of(source)
            yield data, Maker(data, tokenizer, template, config.batch.sequence_length + 1)


def prepare(config: RunConfig) -> None:
    """Prepare the data set of each corpus of the run in its `path`, unless the very same is there already."""
    for data, maker in makers(config):
        path = Path(data.path)
        settings = data.model_dump(mode="json", exclude=NOT_OF_THE_BUILD - {"objective"})
        settings |= {
            "corpus": describe_files(find_files(data)),
            "tokenizer": maker.tokenizer.fingerprint(),
            "sequence_length": config.batch.sequence_length,
        }
        if (old := Manifest.load(path)) is not None:
            refuse_other(path, old, settings)
            print(f"tune: already prepared in {path}.")
            print_summary(old)
            continue
        tally = Tally()
        with new_folder(path) as place:
            manifest = _write(place, maker, tally, settings)
            manifest.save(place)
            if tally.bad:
                report = "".join(f"{bad.file}: {bad}\n" for bad in tally.bad)
                (place / SKIPPED).write_text(report, encoding="utf-8")
        print(f"tune: prepared in {path}.")
        for line in tally.lines():
            print(f"  {line}")
        objective, length = maker.objective, config.batch.sequence_length
        packed = open_supervised(path, "train", objective, length, config.seed)
        full = (manifest.train.tokens - manifest.train.documents) / (len(packed) * length)
        print(f"  {manifest.train.documents:,} rows are packed into {len(packed):,} sequences, {full:.1%} full")
        print(f"  {manifest.held_out.documents:,} rows are held out")


def _write(place: Path, maker: Maker, tally: Tally, settings: dict[str, object]) -> Manifest:
    """Both splits, a row on one side by a hash of its ids."""
    dtype = best_dtype(maker.tokenizer.vocabulary)
    rows = [
        (_hash(made.ids), np.array(made.ids, dtype), np.array(made.trained, np.uint8))
        for _, _, made in maker.rows(tally)
    ]
    if not rows:
        raise JinguError("no row is left to train on.", where="data.input", fix="`jingu tune preview` tells why.")
    ordered = sorted(key for key, _, _ in rows)
    limit = int(maker.data.held_out * 2**64).to_bytes(9)[-8:] if maker.data.held_out else b""
    if maker.data.held_out and not ordered[0] < limit <= ordered[-1]:  # one side would be empty
        limit = ordered[1] if len(set(ordered)) > 1 else b""
    splits: dict[SplitName, Split] = {"train": Split(), "held_out": Split()}
    for name in splits:
        chosen = [row for row in rows if (row[0] < limit) == (name == "held_out")]
        if chosen:
            ids, masks = write_supervised(place, name, dtype, [row[1] for row in chosen], [row[2] for row in chosen])
            splits[name] = Split(shards=[ids], beside=[masks])
    return Manifest(
        tokenizer=maker.tokenizer.fingerprint(),
        vocabulary=maker.tokenizer.vocabulary,
        end_id=maker.tokenizer.end_id,
        dtype=dtype,
        settings=settings,
        train=splits["train"],
        held_out=splits["held_out"],
        empty=0,
        invalid=0,
        replaced=0,
        skipped=len(tally.bad),
    )
