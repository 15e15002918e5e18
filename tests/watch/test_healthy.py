"""No false alarm while four ranks train healthily, in compressed time: all times are shares of the watchdog's timeout.

The true hour, with the timeout that runs have by default:

    JINGU_HEALTHY_SECONDS=3600 python -m pytest -m slow tests/watch/test_healthy.py
"""

from __future__ import annotations

import os
import random
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from jingu.runtime.ranks import RankInfo
from jingu.watch.activity import watch_rank
from tests.limits import PATIENCE
from tests.watch.test_hangs import WORLD, start_ranks

SECONDS = float(os.environ.get("JINGU_HEALTHY_SECONDS", "60"))
TIMEOUT = max(1.5, SECONDS / 60)


def train_healthily(rank: int, store: str, folder: str, seconds: float) -> None:
    """Train with all that a healthy run does now and then, and that looks like a hang."""
    torch.set_num_threads(1)
    os.dup2(os.open(f"{folder}/output", os.O_CREAT | os.O_WRONLY | os.O_APPEND), 2)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, WORLD), rank=rank, world_size=WORLD, timeout=timedelta(seconds=PATIENCE)
    )
    end = time.monotonic() + seconds
    is_over = torch.zeros(1)
    with watch_rank(Path(folder), RankInfo(rank, WORLD, torch.device("cpu"), "node"), TIMEOUT) as activity:
        for step in range(10**9):
            activity.enter("data", step)
            # A slow read of another rank in each step, of half of what is allowed at most.
            draw = random.Random(step)
            if rank == draw.randrange(WORLD):
                time.sleep(min(draw.expovariate(100.0), 0.5) * TIMEOUT)
            activity.enter("micro-batch", micro_batch=0)
            if step == 0:  # compilation, on one rank longer than on the others
                time.sleep((1.5 + rank / 2) * TIMEOUT)
            activity.enter("gradients")
            is_over.fill_(time.monotonic() > end)
            dist.all_reduce(is_over)
            for phase, every in (("evaluate", 400), ("save", 900)):
                if step % every == every - 1:
                    activity.enter(phase)
                    time.sleep(2.5 * TIMEOUT * (rank == 0))
                    dist.barrier()
                    activity.enter("between steps")
            if is_over.item():
                break
    if rank == 0:
        (Path(folder) / "steps").write_text(str(step + 1))


@pytest.mark.slow
def test_no_false_alarm_in_healthy_training(tmp_path):
    with start_ranks(tmp_path, SECONDS, train_healthily) as processes:
        for process in processes:
            process.join(SECONDS + PATIENCE)
        assert [process.exitcode for process in processes] == [0] * WORLD, (tmp_path / "output").read_text()
    output = (tmp_path / "output").read_text()
    assert "no progress" not in output and "Straggler" not in output
    assert not list(tmp_path.glob("jingu-watch-*/verdict.txt"))
    assert int((tmp_path / "steps").read_text()) > 10
