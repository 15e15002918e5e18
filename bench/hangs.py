"""Hangs planted into `jingu train`: whether the right rank is named, and how long it takes; and quiet runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.children import LITTLE_DATA, ROOT, prepare_data

TIMEOUT = 10.0
# The verdict must come this much later than `train.hang_timeout`.
LIMIT = TIMEOUT + 5.0
WORLDS = (2, 4, 8)
FAULTS = ("sleep", "data", "stop", "interpreter", "skip", "operation", "shape")
STEP = 12
QUIET_RUNS = 30
QUIET_STEPS = 60
CONFIG = f"""{LITTLE_DATA}
name: run
model: {{num_layers: 2, hidden_size: 32, num_heads: 4}}
batch: {{sequence_length: 64, global_batch_size: 8}}
train: {{steps: 1000000, log_every: 10, compile: false, hang_timeout: {TIMEOUT}}}
checkpoint: {{every: 0}}
"""
# Python imports this module at the start of each process. It plants a fault into one rank of a run.
PLANT = """
import importlib.abc, importlib.util, itertools, os, signal, sys, time
from collections import deque

FAULT, RANK, STEP, FILE = os.environ["PLANT"].split(",")
MODULES = {"jingu.runtime.collective_stop", "jingu.data.batch_prefetch"}


def begin():
    with open(FILE, "w") as file:
        file.write(str(time.monotonic()))


def read_rows():
    time.sleep(10000)


def plant_stop(module):
    import torch, torch.distributed as dist
    original = module.CollectiveStop.agree
    steps = itertools.count(1)

    def agree(self, *words, **more):
        if next(steps) != int(STEP) or FAULT == "data":
            return original(self, *words, **more)
        begin()
        if FAULT == "sleep":
            time.sleep(10000)
        if FAULT == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if FAULT == "interpreter":
            deque(itertools.repeat(None), maxlen=0)
        if FAULT == "operation":
            dist.broadcast(torch.ones(3), 0)
        if FAULT == "shape":
            dist.all_reduce(torch.ones(7), op=dist.ReduceOp.MAX)
        if FAULT == "skip":
            return original.__globals__["StopDecision"](0, False, False)
        return original(self, *words, **more)

    module.CollectiveStop.agree = agree


def plant_data(module):
    original = module.BatchPrefetcher._prepare

    def prepare(self, step, first, count):
        if FAULT == "data" and step == int(STEP):
            begin()
            read_rows()
        return original(self, step, first, count)

    module.BatchPrefetcher._prepare = prepare


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name not in MODULES:
            return None
        MODULES.discard(name)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            (plant_stop if name.endswith("collective_stop") else plant_data)(module)

        spec.loader.exec_module = exec_module
        return spec


if os.environ.get("RANK") == RANK and "train" in sys.orig_argv:
    sys.meta_path.insert(0, Finder())
"""


def start(folder: Path, name: str, world: int, *overrides: str, plant: str = "") -> subprocess.Popen[str]:
    """Start a run; its output goes to a pipe."""
    words = ["train", "run.yaml", "--processes", str(world), f"name={name}", *overrides]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if plant:
        environment |= {"PYTHONPATH": f"{folder / 'plant'}:{ROOT}", "PLANT": plant}
    return subprocess.Popen(
        [sys.executable, "-m", "jingu", *words], cwd=folder, env=environment, stderr=subprocess.PIPE, text=True
    )


def find_hang(folder: Path, fault: str, world: int, culprit: int) -> tuple[float, str]:
    """Plant a fault into a run. Returns the seconds until the verdict, and the verdict."""
    file = folder / f"{fault}-{world}"
    process = start(folder, f"{fault}-{world}", world, plant=f"{fault},{culprit},{STEP},{file}")
    verdict, end = "", 0.0
    assert process.stderr is not None
    for line in process.stderr:
        if "Training has" in line:
            end = time.monotonic()
        if end:
            verdict += line
    process.wait()
    return end - float(file.read_text(encoding="utf-8")), verdict


def is_named(verdict: str, culprit: int, world: int) -> bool:
    """Return whether a verdict names the rank, and no other one; of two ranks without a majority, both."""
    named = {int(number) for number in re.findall(r"^  rank (\d+) \(", verdict, re.MULTILINE)}
    return culprit in named if world == 2 else named == {culprit}


def run(argument: str = "") -> str:
    """Return the table as Markdown."""
    worlds = (2,) if argument == "tiny" else WORLDS
    quiet_runs = 1 if argument == "tiny" else QUIET_RUNS
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare_data(folder, CONFIG)
        (folder / "plant").mkdir()
        (folder / "plant" / "sitecustomize.py").write_text(PLANT, encoding="utf-8")
        for number, fault in enumerate(FAULTS[:1] if argument == "tiny" else FAULTS):
            cells = []
            for world in worlds:
                seconds, verdict = find_hang(folder, fault, world, culprit=number % world)
                mark = "" if is_named(verdict, number % world, world) else f" (wrong: {verdict!r})"
                cells.append(f"{seconds:.1f} s{mark}")
                print(fault, world, cells[-1], verdict, file=sys.stderr, flush=True)
            rows.append(f"| {fault} | {' | '.join(cells)} |")
        alarms = 0
        for number in range(quiet_runs):
            process = start(folder, f"quiet-{number}", worlds[number % len(worlds)], f"train.steps={QUIET_STEPS}")
            _, output = process.communicate()
            alarms += process.returncode != 0 or "Training has" in output or "Straggler" in output
            print("quiet", number, process.returncode, output[-200:], file=sys.stderr, flush=True)
    heading = [f"| planted | {' | '.join(f'{world} ranks' for world in worlds)} |", "|---" * (len(worlds) + 1) + "|"]
    return "\n".join([*heading, *rows, "", f"False alarms in {quiet_runs} quiet runs: {alarms}."])
