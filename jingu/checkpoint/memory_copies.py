"""Copies of a run's newest state in main memory: each rank's part on its own node, and once more on another node.

Every rank has a folder in an in-memory file system. It writes its part of a checkpoint there, as on a disk, and stores
the files of a neighbour on another node:

    FOLDER/jingu-RUN/rank-00001/step-00000012-TIME/
        shard-00001-of-00004.safetensors  part-00001.json      its own
        shard-00000-of-00004.safetensors  part-00000.json      the neighbour's
        state.json  part-00004.json                            rank 0's: what is not a tensor, and its checksum

If a node is lost with its memory, each part still exists on another node. Older copies are deleted once all ranks
have the new ones. To resume, a node fetches the files that its ranks need and it lacks, and loads them as usual.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from jingu.checkpoint.manifest import MANIFEST, STATE, Manifest, merge, read_manifest
from jingu.checkpoint.remote import CheckpointPath
from jingu.checkpoint.resume import STEP_NAME, step_folder
from jingu.checkpoint.save_folder import part_path, shard_name, write_small_file
from jingu.checkpoint.shards import plan_part
from jingu.checkpoint.store import StateTensors, local_blocks, overlapping_pieces, run_on_all_ranks, write_blocks
from jingu.parallel.sharding import TensorBlock
from jingu.runtime.ranks import all_ranks_agree, broadcast_from_first, gather_from_all

# File beside the checkpoints that identifies the run's copies. It is deleted together with the checkpoints.
RUN_ID = "memory-id"
_FIRST_SHARD = "shard-00000-of-"


class MemoryCopies:
    """The in-memory copies of one run. Every rank has one, and all call the same methods.

    Attributes:
        bytes: maximum main memory of a rank's copies: its own and its neighbour's, twice while newer ones are written.
    """

    def __init__(self, folder: Path, run_id: int, tensors: Callable[[], StateTensors]) -> None:
        """Create this rank's folder, and find out which ranks share a node.

        Args:
            folder: folder in main memory; ranks that see the same folder are on one node.
            run_id: number of the run, equal on all ranks.
            tensors: returns the tensors to save or to fill, by name.

        Raises:
            CheckpointError: on every rank, if some rank cannot write there.
        """
        self._rank = dist.get_rank()
        self._world_size = dist.get_world_size()
        self._tensors = tensors
        self._root = folder / f"jingu-{run_id:016x}"
        self._rank_folder = self._root / f"rank-{self._rank:05d}"

        def create_folders() -> str:
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._rank_folder.mkdir(exist_ok=True)
            info = self._root.stat()
            return f"{socket.gethostname()}/{info.st_dev}/{info.st_ino}"

        # The node of every rank, and the ranks of this node.
        self._nodes: list[str] = gather_from_all(run_on_all_ranks(create_folders, folder, gather_from_all))
        self._members = [rank for rank, node in enumerate(self._nodes) if node == self._nodes[self._rank]]
        # The distance to the neighbour's rank, such that the neighbour is on another node.
        largest_node = max(map(self._nodes.count, self._nodes))
        self._shift = largest_node if largest_node < self._world_size else 1
        _, blocks = plan_part(self._blocks(), self._rank, self._world_size)
        own_bytes = sum(block.local.nbytes for block in blocks.values())
        self.bytes = max(gather_from_all(own_bytes)) * min(2, self._world_size) * 2
        self._complete: dict[int, str] = {}

    def _blocks(self) -> dict[str, TensorBlock]:
        return local_blocks(self._tensors(), self._rank, self._world_size)

    # Saving

    def save(self, state: Mapping[str, Any], step: int) -> None:
        """Copy the tensors and rank 0's `state` to memory on this node and on the neighbour's. Training waits.

        Raises:
            CheckpointError: on every rank, if a rank failed; earlier copies are unchanged.
        """
        key = f"step-{step:08d}-{broadcast_from_first(time.time_ns()):020d}"
        partial = self._rank_folder / f".{key}"

        def write() -> None:
            partial.mkdir()
            write_blocks(partial, self._blocks(), self._rank, self._world_size)
            if self._rank == 0:
                record = write_small_file(partial / STATE, json.dumps(state, ensure_ascii=False).encode())
                # An additional part after those of the ranks has the checksum of the state.
                manifest = Manifest(ranks=self._world_size, files={STATE: record}, tensors={})
                write_small_file(part_path(partial, self._world_size), manifest.to_bytes())

        try:
            run_on_all_ranks(write, self._rank_folder, gather_from_all)
            if self._world_size > 1:
                self._exchange_with_neighbours(partial)
            run_on_all_ranks(lambda: partial.rename(self._rank_folder / key), self._rank_folder, gather_from_all)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        self.delete(keep=key)

    def _exchange_with_neighbours(self, partial: Path) -> None:
        """Send this rank's files to one neighbour, and receive those of another one at the same time."""
        ranks = self._world_size
        moves = [(name, rank, (rank + self._shift) % ranks) for rank in range(ranks) for name in _files_of(rank, ranks)]
        self._transfer(moves, {path.name: path for path in _list(partial)}, partial)

    def delete(self, keep: str = "") -> None:
        """Delete this rank's copies except those named `keep`, and copies of ranks that no longer exist."""
        if not keep:
            shutil.rmtree(self._rank_folder, ignore_errors=True)
        elif self._rank_folder.is_dir():
            for path in self._rank_folder.iterdir():
                if path.name != keep:
                    shutil.rmtree(path, ignore_errors=True)
        if self._rank == self._members[0]:
            names = {f"rank-{rank:05d}" for rank in self._members}
            for path in _list(self._root):
                if path.name not in names:
                    shutil.rmtree(path, ignore_errors=True)
        if not keep:
            with contextlib.suppress(OSError):
                self._root.rmdir()  # succeeds on the node's last rank

    # Resuming

    def steps(self) -> list[int]:
        """Return the steps, in order, whose parts are all in the memory of some node; equal on all ranks."""
        local_files: dict[str, list[str]] = {}
        for folder in _list(self._root, "rank-"):
            for copy in _list(folder, "step-"):
                local_files.setdefault(copy.name, []).extend(path.name for path in _list(copy))
        files: dict[str, set[str]] = {}
        for table in gather_from_all(local_files):
            for key, names in table.items():
                files.setdefault(key, set()).update(names)
        self._complete = {}
        # Names sort by step and time, so that the later of two attempts at a step counts.
        for key in sorted(files):
            ranks = _number_of_ranks(files[key])
            step = STEP_NAME.fullmatch(key.rpartition("-")[0])
            if step and ranks and all(files[key].issuperset(_files_of(rank, ranks)) for rank in range(ranks)):
                self._complete[int(step[1])] = key
        return sorted(self._complete)

    def gather(self, step: int) -> Path:
        """Return a checkpoint folder on this node with all files that its ranks need; `release` deletes it.

        Raises:
            CheckpointError: on every rank, if a copy in memory is damaged.
        """
        key = self._complete[step]
        folder = step_folder(self._root / "loading", step)
        is_leader = self._rank == self._members[0]

        def create_folder() -> None:
            if is_leader:
                shutil.rmtree(folder.parent, ignore_errors=True)
                folder.mkdir(parents=True)

        def read_parts() -> Manifest:
            ranks = _number_of_ranks(set(files))
            return merge(read_manifest(part_path(folder, rank)) for rank in range(ranks + 1))

        def write_manifest() -> set[str]:
            if is_leader:
                write_small_file(folder / MANIFEST, manifest.to_bytes())
            blocks = {name: block for name, block in self._blocks().items() if name in manifest.tensors}
            return set(overlapping_pieces(manifest, blocks))

        run_on_all_ranks(create_folder, folder, gather_from_all)
        # 1. Fetch the small files of all ranks, which tell which shards are needed.
        files = self._fetch(key, folder, lambda name: not name.startswith("shard-"))
        manifest = run_on_all_ranks(read_parts, folder, gather_from_all)
        needed_names = run_on_all_ranks(write_manifest, folder, gather_from_all)
        self._fetch(key, folder, lambda name: name in needed_names)
        return folder

    def release(self) -> None:
        """Delete the folder of `gather`, once all ranks have read it."""
        if self._rank == self._members[0]:
            shutil.rmtree(self._root / "loading", ignore_errors=True)

    def _fetch(self, key: str, folder: Path, needed_names: Callable[[str], bool]) -> list[str]:
        """Copy the needed files of the copies `key` to each node's folder; return the names of all existing files."""
        local_paths = {path.name: path for path in sorted(self._root.glob(f"rank-*/{key}/*"))}
        tables: list[list[str]] = gather_from_all(list(local_paths))
        everywhere = sorted({name for table in tables for name in table})
        requests: list[list[str]] = gather_from_all([name for name in everywhere if needed_names(name)])
        # Transfers to make: name, sending rank, and first rank of the receiving node.
        moves = []
        for node in dict.fromkeys(self._nodes):
            members = [rank for rank, other_node in enumerate(self._nodes) if other_node == node]
            for name in sorted({name for rank in members for name in requests[rank]}):
                holders = [rank for rank, table in enumerate(tables) if name in table]
                sender = members[0] if members[0] in holders else holders[members[0] % len(holders)]
                moves.append((name, sender, members[0]))
        self._transfer(moves, local_paths, folder)
        # A barrier: other ranks of a node must not read files that its first rank is still receiving.
        all_ranks_agree(True)
        return everywhere

    def _transfer(self, moves: Sequence[tuple[str, int, int]], paths: Mapping[str, Path], folder: Path) -> None:
        """Send files between ranks.

        Args:
            moves: name, sender and receiver of each file, in the same order on all ranks.
            paths: the files of this rank, by name.
            folder: folder for the files that this rank receives.
        """
        sizes: list[dict[str, int]] = gather_from_all({name: path.stat().st_size for name, path in paths.items()})

        def make_room() -> dict[str, Tensor]:
            buffers = {}
            for name, sender, receiver in moves:
                if self._rank == sender == receiver:
                    os.link(paths[name], folder / name)
                elif self._rank == receiver:
                    buffers[name] = _create_mapped(folder / name, sizes[sender][name])
            return buffers

        buffers = run_on_all_ranks(make_room, folder, gather_from_all)
        sends = [
            dist.isend(_map_file(paths[name]), receiver)
            for name, sender, receiver in moves
            if self._rank == sender != receiver
        ]
        for name, sender, receiver in moves:
            if self._rank == receiver != sender:
                dist.recv(buffers[name], sender)
        for work in sends:
            assert work is not None  # None is only returned on ranks outside of the group
            work.wait()


