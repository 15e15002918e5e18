"""A sweep: its runs and their names, mistakes before the first run, skipping, failures, and the table."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from jingu.cli import main
from jingu.config.load import dump_yaml
from jingu.launch import sweep as sweep_module
from jingu.launch.sweep import Range, SweepRun, plan_sweep, read_space
from tests.limits import PATIENCE

GRID = ["--grid", "optimizer.lr=1e-2,1e-9", "--grid", "train.steps=2"]


@pytest.fixture
def run_file(tiny_run, tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    config = tiny_run({"train.steps": 4, "schedule.warmup": 1, "evaluation.every": 2}, name="mine")
    path.write_text(dump_yaml(config), encoding="utf-8")
    return path


@pytest.fixture
def starts(monkeypatch) -> list[int]:
    """Trains in this process instead of a child process; the list has a number for each run that was started."""
    numbers: list[int] = []

    def launch(processes: int, words: Sequence[str], inherit: Sequence[int]) -> int:
        numbers.append(processes)
        return main(words)

    monkeypatch.setattr(sweep_module, "launch_local_ranks", launch)
    return numbers


def refuse(monkeypatch, capsys, *words: str) -> str:
    """The message for a sweep that must not start any run."""
    monkeypatch.setattr(sweep_module, "launch_local_ranks", lambda *_: pytest.fail("a run was started"))
    assert main(["sweep", *words]) == 2
    return capsys.readouterr().err


def plan(file: Path, grid: list[str], overrides: Sequence[str] = (), *more: int) -> list[SweepRun]:
    return plan_sweep(file, overrides, read_space(grid), *more)


def test_runs_are_the_product_of_the_values(run_file, tmp_path):
    runs = plan(run_file, ["optimizer.lr=1e-2,1e-3", "train.steps=5", "optimizer.lr=1e-3,1e-4"], ["seed=7"])
    assert [(run.config.optimizer.lr, run.config.train.steps, run.config.seed) for run in runs] == [
        (1e-2, 5, 7),
        (1e-3, 5, 7),
        (1e-4, 5, 7),
    ]
    assert runs[0].folder == tmp_path / "runs" / "mine-sweep" / "mine-optimizer.lr_1e-2-train.steps_5"


def test_commas_within_brackets_do_not_separate(run_file):
    grid = ["optimizer.param_groups=[],[{match: embedding.*, lr_multiplier: 0.5}]"]
    groups = [run.config.optimizer.param_groups for run in plan(run_file, grid)]
    assert [len(each) for each in groups] == [0, 1] and groups[1][0].lr_multiplier == 0.5


def test_random_combinations_depend_on_the_seed_alone(run_file):
    grid = [f"seed={','.join(map(str, range(20)))}"]

    def names(count: int, seed: int) -> list[str]:
        return [run.config.name for run in plan(run_file, grid, [], count, seed)]

    assert names(5, 1) == names(5, 1) != names(5, 2)
    assert len(set(names(5, 1))) == 5 and len(names(99, 1)) == 20


def test_values_of_ranges_lie_within_them(run_file):
    space = read_space(["train.steps=5,6", "optimizer.lr=1e-4:1e-1", "seed=3:5", "optimizer.weight_decay=0:0.1"])
    assert [own.is_log for own in space.ranges.values()] == [True, False, False]
    draws = space.combine(200, seed=1)
    assert draws == space.combine(200, seed=1) != space.combine(200, seed=2)
    assert {draw["seed"] for draw in draws} == {"3", "4", "5"}
    rates = [float(draw["optimizer.lr"]) for draw in draws]
    # On a log scale, a third of the values lies in each power of ten.
    assert all(1e-4 <= rate <= 1e-1 for rate in rates) and 40 < sum(rate < 1e-3 for rate in rates) < 95
    # Draws that repeat are one run.
    assert sorted(draw["seed"] for draw in read_space(["seed=3:5"]).combine(50, seed=1)) == ["3", "4", "5"]
    assert len(space.corners()) == 8 and Range(1, 9, True).show(8.6) == "9"


def test_parts_train_all_runs_once_and_the_table_has_all(run_file, tmp_path, starts, capsys):
    words = ["sweep", str(run_file), "--grid", "seed=1,2,3", "--grid", "train.steps=2"]
    assert main([*words, "--part", "2/2"]) == 0
    out = capsys.readouterr().out
    assert "Run 1 of 1: seed=2 train.steps=2" in out and out.count("not started") == 2
    assert main([*words, "--part", "1/2"]) == 0
    assert len(starts) == 3 and main([*words, "--part", "7/9"]) == 0 and len(starts) == 3
    assert "Part 7 of 9 has no run." in capsys.readouterr().out
    table = json.loads((tmp_path / "runs" / "mine-sweep" / "sweep.json").read_text())["runs"]
    assert sorted(row["settings"]["seed"] for row in table if row["state"] == "complete") == ["1", "2", "3"]
    page = (tmp_path / "runs" / "mine-sweep" / "sweep.html").read_text()
    assert "src=" not in page and "http-equiv" in page
    seeds, curves = page.split("<figure")[1:]
    assert ">seed</b>" in seeds and seeds.count("<circle") == 6 and all(f">{seed}</text>" in seeds for seed in "123")
    assert curves.count('class="series') == 3


def optuna_with_fixed_choices(told: list[float | None]) -> SimpleNamespace:
    """What a sweep uses of Optuna: its choices follow from the number of the trial."""

    def ask() -> SimpleNamespace:
        rate = (1e-3, 1e-2, 1e-9)[len(told) % 3]
        suggestions = {"suggest_float": lambda *_, log: rate, "suggest_categorical": lambda _, values: values[0]}
        return SimpleNamespace(**suggestions)

    study = SimpleNamespace(ask=ask, tell=lambda _trial, loss, state: told.append(loss))
    return SimpleNamespace(
        create_study=lambda sampler: study,
        logging=SimpleNamespace(set_verbosity=lambda _: None, WARNING=30),
        samplers=SimpleNamespace(TPESampler=lambda seed: seed),
        trial=SimpleNamespace(TrialState=SimpleNamespace(FAIL="fail")),
    )


def test_optuna_chooses_and_a_sweep_resumes(run_file, tmp_path, starts, monkeypatch, capsys):
    told: list[float | None] = []
    monkeypatch.setattr(sweep_module, "find_spec", lambda _: object())
    monkeypatch.setattr(sweep_module, "import_module", lambda _: optuna_with_fixed_choices(told))
    words = ["sweep", str(run_file), "--grid", "optimizer.lr=1e-9:1e-2", "--grid", "train.steps=2", "--optuna"]
    assert main([*words, "2"]) == 0 and len(starts) == 2 and len(told) == 2
    first = list(told)
    told.clear()
    assert main([*words, "3"]) == 0 and len(starts) == 3 and told[:2] == first
    table = json.loads((tmp_path / "runs" / "mine-sweep" / "sweep.json").read_text())["runs"]
    assert [row["settings"]["optimizer.lr"] for row in table] == ["0.01", "0.001", "1e-09"]
    assert main([*words, "3", "--part", "1/2"]) == 2
    monkeypatch.setattr(sweep_module, "find_spec", lambda _: None)
    assert main([*words, "3"]) == 2
    assert "Optuna is not installed." in capsys.readouterr().err


def test_real_optuna_comes_to_the_same_choices_again(run_file, monkeypatch):
    pytest.importorskip("optuna")
    monkeypatch.setattr(sweep_module, "_result", lambda run, _: {"validation_loss": run.config.optimizer.lr})
    space = read_space(["seed=1,2", "optimizer.lr=1e-4:1e-2", "train.steps=3:9"])

    def names() -> list[str]:
        return [run.config.name for run in sweep_module.search_runs(run_file, [], space, 12, seed=3)]

    assert names() == names() and len(set(names())) > 6


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ("optimizer.lrr=1,2", "Did you mean optimizer.lr?"),
        ("optimizer.lr=1e-3,fast", "optimizer.lr"),
        ("optimizer.lr=", "is not a setting with values."),
        ("optimizer.lr", "is not a setting with values."),
        ("name=a,b", "name cannot vary"),
        ("tokenizer.path=a/b,a:b", "two combinations would have the same name"),
    ],
)
def test_a_mistake_is_refused_before_the_first_run(run_file, monkeypatch, capsys, grid, message):
    assert message in refuse(monkeypatch, capsys, str(run_file), "--grid", grid)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--grid", "optimizer.lr=1e-2:1e-3"], "is an empty range."),
        (["--grid", "optimizer.lr=1e-4:1e-3"], "a range has no finite number of combinations. Add --random N"),
        (
            ["--grid", "optimizer.lr=1e-4:1e-3", "--grid", "optimizer.lr=1"],
            "optimizer.lr has both values and a range.",
        ),
        (
            ["--grid", "optimizer.lr=1e-4:1e-3", "--grid", "optimizer.lr=1e-3:1e-2"],
            "optimizer.lr has two ranges.",
        ),
    ],
)
def test_a_wrong_range_is_refused(run_file, monkeypatch, capsys, words, message):
    assert message in refuse(monkeypatch, capsys, str(run_file), *words)


def test_a_sweep_without_settings_is_refused(run_file, monkeypatch, capsys):
    assert "--grid is missing." in refuse(monkeypatch, capsys, str(run_file))


def test_runs_are_sorted_by_loss_and_skipped_when_complete(run_file, tmp_path, starts, capsys):
    words = ["sweep", str(run_file), *GRID, "--processes", "3"]
    assert main(words) == 0
    assert starts == [3, 3]
    lines = capsys.readouterr().out.splitlines()
    header = next(index for index, line in enumerate(lines) if line.startswith("optimizer.lr"))
    # With hardly any learning rate the loss stays high.
    assert [line.split()[:4] for line in lines[header + 1 : header + 3]] == [
        ["1e-2", "2", "complete", "2"],
        ["1e-9", "2", "complete", "2"],
    ]
    table = json.loads((tmp_path / "runs" / "mine-sweep" / "sweep.json").read_text())["runs"]
    assert [row["settings"]["optimizer.lr"] for row in table] == ["1e-2", "1e-9"]
    assert table[0]["validation_loss"] < table[1]["validation_loss"]

    assert main(words) == 0
    assert starts == [3, 3]
    # A run with other settings is not one that is complete.
    assert main([*words, "seed=9"]) == 2
    assert len(starts) == 4
    table = json.loads((tmp_path / "runs" / "mine-sweep" / "sweep.json").read_text())["runs"]
    assert [(row["state"], row["validation_loss"]) for row in table] == [("failed", None)] * 2


def test_a_run_that_fails_does_not_end_the_sweep(run_file, tmp_path, monkeypatch, capsys):
    codes = [137, 1]
    monkeypatch.setattr(sweep_module, "launch_local_ranks", lambda *_, **__: codes.pop())
    assert main(["sweep", str(run_file), *GRID]) == 137
    assert "Run 2 of 2" in capsys.readouterr().out
    table = json.loads((tmp_path / "runs" / "mine-sweep" / "sweep.json").read_text())["runs"]
    assert [(row["state"], row["validation_loss"]) for row in table] == [("failed", None)] * 2


@pytest.mark.slow
def test_ctrl_c_saves_and_the_same_command_resumes(run_file, tmp_path):
    words = [sys.executable, "-m", "jingu", "sweep", str(run_file), "--grid", "train.steps=3000,3"]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        # Steps are logged from the first one on.
        next(line for line in process.stderr if "step 5 of 3000" in line)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    run = tmp_path / "runs" / "mine-sweep" / "mine-train.steps_3000"
    (saved,) = [int(folder.name.split("-")[-1]) for folder in (run / "checkpoints").glob("step-*")]
    assert 5 <= saved < 3000
    assert not (run.parent / "mine-train.steps_3").exists()

    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        next(line for line in process.stderr if f"step {saved + 2} of 3000" in line)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    starts = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in starts if row["type"] == "start"] == [0, saved]
