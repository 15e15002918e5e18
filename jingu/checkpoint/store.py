"""Saving and loading of tensors: every rank writes and reads its own bytes.

`save` writes from the tensors' own memory and returns when all is on disk; `jingu.checkpoint.background` writes a copy
of them while training goes on. `jingu.checkpoint.files` tells what is on disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableSet, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from jingu.checkpoint.files import (
    begin,
    cause_of,
    could_not_save,
    finish_save,
    leave_note,
    notes,
    open_checkpoint,
    partial_name,
    reading,
    remove,
    write_part,
)
from jingu.checkpoint.manifest import CheckpointError, Manifest, Piece, distinct, pieces_by_file
from jingu.checkpoint.remote import Place
from jingu.checkpoint.shards import (
    ASIDE,
    DTYPE_NAMES,
    DTYPES,
    Held,
    bytes_of,
    check_header,
    fill,
    plan_part,
)
from jingu.checkpoint.slices import cut, overlap, slice_of
from jingu.checkpoint.stream import read_at
from jingu.parallel.sharing import local
from jingu.runtime.device import one_thread

T = TypeVar("T")
Agree = Callable[[bool], bool]
READERS, ASKERS = 2, 4
"""Threads that read files of a disk side by side; and requests to a store that are under way."""


class MismatchError(CheckpointError):
    """A checkpoint that is good, and of other tensors than those to be filled."""


# Saving


def save(
    folder: Place,
    tensors: Mapping[str, Tensor],
    state: Mapping[str, Any],
    *,
    rank: int = 0,
    ranks: int = 1,
    agree: Agree = bool,
) -> None:
    """Write a checkpoint; every rank calls this, and returns when the whole of it is on disk.

    Args:
        folder: final name. A checkpoint that is already there is replaced at the end.
        tensors: by logical name: DTensors in any layout, and plain tensors that are equal on all ranks. A rank outside
            the mesh of a DTensor need not name it.
        state: JSON values, equal on all ranks; the first rank's are written.
        agree: True on every rank if every rank passed True; the one thing that ranks exchange here.

    Raises:
        CheckpointError: on every rank, if some rank could not write its part; says which one and why. Nothing is
            left behind, and the other checkpoints are untouched.
    """
    partial = partial_name(folder)

    def prepare() -> None:
        if rank == 0:
            remove(partial)
            begin(folder, first=True)

    def write() -> None:
        write_blocks(partial, held_blocks(tensors, rank, ranks), rank, ranks)

    def finish() -> None:
        if rank == 0:
            finish_save(folder, state, ranks)

    for phase in (prepare, write, finish):
        error: Exception | None = None
        try:
            phase()
        except Exception as caught:
            error = caught
            leave_note(partial, rank, caught)
        if agree(error is None):
            continue
        causes = ({} if error is None else {rank: cause_of(error)}) | notes(partial)
        agree(True)  # everyone has read the notes
        if rank == 0:
            remove(partial)
        if error is not None and not isinstance(error, OSError | CheckpointError):
            raise error  # not something that a user can mend
        raise could_not_save(folder, causes) from error


def write_blocks(partial: Place, blocks: Sequence[Held], rank: int, ranks: int) -> None:
    """Write one rank's part from the memory of its tensors."""
    plan, written = plan_part(blocks, rank, ranks)
    owner = {piece: block for block in written for piece in plan.tensors[block.name].pieces}
    write_part(partial, plan, lambda piece: bytes_of(owner[piece], piece), rank)


def held_blocks(tensors: Mapping[str, Tensor], rank: int = 0, ranks: int = 1) -> list[Held]:
    """What this rank holds, in an order that all ranks share."""
    blocks = []
    with torch.no_grad():
        for name in sorted(tensors):
            tensor = tensors[name]
            try:
                found = slice_of(tensor, rank, ranks)
            except ValueError as error:
                raise CheckpointError(f"tensor {name} cannot be stored: {error}.") from None
            if found is not None:
                blocks.append(Held(name, found, local(tensor).detach()))
    return blocks


# Loading


def load(
    folder: Place,
    tensors: Mapping[str, Tensor],
    *,
    prefix: str = "",
    whole: bool = True,
    agree: Agree = bool,
) -> None:
    """Fill tensors from a checkpoint of any layout, in place; each rank reads what it needs, and checks all it reads.

    Args:
        tensors: by logical name: plain tensors (filled whole) or DTensors (their local blocks), on any device.
        prefix: only names that begin with this are expected; the rest of the checkpoint is left alone.
        whole: False where other ranks hold further tensors, so that none that is stored is one too many.
        agree: as in `save`; with it no rank goes on alone where another one could not load.

    Raises:
        MismatchError: names that are missing on either side, another shape or dtype (nothing is converted).
        CheckpointError: bytes that do not match their checksum. The tensors then hold a mixture.
    """

    def compare() -> Manifest:
        manifest = open_checkpoint(folder)
        _compare(folder, manifest, tensors, prefix, whole)
        return manifest

    manifest = together(compare, folder, agree)
    together(lambda: load_blocks(folder, manifest, held_blocks(tensors)), folder, agree)


def together(work: Callable[[], T], where: Place, agree: Agree) -> T:
    """Do something that may fail on a rank, and fail on all ranks then: no rank goes on alone."""
    error: Exception | None = None
    try:
        result = work()
    except Exception as caught:
        error = caught
    if agree(error is None):
        return result
    if isinstance(error, OSError):
        raise CheckpointError(f"{cause_of(error)}.", where=where) from error
    raise error or CheckpointError("another rank failed here, and its log says why.", where=where)


