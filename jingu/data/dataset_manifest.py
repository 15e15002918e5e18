"""manifest.json: the contents of a built data set, and the settings and corpus that it was built from."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

import xxhash
from pydantic import BaseModel, ConfigDict, ValidationError

from jingu.errors import JinguError, pluralize
from jingu.text.build_record import read_record, write_record

MANIFEST_NAME = "manifest.json"
# The names of the corpus files, in their order.
CORPUS_FILES_NAME = "files.json"
# Number and size of the blocks that `sample_checksum` reads.
SAMPLE_BLOCKS = 16
SAMPLE_BLOCK_BYTES = 64 << 10
SplitName = Literal["train", "validation"]


class ManifestModel(BaseModel):
    """A part of the manifest; unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class ShardEntry(ManifestModel):
    """One pair of files, NAME.bin and NAME.idx, with their sizes in bytes and their xxh3-128 in hex."""

    name: str
    documents: int
    tokens: int  # ids in the .bin, including an EOS for each document
    text_bytes: int  # UTF-8 bytes of the documents' text
    bin_bytes: int
    idx_bytes: int
    bin_xxh3: str
    idx_xxh3: str
    # What `sample_checksum` returns; empty in data sets of older versions.
    bin_sample_xxh3: str = ""
    idx_sample_xxh3: str = ""


class SplitEntry(ManifestModel):
    """The shards of a split, in order."""

    shards: list[ShardEntry] = []
    # One sidecar for each shard. For supervised data it has the loss weight of each id. Otherwise it has two numbers
    # for each document: the index of its file in files.json, and its position in that file. Data sets that other tools
    # wrote have no sidecars.
    sidecars: list[ShardEntry] = []

    @property
    def files(self) -> list[ShardEntry]:
        """Shards and sidecars."""
        return [*self.shards, *self.sidecars]

    @property
    def documents(self) -> int:
        return sum(shard.documents for shard in self.shards)

    @property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards)

    @property
    def text_bytes(self) -> int:
        return sum(shard.text_bytes for shard in self.shards)


class DatasetManifest(ManifestModel):
    """Everything needed to open a data set, and to check that it is the one that the settings describe."""

    format: Literal[1] = 1
    tokenizer: str  # fingerprint of the tokenizer
    vocab_size: int
    eos_token_id: int  # the id after every document
    dtype: str
    settings: dict[str, Any]  # the settings and the corpus that determine the content
    train: SplitEntry
    validation: SplitEntry
    # Numbers of documents without text, documents that are not UTF-8, documents read with U+FFFD in place of invalid
    # UTF-8, documents with errors (skipped.txt lists them), and duplicates. All but `replaced` are left out.
    empty: int = 0
    invalid: int = 0
    replaced: int = 0
    skipped: int = 0
    duplicates: int = 0

    def split(self, name: SplitName) -> SplitEntry:
        """Return a split by its name."""
        return self.train if name == "train" else self.validation

    def save(self, folder: Path) -> None:
        """Write manifest.json into `folder`."""
        write_record(folder / MANIFEST_NAME, self.model_dump(mode="json"))

    @classmethod
    def load(cls, folder: Path) -> DatasetManifest | None:
        """Read manifest.json in `folder`; None if the folder is missing or empty.

        Raises:
            JinguError: the folder contains something else, or the manifest is damaged.
        """
        record = read_record(folder, MANIFEST_NAME, "jingu data build")
        if record is None:
            return None
        try:
            return cls.model_validate(record)
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(map(str, first["loc"]))
            what = f"the manifest is damaged, or of another version of jingu ({key}: {first['msg']})."
            fix = "Delete the folder and build the data set again."
            raise JinguError(what, where=folder / MANIFEST_NAME, fix=fix) from error


def sample_checksum(path: Path) -> str:
    """Return the checksum of evenly spaced blocks of a file; a file of up to 1 MiB is read completely."""
    digest = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as stream:
        last_start = max(os.fstat(stream.fileno()).st_size - SAMPLE_BLOCK_BYTES, 0)
        for number in range(SAMPLE_BLOCKS):
            stream.seek(number * last_start // (SAMPLE_BLOCKS - 1))
            digest.update(stream.read(SAMPLE_BLOCK_BYTES))
    return digest.hexdigest()


def check_files(folder: Path, *splits: SplitEntry) -> None:
    """Raise JinguError if a file of the splits is missing, or differs from the manifest in its size or a sample."""
    for entry in (entry for split in splits for entry in split.files):
        for name, size, sample in (
            (f"{entry.name}.bin", entry.bin_bytes, entry.bin_sample_xxh3),
            (f"{entry.name}.idx", entry.idx_bytes, entry.idx_sample_xxh3),
        ):
            path = folder / name
            if not path.is_file():
                raise damaged_dataset_error(path, f"the file is missing; the manifest says {size:,} bytes.")
            actual = path.stat().st_size
            if actual != size:
                what = f"the file has {actual:,} bytes; the manifest says {size:,} bytes."
                raise damaged_dataset_error(path, what)
            if sample and sample_checksum(path) != sample:
                raise damaged_dataset_error(path, "the content of the file does not match its checksum.")


def damaged_dataset_error(path: Path, what: str) -> JinguError:
    """Return the error for a file of a data set that is not as it was written."""
    return JinguError(what, where=path, fix="Copy the file again, or delete the folder and build the data set again.")


def print_summary(manifest: DatasetManifest) -> None:
    """Print the contents of a data set, and how many documents were left out."""
    for title, split in (("train", manifest.train), ("validation", manifest.validation)):
        print(
            f"  {title}: {pluralize(split.documents, 'document')}, {split.tokens:,} tokens,"
            f" {split.text_bytes:,} bytes of text ({split.text_bytes / max(split.tokens, 1):.2f} per token),"
            f" {pluralize(len(split.shards), 'shard')}"
        )
    print(
        f"  left out: {manifest.empty} empty, {manifest.invalid} not UTF-8;"
        f" read with bytes replaced: {manifest.replaced}"
    )
    bos_ids = manifest.settings.get("bos_ids")
    if bos_ids:
        print(f"  every document begins with {', '.join(map(str, bos_ids))}, as the tokenizer's template says")
    if manifest.duplicates:
        print(f"  left out as copies of others: {pluralize(manifest.duplicates, 'document')}")
    if manifest.skipped:
        print(f"  left out because of errors: {manifest.skipped:,}, listed in skipped.txt")
