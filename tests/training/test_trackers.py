"""Services beside metrics.jsonl: what they receive, where they go on after a resume, and what their failures do."""

from __future__ import annotations

import json
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from jingu.training.trackers import Trackers


class StubRun:
    """A run of W&B that remembers what it gets."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings
        self.rows: list[dict[str, float]] = []
        self.step_metric = ""
        self.is_finished = False

    def define_metric(self, _pattern: str, step_metric: str) -> None:
        self.step_metric = step_metric

    def log(self, row: dict[str, float]) -> None:
        if "train/fail" in row:
            raise ConnectionError("no network")
        self.rows.append(row)

    def finish(self) -> None:
        self.is_finished = True


@pytest.fixture
def wandb(monkeypatch) -> list[StubRun]:
    runs: list[StubRun] = []
    module: Any = ModuleType("wandb")
    module.__spec__ = ModuleSpec("wandb", None)
    module.init = lambda **settings: runs.append(StubRun(**settings)) or runs[-1]
    monkeypatch.setitem(sys.modules, "wandb", module)
    return runs


def test_wandb_receives_numbers_and_goes_on_in_the_same_run(tiny_run, tmp_path, wandb):
    config = tiny_run({"train.trackers": ["wandb"]}, name="mine")
    trackers = Trackers(tmp_path, config, None)
    trackers.log("train", {"loss": 2.5, "tokens": 7, "note": "text", "flag": True}, 3)
    trackers.log("sample", {"prompt": "a", "text": "b"}, 3)
    trackers.close()
    (first,) = wandb
    assert first.rows == [{"train/loss": 2.5, "train/tokens": 7.0, "step": 3}] and first.step_metric == "step"
    assert first.is_finished and first.settings["name"] == "mine" and first.settings["config"]["train.steps"] > 0
    Trackers(tmp_path, config, 3).close()
    assert wandb[1].settings["id"] == first.settings["id"] and wandb[1].settings["resume"] == "allow"


def test_a_service_that_fails_is_left_out_and_training_goes_on(tiny_run, tmp_path, wandb, caplog):
    trackers = Trackers(tmp_path, tiny_run({"train.trackers": ["wandb"]}), None)
    for key in ("loss", "fail", "loss"):
        trackers.log("train", {key: 1.0}, 1)
    trackers.close()
    assert len(wandb[0].rows) == 1 and not wandb[0].is_finished
    module = SimpleNamespace(init=None, __spec__=ModuleSpec("wandb", None))
    sys.modules["wandb"] = module  # type: ignore[assignment]
    Trackers(tmp_path, tiny_run({"train.trackers": ["wandb"]}), None).log("train", {"loss": 1.0}, 1)


def test_swanlab_goes_on_in_the_same_run(tiny_run, tmp_path, monkeypatch):
    """The real client, which writes files when it is offline."""
    pytest.importorskip("swanlab")
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    config = tiny_run({"train.trackers": ["swanlab"]}, name="mine")
    for resume_step in (None, 3):
        trackers = Trackers(tmp_path, config, resume_step)
        trackers.log("train", {"loss": 2.5}, 3 if resume_step is None else 4)
        trackers.close()
        assert trackers._trackers.keys() == {"swanlab"}
    run_id = json.loads((tmp_path / "trackers.json").read_text())["swanlab"]
    assert list((tmp_path / "swanlab").glob(f"run-*-{run_id}"))


def test_mlflow_has_the_numbers_of_metrics(tiny_run, train_on, done, tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "mlruns").as_uri())
    config = tiny_run({"train.trackers": ["mlflow"], "train.steps": 3}, name="a")
    train_on(1, config)
    resumed = Trackers(done(config).folder, config, 3)
    resumed.log("train", {"loss": 1.5}, 4)
    resumed.close()
    client = mlflow.MlflowClient()
    (run,) = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    history = client.get_metric_history(run.info.run_id, "train/loss")
    losses = [*done(config).column("loss"), 1.5]
    assert [metric.value for metric in sorted(history, key=lambda metric: metric.step)] == pytest.approx(losses)
    assert run.info.run_name == "a" and run.info.status == "FINISHED"
    assert (Path(run.info.artifact_uri.removeprefix("file://")) / "config.yaml").exists()
