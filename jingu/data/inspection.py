"""`jingu data inspect` and `jingu data preview`: show the contents of a data set, and the rows of a training step."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import xxhash

from jingu.config.schema import RunConfig
from jingu.data.dataset import TokenDataset, check_tokenizer, open_dataset
from jingu.data.dataset_manifest import DatasetManifest, check_files, damaged_dataset_error, print_summary
from jingu.data.objective import batch_function, build_objective
from jingu.data.open_sources import MAX_USEFUL_EPOCHS, count_epochs, open_sources
from jingu.data.permutation import Int64Array
from jingu.errors import JinguError, pluralize
from jingu.text.tokenizer import Tokenizer

# Width of the longest bar of a histogram, in characters.
MAX_BAR_WIDTH = 40


def inspect(path: Path, document: int | None = None, tokenizer: Path | None = None) -> None:
    """Print what a data set contains and how long its documents are, and verify the checksum of every file.

    Args:
        document: show this document of the training split (from 0) instead.
        tokenizer: folder of the tokenizer that decodes the document; without one, its ids are shown.
    """
    manifest = DatasetManifest.load(path)
    if manifest is None:
        raise JinguError("there is no data set here.", where=path, fix="Run `jingu data build`.")
    dataset = open_dataset(path, "train")
    if document is not None:
        _print_document(dataset, document, None if tokenizer is None else Tokenizer.load(tokenizer))
        return
    print(f"data: {path}, ids as {manifest.dtype} of a vocabulary of {manifest.vocab_size:,}.")
    print_summary(manifest)
    _print_lengths(dataset.document_lengths())
    check_files(path, manifest.train, manifest.validation)
    for entry in (*manifest.train.files, *manifest.validation.files):
        _check_file(path / f"{entry.name}.bin", entry.bin_xxh3)
        _check_file(path / f"{entry.name}.idx", entry.idx_xxh3)
    print("  every file matches its checksum")


def _check_file(path: Path, checksum: str) -> None:
    """Raise JinguError if the content of a file does not match its checksum."""
    with path.open("rb") as stream:
        actual = hashlib.file_digest(stream, xxhash.xxh3_128).hexdigest()
    if actual != checksum:
        raise damaged_dataset_error(path, "the content of the file does not match its checksum.")


def preview(config: RunConfig, step: int = 0, rows: int = 4) -> None:
    """Print how much of each source the run uses, and rows of a step: decoded, with their documents.

    Args:
        step: counted from 0.
        rows: how many rows of the global batch, from the first on.
    """
    tokenizer = Tokenizer.load(Path(config.tokenizer.path))
    dataset = open_sources(config, tokenizer)
    epochs_by_source = count_epochs(config, dataset)
    print(f"{pluralize(config.train.steps, 'step')} of {pluralize(config.batch.global_batch_size, 'sequence')}:")
    for name, share, epochs in epochs_by_source:
        warning = f"; more than {MAX_USEFUL_EPOCHS} teach little more" if epochs > MAX_USEFUL_EPOCHS else ""
        print(f"  {name}: {share:.2%} of the sequences, {epochs:.2f} epochs{warning}")
    if step >= config.train.steps:
        print(f"The run ends before step {step:,} (counted from 0): without more steps, its rows are never trained on.")
    source_ids, numbers, locations = dataset.locate(step)
    get_batch = batch_function(dataset, build_objective(config, dataset, tokenizer))
    batch = get_batch(step, 0, min(rows, dataset.global_batch_size))
    for row, tokens in enumerate(batch.tokens.tolist()):
        source_id = int(source_ids[row])
        source = dataset.sources[source_id]
        epoch, number = divmod(int(numbers[row]), len(source))
        print(f"\nstep {step}, row {row}: {epochs_by_source[source_id][0]}, sequence {number:,} of its epoch {epoch}")
        offsets = source.token_offsets(locations[row : row + 1])[0]
        for document, count in documents_at(source.dataset, offsets):
            print(f"  {describe_document(source.dataset, *document, tokens=count)}")
        if batch.source is None:
            num_tokens = int((offsets >= 0).sum())
            print(tokenizer.decode(tokens[:num_tokens]))
        else:
            read_ids = batch.source.tokens[row]
            if batch.source.documents is not None:
                read_ids = read_ids[batch.source.documents[row] >= 0]
            target_ids = batch.labels[row][batch.labels[row] >= 0]
            print(f"reads: {tokenizer.decode(read_ids.tolist(), keep_special_tokens=True)}")
            print(f"writes: {tokenizer.decode(target_ids.tolist(), keep_special_tokens=True)}")


def documents_at(dataset: TokenDataset, offsets: Int64Array) -> Iterator[tuple[tuple[int, int], int]]:
    """Yield the documents (shard, number) that contain these offsets, and how many of the offsets; -2 is padding."""
    offsets = offsets[offsets >= 0]
    # Offsets are contiguous, except between the pieces of a packed row and at the end of the data.
    for run in np.split(offsets, np.flatnonzero(np.diff(offsets) != 1) + 1):
        offset = int(run[0])
        end = int(run[-1]) + 1
        while offset < end:
            document = dataset.find_document(offset)
            start, length = dataset.document_range(*document)
            count = min(start + length, end) - offset
            yield document, count
            offset += count


def describe_document(dataset: TokenDataset, shard: int, number: int, tokens: int) -> str:
    """Return a document's name, as a list of documents to drop names it, and its origin."""
    origin = dataset.document_origin(shard, number)
    of_origin = f" of {origin}" if origin else ""
    return f"{dataset.document_name(shard, number)}  # {pluralize(tokens, 'token')}{of_origin}"


def _print_document(dataset: TokenDataset, document: int, tokenizer: Tokenizer | None) -> None:
    """Print a document of the split by its number: its text, or its ids without a tokenizer."""
    lengths = dataset.document_lengths()
    if document >= len(lengths):
        what = f"it has {pluralize(len(lengths), 'document')}, numbered from 0, but no {document:,}."
        raise JinguError(what, where=dataset.path)
    start = int(lengths[:document].sum())
    ids = dataset.gather(np.array([start]), int(lengths[document]))[0].tolist()
    print(describe_document(dataset, *dataset.find_document(start), tokens=len(ids)))
    if tokenizer is None:
        print(" ".join(map(str, ids)))
    else:
        check_tokenizer(dataset, tokenizer)
        print(tokenizer.decode(ids))


def _print_lengths(lengths: Int64Array) -> None:
    """Print quantiles of the document lengths, and a histogram by powers of two."""
    low, median, high = np.quantile(lengths, [0.05, 0.5, 0.95])
    print(
        f"  tokens per document: {lengths.min():,} (min), {low:,.0f} (5%), {median:,.0f} (median), {high:,.0f} (95%), "
        f"{lengths.max():,} (max), {lengths.mean():,.1f} (mean)"
    )
    counts = np.bincount(np.ceil(np.log2(lengths)).astype(np.int64))
    for power in np.flatnonzero(counts).tolist():
        bar = "█" * max(round(MAX_BAR_WIDTH * counts[power] / counts.max()), 1)
        print(f"  {f'up to {2**power:,}':>20}  {bar} {counts[power]:,}")
