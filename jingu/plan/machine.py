"""Machines: a GPU, its memory and links, and the share of their peak rates that a training step achieves."""

from __future__ import annotations

import csv
import re
import time
from collections.abc import Callable
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from jingu.config.strict_yaml import parse_yaml
from jingu.errors import JinguError
from jingu.runtime.files import read_text
from jingu.runtime.gpus import num_usable_cores
from jingu.tables import read_table

if TYPE_CHECKING:
    import torch

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class Efficiency(_Part):
    """The efficiency of a step on a machine: constants that calibration fits, each with a physical meaning.

    The defaults were fitted to published runs (`bench/planning.py`).

    Attributes:
        matmul: throughput of a step's large matmuls, as a share of the best measured matmul.
        half_gflop: size of a matmul, in GFLOP, that achieves half of that.
        attention: throughput of fused attention, as a share of the best measured matmul.
        memory: share of the memory bandwidth that elementwise operations achieve.
        kernel_us: time to launch a kernel, in µs; a small operation takes at least this long.
        operation_us: minimum time of an elementwise operation on a CPU, in µs.
        link: share of the bandwidth within a node that collectives achieve.
        nic: share of the network bandwidth that collectives achieve.
        hop_us: latency of a collective between two GPUs of a node, or two ranks of a CPU, in µs.
    """

    matmul: Positive = 0.95
    half_gflop: Positive = 12.0
    attention: Positive = 0.58
    memory: Positive = 0.58
    kernel_us: Positive = 11.5
    operation_us: Positive = 2.0
    link: Positive = 0.75
    nic: Positive = 0.8
    hop_us: Positive = 4.2


class Machine(_Part):
    """A GPU of a cluster and its surroundings. Bandwidths are in GB/s, per GPU and in one direction.

    Attributes:
        memory_gib: memory of a GPU that a process can use.
        peak_tflops: the vendor's peak of dense bf16 matmuls (fp16 on GPUs without bf16).
        matmul_tflops: the best measured throughput of these matmuls.
        memory_gbs: bandwidth of the GPU's memory.
        link_gbs: bandwidth to the other GPUs of the node.
        nic_gbs: bandwidth to other nodes.
        host_gbs: bandwidth to main memory.
        host_gib: a GPU's share of main memory.
        disk_gbs: write bandwidth of a node to the storage of checkpoints.
        watts: power of a GPU under load.
        gpus_per_node: GPUs of a node.
        multiprocessors: units of a GPU that compute tiles of a matmul; 0: unknown, or a CPU.
        sustained: share of `matmul_tflops` that remains under continuous load, by the limit of power.
        ampere_kernels: speed that kernels written for Ampere keep on this GPU, relative to matmuls.
        has_bf16: whether it computes in bf16; NVIDIA's GPUs before Ampere do not.
        is_shared: whether the ranks of a node share one device, as on CPUs.
        cores: cores of a node if `is_shared`; None for one per rank.
        interval: bounds of measured over planned seconds for 9 of 10 logged steps, from a calibration.
    """

    name: str = "custom"
    memory_gib: Positive
    peak_tflops: Positive
    matmul_tflops: Positive
    memory_gbs: Positive
    link_gbs: Positive
    nic_gbs: Positive
    host_gbs: Positive = 25.0
    host_gib: Positive = 240.0
    disk_gbs: Positive = 2.0
    watts: Positive = 400.0
    gpus_per_node: Annotated[int, Field(ge=1)] = 8
    multiprocessors: Annotated[int, Field(ge=0)] = 0
    sustained: Annotated[float, Field(gt=0, le=1)] = 1.0
    ampere_kernels: Annotated[float, Field(gt=0, le=1)] = 1.0
    has_bf16: bool = True
    is_shared: bool = False
    cores: Annotated[int, Field(ge=1)] | None = None
    efficiency: Efficiency = Efficiency()
    interval: tuple[Positive, Positive] | None = None

    @property
    def matmul_flops(self) -> float:
        """Best FLOP/s of matmuls under continuous load."""
        return self.matmul_tflops * 1e12 * self.sustained

    @property
    def usable_bytes(self) -> float:
        """Bytes of a GPU without the driver's context and libraries; of a CPU, without other processes."""
        return (self.memory_gib * 0.95 if self.is_shared else self.memory_gib - 1.5) * 2**30

    @property
    def host_bytes(self) -> float:
        """Bytes of a GPU's share of main memory."""
        return self.host_gib * 2**30

    @property
    def ranks_per_core(self) -> float:
        """Ranks that share a core, at least 1. While some of them wait, the others compute faster."""
        return max(1.0, self.gpus_per_node / self.cores) if self.is_shared and self.cores else 1.0

    def with_nodes(self, gpus_per_node: int) -> Machine:
        """Return the machine with another number of GPUs per node; ranks on a CPU share its memory and speed."""
        update: dict[str, object] = {"gpus_per_node": gpus_per_node}
        if self.is_shared:
            names = ("memory_gib", "peak_tflops", "matmul_tflops", "memory_gbs", "link_gbs")
            update |= {name: getattr(self, name) * self.gpus_per_node / gpus_per_node for name in names}
        return self.model_copy(update=update)


