"""Saving while training goes on: tensors are copied to shared memory, and a process of its own writes the copy.

The copy, too, is made while training goes on: between two steps of the optimizer nothing changes the tensors, and a
step of the optimizer waits for what is not copied by then. So what lands on the disk is the step that it claims to be.
The memory is used again for each save, so there is one copy, and one save at a time.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import jingu
from jingu.checkpoint.files import leave_note, partial_name, write_all
from jingu.checkpoint.manifest import CheckpointError
from jingu.checkpoint.remote import Place
from jingu.checkpoint.resume import Keep
from jingu.checkpoint.shards import Held, plan_part
from jingu.checkpoint.store import held_blocks


@dataclass(frozen=True)
class Outcome:
    """How a save in the background ended."""

    folder: Place
    problem: str | None
    """None: this rank's part is on disk; on the first rank, the whole checkpoint."""


class BackgroundSaver:
    """Saves the same tensors again and again; every rank has one."""

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        optimizer: torch.optim.Optimizer | None = None,
        *,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        """Take the memory for a copy of what this rank writes of `tensors`, and start the process that writes.

        Args:
            optimizer: whose steps change the tensors, and wait for the copy; None: who changes them calls `settle`.

        Raises:
            CheckpointError: tensors that cannot be stored.
        """
        self._rank, self._ranks, self._threads = rank, ranks, torch.get_num_threads()
        blocks = held_blocks(tensors, self._rank, self._ranks)
        self._layout = _layout(blocks)
        plan, written = plan_part(blocks, rank, ranks)
        self._plan = plan.model_dump(mode="json")
        self._written = [block.name for block in written]
        sizes = [prod(block.slice.size) * block.local.element_size() for block in written]
        self.bytes = sum(sizes)
        """Main memory taken for the copy."""
        self._file = _shared_memory(self.bytes)
        self._memory, self._pinned = torch.empty(0, dtype=torch.uint8), False
        if self.bytes:
            self._memory = torch.frombuffer(mmap.mmap(self._file, self.bytes), dtype=torch.uint8)
            self._memory.zero_()  # the system hands out the pages now rather than in the first save
            self._pinned = any(block.local.is_cuda for block in written) and _pin(self._memory)
        self._places = [
            raw.view(block.local.dtype).view(block.slice.size)
            for raw, block in zip(self._memory.split(sizes), written, strict=True)
        ]
        self._pending: Place | None = None
        self._said = b""
        self._process = self._start()
        self._copying: threading.Thread | None = None
        self._on_card: torch.cuda.Event | None = None
        self._error: BaseException | None = None
        self._free = threading.Event()
        self._free.set()
        self._hook = None if optimizer is None else optimizer.register_step_pre_hook(lambda *_: self.settle())

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-m", "jingu.checkpoint.writer", str(self._file)],
            cwd=Path(jingu.__file__).parents[1],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[self._file],
            process_group=0,  # Ctrl-C in the terminal is for training
            bufsize=0,
        )
        _tell(process, {"rank": self._rank, "bytes": self.bytes, "plan": self._plan})
        return process

    def save(
        self,
        folder: Place,
        tensors: Mapping[str, Tensor],
        state: Mapping[str, Any],
        keep: Keep,
        copy_to: str | None = None,
    ) -> None:
        """Have the tensors copied, and the copy written. No save may be under way: `poll` first.

        The tensors must not change before `settle` returns, which the optimizer's next step sees to.

        Args:
            folder, tensors, state: as for `jingu.checkpoint.store.save`.
            keep: the checkpoints beside this one that need not stay are deleted when it is complete.
            copy_to: an address where a copy of it goes then, as `jingu.checkpoint.remote` knows them.

        Raises:
            ValueError: the tensors are other ones than at the start, or laid out otherwise.
        """
        assert self._pending is None
        blocks = held_blocks(tensors, self._rank, self._ranks)
        if _layout(blocks) != self._layout:
            raise ValueError("the tensors to save, or their layout, are no longer what they were")
        if self._copying is not None:
            self._copying.join()  # or it might ask a new process for what the one that has ended was to write
        if self._process.poll() is not None:
            self._process, self._said = self._start(), b""
        self._pending = folder.absolute()
        request: dict[str, Any] = {"folder": str(self._pending)}
        if self._rank == 0:
            request |= {"state": state, "keep": asdict(keep), "copy_to": copy_to}
        by_name = {block.name: block.local for block in blocks}
        pairs = [(place, by_name[name]) for place, name in zip(self._places, self._written, strict=True)]
        self._on_card = self._copy_from_card([pair for pair in pairs if pair[1].is_cuda])
        self._free.clear()
        self._copying = threading.Thread(target=self._copy, args=([p for p in pairs if not p[1].is_cuda], request))
        self._copying.start()

    def _copy_from_card(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> torch.cuda.Event | None:
        """Have a card copy beside what it computes; the event that says when it has."""
        if not pairs:
            return None
        beside = torch.cuda.Stream(pairs[0][1].device)
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            torch._foreach_copy_([to for to, _ in pairs], [tensor for _, tensor in pairs], non_blocking=self._pinned)
        return beside.record_event()

    def _copy(self, pairs: Sequence[tuple[Tensor, Tensor]], request: dict[str, Any]) -> None:
        """In a thread: have what is in main memory copied, and ask for the writing when all is copied.

        As many threads copy as training computes with, so that each core gives it the same time: training divides its
        work evenly, and the others would wait for a core that gives more.
        """
        rest = iter(sorted(pairs, key=lambda pair: -pair[1].numel()))
        try:
            with ThreadPoolExecutor(self._threads) as pool:
                for copied in [pool.submit(_copy_all, rest) for _ in range(self._threads)]:
                    copied.result()
            self._free.set()
            if self._on_card is not None:
                self._on_card.synchronize()
            _tell(self._process, request)
        except BaseException as error:
            self._error = error
            self._free.set()

    def settle(self) -> None:
        """Return when the tensors may change: they are copied, or a card will have before what it is told next."""
        self._free.wait()
        if self._on_card is not None:
            torch.cuda.current_stream().wait_event(self._on_card)
        if self._error is not None:
            raise self._error

    @property
    def busy(self) -> bool:
        """Whether a save is under way, as far as `poll` has heard."""
        return self._pending is not None

    def poll(self, seconds: float | None = 0.0) -> Outcome | None:
        """How the save under way has ended, once it has; None where there is none, or it has not yet.

        Args:
            seconds: how long to wait for it; None: until it has ended.
        """
        deadline = None if seconds is None else time.monotonic() + seconds
        if self._copying is not None and (seconds is None or self._error is not None):
            self._copying.join()
            self.settle()
        assert self._process.stdout is not None
        while self._pending is not None:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([self._process.stdout], [], [], left)[0]:
                return None
            data = self._process.stdout.read(4096)
            self._said += data or b""
            if not data:
                problem = f"the process that writes it ended {_how(self._process.wait())}"
                if self._rank:  # it could not tell the first rank
                    leave_note(partial_name(self._pending), self._rank, CheckpointError(problem))
                return self._ended(problem)
            if self._said.endswith(b"\n"):
                answer, self._said = json.loads(self._said), b""
                return self._ended(answer["problem"])
        return None

    def _ended(self, problem: str | None) -> Outcome:
        assert self._pending is not None
        folder, self._pending = self._pending, None
        return Outcome(folder, problem)

    def close(self) -> None:
        """End the process, also where it is in the middle of a save, and give the memory back."""
        assert self._process.stdin is not None and self._process.stdout is not None
        if self._hook is not None:
            self._hook.remove()
        if self._copying is not None:
            self._copying.join()
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._memory.data_ptr())
        os.close(self._file)


def _copy_all(pairs: Iterator[tuple[Tensor, Tensor]]) -> None:
    """Copy pair after pair of those that several threads share. (An operation of PyTorch would start threads of its
    own.)"""
    for to, tensor in pairs:
        if tensor.is_contiguous():
            ctypes.memmove(to.data_ptr(), tensor.data_ptr(), tensor.numel() * tensor.element_size())
        else:
            to.copy_(tensor)


def _layout(blocks: list[Held]) -> list[object]:
    return [(block.name, block.slice, block.local.dtype) for block in blocks]


def _tell(process: subprocess.Popen[bytes], message: dict[str, Any]) -> None:
    """A process that has ended is noticed by its silence."""
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        write_all(process.stdin, memoryview(json.dumps(message).encode() + b"\n"))


def _how(code: int) -> str:
    return f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"


def _shared_memory(size: int) -> int:
    """A descriptor of so many bytes of memory that another process can map."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("jingu-checkpoint", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, size)
    return descriptor


def _pin(memory: Tensor) -> bool:
    """Let a card copy into the memory at full speed; whether that was allowed."""
    return int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)) == 0
