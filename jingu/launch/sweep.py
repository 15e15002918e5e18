"""`jingu sweep`: one run for each combination of settings, one after another; a table and a page of their losses."""

from __future__ import annotations

import json
import math
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jingu.checkpoint.resume import checkpoints_path, complete_steps
from jingu.config.load import dump_yaml, load_config
from jingu.config.schema import RunConfig
from jingu.errors import JinguError, pluralize
from jingu.formatting import format_number, print_table
from jingu.launch.search_space import SearchSpace, read_space
from jingu.report.board import describe_state
from jingu.report.record import get_number, read_run
from jingu.report.sweep_page import MAX_CURVES, render_sweep
from jingu.runtime.files import write_error, write_text_atomically
from jingu.runtime.launcher import launch_local_ranks
from jingu.runtime.signals import EXIT_INTERRUPTED, EXIT_PREEMPTED


@dataclass(frozen=True)
class SweepRun:
    """One run of a sweep: its values of the varied settings, as texts, and its whole configuration."""

    settings: Mapping[str, str]
    config: RunConfig

    @property
    def folder(self) -> Path:
        return Path(self.config.runs_dir) / self.config.name

    @property
    def has_begun(self) -> bool:
        """Whether the folder holds a run with exactly this configuration."""
        config_file = self.folder / "config.yaml"
        return config_file.is_file() and config_file.read_text(encoding="utf-8") == dump_yaml(self.config)

    @property
    def is_complete(self) -> bool:
        """Whether the checkpoint of the last step exists."""
        steps = complete_steps(checkpoints_path(self.folder, self.config)) if self.has_begun else []
        return self.config.train.steps in steps


def sweep(
    file: Path,
    overrides: Sequence[str],
    grid: Sequence[str],
    random: int | None = None,
    optuna: int | None = None,
    seed: int = 0,
    part: tuple[int, int] = (1, 1),
    processes: int | None = None,
) -> int:
    """Train one run for each combination of settings, in `RUNS_DIR/NAME-sweep`; complete runs are skipped.

    Args:
        grid: settings to vary, each `key=value,value`, or `key=low:high` to draw from a range.
        random: train only this many combinations, chosen at random.
        optuna: train this many runs, whose settings Optuna chooses based on the losses of earlier runs.
        seed: seed of the random choices and of Optuna.
        part: (i, n) trains every n-th combination from the i-th on; other processes train the others.
        processes: ranks of each run.

    Returns:
        The exit code: 0 if all runs are complete, 1 if one has failed; 130 or 75 if a signal stopped the sweep.

    Raises:
        JinguError: a setting or its value is wrong; no run was started.
    """
    space = read_space(grid)
    base = load_config(file, overrides)
    folder = Path(base.runs_dir) / f"{base.name}-sweep"
    if optuna is None:
        runs = plan_sweep(file, overrides, space, random, seed)
        own_runs: Iterable[SweepRun] = runs[part[0] - 1 :: part[1]]
        count = len(runs[part[0] - 1 :: part[1]])
    else:
        if random is not None or part != (1, 1):
            raise JinguError(
                "Optuna chooses runs one after another.", where="--optuna", fix="Omit --random and --part."
            )
        runs, own_runs, count = [], search_runs(file, overrides, space, optuna, seed), optuna
    codes: dict[str, int] = {}
    results: list[dict[str, Any]] = []
    for number, run in enumerate(own_runs, start=1):
        # 1. Print which run is next, and train it unless it is complete.
        words = " ".join(f"{key}={value}" for key, value in run.settings.items())
        is_complete = run.is_complete
        note = " (complete already)" if is_complete else ""
        print(f"Run {number} of {count}: {words}{note}", flush=True)
        codes[run.config.name] = code = 0 if is_complete else _train(run.config, processes or 1)

        # 2. A signal stops the sweep (the run has saved); a failure of one run does not.
        if code in (EXIT_INTERRUPTED, EXIT_PREEMPTED):
            print(f"Stopped in run {number} of {count}. The same command resumes the sweep.", flush=True)
            return code

        # 3. Write the results so far, including those of the runs of other parts.
        runs += [run] * (run not in runs)
        results = sorted((_result(run, codes.get(run.config.name)) for run in runs), key=_rank)
        _write_results(folder, results)
    if not codes:
        print(f"Part {part[0]} of {part[1]} has no run.")
        return 0
    _print_results(results)
    print(f"{pluralize(len(runs), 'run')} in {folder}; the table is {folder / 'sweep.json'}, also as sweep.html.")
    return int(any(codes.values()))


