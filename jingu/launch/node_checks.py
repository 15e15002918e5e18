"""The checks of one node for `jingu doctor`: `python -m jingu.launch.node_checks NAME FOLDER` runs one of them.

Each check runs in its own process with a time limit, so a device that hangs or kills its process fails only one check.
"""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any
from uuid import uuid4

from jingu.errors import join_words, pluralize
from jingu.runtime.gpus import num_usable_cores

# Time limit of a check.
CHECK_SECONDS = 60.0
_DISK_BYTES = 2**26
MESSAGE_BYTES = 2**24
# Below these rates, a disk or a network is broken, whatever others have.
_MIN_DISK_GBS, _MIN_PAIR_GBS = 0.002, 0.01
# A rate below this share of the usual one fails.
SLOW_SHARE = 0.5
CLOCK_SECONDS = 1.0
RDMA_DEVICES = Path("/sys/class/infiniband")
# RDMA locks the buffers of all connections in memory. With a lower limit it fails as connections are added.
_LOCKED_BYTES = 2**30
# Benchmarks, which must not run at the same time as other checks.
_MEASUREMENTS = ("devices", "disk")
# Identifies the running kernel, which all containers of a machine share; KERNEL is its key among the figures.
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
KERNEL = "kernel"
# The check that takes the names of all nodes as arguments.
NAMES = "names of nodes"
# Time for a machine to connect to itself.
_NAME_SECONDS = 5.0
Figures = dict[str, Any]


class CheckError(Exception):
    """A check has failed; the message says why."""


def check_devices(_folder: Path) -> tuple[str, Figures]:
    """Run a matmul on each device, and measure the figures that a machine file of `jingu plan` has."""
    import torch

    from jingu.plan.machine import find_gpu, measure_machine
    from jingu.runtime.device import device_name, find_device_type

    device = torch.device(find_device_type("auto"))
    for index in range(torch.accelerator.device_count() or 1):
        device_here = torch.device(device.type, index)
        a = torch.randn(512, 512, device=device_here)
        if not bool(torch.isfinite(a @ a).all()):
            raise CheckError(f"the matmul of two finite matrices is not finite on {device_here}")
    machine = measure_machine()
    count = torch.accelerator.device_count() or machine.gpus_per_node
    name = device_name(device)
    text = f"{count} × {name}, {machine.matmul_tflops:,.2f} TFLOP/s and {machine.memory_gbs:,.0f} GB/s each"
    gpu = find_gpu(name)
    if gpu is not None and machine.matmul_tflops < SLOW_SHARE * gpu.matmul_tflops:
        raise CheckError(
            f"{text}, but {gpu.matmul_tflops:,.0f} TFLOP/s are usual; another process uses it, or its clock is low"
        )
    return text, machine.model_dump(mode="json")