class Reader:
    """Tensors of a checkpoint, one at a time; its manifest, and the header of each file, are read and checked once."""

    def __init__(self, folder: Place) -> None:
        self.folder, self.manifest = folder, open_checkpoint(folder)
        self._checked: set[str] = set()

    def read(self, name: str) -> Tensor:
        """One whole logical tensor, in main memory."""
        if name not in self.manifest.tensors:
            raise CheckpointError(f"there is no tensor {name} in this checkpoint.", where=self.folder)
        stored = self.manifest.tensors[name]
        tensor = torch.empty(stored.shape, dtype=DTYPES[stored.dtype])
        load_blocks(self.folder, self.manifest, held_blocks({name: tensor}), self._checked)
        return tensor

    def read_expert(self, name: str, number: int) -> Tensor:
        """Matrix `number` of a tensor that has one for each expert, without the rest: mapped where a piece has it
        whole.

        It is not checked against a checksum: those are of whole pieces.
        """
        if not isinstance(self.folder, Path):
            return self.read(name)[number]
        stored = self.manifest.tensors[name]
        offset, size = (number, *[0] * len(stored.shape[1:])), torch.Size((1, *stored.shape[1:]))
        whole = torch.empty(size, dtype=DTYPES[stored.dtype])
        for piece in distinct(stored).values():
            shared = overlap(piece.offset, piece.shape, offset, size)
            if shared is None:
                continue
            row = torch.Size((1, *piece.shape[1:]))
            begin = piece.bytes[0] + (number - piece.offset[0]) * prod(row) * whole.itemsize
            mapped = read_at(self.folder / piece.file, begin, row, whole.dtype)
            if row == size:
                return mapped[0]
            cut(whole, offset, *shared).copy_(mapped)
        return whole[0]


def _compare(folder: Place, manifest: Manifest, tensors: Mapping[str, Tensor], prefix: str, whole: bool) -> None:
    here = {name: f"{DTYPE_NAMES.get(each.dtype, each.dtype)} {list(each.shape)}" for name, each in tensors.items()}
    stored = {
        name: f"{each.dtype} {list(each.shape)}" for name, each in manifest.tensors.items() if name.startswith(prefix)
    }
    absent, extra = sorted(here.keys() - stored.keys()), sorted(stored.keys() - here.keys() if whole else ())
    wrong = [
        f"{name} (here {here[name]}, stored {stored[name]})"
        for name in sorted(here.keys() & stored.keys())
        if here[name] != stored[name]
    ]
    complaints = [
        f"{what}: {', '.join(which[:8])}{f' and {len(which) - 8} more' if len(which) > 8 else ''}"
        for what, which in (
            ("tensors that it lacks", absent),
            ("tensors that have no place here", extra),
            ("tensors of another shape or dtype (nothing is converted)", wrong),
        )
        if which
    ]
    if complaints:
        raise MismatchError(f"this checkpoint is of another model or optimizer: {'; '.join(complaints)}.", where=folder)


def needed_pieces(manifest: Manifest, blocks: Iterable[Held]) -> dict[str, list[tuple[Piece, Held]]]:
    """The pieces that blocks overlap, by file."""
    work: dict[str, list[tuple[Piece, Held]]] = {}
    for block in blocks:
        for piece in distinct(manifest.tensors[block.name]).values():
            if overlap(piece.offset, piece.shape, block.slice.offset, block.slice.size):
                work.setdefault(piece.file, []).append((piece, block))
    return work


def load_blocks(
    folder: Place, manifest: Manifest, blocks: Iterable[Held], checked: MutableSet[str] | None = None
) -> None:
    """Read every stored piece that a block held here overlaps; a few threads, each from front to back, which is how a
    disk is fastest.

    Args:
        checked: files whose header need not be checked; those that were are added.
    """
    checked, work = set() if checked is None else checked, needed_pieces(manifest, blocks)
    unchecked = work.keys() - checked
    inside = pieces_by_file(manifest) if unchecked else {}

    def look(name: str) -> None:
        with reading(folder / name) as file:
            check_header(file, inside[name], manifest.files[name], folder / name)

    def read(name: str, pairs: Sequence[tuple[Piece, Held]]) -> None:
        with reading(folder / name) as file:
            aside = torch.empty(ASIDE, dtype=torch.uint8)
            for piece, block in pairs:
                fill(block, piece, file, folder, aside)

    threads = READERS if isinstance(folder, Path) else ASKERS
    jobs = [(name, run) for name in sorted(work) for run in _runs(work[name], -(-threads // len(work)))]
    with one_thread(), ThreadPoolExecutor(threads) as pool:
        list(pool.map(look, unchecked))
        checked |= unchecked
        list(pool.map(lambda job: read(*job), jobs))


def _runs(pairs: Iterable[tuple[Piece, Held]], count: int) -> list[list[tuple[Piece, Held]]]:
    """Pieces of a file, in its order, in runs of about as many bytes each."""
    ordered = sorted(pairs, key=lambda pair: pair[0].bytes)
    size, begin = sum(piece.bytes[1] - piece.bytes[0] for piece, _ in ordered), 0
    runs: list[list[tuple[Piece, Held]]] = [[] for _ in range(count)]
    for piece, block in ordered:
        runs[begin * count // size].append((piece, block))
        begin += piece.bytes[1] - piece.bytes[0]
    return [run for run in runs if run]
