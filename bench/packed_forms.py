"""Reading quantized matrices, compared with `cp` of the packed file, in CPU time; and the memory that it takes.

Each file holds matrices of random codes in one form, in the page cache. `cp`, the reader, which dequantizes all
matrices one after another, and one that keeps them as they are stored, and touches each of their pages, alternate.
Rates are medians over the rounds. Memory is the growth of the process while the file is read, without mapped files,
relative to a dequantized matrix.

Argument `tiny` is a quick check with small matrices.
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import tempfile
import threading
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from jingu.checkpoint.mapped_files import map_file
from jingu.compat.malloc import release_free_memory
from jingu.formats.huggingface import read_stored
from jingu.formats.packed_forms import METHODS
from jingu.formats.packed_matrices import PackedMatrix, Stored, join_packed
from jingu.formats.safetensors import read_header

ROUNDS = 7
MATRICES = 8
_PAGE = 4096
Tensors = dict[str, Tensor]


def _words(*shape: int) -> Tensor:
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int64).to(torch.int32)


def _bytes(*shape: int) -> Tensor:
    return torch.randint(0, 255, shape, dtype=torch.uint8)


def _fp8(*shape: int) -> Tensor:
    return (_bytes(*shape) % 126).view(torch.float8_e4m3fn)


def _scales(*shape: int) -> Tensor:
    return (torch.rand(shape) + 0.1) / 100


def _gptq(size: int, order: Tensor) -> Tensors:
    groups = size // 128
    # Symmetric, as most models are: all zero points are 8, of which 7 is stored.
    parts = {"qweight": _words(size // 8, size), "qzeros": torch.full((groups, size // 8), 0x77777777).int()}
    return parts | {"scales": _scales(groups, size).half(), "g_idx": (order // 128).int()}


def _nf4(size: int) -> Tensors:
    from jingu.model.quantized_weight import import_bitsandbytes

    import_bitsandbytes()
    import bitsandbytes.functional as library

    packed, state = library.quantize_4bit(
        torch.randn(size, size).bfloat16(), compress_statistics=True, quant_type="nf4"
    )
    return {"weight": packed, **{f"weight.{name}": part for name, part in state.as_dict(packed=True).items()}}


def _forms(size: int) -> dict[str, tuple[dict[str, Any], Callable[[], Tensors]]]:
    """Return the config of each form, and the function that makes the tensors of a matrix."""
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    half, groups = size // 2, size // 128
    return {
        "GPTQ, 4 bits": (gptq, lambda: _gptq(size, torch.arange(size))),
        "GPTQ, 4 bits, ordered by activations": (gptq, lambda: _gptq(size, torch.randperm(size))),
        "AWQ": (
            {"quant_method": "awq", "bits": 4, "group_size": 128},
            lambda: {
                "qweight": _words(size, size // 8),
                "qzeros": _words(groups, size // 8),
                "scales": _scales(groups, size).half(),
            },
        ),
        "int4 of compressed-tensors": (
            {"quant_method": "compressed-tensors", "format": "pack-quantized"},
            lambda: {
                "weight_packed": _words(size, size // 8),
                "weight_scale": _scales(size, groups).bfloat16(),
                "weight_shape": torch.tensor([size, size]),
            },
        ),
        "FP8, blocks of 128 × 128": (
            {"quant_method": "fp8", "weight_block_size": [128, 128]},
            lambda: {"weight": _fp8(size, size), "weight_scale_inv": _scales(groups, groups)},
        ),
        "MXFP4, 4 experts": (
            {"quant_method": "mxfp4"},
            lambda: {"w_blocks": _bytes(4, size, size // 128, 16), "w_scales": _bytes(4, size, size // 128)},
        ),
        "NVFP4 of ModelOpt": (
            {"quant_method": "modelopt"},
            lambda: {
                "weight": _bytes(size, half),
                "weight_scale": _fp8(size, size // 16),
                "weight_scale_2": torch.tensor(0.01),
            },
        ),
        "nf4, nested scales": ({"quant_method": "bitsandbytes"}, lambda: _nf4(size)),
        "int8 of bitsandbytes": (
            {"quant_method": "bitsandbytes"},
            lambda: {"weight": _bytes(size, size).view(torch.int8), "SCB": _scales(size)},
        ),
    }


def _open(file: Path, config: dict[str, Any]) -> list[Stored]:
    places = {key: (file, key, location) for key, location in read_header(file).items()}
    return list(join_packed(places, METHODS[config["quant_method"]].forms, config).values())


def cpu_time() -> float:
    """Return the CPU time of this process and of the programs that it has run."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def peak_memory(work: Callable[[], object]) -> int:
    """Return the growth in bytes of the process's anonymous memory during a call, at most, sampled in a thread."""
    before = peak = _anonymous_memory()
    ended = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not ended.wait(0.0005):
            peak = max(peak, _anonymous_memory())

    thread = threading.Thread(target=watch)
    thread.start()
    work()
    ended.set()
    thread.join()
    return peak - before


def _anonymous_memory() -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))


def _measure(config: dict[str, Any], make: Callable[[], Tensors], rounds: int, folder: Path) -> str:
    """Return the cells of a form's row."""
    file, copy = folder / "model.safetensors", folder / "copy"
    save_file({f"m{index}.{suffix}": part for index in range(MATRICES) for suffix, part in make().items()}, file)
    matrices = _open(file, config)

    def read() -> None:
        for matrix in matrices:
            read_stored(matrix)

    def keep() -> None:
        files = lru_cache(maxsize=None)(map_file)
        for _, _, matrix in matrices:
            assert isinstance(matrix, PackedMatrix)
            for part in matrix.to(torch.device("cpu"), files).memory:
                part.flatten().view(torch.uint8)[::_PAGE].sum()

    def copy_file() -> None:
        subprocess.run(["cp", str(file), str(copy)], check=True)

    largest = max(read_stored(matrix).nbytes for matrix in matrices)
    seconds = []
    for _ in range(rounds):
        times = []
        for work in (copy_file, read, keep):
            copy.unlink(missing_ok=True)
            begin = cpu_time()
            work()
            times.append(cpu_time() - begin)
        seconds.append(times)
    copy_time, read_time, keep_time = (statistics.median(each) for each in zip(*seconds, strict=True))
    size = file.stat().st_size / 1e9
    release_free_memory()
    memory = peak_memory(read) / largest
    rates = [size / copy_time, size / read_time, copy_time / read_time, memory, copy_time / keep_time]
    return " | ".join([f"{size * 1000:.0f}", *(f"{rate:.2f}" for rate in rates)])


def run(argument: str = "") -> str:
    """Return the table as Markdown."""
    size, rounds = (256, 2) if argument == "tiny" else (4096, ROUNDS)
    lines = [
        "| form | packed, MB | `cp`, GB per CPU second | read | read / cp | memory | kept as stored / cp |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, (config, make) in _forms(size).items():
        with tempfile.TemporaryDirectory() as folder:
            lines.append(f"| {name} | {_measure(config, make, rounds, Path(folder))} |")
    return "\n".join(lines)


if __name__ == "__main__":
    import sys

    print(run(*sys.argv[1:]))
