"""Stages of a file: ordinary runs, of which later ones start from earlier ones."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml

from jingu.align.commands import align
from jingu.cli import main
from jingu.config.load import load_stages
from jingu.config.schema import RunConfig
from jingu.config.sections.policies import PpoSettings, SeparateCriticSettings
from jingu.errors import JinguError
from jingu.runtime.launcher import launch_local_ranks
from tests.align.preferences import write_pairs
from tests.conftest import Done, MakeRun, peak_unmeasured
from tests.limits import PATIENCE
from tests.mistakes import explain_mistake

EXAMPLES = Path(__file__).parents[2] / "examples"


def write_stages(tiny_run: MakeRun, folder: Path) -> Path:
    """Write two stages: a model, and DPO of it."""
    shared = tiny_run({"train.steps": 2}).model_dump()
    data = {"input": str(write_pairs(folder / "pairs.jsonl")), "path": str(folder / "pairs")}
    objective = {"type": "preference", "template": "plain"}
    dpo = {
        "name": "dpo",
        "initialize": {"from": "base"},
        "task": {"type": "dpo"},
        "data": {**data, "suffixes": [".jsonl"], "objective": objective},
        "batch": {"sequence_length": 48},
    }
    tree = {**shared, "stages": [{"name": "base"}, dpo]}
    file = folder / "stages.yaml"
    file.write_text(yaml.safe_dump({key: value for key, value in tree.items() if key != "name"}), encoding="utf-8")
    return file


def test_stages_run_and_resume(
    tiny_run: MakeRun, tmp_path: Path, done: object, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_stages(tiny_run, tmp_path)
    base, dpo = load_stages(file)
    assert dpo.initialize.from_ == f"{base.runs_dir}/base"
    # A section of another type replaces the shared one, others are merged.
    assert dpo.data.objective.type == "preference" and dpo.data.validation_fraction == 0.2
    with peak_unmeasured():
        assert align(file) == 0
        assert sorted(path.name for path in Path(base.runs_dir).iterdir()) == ["base", "dpo"]
        capsys.readouterr()
        assert main(["align", str(file), "--from", "dpo"]) == 0
    output = capsys.readouterr()
    assert "stage base" not in output.out and "complete already" in output.err


@pytest.mark.slow
def test_stages_run_on_ranks_that_a_launcher_starts(
    tiny_run: MakeRun, tmp_path: Path, done: Callable[..., Done]
) -> None:
    losses = []
    for name in ("here", "launched"):
        folder = tmp_path / name
        folder.mkdir()
        file = write_stages(lambda *a, folder=folder: tiny_run(*a, runs_dir=str(folder / "runs")), folder)
        code = align(file, processes=2) if name == "here" else launch_local_ranks(2, ["align", str(file)])
        assert code == 0
        losses.append([done(config).column("loss") for config in load_stages(file)])
    assert losses[0] == losses[1] and [len(column) for column in losses[0]] == [2, 2]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("name: run\n", "the file has no list of stages"),
        ("stages:\n  - task: {type: dpo}\n", "the file has no list of stages, each with a name"),
        ("stages:\n  - name: a\n  - name: a\n", "two stages have the name a"),
        ("stages:\n  - name: a\n    trian: {}\n", "stages.yaml:3: trian is not a setting"),
        ("optimizer: {lr: fast}\nstages:\n  - name: a\n", "stages.yaml:1: optimizer.lr takes a number"),
    ],
)
def test_mistakes_are_found_before_the_first_stage(text: str, words: str, tmp_path: Path) -> None:
    assert words in explain_mistake(align, tmp_path / "stages.yaml", text)


def test_an_unknown_stage_is_named(tiny_run: MakeRun, tmp_path: Path) -> None:
    with pytest.raises(JinguError, match="there is no stage reward"):
        align(write_stages(tiny_run, tmp_path), first="reward")


def test_the_examples_load() -> None:
    stages = load_stages(EXAMPLES / "align" / "preferences.yaml")
    assert [stage.task.type for stage in stages] == ["pretraining", "dpo", "reward"]
    assert {stage.initialize.from_ for stage in stages[1:]} == {"build/align/runs/sft"}
    assert all(isinstance(stage, RunConfig) for stage in stages)
    ppo = load_stages(EXAMPLES / "rlhf.yaml")[-1].task
    assert isinstance(ppo, PpoSettings) and isinstance(ppo.critic, SeparateCriticSettings)
    assert ppo.critic.model == "build/rlhf/runs/reward"
    assert [reward.audit for reward in ppo.rewards] == [False, True]


# Ends the process that trains when it asks for an audit, at some calls over all starts.
FATAL_AUDIT = """
import os, signal
from pathlib import Path

calls = Path(__file__).with_suffix(".calls")

def kill_now_and_then():
    number = int(calls.read_text()) + 1 if calls.exists() else 1
    calls.write_text(str(number))
    if number in KILLS:
        os.kill(os.getppid(), signal.SIGKILL)
"""


def prepare_example(folder: Path, kills: tuple[int, ...]) -> None:
    """Write the example into a folder, with fewer steps, and an audit that ends the run at some of its calls."""
    shutil.copytree(EXAMPLES, folder / "examples")
    rows = folder / "examples" / "align" / "rows.py"
    subprocess.run([sys.executable, rows, "build/rlhf"], cwd=folder, check=True)
    text = rows.read_text().replace("    scores = []\n", "    scores = []\n    kill_now_and_then()\n")
    rows.write_text(f"{text.partition('if __name__')[0]}\nKILLS = {kills}\n{FATAL_AUDIT}")
    file = folder / "examples" / "rlhf.yaml"
    tree = yaml.safe_load(file.read_text())
    for stage, steps, every in zip(tree["stages"], (40, 20, 6), (10, 5, 2), strict=True):
        stage["train"] = {"steps": steps, "log_every": every}
        stage["checkpoint"] = {"every": every}
    tree["evaluation"] = {"every": 0}
    file.write_text(yaml.safe_dump(tree))


def align_until(folder: Path, line: str | None) -> int:
    """Run the example until it prints a line, then kill it; return its exit code."""
    command = [sys.executable, "-m", "jingu", "align", "examples/rlhf.yaml"]
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent)}
    with subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for text in process.stderr:
            if line is not None and line in text:
                process.kill()
        return process.wait(PATIENCE)


@pytest.mark.slow
def test_the_example_of_three_stages_ends_with_the_same_weights_however_often_it_is_killed(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    (tmp_path / "killed").mkdir()
    prepare_example(tmp_path / "whole", ())
    assert align_until(tmp_path / "whole", None) == 0
    # Twice in each of the first stages, and then within rollouts.
    prepare_example(tmp_path / "killed", (2, 5, 6, 9, 10, 11))
    lines = ["step 10 of 40", "step 30 of 40", "step 5 of 20", "step 15 of 20"]
    codes = [align_until(tmp_path / "killed", line) for line in lines]
    while 0 not in codes and len(codes) < 20:
        codes.append(align_until(tmp_path / "killed", None))
    assert codes[-1] == 0 and set(codes[:-1]) == {-signal.SIGKILL} and len(codes) > 10
    for stage in ("sft", "reward", "ppo"):
        runs = [Done(tmp_path / name / "build" / "rlhf" / "runs" / stage) for name in ("whole", "killed")]
        whole, killed = (run.tensors() for run in runs)
        assert whole.keys() == killed.keys()
        assert all(torch.equal(tensor, killed[name]) for name, tensor in whole.items()), stage
