"""Save and load checkpoints: every rank writes and reads its own bytes.

`save` writes directly from the tensors' memory and returns when everything is on disk; `jingu.checkpoint.async_save`
writes a copy of them during training. `jingu.checkpoint.save_folder` describes the files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableSet, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from jingu.checkpoint import save_folder, shards
from jingu.checkpoint.manifest import CheckpointError, Manifest, Piece
from jingu.checkpoint.mapped_files import map_tensor
from jingu.checkpoint.remote import CheckpointPath
from jingu.checkpoint.save_folder import describe_cause, open_checkpoint, open_for_reading
from jingu.checkpoint.shards import DTYPE_NAMES, DTYPES, check_header, fill_from_piece, overlap, piece_bytes, plan_part
from jingu.parallel.sharding import TensorBlock, subblock, whole_block
from jingu.runtime.device import single_thread

T = TypeVar("T")
# Returns every rank's JSON value, by rank, on every rank.
Gather = Callable[[Any], list[Any]]
StateTensors = Mapping[str, Tensor | TensorBlock]
# Number of threads that read from a disk, and from an object store.
DISK_THREADS = 2
URL_THREADS = 4
# Maximum number of names in an error message, which then says how many more there are.
_LISTED_NAMES = 8


class MismatchError(CheckpointError):
    """An intact checkpoint does not have the tensors to fill.

    Attributes:
        concerns_only_optimizer: whether the weights could be filled.
    """

    concerns_only_optimizer: bool = False


# Saving


def _gather_alone(value: Any) -> list[Any]:
    return [value]


def save(
    folder: CheckpointPath,
    tensors: StateTensors,
    state: Mapping[str, Any],
    *,
    rank: int = 0,
    ranks: int = 1,
    gather: Gather = _gather_alone,
) -> None:
    """Write a checkpoint, and return when all of it is on disk; every rank calls this.

    Args:
        folder: final path. An existing checkpoint there is replaced at the end.
        tensors: by name, this rank's blocks of sharded tensors, and plain tensors that are equal on all ranks. Ranks
            may have blocks of different tensors, such as those of pipeline stages.
        state: JSON values, equal on all ranks; those of rank 0 are written.
        gather: returns every rank's value on every rank; the only communication between ranks here.

    Raises:
        CheckpointError: on every rank, if a rank could not write its part; it names the ranks and the causes. Nothing
            is left behind, and other checkpoints are unchanged.
    """
    partial = save_folder.partial_path(folder)

    def prepare() -> None:
        if rank == 0:
            save_folder.delete_folder(partial)
            save_folder.create_partial(folder, first=True)

    def write() -> None:
        write_blocks(partial, local_blocks(tensors, rank, ranks), rank, ranks)

    def finish() -> None:
        if rank == 0:
            save_folder.finish_save(folder, state, ranks)

    for phase in (prepare, write, finish):
        _, error, causes = _try_on_all_ranks(phase, gather)
        if causes and rank == 0:
            save_folder.delete_folder(partial)
        if error is not None and not isinstance(error, OSError | CheckpointError):
            raise error  # a bug, not something that a user can fix
        if causes:
            raise save_folder.save_error(folder, causes) from error


def write_blocks(partial: CheckpointPath, blocks: Mapping[str, TensorBlock], rank: int, ranks: int) -> None:
    """Write one rank's part of a checkpoint from the memory of its tensors."""
    plan, blocks_in_file = plan_part(blocks, rank, ranks)
    block_of = {piece: block for name, block in blocks_in_file.items() for piece in plan.tensors[name].pieces}
    save_folder.write_part(partial, plan, lambda piece: piece_bytes(block_of[piece], piece), rank)


def local_blocks(tensors: StateTensors, rank: int = 0, ranks: int = 1) -> dict[str, TensorBlock]:
    """Return this rank's blocks by name, in the same order on all ranks. A plain tensor is one block."""
    return {
        name: tensor if isinstance(tensor, TensorBlock) else whole_block(tensor, rank, ranks)
        for name, tensor in sorted(tensors.items())
    }


# Loading


