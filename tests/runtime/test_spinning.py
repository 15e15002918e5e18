"""Threads that sleep while the machine is busy. What it gains is measured by `python -m bench busy`."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch

from jingu.runtime import spinning
from jingu.runtime.spinning import SleepingThreads, seconds_without_cpu, sleep_on_busy_machine
from tests.limits import PATIENCE


def test_sleeping_threads_outnumber_the_cpus_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spinning, "num_usable_cores", lambda: 4)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        a = torch.randn(300, 300)
        product = a @ a
        before = len(list(Path("/proc/self/task").iterdir()))
        sleeping = SleepingThreads()
        # Two threads compute. Three pools, each of one thread beside the one that has it, make five.
        assert len(list(Path("/proc/self/task").iterdir())) == before + 6
        assert torch.equal(a @ a, product) and torch.get_num_threads() == 2
        sleeping.end()
        deadline = time.monotonic() + PATIENCE
        while len(list(Path("/proc/self/task").iterdir())) > before:
            assert time.monotonic() < deadline
        torch.set_num_threads(1)
        # A single thread waits for no other.
        assert not SleepingThreads()._threads
    finally:
        torch.set_num_threads(threads)


def test_threads_sleep_while_they_wait_for_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """They begin above the higher share and end below the lower one."""
    shares = iter([0.1, 0.4, 0.9, 0.4, 0.2, 0.4, 0.7])
    events: list[str] = []
    clock, waited, stop = [0.0], [0.0], threading.Event()

    class Sleepers:
        def __init__(self) -> None:
            events.append(f"sleep at {clock[0]:g}")

        def end(self) -> None:
            events.append(f"end at {clock[0]:g}")

    def wait(_: float) -> bool:
        share = next(shares, None)
        clock[0] += 1
        waited[0] += share or 0
        return share is None

    monkeypatch.setattr(spinning, "SleepingThreads", Sleepers)
    monkeypatch.setattr(spinning, "seconds_without_cpu", lambda: waited[0])
    monkeypatch.setattr(spinning.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(stop, "wait", wait)
    spinning._watch(stop)
    assert events == ["sleep at 3", "end at 5", "sleep at 7", "end at 8"]


def test_systems_that_do_not_tell_are_left_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    first = seconds_without_cpu()
    assert first is not None and first >= 0
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "schedstat").write_text("5 1500000000 9\n", encoding="ascii")
    (tmp_path / "8").mkdir()  # a thread that has ended
    monkeypatch.setattr(spinning, "_TASKS", tmp_path)
    assert seconds_without_cpu() == 1.5
    monkeypatch.setattr(spinning, "_TASKS", tmp_path / "nowhere")
    assert seconds_without_cpu() is None
    with sleep_on_busy_machine():
        pass
