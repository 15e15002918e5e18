"""Asynchronous saves: tensors are copied to shared memory, and a separate process writes the copy during training.

Training also continues while the copy is made. Nothing changes the tensors between two optimizer steps, and the next
optimizer step waits until the copy is complete, so that the saved state is exactly that of its step. The memory is
reused for each save: there is one copy, and one save at a time.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jingu.checkpoint.manifest import CheckpointError
from jingu.checkpoint.remote import CheckpointPath
from jingu.checkpoint.retention import Retention
from jingu.checkpoint.save_folder import partial_path, write_all, write_failure_note
from jingu.checkpoint.shards import plan_part
from jingu.checkpoint.store import StateTensors, local_blocks
from jingu.compat.torch import foreach_copy_
from jingu.parallel.sharding import TensorBlock
from jingu.runtime.device import device_module
from jingu.runtime.files import PACKAGE_ROOT

CopyPair = tuple[Tensor, Tensor]  # target and value


@dataclass(frozen=True)
class SaveResult:
    """The result of a save.

    Attributes:
        problem: why the save failed; None if this rank's part is on disk (on rank 0, the whole checkpoint).
    """

    folder: CheckpointPath
    problem: str | None


class AsyncSaver:
    """Saves the same tensors repeatedly; every rank has one.

    Attributes:
        bytes: main memory of the copy.
    """

    def __init__(
        self, tensors: StateTensors, optimizer: torch.optim.Optimizer | None = None, *, rank: int = 0, ranks: int = 1
    ) -> None:
        """Allocate memory for a copy of the part of `tensors` that this rank writes, and start the writer process.

        Args:
            optimizer: the optimizer that changes the tensors; its steps wait for the copy. With None, callers must call
                `wait_for_copy` before they change the tensors.

        Raises:
            CheckpointError: the tensors cannot be stored.
        """
        self._rank = rank
        self._ranks = ranks
        self._threads = torch.get_num_threads()
        blocks = local_blocks(tensors, rank, ranks)
        self._layout = _layout(blocks)
        plan, blocks_in_file = plan_part(blocks, rank, ranks)
        self._plan = plan.model_dump(mode="json")
        sizes = [block.local.nbytes for block in blocks_in_file.values()]
        # The GPU of the blocks, if any of them is on one.
        devices = {block.local.device for block in blocks_in_file.values()}
        self._device = next(filter(_has_streams, devices), torch.device("cpu"))
        self.bytes = sum(sizes)
        self._descriptor = _create_shared_memory(self.bytes)
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._is_pinned = False
        if self.bytes:
            self._memory = torch.frombuffer(mmap.mmap(self._descriptor, self.bytes), dtype=torch.uint8)
            self._memory.zero_()  # makes the system allocate the pages now rather than in the first save
            if self._device.type == "cuda":
                self._is_pinned = _pin(self._memory)
        # The target of each block's copy, by the name of its tensor.
        self._copies = {
            name: memory.view(block.local.dtype).view(block.size)
            for memory, (name, block) in zip(self._memory.split(sizes), blocks_in_file.items(), strict=True)
        }
        self._process = self._start_process()
        # A single thread copies and then waits for the writer process, so a save begins after the previous one.
        self._thread = ThreadPoolExecutor(1)
        self._folder: CheckpointPath = Path()
        self._gpu_copy: Any | None = None
        self._copying: Future[None] | None = None
        self._writing: Future[str | None] | None = None
        self._hook = None
        if optimizer is not None:
            self._hook = optimizer.register_step_pre_hook(lambda *_: self.wait_for_copy())

    def _start_process(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-m", "jingu.checkpoint.writer_process", str(self._descriptor)],
            cwd=PACKAGE_ROOT.parent,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[self._descriptor],
            process_group=0,  # Ctrl-C in the terminal is for training
            bufsize=0,
        )
        _send(process, {"rank": self._rank, "bytes": self.bytes, "plan": self._plan})
        return process

    def save(
        self,
        folder: CheckpointPath,
        tensors: StateTensors,
        state: Mapping[str, Any],
        retention: Retention,
        copy_to: str | None = None,
    ) -> None:
        """Start a save: copy the tensors, then write the copy. No other save may be pending: call `poll` first.

        The tensors must not change before `wait_for_copy` returns, which the optimizer's next step ensures.

        Args:
            folder, tensors, state: as for `jingu.checkpoint.store.save`.
            retention: which other checkpoints of the run are kept once this one is complete.
            copy_to: URL to copy the complete checkpoint to; None: no copy.

        Raises:
            ValueError: the tensors or their layout differ from those at the start.
        """
        assert self._writing is None
        blocks = local_blocks(tensors, self._rank, self._ranks)
        if _layout(blocks) != self._layout:
            raise ValueError("the tensors to save, or their layout, differ from those at the start")
        if self._process.poll() is not None:
            self._process = self._start_process()
        self._folder = folder.absolute()
        request: dict[str, Any] = {"folder": str(self._folder)}
        if self._rank == 0:
            request |= {"state": state, "retention": asdict(retention), "copy_to": copy_to}
        pairs = [(copy, blocks[name].local) for name, copy in self._copies.items()]
        self._gpu_copy = self._start_gpu_copy([pair for pair in pairs if _has_streams(pair[1].device)])
        self._copying = self._thread.submit(self._copy, [pair for pair in pairs if not _has_streams(pair[1].device)])
        self._writing = self._thread.submit(self._write, self._copying, request)

    def _start_gpu_copy(self, pairs: Sequence[CopyPair]) -> Any | None:
        """Start to copy from the GPU on a separate stream; return the event of its end."""
        if not pairs:
            return None
        module = device_module(self._device)
        stream = module.Stream(self._device)
        stream.wait_stream(module.current_stream())
        with module.stream(stream):
            foreach_copy_([copy for copy, _ in pairs], [tensor for _, tensor in pairs], non_blocking=self._is_pinned)
        return stream.record_event()

    def _copy(self, pairs: Sequence[CopyPair]) -> None:
        """Copy the tensors in main memory, on the save thread.

        The copy uses as many threads as training, so that it takes the same time from each core: training divides its
        work evenly, and would wait for the slowest core.
        """
        largest_first = iter(sorted(pairs, key=lambda pair: -pair[1].numel()))
        with ThreadPoolExecutor(self._threads) as pool:
            for future in [pool.submit(_copy_all, largest_first) for _ in range(self._threads)]:
                future.result()

    def _write(self, copying: Future[None], request: dict[str, Any]) -> str | None:
        """Let the writer process write the complete copy, on the save thread; return why it failed, or None."""
        copying.result()  # raises if the copy failed
        if self._gpu_copy is not None:
            self._gpu_copy.synchronize()
        _send(self._process, request)
        assert self._process.stdout is not None
        answer = self._process.stdout.readline()
        if answer:
            problem: str | None = json.loads(answer)
            return problem
        problem = f"the process that writes it ended {_exit_reason(self._process.wait())}"
        if self._rank:  # the writer process has ended, so this thread reports the problem to rank 0
            write_failure_note(partial_path(self._folder), self._rank, CheckpointError(problem))
        return problem

    def wait_for_copy(self) -> None:
        """Wait until the tensors may change: they are copied, or the GPU copies them before its next work."""
        if self._copying is not None:
            self._copying.result()
        if self._gpu_copy is not None:
            device_module(self._device).current_stream().wait_event(self._gpu_copy)

    @property
    def busy(self) -> bool:
        """Whether there is a save whose result `poll` has not returned yet."""
        return self._writing is not None

    def poll(self, seconds: float | None = 0.0) -> SaveResult | None:
        """Return the result of the pending save; None if there is none, or if it is not finished.

        Args:
            seconds: time to wait for the end of the save; None waits without a limit.
        """
        if self._writing is None or not wait([self._writing], seconds).done:
            return None
        problem = self._writing.result()
        self._writing = None
        return SaveResult(self._folder, problem)

    def close(self) -> None:
        """End the writer process, even in the middle of a save, and free the memory."""
        if self._hook is not None:
            self._hook.remove()
        with self._process:  # closes its pipes
            self._process.kill()
            self._thread.shutdown()
        if self._is_pinned:
            torch.cuda.cudart().cudaHostUnregister(self._memory.data_ptr())
        os.close(self._descriptor)


def _has_streams(device: torch.device) -> bool:
    """Return whether the device has streams, and so can copy while it computes."""
    return device.type not in ("cpu", "mps")


def _copy_all(pairs: Iterator[CopyPair]) -> None:
    """Copy the pairs of an iterator that several threads share. (PyTorch's own copy would start additional threads.)"""
    for copy, tensor in pairs:
        if tensor.is_contiguous() and tensor.device.type == "cpu":
            ctypes.memmove(copy.data_ptr(), tensor.data_ptr(), tensor.nbytes)
        else:
            copy.copy_(tensor)


def _layout(blocks: Mapping[str, TensorBlock]) -> list[object]:
    """Return the properties of the blocks that must be equal in all saves."""
    return [
        (name, block.local.dtype, block.shape, block.offset, block.size, block.replica, block.replicas)
        for name, block in blocks.items()
    ]


def _send(process: subprocess.Popen[bytes], message: dict[str, Any]) -> None:
    """Write a line of JSON to a process. If the process has ended, that is detected later, when it does not answer."""
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        write_all(process.stdin, memoryview(json.dumps(message).encode() + b"\n"))


def _exit_reason(code: int) -> str:
    return f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"


def _create_shared_memory(size: int) -> int:
    """Return a file descriptor of memory that another process can map."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("jingu-checkpoint", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, size)
    return descriptor


def _pin(memory: Tensor) -> bool:
    """Page-lock memory, so that a GPU copies into it at full speed; return whether the driver allowed it."""
    return int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)) == 0
