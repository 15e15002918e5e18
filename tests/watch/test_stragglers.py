"""Stragglers on real ranks and in made-up measurements: who is named, for what cause, and who is not."""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import timedelta
from importlib.machinery import ModuleSpec
from math import sqrt
from pathlib import Path
from statistics import mean, stdev
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from jingu.runtime.ranks import RankInfo
from jingu.watch import pace as pace_module
from jingu.watch.activity import Activity, _open_slot, watch_rank
from jingu.watch.pace import (
    Pace,
    PaceMeter,
    Window,
    describe_oversubscription,
    describe_straggler,
    estimate_noise,
)
from jingu.watch.watchdog import STRAGGLERS, Watchdog
from tests.limits import PATIENCE
from tests.watch.test_hangs import CULPRIT, WORLD, start_ranks

USUAL = Pace(0, "node0", 0, step=1.0, compute=0.6, core=0.1, data=0.01, clock=1980.0)


def describe(stage: int = 0, **changes: float) -> str | None:
    """The sentence about rank 3 of four, of which the others are alike; rank 4 is of another stage."""
    own = replace(USUAL, rank=3, host="node1", stage=stage, **changes)
    peers = [replace(USUAL, rank=rank) for rank in range(3)]
    return describe_straggler(own, [*peers, own, replace(USUAL, rank=4, stage=1, compute=9.0)])


@pytest.mark.parametrize("factor", [1.3, 1.5, 2.0])
def test_slow_compute_is_named_with_its_cost(factor):
    text = describe(compute=0.6 * factor)
    share = (0.6 * factor - 0.6) / max(1.0, 0.6 * factor)
    assert text == (f"rank 3 (node1) computes {factor:.2f} times as long as its peers: {share:.0%} of the run's time.")


def test_causes_are_named_where_they_are_known():
    assert (describe(compute=0.9, clock=1050.0) or "").endswith(" Its clock is 1,050 MHz (others 1,980).")
    assert (describe(compute=0.9, core=0.35) or "").endswith(" It waits for cores that other processes or threads use.")
    text = "rank 3 (node1) waits for data for 0.3 s of a step (its peers: 0.01 s): 29% of the run's time."
    assert describe(data=0.3) == text
    # Of a card only the clock is known.
    assert describe(compute=0.0, clock=1050.0) == (
        "rank 3 (node1) has a slow GPU. Its clock is 1,050 MHz (others 1,980)."
    )


def test_a_rank_that_cannot_run_is_named_though_it_computes_as_long():
    assert describe(stopped=0.6) == (
        "rank 3 (node1) is stopped (by SIGSTOP, a debugger or a freezer) for 60% of the run's time (its peers: 0%)."
    )
    assert describe(disk=0.35) == "rank 3 (node1) waits for a disk for 35% of the run's time (its peers: 0%)."
    assert describe(stopped=0.15) is None and describe(disk=0.15) is None


@pytest.mark.parametrize(("compute", "throttled"), [(6.13, 5.0), (2.0, 1.3), (0.9, 0.25)])
def test_a_quota_is_the_cause_and_no_share_exceeds_the_whole(compute, throttled):
    """In a group with a quota, all threads of a rank wait at once, and their times add up to more than a step."""
    text = describe(compute=compute, core=compute - 0.5, throttled=throttled) or ""
    assert text.endswith(" The CPU quota of its control group, such as a container's CPU limit, stops it.")
    assert 0 < int(text.partition("% of the run")[0].rpartition(" ")[2]) <= 100