def load(
    folder: CheckpointPath,
    tensors: StateTensors,
    *,
    prefix: str | tuple[str, ...] = "",
    whole: bool = True,
    gather: Gather = _gather_alone,
) -> None:
    """Fill tensors in place from a checkpoint of any layout. Each rank reads and verifies only the bytes it needs.

    Args:
        tensors: as in `save`, on any device.
        prefix: load only names with this prefix (or one of these), and ignore the rest of the checkpoint.
        whole: whether additional tensors in the checkpoint are an error; False if other ranks load those.
        gather: as in `save`; no rank continues if another one could not load.

    Raises:
        MismatchError: names are missing on either side, or shapes or dtypes differ (nothing is converted).
        CheckpointError: bytes do not match their checksum. The tensors may then have some of the new values.
    """

    def compare() -> Manifest:
        manifest = open_checkpoint(folder)
        _compare(folder, manifest, local_blocks(tensors), prefix, whole)
        return manifest

    manifest = run_on_all_ranks(compare, folder, gather)
    run_on_all_ranks(lambda: load_blocks(folder, manifest, local_blocks(tensors)), folder, gather)


def run_on_all_ranks(work: Callable[[], T], where: CheckpointPath, gather: Gather) -> T:
    """Call `work` on every rank and return its result; raise on all ranks if it fails on one."""
    result, error, causes = _try_on_all_ranks(work, gather)
    if error is None and not causes:
        return cast(T, result)
    if error is not None and not isinstance(error, OSError):
        raise error
    cause = describe_cause(error) if error else "; ".join(f"rank {rank}: {cause}" for rank, cause in causes.items())
    raise CheckpointError(f"{cause.removesuffix('.')}.", where=where) from error


def _try_on_all_ranks(work: Callable[[], T], gather: Gather) -> tuple[T | None, Exception | None, dict[int, str]]:
    """Call `work` on every rank; return this rank's result or error, and the causes of all failures by rank."""
    result: T | None = None
    error: Exception | None = None
    try:
        result = work()
    except Exception as caught:
        error = caught
    causes = enumerate(gather(None if error is None else describe_cause(error)))
    return result, error, {rank: cause for rank, cause in causes if cause is not None}


class CheckpointReader:
    """Reads tensors one at a time. The manifest and the header of each file are read and verified only once."""

    def __init__(self, folder: CheckpointPath) -> None:
        self.folder = folder
        self.manifest = open_checkpoint(folder)
        self._checked_files: set[str] = set()

    def read(self, name: str) -> Tensor:
        """Return a whole tensor in main memory. Raise CheckpointError if there is no tensor of that name."""
        if name not in self.manifest.tensors:
            raise CheckpointError(f"there is no tensor {name} in this checkpoint.", where=self.folder)
        record = self.manifest.tensors[name]
        tensor = torch.empty(record.shape, dtype=DTYPES[record.dtype])
        load_blocks(self.folder, self.manifest, local_blocks({name: tensor}), self._checked_files)
        return tensor

    def read_expert(self, name: str, expert: int) -> Tensor:
        """Return matrix `expert` of a tensor [E, ...] without reading the others; memory-mapped if it is in one piece.

        The matrix is not verified, because checksums are those of whole pieces.
        """
        if not isinstance(self.folder, Path):
            return self.read(name)[expert]
        record = self.manifest.tensors[name]
        offset = (expert, *[0] * len(record.shape[1:]))
        size = torch.Size((1, *record.shape[1:]))
        value = torch.empty(size, dtype=DTYPES[record.dtype])
        for piece in record.unique_pieces().values():
            region = overlap(piece.offset, piece.shape, offset, size)
            if region is None:
                continue
            row = torch.Size((1, *piece.shape[1:]))
            begin = piece.bytes[0] + (expert - piece.offset[0]) * prod(row) * value.itemsize
            mapped_rows = map_tensor(self.folder / piece.file, begin, row, value.dtype)
            if row == size:
                return mapped_rows[0]
            # The matrix is divided into several pieces: copy them together.
            subblock(value, offset, *region).copy_(mapped_rows)
        return value[0]


