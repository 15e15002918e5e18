"""Stragglers during training: ranks that compute for longer than their peers or wait for data, and slow links.

On CPUs, the computation time is the time in which a process runs or waits for a core: in a collective it sleeps. On
GPUs, whose work the host does not see, it compares the clock frequencies, which NVML reports if pynvml is installed.
"""

from __future__ import annotations

import json
import time
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from math import hypot, sqrt
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from jingu.runtime.files import write_text_atomically
from jingu.watch.links import Link, LinkMeter, describe_slow_link
from jingu.watch.slot import READS, READS_OFFSET, STAGE, STAGE_OFFSET, UNTIMED_PHASES

if TYPE_CHECKING:
    from jingu.watch.local_rank import LocalRank

# A straggler takes this much longer than its peers, in this many windows in a row, and loses this share of a step.
SLOW_RATIO = 1.2
_WINDOWS = 3
_SHARE_OF_STEP = 0.05
# Differences below this many standard errors count as noise.
_NUM_ERRORS = 3.0
# Number of windows from which the noise of a rank's computation time is estimated.
_NOISE_WINDOWS = 12
# A GPU is slow if its clock is below this share of its peers' clocks.
_SLOW_CLOCK = 0.85
# A rank that cannot run for this much more of the time than its peers is a straggler.
_STOPPED_SHARE = 0.2
# A node is oversubscribed if each of its ranks waits for a core for this share of the time in which it could compute.
_CORE_SHARE = 0.5
# Keys of what is counted beside ranks: links of the node, and its cores.
_LINKS, _CORES = -1, -2
# Minimum steps of a window.
_STEPS = 3
_CGROUPS = Path("/sys/fs/cgroup")
# Windows of two nodes are compared only if they end at most this many windows apart.
_RECENT_WINDOWS = 3


@dataclass(frozen=True)
class Pace:
    """The pace of a rank in a window. Times are in seconds per step.

    Attributes:
        stage: pipeline stage; peers are the ranks of the same stage.
        step: duration of a step.
        compute: time in which the process ran or waited for a core; 0 on an accelerator.
        core: the part of `compute` in which it waited for a core.
        data: time in which it read data.
        compute_error, data_error: standard errors of `compute` and `data`.
        clock: clock frequency of the GPU in MHz; 0 if unknown.
        stopped: share of the time in which the process was stopped, by a signal or a debugger.
        disk: share of the time in which its main thread waited for a disk, or was frozen.
        throttled: time in which the CPU quota of its control group stopped it.
    """

    rank: int
    host: str
    stage: int
    step: float
    compute: float = 0.0
    core: float = 0.0
    data: float = 0.0
    compute_error: float = 0.0
    data_error: float = 0.0
    clock: float = 0.0
    stopped: float = 0.0
    disk: float = 0.0
    throttled: float = 0.0


def describe_straggler(suspect: Pace, paces: Sequence[Pace]) -> str | None:
    """Describe a rank that is a straggler among its peers; None if it is not, or has no peers."""
    peers = [pace for pace in paces if pace.stage == suspect.stage and pace.rank != suspect.rank]
    if not peers:
        return None

    def usual(field: str) -> float:
        return median(getattr(pace, field) for pace in peers)

    def exceeds(field: str) -> bool:
        value, error = getattr(suspect, field), f"{field}_error"
        limit = max(_SHARE_OF_STEP * suspect.step, _NUM_ERRORS * hypot(getattr(suspect, error), usual(error)))
        return bool(value - usual(field) > limit and value > SLOW_RATIO * usual(field))

    place = f"rank {suspect.rank} ({suspect.host})"
    clock = f"Its clock is {suspect.clock:,.0f} MHz (others {usual('clock'):,.0f})."
    is_slow_clock = 0 < suspect.clock < _SLOW_CLOCK * usual("clock")
    # A process that cannot run looks as if it waited in a collective.
    for field, cause in (("stopped", "is stopped (by SIGSTOP, a debugger or a freezer)"), ("disk", "waits for a disk")):
        share = getattr(suspect, field)
        if share - usual(field) > _STOPPED_SHARE:
            return f"{place} {cause} for {share:.0%} of the run's time (its peers: {usual(field):.0%})."
    # Check data first: a slow dataset's own code also counts as computation.
    if exceeds("data"):
        return (
            f"{place} waits for data for {suspect.data:.3g} s of a step (its peers: {usual('data'):.3g} s): "
            f"{(suspect.data - usual('data')) / suspect.step:.0%} of the run's time."
        )
    if exceeds("compute"):
        excess = suspect.compute - usual("compute")
        text = f"{place} computes {suspect.compute / usual('compute'):.2f} times as long as its peers: "
        # The times of several threads add up to more than a step.
        text += f"{excess / max(suspect.step, suspect.compute):.0%} of the run's time."
        if is_slow_clock:
            return f"{text} {clock}"
        if suspect.throttled - usual("throttled") > _SHARE_OF_STEP * suspect.step:
            return f"{text} The CPU quota of its control group, such as a container's CPU limit, stops it."
        if suspect.core - usual("core") > excess / 2:
            return f"{text} It waits for cores that other processes or threads use."
        return text
    return f"{place} has a slow GPU. {clock}" if is_slow_clock else None


