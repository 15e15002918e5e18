"""Properties of the device and the host: supported dtypes, peak FLOP/s, memory, compilers; threads and huge pages."""

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
from typing import Any, TypeVar

import torch
from pydantic import ByteSize, TypeAdapter

from jingu.compat.torch import compiler_is_loaded, cpu_has_bf16_units, has_triton
from jingu.config.sections.parallel import DeviceType
from jingu.errors import JinguError
from jingu.runtime.futures import fulfill

T = TypeVar("T")

# PyTorch's dtypes by their names in settings and options.
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


# What each type of device needs, for error messages.
_REQUIREMENTS = {
    "cuda": "a build of PyTorch for CUDA or ROCm, and their driver",
    "xpu": "a build of PyTorch for XPU, and Intel's driver",
    "npu": "the package torch_npu, and CANN",
    "mps": "macOS on Apple silicon",
}


def find_device_type(choice: DeviceType) -> str:
    """Return the type of the device to use, such as `cuda`; auto: the machine's accelerator, or else cpu.

    Raises:
        JinguError: the machine has no such device, or PyTorch is built without it.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    available = "cpu" if accelerator is None else accelerator.type
    if choice == "auto":
        return available
    if choice not in ("cpu", available):
        has = f"finds {'no accelerator' if available == 'cpu' else available}"
        if choice in ("cuda", "mps") and not getattr(torch.backends, choice).is_built():
            has = f"is built without {choice.upper()}"
        raise JinguError(
            f"no {choice.upper()} device is to be found; PyTorch {torch.__version__} {has}.",
            where="device.type",
            fix=f"It needs {_REQUIREMENTS[choice]}. Use auto or cpu otherwise.",
        )
    return choice


def check_number_format(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype. Raises JinguError if the device has no hardware for it; CPUs support every dtype."""
    if dtype == torch.float64 and device.type == "mps":
        raise JinguError("Apple GPUs do not compute in fp64.", where="precision", fix="Choose fp32, or the CPU.")
    if dtype == torch.bfloat16 and device.type != "cpu" and not has_fast_bf16(device):
        problem = f"{device_name(device)} has no units for bf16; NVIDIA GPUs have them since Ampere."
        raise JinguError(problem, where="precision", fix="Choose auto, fp16 or fp32.")
    return dtype


def check_fp8(device: torch.device, where: str = "precision.type") -> None:
    """Raise JinguError if the device does not multiply in FP8. CPUs do, slowly."""
    problem = None
    if device.type not in ("cpu", "cuda") or torch.version.hip is not None:
        problem = "FP8 is supported only on NVIDIA GPUs, and on CPUs for tests."
    elif device.type == "cuda" and torch.cuda.is_available() and torch.cuda.get_device_capability(device) < (8, 9):
        name = torch.cuda.get_device_name(device)
        problem = f"{name} has no units for FP8; NVIDIA GPUs have them since Ada and Hopper."
    if problem is not None:
        raise JinguError(problem, where=where, fix="Choose bf16.")


def gpu_uuid(device: torch.device) -> str:
    """Return the UUID of an NVIDIA GPU in NVML's form, `GPU-...`; empty for other devices."""
    return (
        f"GPU-{torch.cuda.get_device_properties(device).uuid}" if device.type == "cuda" and torch.version.cuda else ""
    )


def device_module(device: torch.device) -> Any:
    """Return PyTorch's module for a type of device, such as torch.cuda."""
    return torch.get_device_module(device)


def device_name(device: torch.device) -> str:
    """Return the name of a device, such as `NVIDIA H200`; of a CPU and of Apple's GPUs, the type."""
    if device.type in ("cpu", "mps"):
        return device.type.upper()
    return str(device_module(device).get_device_name(device))


