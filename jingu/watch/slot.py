"""The file of one rank: what it does at the moment.

This module does not import torch, so that a watchdog stays small.
"""

from __future__ import annotations

import struct
from pathlib import Path

# Number of changes, phase, step, micro-batch, peer, and the time of the last change (the machine's monotonic clock).
OPERATION = struct.Struct("=q16sqqqd")
# Time at which the rank's thread last ran.
BEAT = struct.Struct("=d")
# Offset of the byte in which the watchdog leaves a command, and the commands.
COMMAND = OPERATION.size + BEAT.size
LISTEN, REPORT, EXIT = range(3)
# The rank's stage of the pipeline, which stays the same.
STAGE = struct.Struct("=q")
STAGE_OFFSET = COMMAND + 1
# Of reading data: how often, for how many seconds in all, and the sum of their squares.
READS = struct.Struct("=qdd")
READS_OFFSET = STAGE_OFFSET + STAGE.size
SLOT_BYTES = READS_OFFSET + READS.size

# Phases of a rank, and how messages call them.
PHASES = {
    "": "start",
    "rollout": "rollouts",
    "log-probs": "log-probabilities of the answers",
    "reference": "log-probabilities of the reference",
    "teacher": "log-probabilities of the teacher",
    "critic": "the critic's step",
    "data": "read data",
    "micro-batch": "forward and backward",
    "receive": "receive of hidden states",
    "send": "send of hidden states",
    "gradients": "reduction of gradients",
    "optimizer": "optimizer step",
    "between steps": "work between steps",
    "evaluate": "evaluation",
    "save": "save",
    "failed": "error",
}
# How long these take says nothing.
UNTIMED_PHASES = ("", "evaluate", "save")


def process_state(pid: int, started: int) -> str:
    """Return the state of a process as the kernel names it (R, S, D, T, Z); empty if it has ended.

    Args:
        started: its start time; another process may have its number now.
    """
    fields = _stat(pid)
    if not fields or int(fields[19]) != started or fields[0] == "Z":
        return ""
    return fields[0]


def start_time(pid: int) -> int:
    """Return when a process started, in clock ticks since the machine did."""
    return int(_stat(pid)[19])


def _stat(pid: int) -> list[str]:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    # The name of the command, in parentheses, may hold spaces.
    return text.rpartition(")")[2].split()
