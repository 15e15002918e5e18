"""`jingu data inspect` and `jingu data preview`: what a data set holds, and what a step of a run is trained on."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import xxhash

from jingu.config.schema import RunConfig
from jingu.data.dataset import TokenDataset, check_tokenizer, open_dataset
from jingu.data.manifest import Manifest, check_sizes, damaged, print_summary
from jingu.data.objective import batches, plan_objective
from jingu.data.order import Numbers
from jingu.data.sources import MANY_EPOCHS, epochs_used, open_sources
from jingu.errors import JinguError, counted
from jingu.text.tokenizer import Tokenizer

BAR = 40
"""Letters of the longest bar of a histogram."""


def inspect(path: Path, document: int | None = None, tokenizer: Path | None = None) -> None:
    """Print what a data set holds and how long its documents are, and compare every file with its checksum.

    Args:
        document: show this document of the training split (from 0) instead.
        tokenizer: folder of the tokenizer that tells its text; without one, its ids are shown.
    """
    manifest = Manifest.load(path)
    if manifest is None:
        raise JinguError("there is no data set here.", where=path, fix="Run `jingu data build`.")
    dataset = open_dataset(path, "train")
    if document is not None:
        _show_document(dataset, document, None if tokenizer is None else Tokenizer.load(tokenizer))
        return
    print(f"data: {path}, ids as {manifest.dtype} of a vocabulary of {manifest.vocabulary:,}.")
    print_summary(manifest)
    _print_lengths(dataset.document_lengths())
    check_sizes(path, manifest.train, manifest.held_out)
    for shard in (*manifest.train.files, *manifest.held_out.files):
        for name, checksum in ((f"{shard.name}.bin", shard.bin_xxh3), (f"{shard.name}.idx", shard.idx_xxh3)):
            with (path / name).open("rb") as stream:
                if hashlib.file_digest(stream, xxhash.xxh3_128).hexdigest() != checksum:
                    raise damaged(path / name, "the file's content is not what was written (checksum).")
    print("  every file has the checksum it was written with")


def preview(config: RunConfig, step: int = 0, rows: int = 4) -> None:
    """Print how much of each source the run uses, and the very rows of a step: decoded, with their documents.

    Args:
        step: counted from 0.
        rows: of the global batch, from the first on.
    """
    tokenizer = Tokenizer.load(Path(config.tokenizer.path))
    source = open_sources(config, tokenizer)
    used = epochs_used(config, source)
    print(f"{counted(config.train.steps, 'step')} of {counted(config.batch.global_size, 'sequence')}:")
    for name, share, epochs in used:
        much = f"; more than {MANY_EPOCHS} teach little more" if epochs > MANY_EPOCHS else ""
        print(f"  {name}: {share:.2%} of the sequences, {epochs:.2f} epochs{much}")
    if step >= config.train.steps:
        print(f"The run ends before step {step:,} (counted from 0): without more steps, its rows are never trained on.")
    which, numbers, starts = source.locate(step)
    batch = batches(source, plan_objective(config, source, tokenizer))(step, 0, min(rows, source.global_size))
    for row, tokens in enumerate(batch.tokens.tolist()):
        windows = source.sources[int(which[row])]
        epoch, number = divmod(int(numbers[row]), len(windows))
        name = used[int(which[row])][0]
        print(f"\nstep {step}, row {row}: {name}, sequence {number:,} of its epoch {epoch}")
        places = windows.places(starts[row : row + 1])[0]
        for document, count in documents_at(windows.dataset, places):
            print(f"  {in_words(windows.dataset, *document, tokens=count)}")
        if batch.source is None:
            print(tokenizer.decode(tokens[: int((places >= 0).sum())]))
        else:
            read, written = batch.source.tokens[row], batch.labels[row]
            read = read if batch.source.documents is None else read[batch.source.documents[row] >= 0]
            print(f"reads: {tokenizer.decode(read.tolist(), special=True)}")
            print(f"writes: {tokenizer.decode(written[written >= 0].tolist(), special=True)}")


def documents_at(dataset: TokenDataset, places: Numbers) -> Iterator[tuple[tuple[int, int], int]]:
    """The documents that places of a data set belong to, as shard and number, and how many places of each."""
    there = places[places >= 0]
    for part in np.split(there, np.flatnonzero(np.diff(there) != 1) + 1):
        at, end = int(part[0]), int(part[-1]) + 1
        while at < end:
            document = dataset.find(at)
            start, length = dataset.document(*document)
            count = min(start + length, end) - at
            yield document, count
            at += count


def in_words(dataset: TokenDataset, shard: int, number: int, tokens: int) -> str:
    """A document's name, as a list of documents to leave out takes it, and where it comes from."""
    origin = dataset.origin(shard, number)
    return f"{dataset.name(shard, number)}  # {counted(tokens, 'token')}{' of ' if origin else ''}{origin}"


def _show_document(dataset: TokenDataset, document: int, tokenizer: Tokenizer | None) -> None:
    lengths = dataset.document_lengths()
    if document >= len(lengths):
        raise JinguError(
            f"it has {counted(len(lengths), 'document')}, numbered from 0, and no {document:,}.", where=dataset.path
        )
    start = int(lengths[:document].sum())
    ids = dataset.gather(np.array([start]), int(lengths[document]))[0].tolist()
    print(in_words(dataset, *dataset.find(start), tokens=len(ids)))
    if tokenizer is None:
        print(" ".join(map(str, ids)))
    else:
        check_tokenizer(dataset, tokenizer)
        print(tokenizer.decode(ids))


def _print_lengths(lengths: Numbers) -> None:
    """Quantiles, and a histogram by powers of two."""
    low, middle, high = np.quantile(lengths, [0.05, 0.5, 0.95])
    print(
        f"  tokens a document: {lengths.min():,} at least, {low:,.0f} (5%), {middle:,.0f} (half), {high:,.0f} (95%), "
        f"{lengths.max():,} at most, {lengths.mean():,.1f} on average"
    )
    counts = np.bincount(np.ceil(np.log2(lengths)).astype(np.int64))
    for power in np.flatnonzero(counts).tolist():
        bar = "█" * max(round(BAR * counts[power] / counts.max()), 1)
        print(f"  {f'up to {2**power:,}':>20}  {bar} {counts[power]:,}")
