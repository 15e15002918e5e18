"""Services beside metrics.jsonl: what they receive, where they go on after a resume, and what their failures do."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from jingu.training.trackers import Trackers
from tests.limits import free_port


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


@pytest.fixture
def status_server(tmp_path, monkeypatch) -> Iterator[list[tuple[str, dict[str, Any]]]]:
    """A server in the place of Kubeflow Trainer's, and what it receives: token and status."""
    received: list[tuple[str, dict[str, Any]]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            received.append((self.headers["Authorization"], body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_arguments: object) -> None:
            pass

    (tmp_path / "token").write_text("secret\n")
    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", f"http://127.0.0.1:{server.server_port}/status")
        monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_TOKEN", str(tmp_path / "token"))
        yield received
        server.shutdown()


def test_kubeflow_trainer_learns_progress_and_time_left(tiny_run, tmp_path, status_server):
    trackers = Trackers(tmp_path, tiny_run({"train.steps": 200}), None)
    for step in range(10, 60, 10):
        trackers.log("train", {"loss": 1 / step, "seconds": 0.5 * step}, step)
    trackers.close()
    # More often than the server wishes it learns only the first progress, and the last.
    assert [token for token, _ in status_server] == ["Bearer secret"] * 2
    first, last = (body["trainerStatus"] for _, body in status_server)
    assert first["progressPercentage"] == 5 and "estimatedRemainingSeconds" not in first
    assert last["progressPercentage"] == 25 and last["estimatedRemainingSeconds"] == 75
    assert {"name": "train/loss", "value": "0.02"} in last["metrics"]
    models = pytest.importorskip("kubeflow_trainer_api.models")
    for _, body in status_server:
        request = models.TrainerV1alpha1UpdateTrainJobStatusRequest.from_dict(body)
        assert request.to_dict()["trainerStatus"].keys() == body["trainerStatus"].keys()


def test_a_run_goes_on_without_kubeflows_server(tiny_run, train_on, done, tmp_path, monkeypatch):
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", f"http://127.0.0.1:{free_port()}/status")
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_TOKEN", str(tmp_path / "missing"))
    config = tiny_run({"train.steps": 3})
    train_on(1, config)
    assert len(done(config).column("loss")) == 3