@cache
def machine_library() -> dict[str, Machine]:
    """Return the known machines by name; machines.csv lists the sources of their figures."""
    text = files("jingu.plan").joinpath("machines.csv").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    rows = csv.DictReader(lines)
    fields = Machine.model_fields
    return {row["name"]: Machine.model_validate({k: v for k, v in row.items() if k in fields}) for row in rows}


# Words of names that do not tell machines of the library apart: vendors, lines of products, sockets, kinds of memory.
_WORDS = frozenset(
    ("nvidia", "geforce", "amd", "instinct", "huawei", "tesla", "dgx", "hgx", "oam", "generation", "gpu", "nvl72", "ac")
)


@cache
def _names() -> dict[frozenset[str], str]:
    """Return the names of the library's machines by the words of all their names."""
    text = files("jingu.plan").joinpath("machines.csv").read_text(encoding="utf-8")
    rows = csv.DictReader(line for line in text.splitlines() if not line.startswith("#"))
    return {_name_words(name): row["name"] for row in rows for name in (*row["also"].split(), row["name"])}


def _name_words(name: str) -> frozenset[str]:
    """Return the words that tell a machine from others: `NVIDIA A100 80GB PCIe` has a100, 80 and pcie."""
    # A model may follow its line without a space, as in RTX4090, and a number of machines stand before it.
    line = re.sub(r"\b(rtx|ascend|\d+x)(?=\w)", r"\1 ", name.lower())
    words = [re.sub(r"^(\d+)(g|gb|gib)$", r"\1", word) for word in re.split(r"[\s_×-]+", line)]
    return frozenset(word for word in words if word not in _WORDS and not re.fullmatch(r"|\d+x|sxm\d?|hbm\w*", word))


def find_machine(name: str) -> Machine:
    """Return a machine: `here`, one of the library, or one that a YAML file describes.

    A file has the fields of `Machine`. With the key `like`, missing fields are those of a machine of the library.

    Raises:
        JinguError: there is no such machine, or the file is wrong.
    """
    if name == "here":
        return measure_machine()
    library = machine_library()
    if name.endswith((".yaml", ".yml")):
        return _read_machine(Path(name))
    entry = _names().get(_name_words(name))
    if entry is not None:
        return library[entry]
    close = get_close_matches(name.lower(), library, n=3, cutoff=0.4) or list(library)
    raise JinguError(
        f"there is no machine {name}.",
        where="--on",
        fix=f"Nearest names: {', '.join(close)}; or give a file such as machine.yaml, or here.",
    )


