"""Services that receive the metrics of a run besides `metrics.jsonl`: TensorBoard, W&B, MLflow, SwanLab."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any
from uuid import uuid4

from jingu.config.load import dump_yaml
from jingu.config.schema import RunConfig
from jingu.config.sections.train import TRACKERS
from jingu.runtime.files import write_text_atomically
from jingu.runtime.log import log_warning
from jingu.tables import flatten, import_name


class Tracker:
    """A service that receives the numbers of each line of metrics, and the samples."""

    def log_numbers(self, numbers: Mapping[str, float], step: int) -> None:
        """Receive numbers, by `kind/key` such as `train/loss`."""
        raise NotImplementedError

    def log_sample(self, prompt: str, text: str, step: int) -> None:
        """Receive a sample. By default, it is ignored."""

    def close(self) -> None:
        """Send what is pending, and end the connection."""
        raise NotImplementedError


class TensorBoardTracker(Tracker):
    """Writes TensorBoard events into a folder of the run."""

    def __init__(self, folder: Path, resume_step: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # The run repeats the steps after `resume_step`. TensorBoard hides their earlier events (`purge_step`).
        self._writer: Any = SummaryWriter(str(folder), purge_step=None if resume_step is None else resume_step + 1)

    def log_numbers(self, numbers: Mapping[str, float], step: int) -> None:
        for key, value in numbers.items():
            self._writer.add_scalar(key, value, step)

    def log_sample(self, prompt: str, text: str, step: int) -> None:
        self._writer.add_text(prompt, text, step)

    def close(self) -> None:
        self._writer.close()


class WandbTracker(Tracker):
    """Sends numbers to W&B, as W&B's own settings say. A run that resumes continues the same W&B run.

    Args:
        run_id: id of the W&B run to continue; None: create one.
    """

    def __init__(self, run_id: str | None, folder: Path, config: RunConfig) -> None:
        self.run_id = run_id or uuid4().hex[:12]
        settings = flatten(config.model_dump(mode="json"))
        wandb = import_module("wandb")
        self._run: Any = wandb.init(id=self.run_id, resume="allow", name=config.name, config=settings, dir=str(folder))
        # W&B drops values whose own step is lower than before, as after a resume. Log the step as a metric instead.
        self._run.define_metric("*", step_metric="step")

    def log_numbers(self, numbers: Mapping[str, float], step: int) -> None:
        self._run.log({**numbers, "step": step})

    def close(self) -> None:
        self._run.finish()


class MlflowTracker(Tracker):
    """Sends numbers to MLflow, to the server and experiment of MLflow's own settings.

    Args:
        run_id: id of the MLflow run to continue; None: create one.
    """

    def __init__(self, run_id: str | None, _folder: Path, config: RunConfig) -> None:
        self._mlflow: Any = import_module("mlflow")
        run = self._mlflow.start_run(run_id=run_id, run_name=config.name)
        self.run_id: str = run.info.run_id
        if run_id is None:
            self._mlflow.log_text(dump_yaml(config), "config.yaml")

    def log_numbers(self, numbers: Mapping[str, float], step: int) -> None:
        # Asynchronous, so that training does not wait for a slow server.
        self._mlflow.log_metrics(dict(numbers), step=step, run_id=self.run_id, synchronous=False)

    def close(self) -> None:
        self._mlflow.end_run()


class SwanlabTracker(Tracker):
    """Sends numbers to SwanLab, as SwanLab's own settings say. A run that resumes continues the same SwanLab run.

    Args:
        run_id: id of the SwanLab run to continue; None: create one.
    """

    def __init__(self, run_id: str | None, folder: Path, config: RunConfig) -> None:
        self.run_id = run_id or uuid4().hex[:12]
        settings = flatten(config.model_dump(mode="json"))
        swanlab = import_module("swanlab")
        place = str(folder / "swanlab")
        self._run: Any = swanlab.init(id=self.run_id, resume="allow", name=config.name, config=settings, log_dir=place)

    def log_numbers(self, numbers: Mapping[str, float], step: int) -> None:
        self._run.log(dict(numbers), step=step)

    def close(self) -> None:
        self._run.finish()


class Trackers:
    """All trackers of a run. A tracker that fails is removed with a warning, and training continues.

    Args:
        folder: folder of the run.
        resume_step: step of the checkpoint from which the run resumes; None for a new run.
    """

    def __init__(self, folder: Path, config: RunConfig, resume_step: int | None) -> None:
        self._trackers: dict[str, Tracker] = {}
        if config.train.tensorboard:
            self._trackers["tensorboard"] = TensorBoardTracker(folder / "tensorboard", resume_step)
        # The ids of this run in the services, which later starts use again.
        path = folder / "trackers.json"
        ids: dict[str, str] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        for name in config.train.trackers:
            try:
                self._trackers[name] = tracker = import_name(TRACKERS[name])(ids.get(name), folder, config)
                ids[name] = tracker.run_id
                write_text_atomically(path, json.dumps(ids))
            except Exception as error:
                _warn(name, error)

    def log(self, kind: str, values: Mapping[str, Any], step: int) -> None:
        """Send the numbers of a line of metrics, named `kind/key`, and the texts of a line `sample`."""
        numbers = {
            f"{kind}/{key}": float(value)
            for key, value in values.items()
            if isinstance(value, int | float) and not isinstance(value, bool)
        }
        for name, tracker in list(self._trackers.items()):
            try:
                if numbers:
                    tracker.log_numbers(numbers, step)
                if kind == "sample":
                    tracker.log_sample(str(values.get("prompt")), str(values.get("text")), step)
            # No error of a service may end a run.
            except Exception as error:
                _warn(name, error)
                del self._trackers[name]

    def close(self) -> None:
        """Close all trackers; warn about those that fail."""
        for name, tracker in self._trackers.items():
            try:
                tracker.close()
            except Exception as error:
                _warn(name, error)


def _warn(name: str, error: Exception) -> None:
    log_warning(f"{name} no longer receives the numbers of this run ({error}). They are in metrics.jsonl.")
