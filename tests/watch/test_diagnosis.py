"""Verdicts from made-up reports, and the parts of the watchdog that need no ranks."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack, suppress

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jingu.runtime.ranks import RankInfo
from jingu.watch.activity import Activity, _open_slot
from jingu.watch.diagnosis import RankReport, judge
from jingu.watch.local_rank import LocalRank, read_stack
from jingu.watch.slot import process_state, start_time
from jingu.watch.watchdog import Watchdog
from tests.limits import free_port

SHAPES = [[4]]


def report(rank: int, last: int, state: str = "running", world: int = 4, **fields: object) -> RankReport:
    """A rank that waits in the call `last` of all ranks, after those before."""
    calls = [[number, "all_reduce", SHAPES, number < last] for number in range(1, last + 1)]
    groups = {"0": {"axis": "all ranks", "ranks": list(range(world)), "calls": calls}}
    return RankReport(rank, f"node{rank}", state, "gradients", 7, groups=groups, **fields)


@given(
    st.integers(2, 9).flatmap(lambda world: st.tuples(st.just(world), st.integers(0, world - 1))), st.integers(1, 50)
)
def test_the_rank_that_is_behind_is_named(size, last):
    world, culprit = size
    reports = [report(rank, last if rank == culprit else last + 1, world=world) for rank in range(world)]
    text = judge(reports, world, 61.0)
    assert text.startswith("Training has made no progress for 61 s in step 8.\n")
    assert f"rank {culprit} (node{culprit}) has not joined all-reduce {last + 1} of all ranks;" in text
    assert text.count("has not joined") == 1


def test_a_node_that_does_not_report_is_named():
    text = judge([report(rank, 3) for rank in (0, 1, 2)], 4, 61.0)
    assert "rank 3, whose node does not report, is the cause." in text


def test_a_stopped_rank_goes_before_one_that_is_behind():
    text = judge([report(0, 3), report(1, 2), report(2, 2, "stopped"), report(3, 3)], 4, 61.0)
    assert "rank 2 (node2) has not joined" in text and "rank 1 (" not in text


def test_another_operation_goes_before_a_rank_that_failed_for_it():
    wrong = report(1, 3)
    wrong.groups["0"]["calls"][1][1] = "all_gather"
    text = judge([report(0, 3, "dead"), wrong, report(2, 3), report(3, 3)], 4, 0.0)
    assert "rank 1 (node1) called all-gather of [[4]] as number 2 of all ranks, where the other ranks called" in text
    assert text.startswith("Training has ended in step 8.")


def test_states_have_sentences():
    sentences = {
        "silent": "A call in a.py:1 f holds the interpreter's lock since 61 s.",
        "disk": "It waits for a disk in a.py:1 f since 61 s.",
        "unreachable": "The network between its node and that of rank 0 is down.",
    }
    for state, sentence in sentences.items():
        culprit = report(3, 2, state, stack=["a.py:1 f"], seconds=61.0)
        assert sentence in judge([*(report(rank, 3) for rank in range(3)), culprit], 4, 61.0)


def test_stack_of_a_thread_is_the_newest_one():
    dump = """Thread 0x00aa (most recent call first):
  File "/x/old.py", line 1 in f
Thread 0x00bb (most recent call first):
  File "/x/other.py", line 2 in g

Current thread 0x00aa (most recent call first):
  File "/a/b/c/new.py", line 3 in h
  File "/x/main.py", line 4 in <module>

Thread 0x00bb (most recent call first):
  File "/x/other.py", line 2 in g
