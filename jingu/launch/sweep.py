"""`jingu sweep`: one run for each combination of settings, one after another; a table and a page of their losses."""

from __future__ import annotations

import itertools
import json
import math
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any

from jingu.checkpoint.resume import checkpoints_path, complete_steps
from jingu.config.load import dump_yaml, load_config
from jingu.config.schema import RunConfig
from jingu.errors import JinguError, pluralize
from jingu.formatting import format_number, print_table
from jingu.report.board import describe_state
from jingu.report.record import get_number, read_run
from jingu.report.sweep_page import MAX_CURVES, render_sweep
from jingu.runtime.exit_codes import EXIT_INTERRUPTED, EXIT_PREEMPTED, combine_exit_codes
from jingu.runtime.files import write_error, write_text_atomically
from jingu.runtime.launcher import launch_local_ranks


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
    return combine_exit_codes(codes.values())


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
        return launch_local_ranks(processes, words, inherit=[file.fileno()])


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


# The settings that a sweep varies: lists of values, and ranges.

# Values are separated by commas, except for those within brackets.
_SEPARATOR = re.compile(r",(?![^\[{]*[\]}])")
# A range of positive numbers whose bounds differ by at least this factor is sampled on a log scale.
_LOG_RATIO = 10
_NUMBER = re.compile(r"-?\d+(\.\d*)?(e-?\d+)?")


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`: integers if both bounds are integers, on a log scale if the range is wide."""

    low: float
    high: float
    is_integer: bool

    @property
    def is_log(self) -> bool:
        return self.low > 0 and self.high >= _LOG_RATIO * self.low

    def draw(self, generator: Random) -> str:
        """Return a random number, formatted as a setting."""
        if self.is_log:
            value = math.exp(generator.uniform(math.log(self.low), math.log(self.high)))
        else:
            value = generator.uniform(self.low, self.high)
        return self.show(value)

    def show(self, value: float) -> str:
        return str(round(value)) if self.is_integer else f"{value:.4g}"


@dataclass(frozen=True)
class SearchSpace:
    """What a sweep varies: the values of each key, and the ranges of others."""

    values: Mapping[str, list[str]]
    ranges: Mapping[str, Range]

    def combine(self, count: int | None, seed: int) -> list[dict[str, str]]:
        """Return all combinations, or `count` random ones; fewer if draws from ranges of integers repeat.

        Raises:
            JinguError: there are ranges, but no count.
        """
        combinations = [dict(zip(self.values, row, strict=True)) for row in itertools.product(*self.values.values())]
        generator = Random(seed)
        if self.ranges:
            if count is None:
                fix = "Add --random N or --optuna N."
                raise JinguError("a range has no finite number of combinations.", where="--grid", fix=fix)
            draws = [generator.choice(combinations) for _ in range(count)]
            rows = [draw | {key: key_range.draw(generator) for key, key_range in self.ranges.items()} for draw in draws]
            return list({tuple(row.items()): row for row in rows}.values())
        if count is not None and count < len(combinations):
            return generator.sample(combinations, count)
        return combinations

    def corners(self) -> list[dict[str, str]]:
        """Return settings that together contain every value and every bound, to validate these."""
        columns = {
            **self.values,
            **{
                key: [key_range.show(key_range.low), key_range.show(key_range.high)]
                for key, key_range in self.ranges.items()
            },
        }
        first = {key: column[0] for key, column in columns.items()}
        return [first | {key: value} for key, column in columns.items() for value in column]

    def suggest(self, trial: Any) -> dict[str, str]:
        """Return settings that a trial of Optuna suggests."""
        settings = {key: trial.suggest_categorical(key, column) for key, column in self.values.items()}
        for key, key_range in self.ranges.items():
            suggest = trial.suggest_int if key_range.is_integer else trial.suggest_float
            bounds = (
                (int(key_range.low), int(key_range.high)) if key_range.is_integer else (key_range.low, key_range.high)
            )
            settings[key] = key_range.show(suggest(key, *bounds, log=key_range.is_log))
        return settings


def read_space(grid: Sequence[str]) -> SearchSpace:
    """Read the settings of a sweep, each `key=value,value` or `key=low:high`. Raises JinguError for a wrong form.

    Values of the same key add up, without repetitions.
    """
    values: dict[str, list[str]] = {}
    ranges: dict[str, Range] = {}
    for text in grid:
        key, _, listing = text.partition("=")
        if key in ("name", "runs_dir"):
            raise JinguError(f"{key} cannot vary: the names of the runs follow from their settings.", where="--grid")
        bounds = listing.split(":")
        if len(bounds) == 2 and all(map(_NUMBER.fullmatch, bounds)):
            low, high = map(float, bounds)
            if low >= high:
                raise JinguError(f"{text} is an empty range.", where="--grid", fix="Write the lower bound first.")
            if key in ranges:
                raise JinguError(f"{key} has two ranges.", where="--grid", fix="Use one of them.")
            ranges[key] = Range(low, high, all(re.fullmatch(r"-?\d+", bound) for bound in bounds))
            continue
        items = _SEPARATOR.split(listing)
        if "" in (key, *items):
            fix = "Write it like --grid optimizer.lr=1e-3,3e-4, without spaces."
            raise JinguError(f"{text} is not a setting with values.", where="--grid", fix=fix)
        values[key] = list(dict.fromkeys([*values.get(key, []), *items]))
    both = next((key for key in values if key in ranges), None)
    if both is not None:
        raise JinguError(f"{both} has both values and a range.", where="--grid", fix="Use one of them.")
    return SearchSpace(values, ranges)