def _compare(
    folder: CheckpointPath,
    manifest: Manifest,
    blocks: Mapping[str, TensorBlock],
    prefix: str | tuple[str, ...],
    whole: bool,
) -> None:
    """Raise MismatchError, with all differences, unless a checkpoint has the tensors to fill."""
    expected_shapes = {
        name: f"{DTYPE_NAMES.get(block.local.dtype, block.local.dtype)} {list(block.shape)}"
        for name, block in blocks.items()
    }
    stored_shapes = {
        name: f"{record.dtype} {list(record.shape)}"
        for name, record in manifest.tensors.items()
        if name.startswith(prefix)
    }
    unexpected_names = stored_shapes.keys() - expected_shapes.keys() if whole else ()
    different = [
        f"{name} (expected {expected_shapes[name]}, stored {stored_shapes[name]})"
        for name in sorted(expected_shapes.keys() & stored_shapes.keys())
        if expected_shapes[name] != stored_shapes[name]
    ]
    problems = []
    for what, names in (
        ("missing tensors", sorted(expected_shapes.keys() - stored_shapes.keys())),
        ("unexpected tensors", sorted(unexpected_names)),
        ("tensors of another shape or dtype (nothing is converted)", different),
    ):
        more = f" and {len(names) - _LISTED_NAMES} more" if len(names) > _LISTED_NAMES else ""
        if names:
            problems.append(f"{what}: {', '.join(names[:_LISTED_NAMES])}{more}")
    if problems:
        error = MismatchError(f"this checkpoint is of another model or optimizer: {'; '.join(problems)}.", where=folder)
        names = [*sorted(expected_shapes.keys() - stored_shapes.keys()), *unexpected_names, *different]
        error.concerns_only_optimizer = all("optimizer/" in name.partition(" ")[0] for name in names)
        raise error


PieceOfBlock = tuple[Piece, TensorBlock]


def overlapping_pieces(manifest: Manifest, blocks: Mapping[str, TensorBlock]) -> dict[str, list[PieceOfBlock]]:
    """Return the stored pieces that overlap blocks, with those blocks, by file."""
    by_file: dict[str, list[PieceOfBlock]] = {}
    for name, block in blocks.items():
        for piece in manifest.tensors[name].unique_pieces().values():
            if overlap(piece.offset, piece.shape, block.offset, block.size):
                by_file.setdefault(piece.file, []).append((piece, block))
    return by_file


def load_blocks(
    folder: CheckpointPath,
    manifest: Manifest,
    blocks: Mapping[str, TensorBlock],
    checked_files: MutableSet[str] | None = None,
) -> None:
    """Read every stored piece that overlaps a block, with a few threads; each one reads sequentially.

    Args:
        checked_files: files whose header need not be checked again; files that are checked here are added.
    """
    if checked_files is None:
        checked_files = set()
    work = overlapping_pieces(manifest, blocks)
    unchecked_files = work.keys() - checked_files
    pieces = manifest.pieces_by_file() if unchecked_files else {}

    def check(name: str) -> None:
        with open_for_reading(folder / name) as file:
            check_header(file, pieces[name], manifest.files[name], folder / name)

    def read(name: str, pairs: Sequence[PieceOfBlock]) -> None:
        staging = torch.empty(shards.STAGING_BYTES, dtype=torch.uint8)
        with open_for_reading(folder / name) as file:
            for piece, block in pairs:
                fill_from_piece(block, piece, file, folder, staging)

    threads = DISK_THREADS if isinstance(folder, Path) else URL_THREADS
    # If there are fewer files than threads, several threads read a file.
    jobs = [(name, run) for name in sorted(work) for run in _split_into_runs(work[name], -(-threads // len(work)))]
    with single_thread(), ThreadPoolExecutor(threads) as pool:
        # A single job runs on this thread, since starting one takes longer than reading a small tensor.
        run_all = pool.map if len(jobs) > 1 else map
        list(run_all(check, unchecked_files))
        checked_files |= unchecked_files
        list(run_all(lambda job: read(*job), jobs))


def _split_into_runs(pairs: Iterable[PieceOfBlock], count: int) -> list[list[PieceOfBlock]]:
    """Split the pieces of a file, in their order in the file, into runs of about the same number of bytes."""
    ordered_pairs = sorted(pairs, key=lambda pair: pair[0].bytes)
    total = sum(piece.bytes[1] - piece.bytes[0] for piece, _ in ordered_pairs)
    runs: list[list[PieceOfBlock]] = [[] for _ in range(count)]
    position = 0
    for piece, block in ordered_pairs:
        runs[position * count // total].append((piece, block))
        position += piece.bytes[1] - piece.bytes[0]
    return [run for run in runs if run]
