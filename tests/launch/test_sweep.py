"""A sweep: its runs and their names, mistakes before the first run, skipping, failures, and the table."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from jingu.cli import main
from jingu.config.load import dump_yaml
from jingu.errors import JinguError
from jingu.launch import sweep as sweep_module
from jingu.launch.sweep import plan_sweep
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


def test_runs_are_the_product_of_the_values(run_file, tmp_path):
    runs = plan_sweep(run_file, ["seed=7"], ["optimizer.lr=1e-2,1e-3", "train.steps=5", "optimizer.lr=1e-3,1e-4"])
    assert [(run.config.optimizer.lr, run.config.train.steps, run.config.seed) for run in runs] == [
        (1e-2, 5, 7),
        (1e-3, 5, 7),
        (1e-4, 5, 7),
    ]
    assert runs[0].folder == tmp_path / "runs" / "mine-sweep" / "mine-optimizer.lr_1e-2-train.steps_5"


def test_commas_within_brackets_do_not_separate(run_file):
    grid = ["optimizer.param_groups=[],[{match: embedding.*, lr_multiplier: 0.5}]"]
    groups = [run.config.optimizer.param_groups for run in plan_sweep(run_file, [], grid)]
    assert [len(each) for each in groups] == [0, 1] and groups[1][0].lr_multiplier == 0.5


def test_random_combinations_depend_on_the_seed_alone(run_file):
    grid = [f"seed={','.join(map(str, range(20)))}"]

    def names(count: int, seed: int) -> list[str]:
        return [run.config.name for run in plan_sweep(run_file, [], grid, count, seed)]

    assert names(5, 1) == names(5, 1) != names(5, 2)
    assert len(set(names(5, 1))) == 5 and len(names(99, 1)) == 20


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ("optimizer.lrr=1,2", "Did you mean optimizer.lr?"),
        ("optimizer.lr=1e-3,fast", "optimizer.lr"),
        ("optimizer.lr=", "is no setting with its values."),
        ("optimizer.lr", "is no setting with its values."),
        ("name=a,b", "name cannot vary"),
        ("tokenizer.path=a/b,a:b", "two combinations would have the same name"),
    ],
)
def test_a_mistake_is_refused_before_the_first_run(run_file, monkeypatch, capsys, grid, message):
    assert message in refuse(monkeypatch, capsys, str(run_file), "--grid", grid)


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
    assert main([*words, "seed=9"]) == 1
    assert len(starts) == 4
    table = json.loads((tmp_path / "runs" / "mine-sweep" / "sweep.json").read_text())["runs"]
    assert [(row["state"], row["validation_loss"]) for row in table] == [("failed", None)] * 2


def test_a_run_that_fails_does_not_end_the_sweep(run_file, tmp_path, monkeypatch, capsys):
    codes = [1]

    def launch(*_arguments: object, **_options: object) -> int:
        if codes:
            return codes.pop()
        raise JinguError("rank 0 was killed by SIGKILL.")

    monkeypatch.setattr(sweep_module, "launch_local_ranks", launch)
    assert main(["sweep", str(run_file), *GRID]) == 1
    out = capsys.readouterr().out
    assert "Run 2 of 2" in out and "killed by SIGKILL" in out
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
