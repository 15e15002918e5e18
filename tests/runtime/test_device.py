"""What is asked of the system about memory."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch

from jingu.runtime.device import collapse_to_huge_pages, make_worker_threads, run_in_thread
from jingu.runtime.signals import handle_signals
from tests.limits import PATIENCE


def test_what_lies_in_large_pages_is_what_lay_there() -> None:
    block = torch.arange(1 << 20)
    collapse_to_huge_pages([(block.data_ptr(), block.nbytes), (1 << 12, 10)])  # nothing lies at the second
    assert torch.equal(block, torch.arange(1 << 20))


def test_threads_beside_work_alone() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        pool = make_worker_threads(2, "test")
        assert [pool.submit(torch.get_num_threads).result() for _ in range(4)] == [1] * 4
        assert (torch.get_num_threads(), run_in_thread(torch.get_num_threads)) == (3, 3)
        pool.shutdown()
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="the system does not show threads")
def test_what_is_done_aside_leaves_no_threads() -> None:
    def done() -> int:
        torch.set_num_threads(3)
        return int(torch.ones(1 << 20).add(1).sum())

    def threads() -> int:
        return len([*Path("/proc/self/task").iterdir()])

    before, threads_before = torch.get_num_threads(), threads()
    try:
        assert run_in_thread(done) == 2 << 20
        with pytest.raises(ZeroDivisionError):
            run_in_thread(lambda: 1 // 0)
    finally:
        torch.set_num_threads(before)
    deadline = time.monotonic() + PATIENCE  # a thread that has said its last word may be about to end
    while threads() > threads_before and time.monotonic() < deadline:
        os.sched_yield()
    assert threads() <= threads_before


def test_ctrl_c_ends_what_is_done_aside() -> None:
    ended = []

    def endless() -> None:
        try:
            os.kill(os.getpid(), signal.SIGINT)
            while True:
                torch.ones(10).sum()
        finally:
            ended.append(True)

    # Tests started in the background inherit that Ctrl-C is ignored.
    with handle_signals(signal.default_int_handler, signal.SIGINT), pytest.raises(KeyboardInterrupt):
        run_in_thread(endless)
    assert ended