def _read_machine(path: Path) -> Machine:
    document = parse_yaml(read_text(path), str(path))
    if document.problems:
        raise document.problems[0]
    values = document.value if isinstance(document.value, dict) else {}
    like = values.pop("like", None)
    base = find_machine(str(like)).model_dump() if like is not None else {}
    try:
        machine = Machine.model_validate(base | {"name": path.stem} | values)
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        fix = f"Its keys are {', '.join(Machine.model_fields)}, and like: a machine of the library."
        raise JinguError(f"this does not describe a machine ({wrong}).", where=path, fix=fix) from None
    if machine.matmul_tflops > machine.peak_tflops:
        raise JinguError(
            f"matmul_tflops {machine.matmul_tflops:g} is above peak_tflops {machine.peak_tflops:g}.",
            where=path,
            fix="Measured matmuls cannot be faster than the peak.",
        )
    return machine


def nominal_machine(device: torch.device) -> Machine:
    """Return this machine without measuring it: its own memory, but speeds of the library or of a common CPU.

    These figures are deterministic, so that every rank of a run chooses the same layout.
    """
    from jingu.runtime.device import device_name, total_memory

    memory = total_memory(device) / 2**30
    if device.type == "cpu":
        return Machine(**read_table(__file__, "common_cpu.toml"), memory_gib=memory, cores=num_usable_cores())
    # An unknown GPU is assumed to be as fast as a common one.
    gpu = find_gpu(device_name(device)) or machine_library()["a100-80"]
    return gpu.model_copy(update={"name": "here", "memory_gib": memory, "host_gib": _host_gib()})


def _host_gib() -> float:
    """Return a GPU's share of the main memory of this machine."""
    import torch

    from jingu.runtime.device import total_memory

    return total_memory(torch.device("cpu")) / 2**30 / max(1, torch.accelerator.device_count())


def find_gpu(title: str) -> Machine | None:
    """Return the library's machine of a GPU, by the device name of its driver; None if the library lacks it."""
    # Numbers must be whole ones: `a40` is no part of A4000, but `910b` is one of 910B2.
    patterns = {name: [rf"(?<!\d){part}(?!(?<=\d)\d)" for part in name.split("-")] for name in machine_library()}
    names = [name for name, parts in patterns.items() if all(re.search(part, title.lower()) for part in parts)]
    return machine_library()[max(names, key=len)] if names else None


def measure_machine() -> Machine:
    """Measure matmul throughput, memory bandwidth and memory size of this machine. CPU ranks will share them."""
    import torch

    from jingu.runtime.device import device_module, find_device_type, measure_peak_flops, total_memory

    device = torch.device(find_device_type("auto"))
    is_gpu = device.type != "cpu"
    dtype = torch.bfloat16 if is_gpu else torch.float32
    tflops = measure_peak_flops(device, dtype) / 1e12
    source = torch.ones(2**26 if is_gpu else 2**23, device=device)
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)
        if is_gpu:
            device_module(device).synchronize()

    # A copy reads and writes each byte.
    memory = 2 * source.nbytes / _best_seconds(copy) / 1e9
    small = torch.ones(8, device=device)
    kernel = _best_seconds(lambda: small.add_(1), 200)
    return Machine(
        name="here",
        memory_gib=total_memory(device) / 2**30,
        peak_tflops=tflops,
        matmul_tflops=tflops,
        memory_gbs=memory,
        host_gib=_host_gib(),
        # CPU ranks exchange data through main memory.
        link_gbs=memory / 4,
        nic_gbs=1.0,
        gpus_per_node=max(1, torch.accelerator.device_count()),
        is_shared=not is_gpu,
        cores=None if is_gpu else num_usable_cores(),
        efficiency=Efficiency(half_gflop=0.01, kernel_us=max(kernel * 1e6, 0.5)),
    )


def _best_seconds(function: Callable[[], object], repeats: int = 20) -> float:
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        best = min(best, time.perf_counter() - start)
    return best
