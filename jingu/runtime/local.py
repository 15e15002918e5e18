"""Ranks on this machine: as many processes of one command as asked for, started, watched, and ended together."""

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
from jingu.runtime.devices import usable_cores, visible_cards
from jingu.runtime.signals import PREEMPTED, STOP_SIGNALS, STOPPED, handling

GRACE_SECONDS = 10.0
"""How long the other ranks may take to leave by themselves after one has failed."""
_WATCH_SECONDS = 0.05

Child = subprocess.Popen[bytes]


def start_local_ranks(
    processes: int,
    arguments: Sequence[str],
    output: Path | None = None,
    cards: Sequence[int] | None = None,
    advice: str = "The same command goes on from the last checkpoint.",
) -> int:
    """Run `jingu ARGUMENTS` as `processes` local ranks; returns the exit code of the one that failed, or 0.

    The ranks find each other as under torchrun, by its environment variables and a store that this process holds.
    SIGINT, SIGTERM and SIGUSR1 are handed on to each rank once, so that all of them save and leave.

    Args:
        output: a file for what they print, instead of the terminal.
        cards: CUDA cards for the ranks, in their order; None: the first ones.
        advice: what to do where a rank was killed.

    Raises:
        JinguError: a rank was killed.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    common = {
        "OMP_NUM_THREADS": str(max(1, usable_cores() // processes)),
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
    }
    if cards is not None:
        common["CUDA_VISIBLE_DEVICES"] = visible_cards(cards, os.environ.get("CUDA_VISIBLE_DEVICES"))
    children: list[Child] = []
    asked: list[int] = []
    with ExitStack() as stack:
        # Handed on when all ranks are there: one that is started later would not hear of it.
        stack.enter_context(handling(lambda number, _: asked.append(number), *STOP_SIGNALS))
        words = stack.enter_context(output.open("wb")) if output else None
        try:
            for rank in range(processes):
                command = [sys.executable, "-m", "jingu", *arguments]
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                # A group of their own: Ctrl-C in the terminal reaches them through this process, and only once.
                children.append(
                    subprocess.Popen(command, env={**common, **own}, process_group=0, stdout=words, stderr=words)
                )
            codes = _watch(children, asked)
        finally:
            for child in children:
                if child.poll() is None:
                    child.kill()
                    child.wait()
    return _verdict(codes, advice)


def _watch(children: list[Child], asked: list[int]) -> list[int | None]:
    """Wait until all ranks have ended, or until one has failed and the grace of the others is over; hand signals on."""
    deadline: float | None = None
    while True:
        while asked:
            number = asked.pop(0)
            for child in children:
                child.send_signal(number)  # nothing, where it has ended
        codes = [child.poll() for child in children]
        if None not in codes:
            return codes
        if deadline is None and any(code not in (None, 0, STOPPED, PREEMPTED) for code in codes):
            deadline = time.monotonic() + GRACE_SECONDS
        if deadline is not None and time.monotonic() > deadline:
            return codes
        time.sleep(_WATCH_SECONDS)


def _verdict(codes: Sequence[int | None], advice: str) -> int:
    """One exit code for all ranks. None is a rank that had to be ended, for another one's failure."""
    if 2 in codes:  # a rank has told of a mistake that can be mended, and the others' ends follow from it
        return 2
    for rank, code in enumerate(codes):
        if code is not None and code < 0:
            name = signal.Signals(-code).name
            why = ", most likely because memory ran out" if -code == signal.SIGKILL else ""
            others = "other ranks left" if None not in codes else "others that did not leave by themselves were ended"
            raise JinguError(
                f"rank {rank}, on {socket.gethostname()}, was ended by {name}{why}; the {others}.",
                fix=advice,
            )
    failed = [code for code in codes if code]
    return failed[0] if failed else 0
