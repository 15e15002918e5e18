"""The watchdog of a node: a process that monitors the node's ranks, and terminates them when training hangs.

It starts and ends with the ranks. It does not import torch and polls only twice a second, so that it does not slow down
training. When a rank has made no progress until the deadline, the watchdogs of all nodes write reports of their ranks
into a folder of the run, and each of them derives the same diagnosis from all reports.
"""

from __future__ import annotations

import json
import random
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median

from jingu.runtime.exit_codes import WATCHDOG_SIGNAL
from jingu.runtime.files import write_text_atomically
from jingu.watch.diagnosis import RankReport, find_difference, is_aborted, judge
from jingu.watch.local_rank import LocalRank
from jingu.watch.pace import PaceMeter
from jingu.watch.slot import COMMAND, EXIT, LISTEN, REPORT, UNTIMED_PHASES
from jingu.watch.stacks import is_debugged, read_stacks

_POLL_SECONDS = 0.5
# The deadline is this many median steps, or the timeout if that is longer.
_DEADLINE_STEPS = 10
# The first steps may compile, and the duration of a step is not known yet: they get a multiple of the timeout.
_FIRST_STEPS = 2
_FIRST_STEPS_FACTOR = 5
# After a rank has exited, the others cannot continue. The diagnosis must come before their launcher kills them, ten
# seconds later.
_SECONDS_AFTER_DEATH = 4.0
# Time for ranks to report, for other nodes to report, and for ranks to exit.
_REPORT_SECONDS = 3.0
_NODE_SECONDS = 10.0
_EXIT_SECONDS = 3.0
_KILL_SECONDS = 1.0
# How often the states of processes are sampled between two polls.
_SAMPLES_PER_POLL = 2
# In a phase that may take long, ranks that do not work for so many deadlines hang: none of them uses this share of a
# core, or reads or writes so many bytes. (They may exchange a few bytes while they wait for each other.)
_UNTIMED_FACTOR = 10
_WORK_SHARE = 0.02
_WORK_BYTES = 2**16
# The shortest window in which ranks are compared.
_MIN_WINDOW = 1.0
# A rollout has no limit at all: its rewards and environments have timeouts of their own, and may take much longer than
# the updates from which the deadline follows. (But the pace of ranks is compared in rollouts.)
_UNLIMITED_PHASES = (*UNTIMED_PHASES, "rollout")
# File beside the run's log, with a line for each straggler.
STRAGGLERS = "stragglers.txt"


