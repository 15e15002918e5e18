"""Launch a command as several ranks on this machine, watch the ranks, and end them together."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch.distributed as dist

from jingu.errors import JinguError
from jingu.runtime.gpus import num_usable_cores, visible_devices
from jingu.runtime.signals import (
    EXIT_INTERRUPTED,
    EXIT_PREEMPTED,
    EXIT_STALLED,
    LAUNCHER_PIPE,
    STOP_SIGNALS,
    handle_signals,
)

# Seconds for the other ranks to exit by themselves after one has failed.
GRACE_SECONDS = 10.0
_POLL_SECONDS = 0.05

Child = subprocess.Popen[bytes]


def launch_local_ranks(
    processes: int,
    arguments: Sequence[str],
    output: Path | None = None,
    gpus: Sequence[int] | None = None,
    inherit: Sequence[int] = (),
    advice: str = "Run the same command again to resume from the last checkpoint.",
) -> int:
    """Run `jingu ARGUMENTS` as `processes` local ranks.

    As under torchrun, the ranks find each other through environment variables and a store, which is in this process.
    SIGINT, SIGTERM and SIGUSR1 are forwarded to each rank once, so that all ranks save and exit.

    Args:
        processes: number of ranks.
        arguments: the command and its arguments.
        output: file for the output of the ranks; None: the terminal.
        gpus: indices of the GPUs for the ranks, in order; None: the first ones.
        inherit: file descriptors that the ranks inherit from this process.
        advice: the `fix` of the error if a rank is killed.

    Returns:
        The exit code of the first rank that failed, or 0.

    Raises:
        JinguError: a rank was killed.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    common = {
        "OMP_NUM_THREADS": str(max(1, num_usable_cores() // processes)),
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
    }
    if gpus is not None:
        common |= visible_devices(gpus, os.environ)
    # Each rank watches this pipe. It is closed when this process ends, even if this process is killed.
    read_end, write_end = os.pipe()
    common[LAUNCHER_PIPE] = str(read_end)
    children: list[Child] = []
    pending_signals: list[int] = []
    with ExitStack() as stack:
        stack.callback(os.close, read_end)
        stack.callback(os.close, write_end)
        # Collect signals here, and forward them once all ranks are running: a rank that starts later would miss them.
        stack.enter_context(handle_signals(lambda number, _: pending_signals.append(number), *STOP_SIGNALS))
        log_file = stack.enter_context(output.open("wb")) if output else None
        try:
            for rank in range(processes):
                # A process group of its own: Ctrl-C then reaches the rank only through this process, and only once.
                children.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "jingu", *arguments],
                        env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                        process_group=0,
                        stdout=log_file,
                        stderr=log_file,
                        pass_fds=[read_end, *inherit],
                    )
                )
            codes = _watch(children, pending_signals)
        finally:
            for child in children:
                child.kill()  # does nothing if the child has exited
                child.wait()
    return _combine_exit_codes(codes, advice)


def _watch(children: list[Child], pending_signals: list[int]) -> list[int | None]:
    """Wait until all ranks have exited, or one has failed and the grace period of the others is over.

    Signals that arrive in `pending_signals` are forwarded to all ranks. Returns the exit code of each rank; None: it
    is still running.
    """
    deadline: float | None = None
    while True:
        while pending_signals:
            number = pending_signals.pop(0)
            for child in children:
                child.send_signal(number)  # does nothing if the child has exited
        codes = [child.poll() for child in children]
        if None not in codes:
            return codes
        if deadline is None and any(code not in (None, 0, EXIT_INTERRUPTED, EXIT_PREEMPTED) for code in codes):
            deadline = time.monotonic() + GRACE_SECONDS
        if deadline is not None and time.monotonic() > deadline:
            return codes
        time.sleep(_POLL_SECONDS)


def _combine_exit_codes(codes: Sequence[int | None], advice: str) -> int:
    """Return one exit code for all ranks.

    Args:
        codes: exit code of each rank; None: the rank did not exit after another one had failed, and was killed.
        advice: see `launch_local_ranks`.

    Raises:
        JinguError: a rank was killed by a signal.
    """
    # These codes explain the failures of all other ranks. 2: a rank has reported an error that the user can fix.
    # EXIT_STALLED: the watchdog has ended the run and named the rank at fault.
    for fatal_code in (2, EXIT_STALLED):
        if fatal_code in codes:
            return fatal_code
    for rank, code in enumerate(codes):
        if code is not None and code < 0:
            name = signal.Signals(-code).name
            why = ", most likely because memory ran out" if -code == signal.SIGKILL else ""
            reason = "other ranks exited" if None not in codes else "ranks that did not exit by themselves were killed"
            raise JinguError(f"rank {rank} on {socket.gethostname()} was killed by {name}{why}; {reason}.", fix=advice)
    failures = [code for code in codes if code]
    return failures[0] if failures else 0
