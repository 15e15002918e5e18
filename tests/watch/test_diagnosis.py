"""Verdicts from made-up reports, and the parts of the watchdog that need no ranks."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack, suppress
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jingu.runtime.ranks import RankInfo
from jingu.watch.activity import Activity, _open_slot
from jingu.watch.diagnosis import RankReport, judge
from jingu.watch.local_rank import LocalRank
from jingu.watch.slot import process_state, start_time
from jingu.watch.stacks import describe_place, find_blocked_stack, is_debugged, read_stacks
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


def disagree(world: int, wrong: dict[int, str], axis: str = "all ranks", group: str = "0", **fields: object):
    """Ranks of a group of which some called something else as number 3."""
    reports = [report(rank, 3, world=world, **fields) for rank in range(world)]
    for own in reports:
        own.groups["0"]["axis"] = axis
        if own.rank in wrong:
            own.groups["0"]["calls"][2][1] = wrong[own.rank]
    return reports


@pytest.mark.parametrize(
    ("world", "wrong", "sentences"),
    [
        (2, {0: "all_gather"}, ["rank 0 (node0) called all-gather", "rank 1 (node1) called all-reduce"]),
        (2, {1: "all_gather"}, ["rank 0 (node0) called all-reduce", "rank 1 (node1) called all-gather"]),
        (
            4,
            {1: "broadcast", 3: "broadcast"},
            [
                "rank 0 (node0) called all-reduce of [[4]] (as rank 2 did) as number 3 of all ranks, where ranks 1 and "
                "3 called broadcast of [[4]]",
                "rank 1 (node1) called broadcast of [[4]] (as rank 3 did)",
            ],
        ),
        (3, {1: "broadcast", 2: "all_gather"}, ["rank 0 (node0)", "rank 1 (node1)", "rank 2 (node2)"]),
    ],
)
def test_without_a_majority_each_side_is_named_with_what_it_does(world, wrong, sentences):
    text = judge(disagree(world, wrong, stack=["/x/jingu/training/loop.py:9 run"], seconds=61.0), world, 61.0)
    assert all(sentence in text for sentence in sentences), text
    assert text.count("It is in jingu/training/loop.py:9 run since 61 s (reduction of gradients).") == len(sentences)


@pytest.mark.parametrize("culprit", range(4))
def test_another_group_of_the_axis_decides(culprit):
    """Two pairs of ranks: in one pair nobody has a majority, and the other pair shows what all do."""
    reports = disagree(4, {culprit: "all_gather"}, axis="tensor")
    for own in reports:
        pair = own.rank // 2
        own.groups[f"pair{pair}"] = {**own.groups.pop("0"), "ranks": [2 * pair, 2 * pair + 1]}
    text = judge(reports, 4, 61.0)
    assert f"rank {culprit} (node{culprit}) called all-gather of [[4]] as number 3 of axis `tensor`" in text
    assert text.count(") called ") == 1, text


def test_a_rank_that_a_library_aborts_is_not_blamed_alone():
    """gloo aborts the rank that receives what it does not expect, which may be the one that is right."""
    other = report(0, 3, "dead", world=2)
    stack = ["/site/torch/distributed/distributed_c10d.py:9 all_reduce", "/x/jingu/training/step.py:5 sum"]
    aborted = RankReport(1, "node1", "dead", "gradients", 7, exit_code=134, stack=stack)
    for first in (replace(other, phase="failed", exit_code=1), replace(other, state="running")):
        text = judge([first, aborted], 2, 0.0)
        assert "rank 1 (node1) was aborted by a library; one reason is a call that does not match another" in text
        assert "It was killed by SIGABRT in torch/distributed/distributed_c10d.py:9 all_reduce" in text
        assert "rank 0 (node0) called all-reduce of [[4]] as number 3 of all ranks last" in text


@pytest.mark.parametrize(
    ("exit_code", "phase", "sentence"),
    [
        (0, "gradients", "It exited with code 0, without an error message."),
        (3, "gradients", "It exited with code 3, without an error message."),
        (137, "gradients", "It was killed by SIGKILL, most likely because memory ran out."),
        (139, "gradients", "It was killed by SIGSEGV."),
        (None, "gradients", "It has ended, without an error message."),
        (1, "failed", "It has ended with an error."),
    ],
)
def test_how_a_rank_has_ended_is_said_as_far_as_it_is_known(exit_code, phase, sentence):
    reports = [replace(report(0, 3, "dead", world=2), exit_code=exit_code, phase=phase), report(1, 3, world=2)]
    assert sentence in judge(reports, 2, 61.0)


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
    stacks = read_stacks(dump)
    assert stacks == {"00aa": ["/a/b/c/new.py:3 h", "/x/main.py:4 <module>"], "00bb": ["/x/other.py:2 g"]}
    assert describe_place(stacks["00aa"]) == " in b/c/new.py:3 h" and describe_place([]) == ""
    assert find_blocked_stack(stacks, "00cc", "data") == []


WAIT = ["/usr/lib/python3.11/threading.py:327 wait", "/usr/lib/python3.11/concurrent/futures/_base.py:451 result"]
MAIN = [*WAIT, "/x/jingu/data/batch_prefetch.py:34 batch", "/x/jingu/training/loop.py:9 run"]
IDLE = ["/usr/lib/python3.11/concurrent/futures/thread.py:81 _worker", "/usr/lib/python3.11/threading.py:975 run"]
REPORTER = ["/usr/lib/python3.11/threading.py:331 wait", "/x/jingu/watch/activity.py:203 run"]
PIPE = ["/x/jingu/runtime/signals.py:70 watch", "/usr/lib/python3.11/threading.py:975 run"]
LOADER = ["/x/jingu/data/dataset.py:88 read_rows", "/x/jingu/data/batch_prefetch.py:42 _prepare"]
SAVER = ["/usr/lib/python3.11/socket.py:706 readinto", "/x/jingu/checkpoint/store.py:5 put"]
POOL = ["/home/me/my_data.py:7 fetch", "/usr/lib/python3.11/concurrent/futures/thread.py:58 run"]
QUEUE = ["/usr/lib/python3.11/queue.py:171 get", "/x/jingu/training/loop.py:9 run"]


@pytest.mark.parametrize(
    ("main", "others", "phase", "place"),
    [
        (MAIN, [IDLE, REPORTER, PIPE, LOADER], "data", "jingu/data/dataset.py:88 read_rows"),
        # The thread that delivers data goes before the one that saves, and the other way round.
        (MAIN, [SAVER, LOADER], "data", "jingu/data/dataset.py:88 read_rows"),
        (
            QUEUE,
            [LOADER, SAVER],
            "save",
            "lib/python3.11/socket.py:706 readinto, called in jingu/checkpoint/store.py:5 put",
        ),
        # The loader itself waits for a thread of the user's data set.
        (MAIN, [[*WAIT, *LOADER], POOL], "data", "home/me/my_data.py:7 fetch"),
        # The main thread works, or waits in a collective.
        (["/x/jingu/model/decoder.py:3 forward"], [LOADER], "micro-batch", "jingu/model/decoder.py:3 forward"),
        # Nobody is there to wait for.
        (
            MAIN,
            [IDLE, REPORTER, PIPE],
            "data",
            "lib/python3.11/threading.py:327 wait, called in jingu/data/batch_prefetch.py:34 batch",
        ),
    ],
)
def test_a_rank_that_waits_for_a_thread_is_in_the_code_of_that_thread(main, others, phase, place):
    stacks = {"0a": main, **{f"0{number}": stack for number, stack in enumerate(others, 1)}}
    assert describe_place(find_blocked_stack(stacks, "0a", phase)) == f" in {place}"


def test_a_process_in_a_debugger_is_not_judged():
    assert is_debugged(["/usr/lib/python3.11/cmd.py:126 cmdloop", "/usr/lib/python3.11/pdb.py:375 interaction"])
    assert is_debugged(["/site/debugpy/server/api.py:1 wait"]) and not is_debugged(MAIN)


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


@pytest.mark.parametrize("phase", ["", "save", "evaluate"])
def test_ranks_that_do_no_work_for_long_hang_in_every_phase(tmp_path, monkeypatch, phase):
    """A save may take long, but its ranks then compute, read or write; the watchdog asks after ten deadlines."""
    clock = 1000.0
    work = [(0.0, 0), (0.0, 0)]
    monkeypatch.setattr(time, "monotonic", lambda: clock)
    monkeypatch.setattr(LocalRank, "send", lambda *_: None)  # the ranks are this process
    monkeypatch.setattr(LocalRank, "work", lambda rank: work[rank.process["rank"]])
    with ExitStack() as stack:
        for rank in (0, 1):
            stack.enter_context(_open_slot(tmp_path, RankInfo(rank, 2, torch.device("cpu"), "node")))
        watchdog = Watchdog(tmp_path, tmp_path / "reports", 2, 60.0)
        monkeypatch.setattr(watchdog, "_wait", lambda *_: None)
        for rank in watchdog._ranks:
            for step in range(4 if phase else 1):
                Activity(rank.slot).enter("gradients" if phase else "", step)
        assert watchdog.poll() is None
        clock += 1.0
        for rank in watchdog._ranks:
            Activity(rank.slot).enter(phase, 5 if phase else 0)
        deadline = 600.0 if phase else 3000.0  # the first steps have five times as long
        for seconds, size in ((deadline - 1, 2**17), (deadline - 1, 2**18)):
            assert watchdog.poll() is None
            clock += seconds
            work[1] = (0.0, size)  # one rank writes, and the other waits for it
        assert watchdog.poll() is None
        clock += deadline - 1
        work[1] = (0.0, 2**18 + 100)  # they only ask each other whether they are done
        assert watchdog.poll() is None
        clock += 2
        # The ranks of another node may still write.
        watchdog._world = 3
        assert watchdog.poll() is None
        watchdog._world = 2
        assert "Training has made no progress for" in (watchdog.poll() or "")
        assert [path.name for path in sorted((tmp_path / "reports").glob("*.txt"))] == [
            "rank-00000.stacks.txt",
            "rank-00001.stacks.txt",
        ]


def test_one_process_that_a_shell_stops_is_not_judged(tmp_path, monkeypatch):
    clock = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: clock)
    monkeypatch.setattr(LocalRank, "send", lambda *_: None)  # the rank is this process
    with _open_slot(tmp_path, RankInfo(0, 1, torch.device("cpu"), "node")):
        watchdog = Watchdog(tmp_path, tmp_path / "reports", 1, 60.0)
        monkeypatch.setattr(watchdog, "_wait", lambda *_: None)
        for step in range(4):
            Activity(watchdog._ranks[0].slot).enter("gradients", step)
            assert watchdog.poll() is None
            clock += 1.0
        with monkeypatch.context() as patch:
            patch.setattr(watchdog._ranks[0], "process_state", lambda: "T")
            for _ in range(3):
                clock += 1000.0
                assert watchdog.poll() is None
        assert watchdog.poll() is None
        clock += 59.0
        assert watchdog.poll() is None
        clock += 2.0
        assert "rank 0 (node) is the cause." in (watchdog.poll() or "")


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
