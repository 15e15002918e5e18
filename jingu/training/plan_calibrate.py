"""`jingu plan calibrate`: fit a machine's efficiency to runs that were made on it."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

from jingu.config.load import load_stored_config
from jingu.config.sections.policies import PolicySettings
from jingu.config.strict_yaml import dump
from jingu.errors import JinguError, pluralize
from jingu.model.spec import ModelSpec
from jingu.parallel.layout import Precision
from jingu.parallel.stages import plan_layout
from jingu.plan.calibration import Measurement, fit_efficiency, prediction_errors, residual_interval
from jingu.plan.forecast import run_software, run_workload
from jingu.plan.machine import Machine, find_machine
from jingu.runtime.device import DTYPES
from jingu.runtime.files import write_error, write_text_atomically

# Number of logged steps at the start that are ignored, because they include compilation and warmup.
WARM_UP = 1


def calibrate(runs: list[Path], on: str, to: Path) -> None:
    """Fit the efficiency of a machine to runs, and write the machine as a file for `jingu plan --on`.

    Args:
        runs: folders of runs.
        on: the machine that the runs were made on: a name of the library, a YAML file, or `here`.
        to: the YAML file to write.

    Raises:
        JinguError: a run cannot be read, has too few logged steps or generates answers; or the file cannot be written.
    """
    base = find_machine(on)
    measurements = [read_run(run, base) for run in runs]
    efficiency = fit_efficiency(measurements, base.efficiency)
    before = prediction_errors(measurements, base.efficiency)
    after = prediction_errors(measurements, efficiency)
    for run, measurement, old, new in zip(runs, measurements, before, after, strict=True):
        print(f"{run}: {measurement.seconds:.3f} s per step; planned {old:+.1%} before, {new:+.1%} now")
    print(
        f"Median error of {pluralize(len(runs), 'run')}: {median(map(abs, before)):.1%} → {median(map(abs, after)):.1%}"
    )
    interval = residual_interval(measurements, base.efficiency)
    print(f"9 of 10 logged steps took {interval[0]:.3f} to {interval[1]:.3f} times what is planned for them.")
    values = base.model_dump() | {
        "name": to.stem,
        "efficiency": efficiency.model_dump(),
        "interval": list(interval),
    }
    try:
        write_text_atomically(to, dump(values))
    except OSError as error:
        raise write_error(error, to, "choose another file (--to FILE)") from error
    print(f"Use it with --on {to}.")


def read_run(run: Path, machine: Machine) -> Measurement:
    """Return the median step of a run, with the terms that the run has measured.

    Raises:
        JinguError: the folder is not that of a run, or the run has too few logged steps or generates answers.
    """
    config = load_stored_config(run / "config.yaml")
    if isinstance(config.task, PolicySettings):
        what = "the run generates answers, whose time is not calibrated."
        raise JinguError(what, where=run, fix="Give runs that learn from data alone.")
    try:
        spec = ModelSpec.from_json((run / "model.json").read_bytes(), run / "model.json")
        lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        records = [json.loads(line) for line in lines]
    except (OSError, ValueError) as error:
        raise JinguError(f"the run cannot be read: {error}.", where=run, fix="Name the folder of a run.") from None
    # An earlier start may have had another number of ranks.
    starts = [number for number, record in enumerate(records) if record["type"] == "start"]
    records = records[starts[-1] :] if starts else []
    speeds = [record["tokens_per_second"] for record in records if record["type"] == "train"][WARM_UP:]
    if not speeds:
        fix = "Let it log at least two steps after its last start."
        raise JinguError("the run has too few logged steps.", where=run, fix=fix)
    start = records[0]
    # An fp8 run computes everything but its fp8 matmuls in bf16.
    dtype = DTYPES["bf16" if start["precision"] == "fp8" else start["precision"]]
    masters = DTYPES["fp64" if start["precision"] == "fp64" else "fp32"]
    precision = Precision(start["precision"], dtype, masters, masters)
    software = run_software(precision, on_gpu=not machine.is_shared, is_compiled=start.get("compile", False))
    work = run_workload(config, spec, *plan_layout(config, start["ranks"], spec), software)
    machine = machine.with_nodes(start["ranks"] if machine.is_shared else machine.gpus_per_node)
    step_seconds = tuple(start["tokens_per_step"] / speed for speed in speeds)
    # Seconds by term, if the run has measured them (`PlanCheck`).
    terms: dict[str, float] = next((record["actual"] for record in reversed(records) if record["type"] == "plan"), {})
    return Measurement(work, machine, median(step_seconds), terms, step_seconds)
