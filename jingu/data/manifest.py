"""manifest.json: what a built data set holds, and what it was built from."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from jingu.errors import JinguError, counted
from jingu.text.record import read_record, write_record

NAME = "manifest.json"
FILES = "files.json"
"""The names of the corpus' files, in their order."""
SplitName = Literal["train", "held_out"]


class Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Shard(Record):
    """One pair of files, NAME.bin and NAME.idx."""

    name: str
    documents: int
    tokens: int
    """Ids in the `.bin`, the ends of the documents included."""
    text_bytes: int
    """UTF-8 bytes of the documents' text."""
    bin_bytes: int
    idx_bytes: int
    bin_xxh3: str
    """xxh3-128 of the file, in hex."""
    idx_xxh3: str


class Split(Record):
    """The shards of one side of the split, in order."""

    shards: list[Shard] = []
    beside: list[Shard] = []
    """For each shard: of supervised data, the weight of each of its ids; else two numbers a document, which of the
    files in files.json it is from, and where it is in it. Data sets of others have none."""

    @property
    def files(self) -> list[Shard]:
        """All of them."""
        return [*self.shards, *self.beside]

    @property
    def documents(self) -> int:
        return sum(shard.documents for shard in self.shards)

    @property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards)

    @property
    def text_bytes(self) -> int:
        return sum(shard.text_bytes for shard in self.shards)


class Manifest(Record):
    """Everything needed to open a data set, or to know that it is the one that settings ask for."""

    format: Literal[1] = 1
    tokenizer: str
    """Fingerprint of the tokenizer."""
    vocabulary: int
    end_id: int
    """The id after every document."""
    dtype: str
    settings: dict[str, Any]
    """The settings and the corpus that decide the content."""
    train: Split
    held_out: Split
    empty: int = 0
    """Documents left out: no text."""
    invalid: int = 0
    """Documents left out: not UTF-8."""
    replaced: int = 0
    """Documents taken with U+FFFD for what was not UTF-8."""
    skipped: int = 0
    """Left out: mistakes, which skipped.txt lists."""
    duplicates: int = 0
    """Documents left out: copies of others."""

    def split(self, name: SplitName) -> Split:
        return self.train if name == "train" else self.held_out

    def save(self, folder: Path) -> None:
        write_record(folder / NAME, self.model_dump(mode="json"))

    @classmethod
    def load(cls, folder: Path) -> Manifest | None:
        """The manifest in `folder`; None where the folder is missing or empty, JinguError where it is another's."""
        record = read_record(folder, NAME, "jingu data build")
        if record is None:
            return None
        try:
            return cls.model_validate(record)
        except ValidationError as error:
            first = error.errors()[0]
            raise JinguError(
                f"the manifest is damaged, or of another version of jingu "
                f"({'.'.join(map(str, first['loc']))}: {first['msg']}).",
                where=folder / NAME,
                fix="Delete the folder and build the data set anew.",
            ) from error


def check_sizes(folder: Path, *splits: Split) -> None:
    """JinguError where a file of the splits is missing or has another size than was written."""
    for shard in (file for split in splits for file in split.files):
        for name, size in ((f"{shard.name}.bin", shard.bin_bytes), (f"{shard.name}.idx", shard.idx_bytes)):
            path = folder / name
            there = path.stat().st_size if path.is_file() else None
            if there != size:
                what = "the file is missing" if there is None else f"the file has {there:,} bytes"
                raise damaged(path, f"{what}; the manifest says {size:,} bytes.")


def damaged(path: Path, what: str) -> JinguError:
    """A file of a built data set that is not as it was written."""
    return JinguError(what, where=path, fix="Copy the file anew, or delete the folder and build the data set anew.")


def print_summary(manifest: Manifest) -> None:
    """What a data set holds, and what was left out of it."""
    for title, split in (("train", manifest.train), ("held out", manifest.held_out)):
        print(
            f"  {title}: {counted(split.documents, 'document')}, {split.tokens:,} tokens,"
            f" {split.text_bytes:,} bytes of text ({split.text_bytes / max(split.tokens, 1):.2f} a token),"
            f" {counted(len(split.shards), 'shard')}"
        )
    print(
        f"  left out: {manifest.empty} empty, {manifest.invalid} not UTF-8;"
        f" taken with bytes replaced: {manifest.replaced}"
    )
    if beginning := manifest.settings.get("beginning"):
        print(f"  every document begins with {', '.join(map(str, beginning))}, as the tokenizer would have it")
    if manifest.duplicates:
        print(f"  left out as copies of others: {counted(manifest.duplicates, 'document')}")
    if manifest.skipped:
        print(f"  left out: {manifest.skipped:,} with mistakes, which skipped.txt lists")