def test_an_oversubscribed_machine_is_said():
    paces = [replace(USUAL, rank=rank, compute=1.0, core=core) for rank, core in enumerate((0.6, 0.7))]
    assert describe_oversubscription(paces) == (
        "node0 is oversubscribed: its 2 ranks wait for a core for 65% of the time in which they could compute. Give "
        "them more cores, or stop other programs there."
    )
    # One rank that waits is a straggler, ranks with a quota wait for that, and a GPU's host does not compute.
    assert describe_oversubscription([replace(paces[0], core=0.1), paces[1]]) is None
    assert describe_oversubscription([replace(pace, throttled=0.5) for pace in paces]) is None
    assert describe_oversubscription([replace(USUAL, compute=0.0, core=0.0)]) is None


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("place", ["pod", "pod/container"])
def test_the_time_of_quotas_is_read_from_both_versions_of_control_groups(tmp_path, monkeypatch, version, place):
    """The quota may be that of a group above: a pod's, not its container's."""
    root = tmp_path / "cpu" if version == 1 else tmp_path
    (root / "pod" / "container").mkdir(parents=True)
    for name in ("", "pod", "pod/container"):
        value = 2 if name == place else 0
        line = f"throttled_time {value}000000000" if version == 1 else f"throttled_usec {value}000000"
        (root / name / "cpu.stat").write_text(f"nr_throttled 7\n{line}\n")
    names = "4:cpuset:/elsewhere\n3:cpu,cpuacct:/pod/container\n0::/\n" if version == 1 else "0::/pod/container\n"
    (tmp_path / "names").write_text(names)
    monkeypatch.setattr(pace_module, "_CGROUPS", tmp_path)
    monkeypatch.setattr(pace_module, "Path", lambda name: tmp_path / "names" if "/proc/" in name else Path(name))
    assert pace_module.throttled_seconds(1) == 2.0


def test_what_is_usual_is_no_straggler():
    assert describe() is None and describe(compute=0.7) is None and describe(compute=0.1) is None
    # A ratio of little is little, another stage may take longer, and a single rank has no peers.
    assert describe(compute=0.64, step=1.0) is None and describe(data=0.04) is None
    assert describe_straggler(USUAL, [USUAL, replace(USUAL, rank=1, stage=1, compute=0.1)]) is None


def test_what_varies_for_hours_names_nobody():
    """Windows of 20 s: in each step another rank waits for its data, and how fast a rank computes varies by a fifth."""
    draw = random.Random(1)
    for _ in range(10):
        slow_windows = [0] * WORLD
        computes: list[list[float]] = [[] for _ in range(WORLD)]
        for _ in range(180):
            paces = []
            for rank, own in enumerate(computes):
                reads = [draw.expovariate(2.0) * (draw.random() < 0.25) for _ in range(20)]
                own.append(draw.gauss(0.5, 0.1))
                errors = {"compute_error": estimate_noise(own[-12:]), "data_error": stdev(reads) / sqrt(20)}
                paces.append(replace(USUAL, rank=rank, compute=own[-1], data=mean(reads), **errors))
            for rank, pace in enumerate(paces):
                slow_windows[rank] = (slow_windows[rank] + 1) * (describe_straggler(pace, paces) is not None)
            assert max(slow_windows) < 3


def test_a_rank_that_becomes_slow_is_named_at_once():
    paces = [replace(USUAL, rank=rank, compute_error=0.02) for rank in range(3)]
    assert estimate_noise([0.6, 0.61, 0.6, 0.61, 0.78]) == pytest.approx(0.01)
    text = describe_straggler(replace(USUAL, rank=3, compute=0.78, compute_error=0.01), paces)
    assert (text or "").startswith("rank 3 (node0) computes 1.30 times as long as its peers")


@pytest.fixture
def watchdog(tmp_path, monkeypatch) -> Any:
    """A watchdog of this process as the only rank of its node, and the rank's record."""
    # A rank that computes for a second between two looks, however busy this machine is.
    clock = itertools.count()
    monkeypatch.setattr(pace_module, "_process_seconds", lambda _: (float(next(clock)), 0.0))
    slots = tmp_path / "slots"
    slots.mkdir()
    with _open_slot(slots, RankInfo(2, 4, torch.device("cpu"), "node1")) as slot:
        yield slots, Activity(slot)