def describe_oversubscription(paces: Sequence[Pace]) -> str | None:
    """Return a sentence about a node all of whose ranks wait for cores for much of their time, else None."""
    shares = [pace.core / pace.compute for pace in paces if pace.compute > 0]
    if not shares or min(shares) < _CORE_SHARE or any(pace.throttled > 0 for pace in paces):
        return None
    share = sum(shares) / len(shares)
    count = f"its {len(paces)} ranks wait" if len(paces) > 1 else "its rank waits"
    return (
        f"{paces[0].host} is oversubscribed: {count} for a core for {share:.0%} of the time in which they could "
        "compute. Give them more cores, or stop other programs there."
    )


def estimate_noise(values: Sequence[float]) -> float:
    """Return the median difference of consecutive values, which a single jump does not affect."""
    return median(abs(after - before) for before, after in pairwise(values)) if len(values) > 1 else 0.0


@dataclass(frozen=True)
class Window:
    """The measurements of a node over several steps.

    Attributes:
        step: the step at the end of the window.
        steps: number of steps in the window.
    """

    step: int
    steps: int
    paces: list[Pace]
    links: list[Link]

    @staticmethod
    def from_dict(values: dict[str, Any]) -> Window:
        paces = [Pace(**pace) for pace in values["paces"]]
        return Window(values["step"], values["steps"], paces, [Link(**link) for link in values["links"]])


@dataclass
class _Reading:
    """Counters of a rank at the beginning of a window."""

    step: int
    seconds: float
    core_seconds: float
    reads: tuple[int, float, float]
    throttled: float


class PaceMeter:
    """Measures the ranks of one node in windows, and compares them with their peers on all nodes.

    Args:
        folder: folder in which the watchdogs of all nodes exchange their windows; `jingu watch` reads it, too.
        window: minimum seconds of a window.
    """

    def __init__(self, ranks: Sequence[LocalRank], folder: Path, window: float) -> None:
        self._ranks = ranks
        self._folder = folder
        self._window = window
        self._gpus = [_open_gpu(rank.process.get("gpu", "")) for rank in ranks]
        self._computes: list[deque[float]] = [deque(maxlen=_NOISE_WINDOWS) for _ in ranks]
        # Number of consecutive slow windows by rank, and of the links and cores of this node.
        self._slow_windows = dict.fromkeys((_LINKS, _CORES, *(rank.process["rank"] for rank in ranks)), 0)
        self._is_oversubscribed = False
        self.links = LinkMeter(ranks[0].process["host"] if ranks else "", [rank.process["pid"] for rank in ranks])
        self._begin()

    def _begin(self) -> None:
        self._start = time.monotonic()
        self._is_disturbed = False
        self._readings = [self._read(rank) for rank in self._ranks]
        self._states: list[Counter[str]] = [Counter() for _ in self._ranks]
        self.links.begin()

    def sample(self) -> None:
        """Sample the states of the ranks' processes: what stops them shows in no counter."""
        for rank, states in zip(self._ranks, self._states, strict=True):
            states[rank.process_state().upper()] += 1

    @staticmethod
    def _read(rank: LocalRank) -> _Reading:
        run, core = _process_seconds(rank.process["pid"])
        reads = READS.unpack_from(rank.slot, READS_OFFSET)
        return _Reading(rank.operation[2], run, core, reads, throttled_seconds(rank.process["pid"]))

    def poll(self) -> list[str]:
        """Poll the ranks once. Returns descriptions of new stragglers at the end of a window."""
        phases = [rank.operation[1] for rank in self._ranks]
        # Discard windows with evaluations or saves: the first rank has more work in them than its peers.
        self._is_disturbed = self._is_disturbed or any(phase in (*UNTIMED_PHASES, "failed") for phase in phases)
        seconds = time.monotonic() - self._start
        steps = self._ranks[0].operation[2] - self._readings[0].step
        if seconds < self._window or steps < _STEPS:
            return []
        window = None
        if not self._is_disturbed:
            window = Window(self._ranks[0].operation[2], steps, self._measure(seconds), self.links.measure())
        self._begin()
        return self._judge(window) if window is not None else []

    def _measure(self, seconds: float) -> list[Pace]:
        paces = []
        rows = zip(self._ranks, self._gpus, self._readings, self._computes, self._states, strict=True)
        for rank, gpu, before, computes, states in rows:
            after = self._read(rank)
            samples = max(1, states.total())
            steps = max(1, after.step - before.step)
            stage = STAGE.unpack_from(rank.slot, STAGE_OFFSET)[0]
            count, total, squares = (b - a for a, b in zip(before.reads, after.reads, strict=True))
            # Variance of the sum of `count` independent reads.
            variance = max(0.0, squares - total * total / count) * count / (count - 1) if count > 1 else 0.0
            is_on_cpu = rank.process["device"] == "cpu"
            computes.append((after.seconds - before.seconds) / steps if is_on_cpu else 0.0)
            paces.append(
                Pace(
                    rank.process["rank"],
                    rank.process["host"],
                    stage,
                    seconds / steps,
                    computes[-1],
                    (after.core_seconds - before.core_seconds) / steps,
                    total / steps,
                    estimate_noise(computes),
                    sqrt(variance) / steps,
                    _read_clock(gpu),
                    states["T"] / samples,
                    states["D"] / samples,
                    (after.throttled - before.throttled) / steps,
                )
            )
        return paces

    def _judge(self, mine: Window) -> list[str]:
        windows = self._exchange(mine)
        paces = [pace for window in windows for pace in window.paces]
        links = [link for window in windows for link in window.links]
        descriptions = {pace.rank: describe_straggler(pace, paces) for pace in mine.paces}
        descriptions[_LINKS] = describe_slow_link(links, mine.paces[0].host)
        descriptions[_CORES] = describe_oversubscription(mine.paces)
        sentences = []
        for number, sentence in descriptions.items():
            count = self._slow_windows[number] = 0 if sentence is None else self._slow_windows[number] + 1
            if sentence is None or count != _WINDOWS:
                continue
            if number == _CORES and not self._is_oversubscribed:  # said once, as busy minutes come and go
                self._is_oversubscribed = True
                sentences.append(sentence)
            elif number != _CORES:
                sentences.append(f"Straggler: {sentence}")
        return sentences

    def _exchange(self, mine: Window) -> list[Window]:
        """Write this node's window; return it and those of other nodes that cover about the same steps.

        The file of a node that has exited may still exist, with an old window.
        """
        with suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            write_text_atomically(self._file(), json.dumps(asdict(mine)))
        other_windows = [window for window in read_windows(self._folder) if window.paces[0].rank != mine.paces[0].rank]
        return [
            mine,
            *(window for window in other_windows if abs(window.step - mine.step) <= _RECENT_WINDOWS * mine.steps),
        ]

    def _file(self) -> Path:
        return self._folder / f"pace-{self._ranks[0].process['rank']:05d}.json"

    def close(self) -> None:
        """Remove this node's file, and the folder if it is empty."""
        with suppress(OSError):
            self._file().unlink(missing_ok=True)
            self._folder.rmdir()  # fails, as it should, while another node or a diagnosis has a file there


