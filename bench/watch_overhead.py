"""Time that the watchdog of a run takes: of one record of a rank, and of one look at the ranks of a node.

    python bench/watch_overhead.py

A rank writes about ten records in a step, and its node's watchdog looks twice a second, in a process of its own.
"""

from __future__ import annotations

import json
import mmap
import os
import tempfile
import time
from pathlib import Path

from jingu.watch.activity import Activity
from jingu.watch.slot import SLOT_BYTES, start_time
from jingu.watch.watchdog import Watchdog

RECORDS = 200_000
LOOKS = 500
RANKS = 8


def measure_record() -> float:
    """Return the seconds of one record."""
    activity = Activity(mmap.mmap(-1, SLOT_BYTES))
    start = time.process_time()
    for number in range(RECORDS):
        activity.enter("micro-batch", 5, number)
    return (time.process_time() - start) / RECORDS


def measure_look(folder: Path) -> float:
    """Return the seconds of one look at the ranks of a node."""
    own = {"host": "node", "pid": os.getpid(), "start_time": start_time(os.getpid()), "thread": "0"}
    for rank in range(RANKS):
        (folder / f"rank-{rank:05d}.slot").write_bytes(bytes(SLOT_BYTES))
        (folder / f"rank-{rank:05d}.json").write_text(json.dumps({"rank": rank, **own}))
    watchdog = Watchdog(folder, folder / "reports", RANKS, 60.0)
    start = time.process_time()
    for _ in range(LOOKS):
        assert watchdog.look() is None
    return (time.process_time() - start) / LOOKS


if __name__ == "__main__":
    print(f"record: {1e6 * measure_record():.2f} µs")
    with tempfile.TemporaryDirectory() as place:
        print(f"look at {RANKS} ranks: {1e6 * measure_look(Path(place)):.0f} µs")