class Watchdog:
    """Watches the ranks of one node.

    Args:
        slots: folder with the slots of this node's ranks.
        folder: folder for the reports of the watchdogs of all nodes.
        world: number of ranks on all nodes.
        timeout: seconds without progress after which training counts as hung, unless its steps are slow.
        master: address and port at which every node must reach the first one; an empty address skips this check.
    """

    def __init__(
        self, slots: Path, folder: Path, world: int, timeout: float, master: tuple[str, int] = ("", 0)
    ) -> None:
        self._slots = slots
        self._folder = folder
        self._world = world
        self._timeout = timeout
        self._master = master
        self._ranks = [LocalRank.open(path) for path in sorted(slots.glob("*.json"))]
        self._first_step: int | None = None
        self._last_step = (0, 0.0)
        self._step_seconds: list[float] = []
        self._has_ended = False
        # Time since which a rank's process has been stopped by a signal, and time at which the last one went on.
        self._stop_time: float | None = None
        self._resume_time = 0.0
        # When the ranks were last seen to work in a phase without a time limit, and their counters then.
        self._work_time = time.monotonic()
        self._work: list[tuple[float, int]] = []
        # A straggler is reported after three windows, which together take as long as the timeout.
        self._pace = PaceMeter(self._ranks, folder, max(_MIN_WINDOW, timeout / 3))
        # The ranks that died first; the deaths of other ranks are consequences.
        self._first_dead: list[int] = []

    def watch(self) -> str | None:
        """Watch until all ranks of this node have exited. Returns the diagnosis if training has hung."""
        diagnosis = None
        while diagnosis is None and not self._has_ended:
            for _ in range(_SAMPLES_PER_POLL):
                # Irregular, so that samples do not keep step with whatever stops a rank periodically.
                time.sleep(_POLL_SECONDS / _SAMPLES_PER_POLL * random.uniform(0.5, 1.5))
                self._pace.sample()
            diagnosis = self.poll()
        self._pace.close()
        return diagnosis

    def poll(self) -> str | None:
        """Poll all ranks once. Returns the diagnosis if training hangs."""
        running = [rank for rank in self._ranks if not rank.is_finished()]
        dead = [rank.process["rank"] for rank in running if not rank.process_state()]
        self._first_dead = self._first_dead or dead
        if len(dead) == len(running):
            self._has_ended = True
            return self._diagnose_exited() if running else None
        if all(rank.operation[1] == "failed" for rank in running):
            return None  # they have printed their errors, and are about to exit
        self._measure_steps(running)
        if len(running) == len(self._ranks) and not dead and not self._is_beginning():
            self._announce(self._pace.poll())
        is_stopped = any(rank.is_stopped() for rank in running)
        if is_stopped and self._stop_time is None:
            self._stop_time = time.monotonic()
        elif not is_stopped and self._stop_time is not None:
            self._stop_time = None
            self._resume_time = time.monotonic()
        if is_stopped and self._world == 1:
            return None  # by Ctrl-Z in a shell, which can let it go on
        phases = {rank.operation[1] for rank in running}
        # After a death no rollout ends by itself.
        if phases & set(UNTIMED_PHASES if dead else _UNLIMITED_PHASES) and self._stop_time is None:
            return self._poll_untimed(running, phases)
        self._work = []
        deadline = self._deadline()
        if dead:
            deadline = min(deadline, _SECONDS_AFTER_DEATH)
        idle_seconds = self._idle_seconds(running)
        return self._investigate(running, idle_seconds) if idle_seconds > deadline else None

    def _poll_untimed(self, running: list[LocalRank], phases: set[str]) -> str | None:
        """Poll ranks in a phase that may take long. Returns the diagnosis if none of them works for a long time."""
        now = time.monotonic()
        work = [rank.work() for rank in running]
        has_worked = len(work) != len(self._work) or any(
            size - last_size > _WORK_BYTES or seconds - last_seconds > _WORK_SHARE * (now - self._work_time)
            for (seconds, size), (last_seconds, last_size) in zip(work, self._work, strict=True)
        )
        if has_worked or "rollout" in phases:
            self._work, self._work_time = work, now
            # Other nodes must not take an earlier report for a present one.
            self._remove_report(running)
        idle_seconds = now - self._work_time
        if idle_seconds <= _UNTIMED_FACTOR * self._deadline():
            return None
        return self._investigate(running, idle_seconds, is_untimed=True)

    def _report_path(self, ranks: list[LocalRank]) -> Path:
        return self._folder / f"{ranks[0].path.stem}.json"

    def _announce(self, sentences: list[str]) -> None:
        """Print descriptions of stragglers, and append them to a file of the run."""
        for sentence in sentences:
            print(f"jingu: {sentence}", file=sys.stderr, flush=True)
        if sentences:
            with suppress(OSError), (self._folder.parent / STRAGGLERS).open("a", encoding="utf-8") as file:
                file.writelines(f"{sentence}\n" for sentence in sentences)

    def _measure_steps(self, ranks: list[LocalRank]) -> None:
        step = max(rank.operation[2] for rank in ranks)
        last_step, last_time = self._last_step
        if self._first_step is None:
            self._first_step = step
        if step > last_step or not last_time:
            now = time.monotonic()
            if last_time:
                self._step_seconds = [*self._step_seconds[-30:], (now - last_time) / (step - last_step)]
            self._last_step = (step, now)

    def _is_beginning(self) -> bool:
        return self._first_step is None or self._last_step[0] < self._first_step + _FIRST_STEPS

    def _deadline(self) -> float:
        if self._is_beginning():
            return self._timeout * _FIRST_STEPS_FACTOR
        return max(self._timeout, _DEADLINE_STEPS * median(self._step_seconds))

    def _remove_report(self, ranks: list[LocalRank]) -> None:
        with suppress(OSError):  # the folder may be read-only by now
            self._report_path(ranks).unlink(missing_ok=True)

    def _idle_seconds(self, ranks: list[LocalRank]) -> float:
        """Return the longest time that a rank has made no progress."""
        if self._stop_time is not None and any(rank.operation[1] in _UNLIMITED_PHASES for rank in ranks):
            # A stopped process does not continue its save or evaluation, either.
            return time.monotonic() - self._stop_time
        last_change = min(rank.operation[5] for rank in ranks)
        return time.monotonic() - (max(last_change, self._resume_time) if self._world == 1 else last_change)

    def _investigate(self, ranks: list[LocalRank], seconds: float, is_untimed: bool = False) -> str | None:
        """Collect the reports of all ranks, and return a diagnosis; None if a rank has made progress meanwhile.

        Args:
            is_untimed: whether the ranks are in a phase that may take long. Those of other nodes may work then, so
                there is a diagnosis only if all nodes report.
        """
        changes = [rank.operation[0] for rank in ranks]
        # 1. Let each rank dump its collective calls, and then its stacks.
        # A rank that is stopped or holds the interpreter's lock cannot answer.
        asked_ranks = [rank for rank in ranks if rank.is_responsive()]
        for rank in asked_ranks:
            rank.slot[COMMAND] = REPORT
        self._wait(lambda: all(rank.slot[COMMAND] == LISTEN for rank in asked_ranks), _REPORT_SECONDS)
        for rank in ranks:
            rank.send(signal.SIGUSR2)
        time.sleep(_POLL_SECONDS)
        # 2. Write the reports of this node, and wait for those of the other nodes.
        with suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            reports = [rank.report() for rank in ranks]
            if not self._reaches_master():
                reports = [replace(report, state="unreachable") for report in reports]
            reports[0] = replace(reports[0], links=self._pace.links.measure())
            report_json = json.dumps([asdict(report) for report in reports])
            write_text_atomically(self._report_path(ranks), report_json)
        self._wait(lambda: len(self._reports()) == self._world, _NODE_SECONDS)
        # 3. If a rank has made progress, it was only slow.
        if [rank.operation[0] for rank in ranks] != changes:
            self._remove_report(ranks)
            return None
        if any(is_debugged(read_stacks(rank.stacks()).get(rank.process["thread"], [])) for rank in ranks):
            return None
        if is_untimed and len(self._reports()) < self._world:
            return None
        self._keep_stacks(ranks)
        return judge(self._reports() or [rank.report() for rank in ranks], self._world, seconds)

    def _keep_stacks(self, ranks: list[LocalRank]) -> None:
        """Keep the stacks of all threads beside the diagnosis, which names one function of each rank."""
        for rank in ranks:
            with suppress(OSError):
                write_text_atomically(self._folder / f"{rank.path.stem}.stacks.txt", rank.stacks())

    def _reaches_master(self) -> bool:
        """Return whether this node has a connection to the first one."""
        try:
            if self._master[0]:
                socket.create_connection(self._master, timeout=_REPORT_SECONDS).close()
        except ConnectionRefusedError:
            return True  # the machine answers
        except OSError:
            return False
        return True

    def _diagnose_exited(self) -> str | None:
        """Return a diagnosis on ranks that have all exited: their calls differ, or one of them was killed.

        Ranks that failed with an error have printed it themselves; then there is no diagnosis.
        """
        reports = [rank.report() for rank in self._ranks]
        first = [report for report in reports if report.rank in self._first_dead and report.phase != "failed"]
        if not find_difference(reports) and not any(map(is_aborted, first)):
            reports = first
        return judge(reports, 0, 0.0) if reports and len(first) < len(self._ranks) else None

    def _reports(self) -> list[RankReport]:
        reports = []
        for path in sorted(self._folder.glob("rank-*.json")):
            reports += [RankReport.from_dict(report) for report in json.loads(path.read_text(encoding="utf-8"))]
        return reports

    @staticmethod
    def _wait(is_done: Callable[[], bool], seconds: float) -> None:
        end = time.monotonic() + seconds
        while not is_done() and time.monotonic() < end:
            time.sleep(0.1)

    def end_ranks(self) -> None:
        """Terminate the ranks of this node: ask their reporter threads to exit, then kill those that remain."""
        for rank in self._ranks:
            rank.slot[COMMAND] = EXIT
        self._wait(lambda: not any(rank.process_state() for rank in self._ranks), _EXIT_SECONDS)
        for number in (WATCHDOG_SIGNAL, signal.SIGCONT):  # a stopped process dies when it goes on
            for rank in self._ranks:
                rank.send(number)
        self._wait(lambda: not any(rank.process_state() for rank in self._ranks), _KILL_SECONDS)
        for rank in self._ranks:
            rank.send(signal.SIGKILL)


def main(slots: Path, folder: Path, world: int, timeout: float, master: tuple[str, int]) -> None:
    """Watch the ranks of this node until they exit. If they hang, print the diagnosis and terminate them."""
    try:
        watchdog = Watchdog(slots, folder, world, timeout, master)
        diagnosis = watchdog.watch()
        if diagnosis is None:
            return
        print(f"\njingu: {diagnosis}", file=sys.stderr, flush=True)
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            write_text_atomically(folder / "verdict.txt", diagnosis + "\n")
            print(f"jingu: The stacks of all threads are in {folder}.", file=sys.stderr, flush=True)
        watchdog.end_ranks()
    finally:
        shutil.rmtree(slots, ignore_errors=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), (sys.argv[5], int(sys.argv[6])))