"""
    assert list(read_stack(dump, "00aa")) == ["b/c/new.py:3 h", "/x/main.py:4 <module>"]
    assert list(read_stack(dump, "00cc")) == []


def test_another_process_with_the_same_number_is_not_the_rank():
    own = os.getpid()
    assert process_state(own, start_time(own)) in ("R", "S")
    assert process_state(own, start_time(own) + 1) == ""
    assert process_state(2**22 + 1, 0) == ""


def test_ranks_that_fail_together_are_not_judged(tmp_path, monkeypatch):
    """They said why themselves, and some exit later than others."""
    for rank in (0, 1):
        with suppress(ValueError), _open_slot(tmp_path, RankInfo(rank, 2, torch.device("cpu"), "node")):
            raise ValueError
    watchdog = Watchdog(tmp_path, tmp_path / "reports", 2, 0.0)
    monkeypatch.setattr(LocalRank, "send", lambda *_: None)  # the ranks are this process
    monkeypatch.setattr(watchdog._ranks[0], "process_state", lambda: "")
    assert watchdog.poll() is None
    # A rank that is still in its group stands still because of the other one.
    Activity(watchdog._ranks[1].slot).enter("gradients", 3)
    assert "rank 0 (node) is the cause." in (watchdog.poll() or "")


@pytest.mark.parametrize(
    ("step_seconds", "deadline"),
    [
        ([2.0] * 5, 60.0),  # short steps: the timeout
        ([20.0, 20.0, 500.0, 20.0, 30.0], 200.0),  # long ones: ten median steps
        ([20.0], 300.0),  # the first steps compile: five times the timeout
    ],
)
def test_training_stands_still_after_ten_median_steps_or_the_timeout(tmp_path, monkeypatch, step_seconds, deadline):
    clock = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: clock)
    monkeypatch.setattr(LocalRank, "send", lambda *_: None)  # the rank is this process
    with ExitStack() as stack:
        stack.enter_context(_open_slot(tmp_path, RankInfo(0, 1, torch.device("cpu"), "node")))
        watchdog = Watchdog(tmp_path, tmp_path / "reports", 1, 60.0)
        activity = Activity(watchdog._ranks[0].slot)
        for step, seconds in enumerate([*step_seconds, 0.0]):
            activity.enter("gradients", step)
            assert watchdog.poll() is None
            clock += seconds
        clock += deadline
        assert watchdog.poll() is None
        clock += 1
        assert "Training has made no progress for" in (watchdog.poll() or "")
        # It goes on while the watchdog asks: no verdict.
        monkeypatch.setattr(watchdog, "_wait", lambda *_: activity.enter("gradients", len(step_seconds) + 1))
        assert watchdog.poll() is None


def test_a_rank_that_is_stopped_while_it_saves_is_judged(tmp_path, monkeypatch):
    """Nobody knows how long a save takes, but a stopped process does not go on with it."""
    with ExitStack() as stack:
        for rank in (0, 1):
            stack.enter_context(_open_slot(tmp_path, RankInfo(rank, 2, torch.device("cpu"), "node")))
        watchdog = Watchdog(tmp_path, tmp_path / "reports", 2, 0.0)
        monkeypatch.setattr(LocalRank, "send", lambda *_: None)  # the ranks are this process
        Activity(watchdog._ranks[0].slot).enter("gradients", 3)
        Activity(watchdog._ranks[1].slot).enter("save", 2)
        assert watchdog.poll() is None
        monkeypatch.setattr(watchdog._ranks[1], "process_state", lambda: "T")
        assert "rank 1 (node) is the cause." in (watchdog.poll() or "")
        monkeypatch.undo()
        assert watchdog.poll() is None


def test_a_rollout_is_only_judged_when_a_rank_is_dead(tmp_path, monkeypatch):
    """Updates are short, and the rollout after them waits for rewards, which have timeouts of their own."""
    clock = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: clock)
    monkeypatch.setattr(LocalRank, "send", lambda *_: None)  # the ranks are this process
    with ExitStack() as stack:
        for rank in (0, 1):
            stack.enter_context(_open_slot(tmp_path, RankInfo(rank, 2, torch.device("cpu"), "node")))
        watchdog = Watchdog(tmp_path, tmp_path / "reports", 2, 60.0)
        monkeypatch.setattr(watchdog, "_wait", lambda *_: None)
        activities = [Activity(rank.slot) for rank in watchdog._ranks]
        for phase, step in [("gradients", step) for step in range(5)] + [("rollout", 5)]:
            for activity in activities:
                activity.enter(phase, step)
            assert watchdog.poll() is None
            clock += 1.0
        clock += 1e6
        assert watchdog.poll() is None
        monkeypatch.setattr(watchdog._ranks[1], "process_state", lambda: "")
        assert "rank 1 (node) is the cause." in (watchdog.poll() or "")


def test_a_master_that_refuses_is_reached(tmp_path):
    assert Watchdog(tmp_path, tmp_path, 1, 60.0, ("127.0.0.1", free_port()))._reaches_master()
    assert Watchdog(tmp_path, tmp_path, 1, 60.0)._reaches_master()
    assert not Watchdog(tmp_path, tmp_path, 1, 60.0, ("no-such-host.invalid", 1))._reaches_master()
