"""Launch a command as several ranks on this machine, watch the ranks, and end them together."""

from __future__ import annotations

import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from jingu.errors import JinguError
from jingu.runtime.exit_codes import (
    EXIT_INTERRUPTED,
    EXIT_MISTAKE,
    EXIT_PREEMPTED,
    combine_exit_codes,
    exit_code_of,
    killing_signal,
)
from jingu.runtime.gpus import num_usable_cores, visible_devices
from jingu.runtime.signals import EXITS_VARIABLE, LAUNCHER_PIPE, STOP_SIGNALS, handle_signals

# Seconds for the other ranks to exit by themselves after one has failed, and after an error that is explained already.
GRACE_SECONDS = 10.0
EXPLAINED_SECONDS = 3.0
_POLL_SECONDS = 0.05

Child = subprocess.Popen[bytes]


@dataclass(frozen=True)
class NodeOfRun:
    """This machine among the nodes of a run.

    Attributes:
        address, port: where the ranks find their store; port 0: `launch_local_ranks` opens it, for ranks that are
            all on this machine.
        first_rank: number of the first rank on this machine.
        world: number of ranks on all nodes; 0: all are on this machine.
        stop_seconds: time for ranks to save and exit after a signal.
    """

    address: str = "127.0.0.1"
    port: int = 0
    first_rank: int = 0
    world: int = 0
    stop_seconds: float = math.inf


ONLY_NODE = NodeOfRun()


def launch_local_ranks(
    processes: int,
    arguments: Sequence[str],
    output: Path | None = None,
    gpus: Sequence[int] | None = None,
    inherit: Sequence[int] = (),
    advice: str = "Run the same command again to resume from the last checkpoint.",
    node: NodeOfRun = ONLY_NODE,
) -> int:
    """Run `jingu ARGUMENTS` as `processes` local ranks.

    As under torchrun, the ranks find each other through environment variables and a store, which is in this process
    (of the first node). SIGINT, SIGTERM and SIGUSR1 are forwarded to each rank once, so that all ranks save and exit.

    Args:
        processes: number of ranks.
        arguments: the command and its arguments.
        output: file for the output of the ranks; None: the terminal.
        gpus: indices of the GPUs for the ranks, in order; None: the first ones.
        inherit: file descriptors that the ranks inherit from this process.
        advice: what to do if a rank is killed.

    Returns:
        The exit code of the rank that failed first, or 0 (`jingu.runtime.exit_codes`).
    """
    world = node.world or processes
    # The store must live as long as the ranks.
    store = open_store(0) if not node.port else None
    common = {
        "OMP_NUM_THREADS": str(max(1, num_usable_cores() // processes)),
        **os.environ,
        "MASTER_ADDR": node.address,
        "MASTER_PORT": str(store.port if store else node.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(processes),
    }
    if gpus is not None:
        common |= visible_devices(gpus, os.environ)
    # Each rank watches this pipe. It is closed when this process ends, even if this process is killed.
    read_end, write_end = os.pipe()
    common[LAUNCHER_PIPE] = str(read_end)
    exits = os.memfd_create("exits")
    common[EXITS_VARIABLE] = f"/proc/{os.getpid()}/fd/{exits}"
    children: list[Child] = []
    pending_signals: list[int] = []
    with ExitStack() as stack:
        for descriptor in (read_end, write_end, exits):
            stack.callback(os.close, descriptor)
        # Collect signals here, and forward them once all ranks are running: a rank that starts later would miss them.
        stack.enter_context(handle_signals(lambda number, _: pending_signals.append(number), *STOP_SIGNALS))
        log_file = stack.enter_context(output.open("wb")) if output else None
        try:
            for rank in range(processes):
                # A process group of its own: Ctrl-C then reaches the rank only through this process, and only once.
                children.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "jingu", *arguments],
                        env={**common, "RANK": str(node.first_rank + rank), "LOCAL_RANK": str(rank)},
                        process_group=0,
                        stdout=log_file,
                        stderr=log_file,
                        pass_fds=[read_end, *inherit],
                    )
                )
            codes = _watch(children, pending_signals, exits, node.stop_seconds)
        finally:
            for child in children:
                child.kill()  # does nothing if the child has exited
                child.wait()
    code = combine_exit_codes([code for code in codes if code is not None], is_whole=world == processes)
    _announce_kill(codes, code, node.first_rank, advice)
    return code


def open_store(port: int) -> Any:
    """Return a store in which the ranks of all nodes meet; it listens while somebody refers to it.

    Args:
        port: 0 for any free port.

    Raises:
        JinguError: another program listens on the port.
    """
    try:
        return dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    except dist.DistNetworkError as error:
        what = f"the ranks cannot meet at port {port}: another program listens there."
        raise JinguError(what, where=socket.gethostname(), fix="Start again, at another port.") from error


def _watch(
    children: list[Child], pending_signals: list[int], exits: int, stop_seconds: float = math.inf
) -> list[int | None]:
    """Wait until all ranks have exited, or one has failed and the grace period of the others is over.

    Signals that arrive in `pending_signals` are forwarded to all ranks.

    Args:
        exits: descriptor of the file for the process ids and exit codes of ranks that have ended.

    Returns:
        The exit code of each rank; None: it is still running.
    """
    deadline = math.inf
    last_codes: list[int | None] = [None] * len(children)
    stop_signals: set[int] = set()
    while True:
        while pending_signals:
            number = pending_signals.pop(0)
            deadline = min(deadline, time.monotonic() + stop_seconds)
            stop_signals.add(number)
            for child in children:
                child.send_signal(number)  # does nothing if the child has exited
        returncodes = [child.poll() for child in children]
        codes = [None if returncode is None else exit_code_of(returncode, stop_signals) for returncode in returncodes]
        for child, code, previous in zip(children, codes, last_codes, strict=True):
            if code is not None and previous is None:
                os.write(exits, f"{child.pid} {code}\n".encode())
        last_codes = codes
        if None not in codes or time.monotonic() > deadline:
            return codes
        if any(code not in (None, 0, EXIT_INTERRUPTED, EXIT_PREEMPTED) for code in codes):
            seconds = EXPLAINED_SECONDS if EXIT_MISTAKE in codes else GRACE_SECONDS
            deadline = min(deadline, time.monotonic() + seconds)
        time.sleep(_POLL_SECONDS)


def _announce_kill(codes: Sequence[int | None], code: int, first_rank: int, advice: str) -> None:
    """Print which rank a signal has killed, if that decides the exit code of all."""
    number = killing_signal(code)
    if number is None:
        return
    rank = first_rank + codes.index(code)
    why = ", most likely because memory ran out" if number == signal.SIGKILL else ""
    end = "other ranks exited" if None not in codes else "ranks that did not exit by themselves were killed"
    where = f"rank {rank} on {socket.gethostname()}"
    if len(codes) == 1:
        print(f"jingu: {where} was killed by {number.name}{why}. {advice}", file=sys.stderr, flush=True)
    else:
        print(f"jingu: {where} was killed by {number.name}{why}; {end}. {advice}", file=sys.stderr, flush=True)
