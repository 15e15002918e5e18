"""What the machine can do: fast number formats, measured peak, memory, compilers."""

from __future__ import annotations

import ctypes
import os
import re
import resource
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TypeVar

import torch

T = TypeVar("T")

PRECISIONS = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Formats of numbers, by the names that settings and options have for them."""


def has_fast_bf16(device: torch.device) -> bool:
    """Whether the device multiplies bf16 matrices in hardware."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def has_compiler(device: torch.device) -> bool:
    """Whether `torch.compile` finds what it generates code with: a C++ compiler, or Triton on CUDA."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if device.type == "cuda":
        from torch.utils._triton import has_triton

        return compiler is not None and bool(has_triton())
    return compiler is not None


def measured_peak(device: torch.device, dtype: torch.dtype, seconds: float = 0.2) -> float:
    """Floating-point operations a second of a large matrix product, the best of several tries."""
    size = 4096 if device.type == "cuda" else 1024
    a, b = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
    best, end = 0.0, time.perf_counter() + seconds
    for trial in range(1000):
        start = time.perf_counter()
        torch.mm(a, b)
        if device.type == "cuda":
            torch.cuda.synchronize()
        elapsed = time.perf_counter() - start
        if trial > 0:  # the first one also sets up the library
            best = max(best, 2 * size**3 / elapsed)
        if time.perf_counter() > end and trial > 1:
            break
    return best


@contextmanager
def one_thread() -> Iterator[None]:
    """Let PyTorch work with one thread on CPU while inside: pieces that small take longer to share out than to do."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def aside(function: Callable[[], T]) -> T:
    """The value of a function that is called on a thread of its own, which then ends.

    So does the pool of threads that PyTorch has shared the work out to. Each thread that computes has such a pool, and
    where the threads of all pools are more than the cores, OpenMP lets them sleep between any two operations instead of
    waiting awake: products of few rows take twice as long. So one thread of a process may keep a pool.

    Where Ctrl-C ends the waiting, it ends the function, too, after the operation that it is in: a thread that still
    computes when the interpreter ends aborts the process. A second one does not wait for that.
    """
    answer: Future[T] = Future()

    def call() -> None:
        try:
            answer.set_result(function())
        except BaseException as error:
            answer.set_exception(error)

    thread = threading.Thread(target=call, daemon=True)
    try:
        thread.start()
        wait([answer])
    except KeyboardInterrupt as error:
        if thread.is_alive():
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(type(error)))
            thread.join()
        raise
    return answer.result()


def threads_beside(number: int, name: str) -> ThreadPoolExecutor:
    """Threads that PyTorch works in without sharing out, beside the one that computes: see `aside`."""
    before, all_here = torch.get_num_threads(), threading.Barrier(number)

    def begin() -> None:
        all_here.wait()
        torch.get_num_threads()  # which a thread takes over from the others when it is first asked
        torch.set_num_threads(1)

    pool = ThreadPoolExecutor(number, name)
    wait([pool.submit(begin) for _ in range(number)])
    torch.set_num_threads(before)  # for threads to come
    return pool


def keep_freed_memory() -> None:
    """Let the C library keep large freed blocks for the next step instead of returning them to the system.

    Otherwise each step's large tensors are mapped anew and every page of them faults: a fifth of a step on CPU.
    glibc's `mallopt`; elsewhere nothing happens.
    """
    trim_threshold, mmap_max = -1, -4
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(trim_threshold, 2**31 - 1)
        mallopt(mmap_max, 0)


def advise(address: int, size: int, advice: int) -> None:
    """Tell the system how a block of memory will be used: `madvise` of Linux; elsewhere nothing happens."""
    if sys.platform == "linux":
        ctypes.CDLL(None).madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), advice)


def in_large_pages(address: int, size: int) -> None:
    """Let the system give a block of memory that nothing lies in yet in pages of 2 MB, where it can."""
    page, hugepage = os.sysconf("SC_PAGE_SIZE"), 14
    first = -(-address // page) * page
    advise(first, max(0, address + size - first), hugepage)


def gather_in_large_pages(blocks: Iterable[tuple[int, int]]) -> None:
    """Let the system hold these blocks of memory (address, bytes) in pages of 2 MB, where it can (from Linux 6.1 on):
    what is read from main memory all the time is then read up to a fifth faster."""
    size, collapse = 1 << 21, 25
    for page in {page for first, count in blocks for page in range(first // size, (first + count - 1) // size + 1)}:
        advise(page * size, size, collapse)


def total_memory(device: torch.device) -> int:
    """Bytes of the card's memory, or of the machine's: the same on every rank of alike machines, whatever is free."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def is_out_of_memory(error: Exception) -> bool:
    """Whether an allocation failed: the allocator for CPUs has no error of its own for it."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


def peak_memory(device: torch.device) -> int:
    """Most bytes this process has held: on the card, or resident in main memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with suppress(OSError):
        # Of this program: `getrusage` begins with what the process had that started it.
        found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8"))
        if found is not None:
            return 1024 * int(found[1])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def eager() -> AbstractContextManager[object]:
    """Run a block that was compiled for training as it is written; it would be compiled again at every length.

    The compiler takes seconds to import, so it is not asked where nothing has brought it in.
    """
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
