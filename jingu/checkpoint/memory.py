"""Copies of a run's newest state in main memory: each rank's part on its own node, and once more on another one.

Every rank has a folder in a file system that is main memory. There it writes its part of a checkpoint, as it would on
a disk, and what a neighbour on the node before its own sends of the same:

    FOLDER/jingu-RUN/rank-00001/step-00000012-TIME/
        shard-00001-of-00004.safetensors  part-00001.json      its own
        shard-00000-of-00004.safetensors  part-00000.json      the neighbour's
        state.json  part-00004.json                            rank 0's: what is not a tensor, and its checksum

So a node may be lost with its memory, and each part is still somewhere. The copies before go when all ranks have the
new ones. On the way back a node fetches what its ranks need and it lacks, and loads it as any checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from jingu.checkpoint.files import part_name, shard_name, write_bytes
from jingu.checkpoint.manifest import MANIFEST, STATE, Manifest, merge, read_manifest
from jingu.checkpoint.remote import Place
from jingu.checkpoint.resume import STEP, step_folder
from jingu.checkpoint.shards import plan_part
from jingu.checkpoint.store import held_blocks, needed_pieces, together, write_blocks
from jingu.errors import JinguError
from jingu.runtime.ranks import all_agree, from_all, from_first

RUN_ID = "memory-id"
"""File beside the checkpoints that names the run's copies: where the checkpoints are deleted, so are they."""
_SHARD = "shard-00000-of-"


