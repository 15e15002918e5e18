"""Three real runs on four CPU ranks, planned before they start: plan and actual by term, before and after calibration.

`jingu doctor` measures the machine with as many ranks as the runs have, all computing at the same time, because ranks
share its cores. Then each run is planned and trained. Its first steps calibrate the plan; the later steps are compared
with the plan. Terms with a gap of a tenth of a step or more are marked.

A shared machine may change its speed within minutes, which no plan knows. The machine is measured before each run and
after the last one, and the table says how the speed of matmuls has changed between the measurements around a run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from jingu.plan.calibration import Measurement, fit_efficiency
from jingu.plan.machine import Machine, find_machine
from jingu.training.plan_calibrate import read_run

RANKS = 4
# Numbers of logged steps for calibration and for comparison.
CALIBRATING, COMPARED = 20, 40
# Gaps of a term, as a share of the step, that are marked.
GAP = 0.1
SHAPE = {"num_layers": 4, "hidden_size": 512, "num_heads": 8}
TINY = {"num_layers": 4, "hidden_size": 128, "num_heads": 4}
EXPERTS = {"num_experts": 8, "num_experts_per_token": 2}
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "tensor 2 × pipeline 2": ("llama", {"tensor": 2, "pipeline": 2}),
    "ZeRO 3": ("llama", {"zero_stage": 3}),
    "mixture, experts over 4 ranks": ("mixtral", {"expert": 4}),
}


def run_file(family: str, parallel: dict[str, Any], steps: int, shape: dict[str, int]) -> dict[str, Any]:
    """Return the settings of a run."""
    model: dict[str, Any] = {"family": family, **shape}
    if family == "mixtral":
        model |= {"experts": EXPERTS, "intermediate_size": shape["hidden_size"]}
    return {
        "tokenizer": {"path": "tokenizer", "vocab_size": 2048, "sample_bytes": 1_000_000},
        "data": {
            "input": "text",
            "path": "data",
            "suffixes": [".py"],
            "validation_fraction": 0.01,
            "invalid_utf8": "skip",
        },
        "model": model,
        "parallel": parallel,
        "batch": {"sequence_length": 256, "global_batch_size": 16, "micro_batch_size": 4},
        "train": {"steps": steps, "compile": False, "log_every": 1},
        "precision": {"type": "fp32"},
        "device": {"type": "cpu"},
        "evaluation": {"every": 0},
        "checkpoint": {"every": 0},
    }


def jingu(folder: Path, *words: str, launched: bool = False) -> str:
    """Run `jingu WORDS...` in a folder and return its output.

    Args:
        launched: whether torchrun starts the command on all ranks.
    """
    start = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}", "-m"] if launched else ["-m"]
    # Without these variables, each rank has its share of the cores as threads, as in training.
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    result = subprocess.run(
        [sys.executable, *start, "jingu", *words], cwd=folder, capture_output=True, text=True, env=clean, check=False
    )
    # `jingu plan` exits with 1 if the run does not fit into memory, and torchrun if a check of `doctor` fails.
    if result.returncode not in (0, 1):
        raise RuntimeError(f"jingu {' '.join(words)}:\n{result.stderr[-3000:]}")
    return result.stdout


def measure_machine(folder: Path) -> Machine:
    """Measure the machine with four ranks; the result is also in `machine.yaml`."""
    path = folder / "machine.yaml"
    path.unlink(missing_ok=True)
    table = jingu(folder, "doctor", "--machine", path.name, launched=True)
    if not path.exists():
        raise RuntimeError(f"doctor has not written the machine:\n{table}")
    return find_machine(str(path))


def matmul_speed(machine: Machine) -> float:
    """Return the FLOP/s of large matmuls."""
    return machine.matmul_flops * machine.efficiency.matmul


def compare_terms(planned: Mapping[str, float], actual: Mapping[str, float], step: float) -> list[str]:
    """Return rows of a table: each term as planned and as measured, and the gap as a share of the step.

    Terms below 0.5% of the step are left out.
    """
    rows = []
    for term in {**planned, **actual}:
        before, after = planned.get(term, 0.0), actual.get(term, 0.0)
        gap = (before - after) / step
        if max(before, after) >= 0.005 * step:
            mark = "**" * (abs(gap) >= GAP)
            rows.append(f"| {term} | {before:.3f} | {after:.3f} | {mark}{gap:+.1%}{mark} |")
    return rows


def calibrated_error(measurement: Measurement, steps: int) -> tuple[float, float]:
    """Return the relative errors of the plan on the later steps, before and after calibration with the first steps.

    Args:
        steps: number of steps for calibration.
    """
    first = replace(
        measurement, step_seconds=measurement.step_seconds[:steps], seconds=median(measurement.step_seconds[:steps])
    )
    seconds = median(measurement.step_seconds[steps:])
    start = measurement.machine.efficiency
    plans = (measurement.plan_terms(efficiency) for efficiency in (start, fit_efficiency([first], start)))
    before, after = (sum(plan.values()) / seconds - 1 for plan in plans)
    return before, after


def run(argument: str = "") -> str:
    """Return plan and actual of each run as tables."""
    from examples.quickstart import collect

    shape = TINY if argument == "tiny" else SHAPE
    tables, errors = [], []
    columns = ("run", "plan, s", "actual, s", f"error on the last {COMPARED} steps", "after calibration")
    summary = ["| " + " | ".join((*columns, "matmuls after the run, relative to before")) + " |", "|---" * 6 + "|"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        collect(folder / "text")
        # 1. Measure the machine with four ranks.
        machine = measure_machine(folder)
        for number, (title, (family, parallel)) in enumerate(RUNS.items()):
            # One step more, because the first logged step warms up and is left out.
            settings = {"name": f"run{number}"} | run_file(family, parallel, CALIBRATING + COMPARED + 1, shape)
            (folder / "run.yaml").write_text(json.dumps(settings), encoding="utf-8")
            if not number:
                jingu(folder, "tokenizer", "train", "run.yaml")
                jingu(folder, "data", "build", "run.yaml")
            # 2. Plan the run.
            words = ("--on", "machine.yaml", "--gpus", str(RANKS), "--json")
            plan = json.loads(jingu(folder, "plan", "run.yaml", *words))
            # 3. Train, and compare.
            jingu(folder, "train", "run.yaml", "--processes", str(RANKS))
            lines = (folder / "runs" / f"run{number}" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
            actual = next(line for line in map(json.loads, reversed(lines)) if line["type"] == "plan")
            step = actual["actual_seconds"]
            error, after = calibrated_error(read_run(folder / "runs" / f"run{number}", machine), CALIBRATING)
            errors.append((abs(error), abs(after)))
            following = measure_machine(folder)
            change = matmul_speed(following) / matmul_speed(machine) - 1
            seconds = f"{plan['step_seconds']:.3f} | {step:.3f}"
            summary.append(f"| {title} | {seconds} | {error:+.1%} | {after:+.1%} | {change:+.1%} |")
            machine = following
            tables += [f"\n{title} ({plan['layout']}):\n", "| term | plan, s | actual, s | gap, of the step |"]
            tables += ["|---|---|---|---|", *compare_terms(plan["seconds"], actual["actual"], step)]
    before, after = (median(pair[number] for pair in errors) for number in (0, 1))
    summary.append(f"\nMedian error: {before:.1%} after doctor, {after:.1%} after calibration.")
    return "\n".join([*summary, *tables])