def read_windows(folder: Path) -> list[Window]:
    """Return the latest window of each node."""
    windows = []
    for path in sorted(folder.glob("pace-*.json")):
        with suppress(OSError, ValueError):
            windows.append(Window.from_dict(json.loads(path.read_text(encoding="utf-8"))))
    return windows


def _process_seconds(pid: int) -> tuple[float, float]:
    """Return the seconds that the threads of a process have run or waited for a core, and the seconds of waiting."""
    run = wait = 0
    for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with suppress(OSError, ValueError):
            own_run, own_wait, _ = map(int, path.read_text(encoding="utf-8").split())
            run += own_run
            wait += own_wait
    return (run + wait) / 1e9, wait / 1e9


def throttled_seconds(pid: int) -> float:
    """Return for how long CPU quotas have stopped the threads of a process's control group, or of one above it."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/cgroup").read_text(encoding="utf-8").splitlines():
            _, controllers, name = line.split(":", 2)
            # Version 2 has one hierarchy, without names of controllers.
            if controllers and "cpu" not in controllers.split(","):
                continue
            root = _CGROUPS / ("cpu" if controllers else "")
            folder = root / name.lstrip("/")
            groups = [folder, *folder.parents[: len(folder.relative_to(root).parts)]] if ".." not in name else [root]
            return max(map(_read_throttled, groups), default=0.0)
    return 0.0


def _read_throttled(folder: Path) -> float:
    with suppress(OSError, ValueError):
        lines = (folder / "cpu.stat").read_text(encoding="utf-8").splitlines()
        values = dict(line.split() for line in lines)
        # Version 1 counts nanoseconds, version 2 microseconds.
        return int(values.get("throttled_time", 0)) / 1e9 + int(values.get("throttled_usec", 0)) / 1e6
    return 0.0


def _open_gpu(uuid: str) -> Any:
    """Return NVML's handle of a GPU; None without a GPU or without pynvml."""
    if not uuid or find_spec("pynvml") is None:
        return None
    nvml = import_module("pynvml")
    try:
        nvml.nvmlInit()
        return nvml.nvmlDeviceGetHandleByUUID(uuid)
    except nvml.NVMLError:
        return None


def _read_clock(gpu: Any) -> float:
    if gpu is None:
        return 0.0
    nvml = import_module("pynvml")
    try:
        return float(nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM))
    except nvml.NVMLError:
        return 0.0