def _write_results(folder: Path, results: Sequence[Mapping[str, Any]]) -> None:
    """Write the table as JSON, and the page with charts."""
    text = json.dumps({"runs": results}, indent=2, ensure_ascii=False, allow_nan=False)
    records = [read_run(folder / row["name"]) for row in results[:MAX_CURVES] if row["validation_loss"] is not None]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_text_atomically(folder / "sweep.json", f"{text}\n")
        write_text_atomically(folder / "sweep.html", render_sweep(folder.name, results, records))
    except OSError as error:
        raise write_error(error, folder) from error


def plan_sweep(
    file: Path, overrides: Sequence[str], space: SearchSpace, random: int | None = None, seed: int = 0
) -> list[SweepRun]:
    """Return the runs of a sweep, with their configurations validated.

    Raises:
        JinguError: a setting or its value is wrong, or two runs would have the same name.
    """
    runs: dict[str, SweepRun] = {}
    for settings in space.combine(random, seed):
        run = _make_run(file, overrides, settings)
        if run.config.name in runs:
            fix = "Use values that differ in letters or digits."
            what = f"two combinations would have the same name, {run.config.name}."
            raise JinguError(what, where="--grid", fix=fix)
        runs[run.config.name] = run
    return list(runs.values())


def search_runs(file: Path, overrides: Sequence[str], space: SearchSpace, count: int, seed: int) -> Iterator[SweepRun]:
    """Yield runs whose settings Optuna chooses. The caller must train each run before it asks for the next one.

    The choices depend only on the seed and the losses, so a resumed sweep makes the same ones.
    """
    if find_spec("optuna") is None:
        fix = "Run `pip install 'jingu[sweep]'`, or use --random."
        raise JinguError("Optuna is not installed.", where="--optuna", fix=fix)
    for settings in space.corners():
        _make_run(file, overrides, settings)
    optuna = import_module("optuna")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed))
    for _ in range(count):
        trial = study.ask()
        run = _make_run(file, overrides, space.suggest(trial))
        yield run
        loss = _result(run, None)["validation_loss"]
        study.tell(trial, loss, state=optuna.trial.TrialState.FAIL if loss is None else None)


def _make_run(file: Path, overrides: Sequence[str], settings: Mapping[str, str]) -> SweepRun:
    base = load_config(file, overrides)
    words = [f"{key}={value}" for key, value in settings.items()]
    # A name may contain only letters, digits, dots, dashes and underscores.
    name = "-".join([base.name, *(re.sub(r"[^\w.-]+", "_", word) for word in words)])
    place = [f"runs_dir={Path(base.runs_dir) / f'{base.name}-sweep'}", f"name={name}"]
    return SweepRun(settings, load_config(file, [*overrides, *words, *place]))


def _train(config: RunConfig, processes: int) -> int:
    """Train a run in separate processes, and return its exit code."""
    # Pass the configuration in a temporary file, so that later edits of the user's file do not affect this sweep.
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
    """Return the settings, state and loss of a run.

    Args:
        code: exit code of the run; None if this sweep has not started it yet.
    """
    state = "not started"
    evaluation: dict[str, Any] = {}
    # Ignore the losses of a run with another configuration in the same folder.
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
    """Return the sort key of a result: the validation loss, or infinity without one."""
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