class MemoryCopies:
    """The copies of one run. Every rank has one, and all call the same methods."""

    def __init__(self, folder: Path, run_id: int, tensors: Callable[[], Mapping[str, Tensor]]) -> None:
        """Make this rank's folder, and find out which ranks share a node.

        Args:
            folder: in main memory; ranks that see the same one are on one node.
            run_id: equal on all ranks.
            tensors: gives what is to be saved or filled, by logical name.

        Raises:
            CheckpointError: on every rank, if some rank cannot write there.
        """
        self._rank, self._world, self._tensors = dist.get_rank(), dist.get_world_size(), tensors
        self._root = folder / f"jingu-{run_id:016x}"
        self._own = self._root / f"rank-{self._rank:05d}"

        def make() -> str:
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._own.mkdir(exist_ok=True)
            place = self._root.stat()
            return f"{socket.gethostname()}/{place.st_dev}/{place.st_ino}"

        self._nodes: list[str] = from_all(together(make, folder, all_agree))
        self._members = [rank for rank, node in enumerate(self._nodes) if node == self._nodes[self._rank]]
        widest = max(map(self._nodes.count, self._nodes))
        self._shift = widest if widest < self._world else 1
        _, written = plan_part(held_blocks(tensors(), self._rank, self._world), self._rank, self._world)
        own = sum(block.local.numel() * block.local.element_size() for block in written)
        self.bytes = max(from_all(own)) * min(2, self._world) * 2
        """Main memory that a rank's copies take at most: its own and a neighbour's, while newer ones are written."""
        self._complete: dict[int, str] = {}

    # Saving

    def save(self, state: Mapping[str, Any], step: int) -> None:
        """Copy the tensors and `state` (the first rank's) to memory, here and at the neighbour's; training waits.

        Raises:
            CheckpointError: on every rank, if some rank could not; the copies before are untouched.
        """
        key = f"step-{step:08d}-{from_first(time.time_ns()):020d}"
        partial = self._own / f".{key}"

        def write() -> None:
            partial.mkdir()
            write_blocks(partial, held_blocks(self._tensors(), self._rank, self._world), self._rank, self._world)
            if self._rank == 0:
                record = write_bytes(partial / STATE, json.dumps(state, ensure_ascii=False).encode())
                sealed = Manifest(ranks=self._world, files={STATE: record}, tensors={})
                write_bytes(part_name(partial, self._world), sealed.to_bytes())

        try:
            together(write, self._own, all_agree)
            if self._world > 1:
                self._pass_on(partial)
            together(lambda: partial.rename(self._own / key), self._own, all_agree)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        self.forget(but=key)

    def _pass_on(self, partial: Path) -> None:
        """Send this rank's files to its neighbour while those of another neighbour come."""
        to, source = (self._rank + self._shift) % self._world, (self._rank - self._shift) % self._world
        own = sorted(_files_of(self._rank, self._world))
        sizes: dict[str, int] = from_all({name: (partial / name).stat().st_size for name in own})[source]
        places = together(lambda: [_room(partial / name, sizes[name]) for name in sorted(sizes)], self._own, all_agree)
        under_way = [dist.isend(_mapped(partial / name), to) for name in own]
        for place in places:
            dist.recv(place, source)
        for work in under_way:
            assert work is not None  # as on ranks outside a group
            work.wait()

    def forget(self, but: str = "") -> None:
        """Delete this rank's copies, except those of one name, and what ranks have left that are no longer here."""
        if not but:
            shutil.rmtree(self._own, ignore_errors=True)
        elif self._own.is_dir():
            for path in self._own.iterdir():
                if path.name != but:
                    shutil.rmtree(path, ignore_errors=True)
        if self._rank == self._members[0]:
            here = {f"rank-{rank:05d}" for rank in self._members}
            for path in _inside(self._root):  # the last rank of the node may take it away meanwhile
                if path.name not in here:
                    shutil.rmtree(path, ignore_errors=True)
        if not but:
            with contextlib.suppress(OSError):
                self._root.rmdir()  # the last one of the node can

    # Finding the way back

    def steps(self) -> list[int]:
        """Steps of which every part is in the memory of some node, in order; the same on all ranks."""
        here: dict[str, list[str]] = {}
        for copy in (copy for own in _inside(self._root, "rank-") for copy in _inside(own, "step-")):
            here.setdefault(copy.name, []).extend(path.name for path in _inside(copy))
        held: dict[str, set[str]] = {}
        for table in from_all(here):
            for key, names in table.items():
                held.setdefault(key, set()).update(names)
        self._complete = {}
        for key in sorted(held):  # of two attempts at a step, the later
            ranks = _ranks_of(held[key])
            step = STEP.fullmatch(key.rpartition("-")[0])
            if step and ranks and all(held[key].issuperset(_files_of(rank, ranks)) for rank in range(ranks)):
                self._complete[int(step[1])] = key
        return sorted(self._complete)

    def gather(self, step: int) -> Path:
        """A checkpoint folder for each node, with what its ranks need to fill their tensors; `release` deletes it.

        Raises:
            CheckpointError: on every rank; what is in memory is damaged.
        """
        key, folder = self._complete[step], step_folder(self._root / "loading", step)
        leads = self._rank == self._members[0]

        def make() -> None:
            if leads:
                shutil.rmtree(folder.parent, ignore_errors=True)
                folder.mkdir(parents=True)

        def read() -> Manifest:
            ranks = _ranks_of(set(here))
            return merge(read_manifest(part_name(folder, rank)) for rank in range(ranks + 1))

        def write() -> set[str]:
            if leads:
                write_bytes(folder / MANIFEST, manifest.to_bytes())
            blocks = [block for block in held_blocks(self._tensors()) if block.name in manifest.tensors]
            return set(needed_pieces(manifest, blocks))

        together(make, folder, all_agree)
        here = self._fetch(key, folder, lambda name: not name.startswith("shard-"))
        manifest = together(read, folder, all_agree)
        needed = together(write, folder, all_agree)
        self._fetch(key, folder, lambda name: name in needed)
        return folder

    def release(self) -> None:
        """Delete what `gather` brought together, once all ranks have read it."""
        if self._rank == self._members[0]:
            shutil.rmtree(self._root / "loading", ignore_errors=True)

    def _fetch(self, key: str, folder: Path, wanted: Callable[[str], bool]) -> list[str]:
        """Bring the wanted files of the copies `key` into the folder of each node; returns all there are anywhere."""
        here = {path.name: path for path in sorted(self._root.glob(f"rank-*/{key}/*"))}
        tables: list[dict[str, int]] = from_all({name: path.stat().st_size for name, path in here.items()})
        everywhere = sorted({name for table in tables for name in table})
        wishes: list[list[str]] = from_all([name for name in everywhere if wanted(name)])
        moves = []
        for node in dict.fromkeys(self._nodes):  # all ranks take the same order, so that none waits for another's turn
            members = [rank for rank, other in enumerate(self._nodes) if other == node]
            for name in sorted({name for rank in members for name in wishes[rank]}):
                holders = [rank for rank, table in enumerate(tables) if name in table]
                sender = members[0] if members[0] in holders else holders[members[0] % len(holders)]
                moves.append((name, sender, members[0]))

        def make_room() -> dict[str, Tensor]:
            for name, sender, leader in moves:
                if self._rank == leader == sender:
                    os.link(here[name], folder / name)
            return {
                name: _room(folder / name, tables[sender][name])
                for name, sender, leader in moves
                if self._rank == leader != sender
            }

        places = together(make_room, folder, all_agree)
        for name, sender, leader in moves:
            if self._rank == leader != sender:
                dist.recv(places[name], sender)
            elif self._rank == sender != leader:
                dist.send(_mapped(here[name]), leader)
        all_agree(True)  # or another rank of a node would read what its leader is still receiving
        return everywhere


