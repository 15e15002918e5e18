"""Select GPUs and CPU cores for ranks. This module does not import torch."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

from jingu.errors import JinguError

# Environment variables that select devices: for NVIDIA, AMD and Intel GPUs, and for Ascend NPUs.
_VISIBLE_DEVICES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK", "ASCEND_RT_VISIBLE_DEVICES")
# Names of consumer GPUs without peer-to-peer copies, on which NCCL would hang or fail.
_WITHOUT_PEER_TO_PEER = re.compile(r"GeForce RTX [345]0[5-9]0")


def select_gpus(text: str, count: int) -> list[int]:
    """Return the GPUs that `--devices` selects: `0,2,4` selects these, `^1,3` selects all but these.

    Args:
        text: the value of `--devices`.
        count: number of GPUs of this machine.

    Raises:
        JinguError: the machine has no GPU, the text is malformed, a GPU does not exist or is repeated, or none is
            left.
    """
    if not count:
        raise JinguError("--devices selects GPUs or NPUs, and this machine has none.", fix="Use --processes N.")
    excludes = text.startswith("^")
    words = text.removeprefix("^").split(",")
    if not all(word.isascii() and word.isdecimal() for word in words):
        raise JinguError(f"--devices takes GPUs, such as 0,2,4, or all but some, such as ^1,3; not {text}.")
    indices = [int(word) for word in words]
    where = f"--devices {text}"
    if missing := [index for index in indices if index >= count]:
        raise JinguError(f"there is no GPU {missing[0]}: this machine has {count}, counted from 0.", where=where)
    if duplicates := [index for index in indices if indices.count(index) > 1]:
        raise JinguError(f"GPU {duplicates[0]} is listed twice.", where=where)
    selection = [index for index in range(count) if index not in indices] if excludes else indices
    if not selection:
        raise JinguError("no GPU is left.", where=where, fix=f"Exclude fewer than all {count}.")
    return selection


def visible_devices(indices: Sequence[int], environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that make only the selected devices visible to a process, for every vendor.

    Args:
        indices: indices among the devices that are visible in `environment`.
        environment: the environment variables of this process.
    """
    variables = {}
    for name in _VISIBLE_DEVICES:
        names = environment.get(name, "").split(",")
        variables[name] = ",".join(names[index] if names != [""] else str(index) for index in indices)
    if "HIP_VISIBLE_DEVICES" not in environment:
        # ROCm reads CUDA_VISIBLE_DEVICES if HIP_VISIBLE_DEVICES is not set.
        del variables["HIP_VISIBLE_DEVICES"]
    return variables


def nccl_environment(names: Sequence[str]) -> tuple[dict[str, str], str]:
    """Return the environment variables that NCCL needs for GPUs with these names, and a message that says why."""
    name = next((name for name in names if _WITHOUT_PEER_TO_PEER.search(name)), None)
    if name is None or len(names) < 2:
        return {}, ""
    why = f"{name} has no peer-to-peer copies: NCCL_P2P_DISABLE=1 is set (set it to 0 if yours has)."
    return {"NCCL_P2P_DISABLE": "1"}, why


def num_usable_cores() -> int:
    """Return the number of CPU cores that this process may use (its affinity); a container may limit it."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