def _list(folder: Path, prefix: str = "") -> list[Path]:
    """Return the contents of a folder; an empty list if another rank has deleted it meanwhile."""
    try:
        return [path for path in folder.iterdir() if path.name.startswith(prefix)]
    except FileNotFoundError:
        return []


def run_id(checkpoints: CheckpointPath, first: bool) -> int:
    """Return the number that identifies the run's copies, on all ranks; rank 0 (`first`) creates it if there is none.

    Raises:
        CheckpointError: on every rank, if it cannot be written.
    """
    file = checkpoints / RUN_ID

    def read_or_create() -> int:
        if not first:
            return 0
        with contextlib.suppress(OSError, ValueError):
            return int(file.read_bytes())
        number = secrets.randbits(62)
        checkpoints.mkdir(parents=True, exist_ok=True)
        with file.open("wb", buffering=0) as out:
            out.write(str(number).encode())
        return number

    number = run_on_all_ranks(read_or_create, file, gather_from_all)
    # A copy of the folder is another run, so include the path.
    hash_value = xxhash.xxh3_64_intdigest(f"{number} {checkpoints.absolute()}".encode()) >> 1
    return broadcast_from_first(hash_value)


def _files_of(rank: int, ranks: int) -> list[str]:
    """Return the names of the files that a rank writes."""
    names = [shard_name(rank, ranks), part_path(Path(), rank).name]
    if rank == 0:
        names += [STATE, part_path(Path(), ranks).name]
    return names


def _number_of_ranks(names: set[str]) -> int:
    """Return how many ranks wrote a copy, from the names of its files; 0 if there is no shard among them."""
    counts = [name.removeprefix(_FIRST_SHARD).partition(".")[0] for name in names if name.startswith(_FIRST_SHARD)]
    return int(counts[0]) if counts and counts[0].isdecimal() else 0


def _map_file(file: Path) -> Tensor:
    """Return the memory-mapped bytes of a file."""
    return torch.from_file(str(file), size=file.stat().st_size, dtype=torch.uint8)


def _create_mapped(file: Path, size: int) -> Tensor:
    """Return the bytes of a new file, to be filled. Raise OSError if there is no room for them."""
    with file.open("xb") as new:
        # Without this, writing to the mapped memory would kill the process (SIGBUS) if there were no room.
        os.posix_fallocate(new.fileno(), 0, size)
    return torch.from_file(str(file), shared=True, size=size, dtype=torch.uint8)
