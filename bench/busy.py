"""Training beside programs that keep the cores busy: tokens/s with 0, 1 and 3 busy loops on two cores.

A small model (that of the quickstart) has many short parallel operations, after each of which threads wait for each
other. Each measurement runs in its own process. Sides and numbers of loops alternate, so ratios within one run are
comparable even if other programs run. The share in parentheses is relative to the same side without loops.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from statistics import median

from jingu.errors import pluralize

LOOPS = (0, 1, 3)
# The training step that each side runs. Only the first side lets threads sleep while the machine is busy.
SIDES = {"jingu": "jingu", "jingu, always spinning": "jingu", "transformers": "transformers"}
SHAPE = {"LAYERS": 4, "WIDTH": 128, "HEADS": 2, "FEED_FORWARD": 344, "VOCABULARY": 2048, "SEQUENCE": 256, "BATCH": 8}
WARMUP, SECONDS = 2.0, 6.0


def measure(side: str) -> None:
    """Print the tokens/s of training for some seconds. Runs in a child process."""
    import torch

    from bench import train_step
    from jingu.runtime.spinning import sleep_on_busy_machine

    vars(train_step).update(SHAPE)
    torch.set_num_threads(train_step.THREADS)
    torch.manual_seed(0)
    step = {"jingu": train_step._jingu, "transformers": train_step._transformers}[SIDES[side]]("fp32", False)
    tokens = torch.randint(0, train_step.VOCABULARY, (train_step.BATCH, train_step.SEQUENCE + 1))
    with sleep_on_busy_machine() if side == "jingu" else nullcontext():
        # Long enough for the watcher of `sleep_on_busy_machine` to measure several times.
        start = time.perf_counter()
        while time.perf_counter() < start + WARMUP:
            step(tokens)
        steps = 0
        start = time.perf_counter()
        while time.perf_counter() < start + SECONDS:
            step(tokens)
            steps += 1
    # The mean, not the median: on a busy machine some steps take much longer than others.
    print(json.dumps(train_step.BATCH * train_step.SEQUENCE * steps / (time.perf_counter() - start)))


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """Run `count` processes that compute in an endless loop, within the block."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def run(argument: str = "") -> str:
    """Return the table as Markdown."""
    rates: dict[tuple[str, int], list[float]] = {}
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    for _ in range(1 if argument == "tiny" else 3):
        for side in SIDES:
            for count in LOOPS:
                with busy_loops(count):
                    command = [sys.executable, "-m", "bench.busy", side]
                    output = subprocess.run(command, check=True, capture_output=True, text=True, env=clean).stdout
                rates.setdefault((side, count), []).append(float(output.splitlines()[-1]))
    headings = " | ".join(pluralize(count, "busy loop") for count in LOOPS)
    lines = [f"| | {headings} |", "|---|" + "---|" * len(LOOPS)]
    for side in SIDES:
        quiet = median(rates[side, 0])
        cells = [f"{median(rates[side, n]):,.0f} ({median(rates[side, n]) / quiet:.2f})" for n in LOOPS]
        lines.append(f"| {side} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    if len(sys.argv) == 2:
        measure(sys.argv[1])
    else:
        print(run())