def copy_to_device(values: Any, device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return a tensor with these values on a device, without waiting for the copy."""
    return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)


def has_fast_bf16(device: torch.device) -> bool:
    """Return whether the device multiplies bf16 matrices in hardware."""
    if device.type == "cpu":
        return cpu_has_bf16_units()
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return device.type == "mps" or bool(device_module(device).is_bf16_supported())


def has_compiler(device: torch.device) -> bool:
    """Return whether `torch.compile` has a C++ compiler, and on accelerators also Triton."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    return compiler is not None and (device.type == "cpu" or has_triton())


def measure_peak_flops(device: torch.device, dtype: torch.dtype, seconds: float = 0.2) -> float:
    """Measure the FLOP/s of a large square matmul; return the best of several trials.

    Args:
        seconds: time to measure; at least three trials are made.
    """
    size = 1024 if device.type == "cpu" else 8192
    # Use varied values: a GPU multiplies constant matrices faster, because they need less power.
    matrix = torch.arange(size * size, dtype=torch.float32, device=device).sin().to(dtype).view(size, size)
    best, end = 0.0, time.perf_counter() + seconds
    for trial in range(1000):
        start = time.perf_counter()
        torch.mm(matrix, matrix)
        if device.type != "cpu":
            device_module(device).synchronize()
        elapsed_seconds = time.perf_counter() - start
        if trial > 0:  # the first one also initializes the library
            best = max(best, 2 * size**3 / elapsed_seconds)
        if time.perf_counter() > end and trial > 1:
            break
    return best


@contextmanager
def single_thread() -> Iterator[None]:
    """Limit PyTorch to one CPU thread within the block. For small tensors, several threads cost more than they save."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def run_in_thread(function: Callable[[], T]) -> T:
    """Call a function on a new thread, wait until the thread has ended, and return the function's value.

    This gets rid of an OpenMP pool. Each thread that computes has its own pool. If all pools together have more threads
    than there are cores, OpenMP lets them sleep between operations instead of spinning, and matmuls of few rows take
    twice as long. So only one thread of a process may keep its pool; the pool of this thread ends with it.

    Ctrl-C also interrupts the function, after its current operation, because a thread that still computes when the
    interpreter shuts down aborts the process. A second Ctrl-C does not wait for the thread.
    """
    answer: Future[T] = Future()
    thread = threading.Thread(target=fulfill, args=(answer, function), daemon=True)
    try:
        thread.start()
        wait([answer])
    except KeyboardInterrupt as error:
        if thread.is_alive():
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(type(error)))
            thread.join()
        raise
    return answer.result()


def make_worker_threads(number: int, name: str) -> ThreadPoolExecutor:
    """Return an executor whose threads compute on one CPU thread each.

    They have no OpenMP pool, so they do not slow down the pool of the main computing thread (see `run_in_thread`).

    Args:
        number: number of threads, which start at once.
        name: prefix of the threads' names.
    """
    num_threads = torch.get_num_threads()
    barrier = threading.Barrier(number)

    def begin() -> None:
        barrier.wait()  # so that each thread runs this once
        # The first call in a thread copies the global setting, and would overwrite a setting made before.
        torch.get_num_threads()
        torch.set_num_threads(1)

    pool = ThreadPoolExecutor(number, name)
    wait([pool.submit(begin) for _ in range(number)])
    torch.set_num_threads(num_threads)  # the global setting, which later threads copy
    return pool


def retain_freed_memory() -> None:
    """Make glibc keep large freed blocks for the next step instead of returning them to the system.

    Otherwise large tensors are mapped again in each step, and their page faults take a fifth of a step on CPU. Does
    nothing if the C library has no `mallopt`.
    """
    trim_threshold, mmap_max = -1, -4
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(trim_threshold, 2**31 - 1)
        mallopt(mmap_max, 0)


def advise_memory(address: int, size: int, advice: int) -> None:
    """Call `madvise` for a block of memory on Linux; do nothing elsewhere. Errors are ignored.

    Args:
        advice: the system's number of the advice.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), advice)


def request_huge_pages(address: int, size: int) -> None:
    """Ask the system for 2 MB pages for a block of memory that has not been written yet (`MADV_HUGEPAGE`)."""
    page, hugepage = os.sysconf("SC_PAGE_SIZE"), 14
    first = -(-address // page) * page
    advise_memory(first, max(0, address + size - first), hugepage)


def collapse_to_huge_pages(blocks: Iterable[tuple[int, int]]) -> None:
    """Ask the system to move blocks of memory to 2 MB pages (`MADV_COLLAPSE`, Linux 6.1 and newer).

    Weights that are read from memory in every step are then read up to 20% faster.

    Args:
        blocks: address and bytes of each block.
    """
    size, collapse = 1 << 21, 25
    for page in {page for first, count in blocks for page in range(first // size, (first + count - 1) // size + 1)}:
        advise_memory(page * size, size, collapse)


def total_memory(device: torch.device) -> int:
    """Return the total memory in bytes, of the GPU or of the host. It is equal on all ranks of equal machines.

    On Apple GPUs it is the memory that Metal recommends to use at most.
    """
    if device.type == "mps":
        return torch.mps.recommended_max_memory()
    if device.type != "cpu":
        return int(device_module(device).get_device_properties(device).total_memory)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def parse_size(text: str, total: int, option: str) -> int:
    """Return a number of bytes: a share of the total (25%), or a size (800MB, 3GB, 1.5GiB, 1000000).

    Args:
        option: the option with the text, for errors.

    Raises:
        JinguError: the text is neither, or more than 100%.
    """
    is_share = text.endswith("%")
    try:
        if is_share:
            size = int(total * float(text[:-1]) / 100)
        else:
            size = int(TypeAdapter(ByteSize).validate_python(text))
    except ValueError:
        size = 0
    if size < 1:
        fix = "Give a share, such as 25%, or bytes, such as 3GB."
        raise JinguError(f"{text} is not a size.", where=option, fix=fix)
    if is_share and size > total:
        raise JinguError(f"{text} is more than all.", where=option, fix="Give 100% or less.")
    return size


def is_out_of_memory(error: Exception) -> bool:
    """Return whether an error means that an allocation failed. PyTorch's CPU allocator has no error class for it."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


def peak_memory(device: torch.device) -> int:
    """Return the peak memory of this process in bytes: allocated on the GPU, or resident in host memory.

    On Apple GPUs, whose peak is not recorded, it is the memory that is allocated now.
    """
    if device.type == "mps":
        return torch.mps.driver_allocated_memory()
    if device.type != "cpu":
        return int(device_module(device).max_memory_allocated(device))
    with suppress(OSError):
        # `getrusage` would include the peak of the process that forked this one.
        match = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8"))
        if match is not None:
            return 1024 * int(match[1])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def force_eager() -> AbstractContextManager[object]:
    """Return a context in which compiled blocks run eagerly, so that they are not recompiled for every new length.

    Importing the compiler takes seconds, so this does nothing if it has not been imported.
    """
    return torch.compiler.set_stance("force_eager") if compiler_is_loaded() else nullcontext()