def check_versions(_folder: Path) -> tuple[str, Figures]:
    """Read what must be equal on all nodes: versions, the driver, and the number of cores."""
    from jingu.launch.start import installed_versions

    versions = {**installed_versions(), "cores": str(os.cpu_count())}
    driver = Path("/proc/driver/nvidia/version")
    if driver.exists():
        import torch  # takes seconds

        match = re.search(r"Module\s+(?:for \S+\s+)?([\d.]+)", driver.read_text(encoding="utf-8"))
        versions["driver"] = match[1] if match else "unknown"
        if torch.cuda.is_available():
            versions["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    kernel = _BOOT_ID.read_text(encoding="utf-8").strip() if _BOOT_ID.exists() else ""
    return ", ".join(f"{name} {version}" for name, version in versions.items()), {KERNEL: kernel}


def check_locked_memory(_folder: Path) -> tuple[str, Figures]:
    """Read how much memory may be locked, which RDMA network cards need."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    text = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit / 2**20:,.0f} MiB"
    if RDMA_DEVICES.is_dir() and any(RDMA_DEVICES.iterdir()):
        if 0 <= limit < _LOCKED_BYTES:
            raise CheckError(f"only {text} may be locked, too little for RDMA; set `ulimit -l unlimited`")
        return text, {}
    return f"{text}, and no RDMA device needs it", {}


def check_memory(_folder: Path) -> tuple[str, Figures]:
    """Read how much main memory is free."""
    lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
    available = sizes["MemAvailable"] / 2**30
    text = f"{available:,.1f} of {sizes['MemTotal'] / 2**30:,.1f} GiB free"
    if sizes["MemAvailable"] < 0.1 * sizes["MemTotal"]:
        raise CheckError(f"only {text}: other processes use the rest")
    return text, {}


def check_disk(folder: Path) -> tuple[str, Figures]:
    """Write into the folder of the runs, rename, and read back."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckError(f"{folder} cannot be created ({error.strerror})") from error
    room = shutil.disk_usage(folder).free
    if room < 4 * _DISK_BYTES:
        raise CheckError(f"{folder} has room for only {room / 2**20:,.0f} MiB")
    block = os.urandom(_DISK_BYTES)
    path = folder / f".doctor-{uuid4().hex}"
    new_path = path.with_suffix(".renamed")
    try:
        start = time.perf_counter()
        with path.open("wb") as file:
            file.write(block)
            os.fsync(file.fileno())
        rate = _DISK_BYTES / (time.perf_counter() - start) / 1e9
        path.rename(new_path)
        if new_path.read_bytes() != block:
            raise CheckError(f"{folder} returned other bytes than were written to it")
    except OSError as error:
        raise CheckError(f"{folder} cannot be written ({error.strerror})") from error
    finally:
        for file_path in (path, new_path):
            with suppress(OSError):  # on a read-only file system even the removal of what does not exist fails
                file_path.unlink(missing_ok=True)
    if rate < _MIN_DISK_GBS:
        raise CheckError(f"{folder} is written at {1e3 * rate:,.1f} MB/s, too slow for checkpoints")
    return f"{rate:,.2f} GB/s, room for {room / 1e9:,.0f} GB in {folder}", {"disk_gbs": rate}


def check_shared_memory(_folder: Path) -> tuple[str, Figures]:
    """Read the size of /dev/shm, through which the ranks of a node exchange data."""
    size = shutil.disk_usage("/dev/shm").free
    if size < 2**28:
        raise CheckError(f"/dev/shm has only {size / 2**20:,.0f} MiB; start the container with --shm-size=8g")
    return f"{size / 2**30:,.1f} GiB", {}


def check_name(_folder: Path) -> tuple[str, Figures]:
    """Resolve this machine's own name, and connect to the address: programs of other nodes would use it, too."""
    name = socket.gethostname()
    address = _find_address(name)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server(("", 0), family=family) as listener:
        try:
            socket.create_connection((address, listener.getsockname()[1]), _NAME_SECONDS).close()
        except OSError as error:
            what = f"{name} is {address}, which does not lead to this machine; change DNS or /etc/hosts"
            raise CheckError(what) from error
    return f"{name} is {address}", {}


def check_names(*names: str) -> tuple[str, Figures]:
    """Resolve the names of all nodes, and their addresses back to names."""
    addresses = {name: _find_address(name) for name in names}
    nameless = []
    for name, address in addresses.items():
        try:
            official, aliases, _ = socket.gethostbyaddr(address)
        except OSError:
            nameless.append(address)
            continue
        labels = {host_name.split(".")[0] for host_name in (official, *aliases)}
        # Only the name of another node shows a mistake: an unknown name may be an alias of the same machine.
        if name.split(".")[0] not in labels and labels & {other_name.split(".")[0] for other_name in names}:
            raise CheckError(f"{name} is {address}, and {address} is {official}; change DNS or /etc/hosts")
    # Not a failure: ranks do not need reverse lookups, but servers that look up their clients wait for a timeout.
    text = f"; no name is known for {join_words(nameless, 'and')}" if nameless else ""
    return f"{pluralize(len(names), 'name')} and addresses{text}", {}


def _find_address(name: str) -> str:
    try:
        return str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise CheckError(f"no address is known for {name}; add it to /etc/hosts") from error


def check_load(_folder: Path) -> tuple[str, Figures]:
    """Look for other processes that use the GPUs (with nvidia-smi), and read the CPU load."""
    program = shutil.which("nvidia-smi")
    if program is not None:
        words = [program, "--query-compute-apps=pid", "--format=csv,noheader"]
        processes = subprocess.run(words, capture_output=True, text=True, check=False).stdout.split()
        if processes:
            raise CheckError(f"other processes use the GPUs: {', '.join(processes)}")
    load, cores = os.getloadavg()[0], num_usable_cores()
    # Not a failure, since the load may be that of other tests of this doctor.
    few = "; the machine is oversubscribed, and runs will be slower" if load > 1.5 * cores + 1 else ""
    return f"{load:.1f} processes computing on {cores} cores{few}", {}


CHECKS: dict[str, Callable[[Path], tuple[str, Figures]]] = {
    "versions": check_versions,
    "devices": check_devices,
    "memory": check_memory,
    "disk": check_disk,
    "shared memory": check_shared_memory,
    "locked memory": check_locked_memory,
    "name": check_name,
    "load": check_load,
}


def run_check(name: str, *words: str, seconds: float = CHECK_SECONDS) -> Figures:
    """Run a check in its own process; return its name, whether it passed, its text and its figures."""
    # A check is not a rank, so it must not see torchrun's variables.
    variables = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    command = [sys.executable, "-m", "jingu.launch.node_checks", name, *words]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=variables, check=False)
    except subprocess.TimeoutExpired:
        return {"check": name, "passed": False, "text": f"no answer in {seconds:.0f} s", "figures": {}}
    if result.returncode:
        reason = (result.stderr.strip().splitlines() or [f"the process ended with {result.returncode}"])[-1]
        return {"check": name, "passed": False, "text": reason, "figures": {}}
    answer: Figures = json.loads(result.stdout.splitlines()[-1])
    return {"check": name, **answer}


def run_checks(folder: Path) -> list[Figures]:
    """Run all checks of a node: first the quick ones in parallel, then the benchmarks one by one."""
    quick = [name for name in CHECKS if name not in _MEASUREMENTS]
    with ThreadPoolExecutor(len(quick)) as pool:
        results = dict(zip(quick, pool.map(lambda name: run_check(name, str(folder)), quick), strict=True))
    return [results[name] if name in results else run_check(name, str(folder)) for name in CHECKS]


def find_slow(rates: dict[tuple[str, str], float]) -> list[str]:
    """Return the nodes whose connections to all their partners are slow compared with other nodes.

    Args:
        rates: the rate of each pair of nodes.
    """
    best: dict[str, float] = {}
    for pair, rate in rates.items():
        for host in pair:
            best[host] = max(rate, best.get(host, 0.0))
    limit = max(SLOW_SHARE * median(best.values()), _MIN_PAIR_GBS) if best else 0.0
    return sorted(host for host, rate in best.items() if rate < limit)


def main(words: Sequence[str]) -> int:
    """Run one check, and print its result as JSON."""
    name, *arguments = words
    try:
        text, figures = check_names(*arguments) if name == NAMES else CHECKS[name](Path(*arguments))
        answer = {"passed": True, "text": text, "figures": figures}
    except CheckError as error:
        answer = {"passed": False, "text": str(error), "figures": {}}
    print(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