def test_nodes_exchange_their_paces_and_name_a_straggler_once(watchdog, tmp_path):
    slots, activity = watchdog
    ranks = Watchdog(slots, tmp_path, 4, 60.0)._ranks
    folder = tmp_path / "exchange"
    meter = PaceMeter(ranks, folder, window=0.0)
    activity.set_stage(1)
    peers = [Pace(rank, "node0", stage, 1.0, compute=1e-9) for rank, stage in ((0, 0), (1, 1), (3, 1))]
    folder.mkdir()
    (folder / "pace-00000.json").write_text(json.dumps(asdict(Window(15, 5, peers, []))))
    # Those of a node that is gone say nothing any more.
    fast = [replace(peer, rank=peer.rank + 8, stage=1, compute=100.0) for peer in peers]
    (folder / "pace-00008.json").write_text(json.dumps(asdict(Window(500, 5, fast, []))))
    said = []
    for step in range(0, 50, 5):
        activity.enter("micro-batch", step)
        said += meter.poll()
    assert len(said) == 1 and said[0].startswith("Straggler: rank 2 (node1) computes ")
    # A window with a checkpoint in it says nothing.
    activity.enter("save", 60)
    assert meter.poll() == []
    meter.close()
    assert sorted(path.name for path in folder.iterdir()) == ["pace-00000.json", "pace-00008.json"]


def test_clock_of_a_card_by_nvml(monkeypatch):
    module: Any = ModuleType("pynvml")
    module.__spec__ = ModuleSpec("pynvml", None)
    module.NVMLError = RuntimeError
    module.NVML_CLOCK_SM = 1
    module.nvmlInit = lambda: None
    module.nvmlDeviceGetHandleByUUID = {"GPU-1": "handle"}.__getitem__
    module.nvmlDeviceGetClockInfo = lambda handle, kind: {("handle", 1): 1050}[handle, kind]
    monkeypatch.setitem(sys.modules, "pynvml", module)
    assert pace_module._read_clock(pace_module._open_gpu("GPU-1")) == 1050.0
    assert pace_module._read_clock(pace_module._open_gpu("")) == 0.0


def compute_slowly(rank: int) -> None:
    burn(1.3 if rank == CULPRIT else 1.0)


def read_slowly(rank: int) -> None:
    if rank == CULPRIT:
        time.sleep(0.05)


def stop_often(rank: int) -> None:
    """Be stopped for 60% of the time, in short bursts, by another process."""
    if rank == CULPRIT and not hasattr(stop_often, "helper"):
        code = (
            "import os, signal, time\nrank = os.getppid()\n"
            "while os.getppid() == rank:\n"
            "    os.kill(rank, signal.SIGSTOP); time.sleep(0.12); os.kill(rank, signal.SIGCONT); time.sleep(0.08)\n"
        )
        stop_often.helper = subprocess.Popen([sys.executable, "-c", code])  # type: ignore[attr-defined]
    burn(0.3)


def burn(factor: float) -> None:
    for _ in range(int(600_000 * factor)):
        pass


def run_rank(rank: int, store: str, folder: str, fault: Callable[[int], None]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, WORLD), rank=rank, world_size=WORLD, timeout=timedelta(seconds=PATIENCE)
    )
    os.dup2(os.open(f"{folder}/output", os.O_CREAT | os.O_WRONLY | os.O_APPEND), 2)
    ranks = RankInfo(rank, WORLD, torch.device("cpu"), "node")
    is_named = torch.zeros(1)
    with watch_rank(Path(folder) / "log", ranks, 1.0) as activity:
        for step in range(1_000_000):
            activity.enter("data", step)
            if fault is read_slowly:
                fault(rank)
            activity.enter("micro-batch")
            if fault in (compute_slowly, stop_often):
                fault(rank)
            activity.enter("gradients")
            file = Path(folder) / "log" / STRAGGLERS
            is_named.fill_(file.exists() and "Straggler" in file.read_text())
            dist.all_reduce(is_named)
            if is_named.item():
                break


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (compute_slowly, "computes 1."),
        (read_slowly, "waits for data for 0.0"),
        (stop_often, "is stopped (by SIGSTOP, a debugger or a freezer) for "),
    ],
)
def test_a_slow_rank_is_named_while_training_goes_on(tmp_path, fault, words):
    (tmp_path / "log").mkdir()
    with start_ranks(tmp_path, fault, run_rank) as processes:
        for process in processes:
            process.join(PATIENCE)
        assert [process.exitcode for process in processes] == [0] * WORLD
    text = (tmp_path / "log" / STRAGGLERS).read_text()
    assert f"Straggler: rank 2 (node) {words}" in text and text in (tmp_path / "output").read_text().replace(
        "jingu: ", ""
    )
