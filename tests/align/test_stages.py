"""Stages of a file: ordinary runs, of which later ones start from earlier ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from jingu.align.commands import align
from jingu.config.load import load_stages
from jingu.config.schema import RunConfig
from jingu.errors import JinguError
from jingu.runtime.launcher import launch_local_ranks
from tests.align.preferences import write_pairs
from tests.conftest import Done, MakeRun, peak_unmeasured

EXAMPLE = Path(__file__).parents[2] / "examples" / "align" / "preferences.yaml"


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
        assert align(file, first="dpo") == 0
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
    file = tmp_path / "stages.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(JinguError) as error:
        align(file)
    assert words in str(error.value)


def test_an_unknown_stage_is_named(tiny_run: MakeRun, tmp_path: Path) -> None:
    with pytest.raises(JinguError, match="there is no stage reward"):
        align(write_stages(tiny_run, tmp_path), first="reward")


def test_the_example_loads() -> None:
    stages = load_stages(EXAMPLE)
    assert [stage.task.type for stage in stages] == ["pretraining", "dpo", "reward"]
    assert {stage.initialize.from_ for stage in stages[1:]} == {"build/align/runs/sft"}
    assert all(isinstance(stage, RunConfig) for stage in stages)
