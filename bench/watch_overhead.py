"""CPU time of watching a run: of the watchdog of a node, and of the records that ranks write for it."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from bench.children import LITTLE_DATA, prepare_data
from jingu.watch.activity import Activity, _Reporter
from jingu.watch.slot import LISTEN, OPERATION, SLOT_BYTES, start_time
from jingu.watch.watchdog import Watchdog

RECORDS = 200_000
LOOKS = 500
NODE_RANKS = 8
RANKS = 4
# A small model with short steps, so that the share of a record is large.
CONFIG = f"""{LITTLE_DATA}
name: watched
model: {{num_layers: 2, hidden_size: 128, num_heads: 4}}
batch: {{sequence_length: 128, global_batch_size: 8}}
train: {{steps: 100000, log_every: 10, compile: false}}
checkpoint: {{every: 0}}
"""


def measure_record() -> float:
    """Return the CPU seconds of writing one record (`Activity.enter`)."""
    activity = Activity(mmap.mmap(-1, SLOT_BYTES))
    start = time.process_time()
    for number in range(RECORDS):
        activity.enter("micro-batch", 5, number)
    return (time.process_time() - start) / RECORDS


def measure_beat() -> float:
    """Return the CPU seconds of a rank's reporter thread each time that it wakes up, twice per second."""
    slot = mmap.mmap(-1, SLOT_BYTES)
    reporter = _Reporter(slot, Path(os.devnull))
    waits = iter([False] * LOOKS + [True])
    reporter._stopped.wait = lambda _: next(waits)  # type: ignore[method-assign, assignment]
    start = time.process_time()
    reporter.run()
    assert slot[OPERATION.size + 8] == LISTEN
    return (time.process_time() - start) / LOOKS


def measure_poll(folder: Path) -> float:
    """Return the CPU seconds that the watchdog needs to check all ranks of a node once."""
    own = {"host": "node", "pid": os.getpid(), "start_time": start_time(os.getpid()), "thread": "0"}
    for rank in range(NODE_RANKS):
        (folder / f"rank-{rank:05d}.slot").write_bytes(bytes(SLOT_BYTES))
        (folder / f"rank-{rank:05d}.json").write_text(json.dumps({"rank": rank, **own}))
    watchdog = Watchdog(folder, folder / "reports", NODE_RANKS, 60.0)
    start = time.process_time()
    for _ in range(LOOKS):
        assert watchdog.poll() is None
    return (time.process_time() - start) / LOOKS


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def measure_run(folder: Path, seconds: float) -> dict[str, float]:
    """Train with a watchdog for some seconds, and return figures by name.

    Returns:
        `share`: CPU time of the watchdog relative to that of all ranks; `step`: CPU seconds per step and rank;
        `records`: records per step and rank; `core`: CPU seconds per second of a rank.
    """
    prepare_data(folder, CONFIG)
    command = [sys.executable, "-m", "jingu", "train", "run.yaml", "--processes", str(RANKS)]
    launcher = subprocess.Popen(command, cwd=folder, stderr=subprocess.DEVNULL)
    try:
        metrics = folder / "runs" / "watched" / "metrics.jsonl"
        while not (metrics.exists() and '"train"' in metrics.read_text(encoding="utf-8")):
            assert launcher.poll() is None
            time.sleep(0.5)
        family = psutil.Process(launcher.pid).children(recursive=True)
        (watchdog,) = [process for process in family if "jingu.watch.watchdog" in process.cmdline()]
        ranks = [process for process in family if "RANK" in process.environ() and process != watchdog]
        (slot, *_) = sorted(Path(watchdog.cmdline()[3]).glob("*.slot"))

        def read() -> tuple[float, float, int, int]:
            changes, _, step, *_ = OPERATION.unpack_from(slot.read_bytes(), 0)
            return _cpu_seconds(watchdog), sum(map(_cpu_seconds, ranks)), changes, step

        before = read()
        time.sleep(seconds)
        own, others, records, steps = (b - a for a, b in zip(before, read(), strict=True))
    finally:
        launcher.terminate()
        launcher.wait()
    per_rank = others / len(ranks)
    return {"share": own / others, "step": per_rank / steps, "records": records / steps, "core": per_rank / seconds}


def run(seconds: str = "120") -> str:
    """Return the table as Markdown."""
    record, beat = measure_record(), measure_beat()
    with tempfile.TemporaryDirectory() as name:
        poll = measure_poll(Path(name))
    with tempfile.TemporaryDirectory() as name:
        figures = measure_run(Path(name), float(seconds))
    # Records scale with steps. The thread wakes up twice per second, whatever CPU time its rank gets.
    in_rank = figures["records"] * record / figures["step"] + 2 * beat / figures["core"]
    return "\n".join(
        [
            "| | |",
            "|---|---|",
            f"| a record of a rank | {record * 1e6:.2f} µs |",
            f"| a poll of {NODE_RANKS} ranks, twice a second | {poll * 1e6:,.0f} µs |",
            f"| a rank's thread, twice a second | {beat * 1e6:.1f} µs |",
            f"| CPU time of a step of a rank | {figures['step'] * 1e3:.1f} ms, with {figures['records']:.1f} records |",
            f"| records and thread, as a share of a rank's CPU time | {in_rank:.3%} |",
            f"| the watchdog of {RANKS} ranks, as a share of their CPU time | {figures['share']:.3%} |",
            f"| together (must be at most 0.5%) | {in_rank + figures['share']:.3%} |",
        ]
    )


if __name__ == "__main__":
    print(run())
