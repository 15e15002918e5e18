"""The planned size of a checkpoint against the tensors that a run saves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jingu.checkpoint.resume import complete_steps, step_folder
from jingu.cli import main
from jingu.config.load import dump_yaml
from jingu.training.commands import train
from jingu.training.run import open_run
from tests.conftest import MakeRun

CASES: dict[str, dict[str, Any]] = {
    "adamw": {"optimizer.type": "adamw"},
    "lion": {"optimizer.type": "lion"},
    "adafactor": {"optimizer.type": "adafactor"},
    "sgd": {"optimizer.type": "sgd"},
    "muon": {"optimizer.type": "muon"},
    "untied muon": {"optimizer.type": "muon", "model.tie_word_embeddings": False},
}


def saved_bytes(run: Path) -> int:
    """Return the bytes of the tensors in the last checkpoint of a run, without the headers of their files."""
    folder = run / "checkpoints"
    contents = [path.read_bytes() for path in step_folder(folder, complete_steps(folder)[-1]).glob("*.safetensors")]
    return sum(len(content) - 8 - int.from_bytes(content[:8], "little") for content in contents)


@pytest.mark.parametrize("name", CASES)
def test_the_planned_size_is_that_of_the_saved_tensors(
    name: str, tiny_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny_run({**CASES[name], "train.steps": 1})
    assert train(config) == 0
    saved = saved_bytes(open_run(config).folder)
    (tmp_path / "plan.yaml").write_text(dump_yaml(config), encoding="utf-8")
    capsys.readouterr()
    assert main(["plan", str(tmp_path / "plan.yaml"), "--on", "h100", "--gpus", "1", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)["checkpoint_bytes"]
    assert planned == pytest.approx(saved, rel=0.01)
