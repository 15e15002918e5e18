"""`jingu sweep`: one run for each combination of settings, one after another, and a table of their losses."""

from __future__ import annotations

import itertools
import json
import math
import random as random_module
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jingu.checkpoint.resume import checkpoints_path, complete_steps
from jingu.config.load import dump_yaml, load_config
from jingu.config.schema import RunConfig
from jingu.errors import JinguError, pluralize
from jingu.formatting import format_number, print_table
from jingu.report.board import describe_state
from jingu.report.record import get_number, read_run
from jingu.runtime.files import write_error, write_text_atomically
from jingu.runtime.launcher import launch_local_ranks
from jingu.runtime.signals import EXIT_INTERRUPTED, EXIT_PREEMPTED

# Values are separated by commas, except for those within brackets.
_SEPARATOR = re.compile(r",(?![^\[{]*[\]}])")


@dataclass(frozen=True)
class SweepRun:
    """One run of a sweep: the settings that it varies, as they were written, and its whole configuration."""

    settings: Mapping[str, str]
    config: RunConfig

    @property
    def folder(self) -> Path:
        return Path(self.config.runs_dir) / self.config.name

    @property
    def has_begun(self) -> bool:
        """Whether the folder holds a run with exactly this configuration."""
        stored = self.folder / "config.yaml"
        return stored.is_file() and stored.read_text(encoding="utf-8") == dump_yaml(self.config)

    @property
    def is_complete(self) -> bool:
        """Whether the checkpoint of the last step is there."""
        steps = complete_steps(checkpoints_path(self.folder, self.config)) if self.has_begun else []
        return self.config.train.steps in steps


def sweep(
    file: Path,
    overrides: Sequence[str],
    grid: Sequence[str],
    random: int | None = None,
    seed: int = 0,
    processes: int | None = None,
) -> int:
    """Train one run for each combination of settings, in `RUNS_DIR/NAME-sweep`; complete runs are skipped.

    Args:
        grid: settings to vary, each `key=value,value`.
        random: train only this many combinations, chosen at random.
        seed: of that choice.
        processes: ranks of each run.

    Returns:
        The exit code: 0 if all runs are complete, 1 if one has failed; 130 or 75 if a signal stopped the sweep.

    Raises:
        JinguError: a setting or its value is wrong; no run was started.
    """
    runs = plan_sweep(file, overrides, grid, random, seed)
    folder = runs[0].folder.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise write_error(error, folder) from error
    codes: dict[str, int] = {}
    for number, run in enumerate(runs, start=1):
        # 1. Say which run is next. One that is complete needs no process.
        words = " ".join(f"{key}={value}" for key, value in run.settings.items())
        is_complete = run.is_complete
        note = " (complete already)" if is_complete else ""
        print(f"Run {number} of {len(runs)}: {words}{note}", flush=True)
        codes[run.config.name] = code = 0 if is_complete else _train(run.config, processes or 1)

        # 2. A signal ends the sweep; the run has saved. A failure does not.
        if code in (EXIT_INTERRUPTED, EXIT_PREEMPTED):
            print(f"Stopped in run {number} of {len(runs)}. The same command resumes the sweep.", flush=True)
            return code

        # 3. Write what is known so far.
        results = sorted((_result(run, codes.get(run.config.name)) for run in runs), key=_rank)
        text = json.dumps({"runs": results}, indent=2, ensure_ascii=False, allow_nan=False)
        try:
            write_text_atomically(folder / "sweep.json", f"{text}\n")
        except OSError as error:
            raise write_error(error, folder) from error
    _print_results(results)
    print(f"{pluralize(len(runs), 'run')} in {folder}; the table is {folder / 'sweep.json'}.")
    return int(any(codes.values()))


def plan_sweep(
    file: Path, overrides: Sequence[str], grid: Sequence[str], random: int | None = None, seed: int = 0
) -> list[SweepRun]:
    """Return the runs of a sweep, with their configurations validated.

    Raises:
        JinguError: a setting or its value is wrong, or two runs would have the same name.
    """
    values = _read_grid(grid)
    combinations = list(itertools.product(*values.values()))
    if random is not None and random < len(combinations):
        combinations = random_module.Random(seed).sample(combinations, random)
    base = load_config(file, overrides)
    runs: dict[str, SweepRun] = {}
    for combination in combinations:
        settings = dict(zip(values, combination, strict=True))
        words = [f"{key}={value}" for key, value in settings.items()]
        # A name has only letters, digits, dots, dashes and underscores.
        name = "-".join([base.name, *(re.sub(r"[^\w.-]+", "_", word) for word in words)])
        if name in runs:
            fix = "Use values that differ in letters or digits."
            raise JinguError(f"two combinations would have the same name, {name}.", where="--grid", fix=fix)
        place = [f"runs_dir={Path(base.runs_dir) / f'{base.name}-sweep'}", f"name={name}"]
        runs[name] = SweepRun(settings, load_config(file, [*overrides, *words, *place]))
    return list(runs.values())


def _read_grid(grid: Sequence[str]) -> dict[str, list[str]]:
    """Return the values of each key, without repetitions. Raises JinguError for a wrong form."""
    values: dict[str, list[str]] = {}
    for text in grid:
        key, _, listing = text.partition("=")
        items = _SEPARATOR.split(listing)
        if "" in (key, *items):
            fix = "Write it like --grid optimizer.lr=1e-3,3e-4, without spaces."
            raise JinguError(f"{text} is no setting with its values.", where="--grid", fix=fix)
        if key in ("name", "runs_dir"):
            raise JinguError(f"{key} cannot vary: the names of the runs follow from their settings.", where="--grid")
        values[key] = list(dict.fromkeys([*values.get(key, []), *items]))
    return values


def _train(config: RunConfig, processes: int) -> int:
    """Train a run in processes of its own, and return its exit code."""
    # The file has no name: what is changed in the run's file from now on does not reach this sweep.
    with tempfile.TemporaryFile() as file:
        file.write(dump_yaml(config).encode())
        file.flush()
        words = ["train", f"/dev/fd/{file.fileno()}"]
        try:
            return launch_local_ranks(processes, words, inherit=[file.fileno()])
        except JinguError as error:  # a rank was killed
            print(f"jingu: {error}", flush=True)
            return 1


def _result(run: SweepRun, code: int | None) -> dict[str, Any]:
    """Return settings, state and losses of a run. `code` is its exit code; None: not started by this sweep yet."""
    state = "not started"
    evaluation: dict[str, Any] = {}
    # The losses of another configuration in this folder say nothing about these settings.
    if run.has_begun and (run.folder / "metrics.jsonl").is_file():
        record = read_run(run.folder)
        state = describe_state(run.folder, record)
        evaluation = record.evaluations[max(record.evaluations)] if record.evaluations else {}
    if code:
        state = "diverged" if state == "diverged" else "failed"
    loss = get_number(evaluation, "loss")
    return {
        "name": run.config.name,
        "settings": dict(run.settings),
        "state": state,
        "step": evaluation.get("step"),
        "validation_loss": loss if math.isfinite(loss) else None,
    }


def _rank(result: Mapping[str, Any]) -> float:
    """Return the validation loss; runs without one come last."""
    loss = result["validation_loss"]
    return math.inf if loss is None else float(loss)


def _print_results(results: Sequence[Mapping[str, Any]]) -> None:
    keys = list(results[0]["settings"])
    rows = [
        [*result["settings"].values(), result["state"], str(result["step"] or "-"), format_number(_rank(result))]
        for result in results
    ]
    width = len(keys)
    print_table([*keys, "state", "step", "validation loss"], rows, right=[*range(width), width + 1, width + 2])