def _inside(folder: Path, prefix: str = "") -> list[Path]:
    """What is in a folder; nothing where it is gone, as a copy that another rank deletes meanwhile."""
    try:
        return [path for path in folder.iterdir() if path.name.startswith(prefix)]
    except FileNotFoundError:
        return []


def id_of(checkpoints: Place, first: bool) -> int:
    """The number that the run's copies go by, on all ranks; the first makes one where there is none.

    Raises:
        JinguError: it cannot be written.
    """
    file, number = checkpoints / RUN_ID, -1
    if first:
        with contextlib.suppress(OSError, ValueError):
            number = int(file.read_bytes())
        if not 0 <= number < 1 << 62:
            number = secrets.randbits(62)
            try:
                checkpoints.mkdir(parents=True, exist_ok=True)
                with file.open("wb", buffering=0) as out:
                    out.write(str(number).encode())
            except OSError:
                number = -1
    # A folder that was copied is that of another run: the place counts, too.
    mixed = xxhash.xxh3_64_intdigest(f"{number} {checkpoints.absolute()}".encode()) >> 1
    name = from_first(mixed if number >= 0 else -1)
    if name < 0:
        raise JinguError(
            f"{RUN_ID} cannot be written.", where=checkpoints, fix="Mend it, or set checkpoint.memory.every=0."
        )
    return name


def _files_of(rank: int, ranks: int) -> list[str]:
    """What one rank writes."""
    names = [shard_name(rank, ranks), part_name(Path(), rank).name]
    return [*names, STATE, part_name(Path(), ranks).name] if rank == 0 else names


def _ranks_of(names: set[str]) -> int:
    """How many ranks wrote a copy; 0 where that cannot be seen."""
    found = [name.removeprefix(_SHARD).partition(".")[0] for name in names if name.startswith(_SHARD)]
    return int(found[0]) if found and found[0].isdecimal() else 0


def _mapped(file: Path) -> Tensor:
    """The bytes of a file."""
    return torch.from_file(str(file), size=file.stat().st_size, dtype=torch.uint8)


def _room(file: Path, size: int) -> Tensor:
    """The bytes of a new file, to be filled. Raises OSError where there is no room for them."""
    with file.open("xb") as new:
        os.posix_fallocate(new.fileno(), 0, size)  # a write to mapped memory for which there is none ends the process
    return torch.from_file(str(file), shared=True, size=size, dtype=torch.uint8)
