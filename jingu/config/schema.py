"""The tree of settings. One YAML file is one run; every section is a frozen model that refuses unknown keys.

The docstring under a field is its documentation: it reaches `jingu config schema`, and so editors.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from jingu.config.sections.base import NotNegative, Place, Positive, Settings, Words
from jingu.config.sections.data import DataSettings, TokenizerSettings
from jingu.config.sections.model import InitializeSettings, ModelSettings
from jingu.config.sections.parallel import DeviceSettings, ParallelSettings
from jingu.config.sections.train import (
    AdamWSettings,
    BatchSettings,
    CosineSettings,
    Optimizer,
    Precision,
    PrecisionSettings,
    Schedule,
    TrainSettings,
)
from jingu.config.sections.tune import FullSettings, Tune


class EvaluationSettings(Settings):
    """Measuring on held-out text."""

    every: NotNegative = 100
    """Steps between evaluations (also at the end); 0: none."""
    sequences: Positive | Literal["all"] = 64
    """Held-out sequences an evaluation reads; all: every one."""
    sequences_at_end: Positive | Literal["all"] | None = None
    """Held-out sequences the evaluation at the run's end reads; null: as many as the others."""
    prompts: list[str] = []
    """Texts continued at each evaluation, to see how the model writes."""
    prompt_tokens: Positive = 48
    """Tokens generated for a prompt."""


class MemorySettings(Settings):
    """Copies of the newest state in main memory, of each rank's node and of a neighbour."""

    every: NotNegative = 0
    """Steps between copies, for which training waits; 0: none."""
    folder: Place = "/dev/shm"
    """Folder of a file system that is in main memory, on every node."""


class CheckpointSettings(Settings):
    """Saving, and finding the way back."""

    every: NotNegative = 200
    """Steps between checkpoints (also at the end); 0: only at the end."""
    minutes: Annotated[float, Field(ge=0)] = 0.0
    """Also save when the last checkpoint is so many minutes old; 0: steps alone decide."""
    background: bool = True
    """Write from a copy in main memory while training goes on; false, or with offload to disk: training waits."""
    when_busy: Literal["wait", "skip"] = "wait"
    """When a save is due while the one before is still being written: wait for that, or save no checkpoint."""
    keep: Positive = 2
    """Newest checkpoints kept; older ones are deleted."""
    keep_every: NotNegative = 0
    """Checkpoints whose step is a multiple of this are kept for good; 0: none."""
    keep_best: NotNegative = 0
    """So many checkpoints are kept whose last evaluation was best; 0: none."""
    best_by: Literal["loss", "bits_per_byte"] = "loss"
    """What of an evaluation decides which is best; lower is better."""
    address: Annotated[str, Field(min_length=1)] | None = None
    """Address (s3://bucket/runs, any of fsspec's) where the checkpoints lie in place of the run's own folder."""
    copy_to: Annotated[str, Field(min_length=1)] | None = None
    """Address that fsspec knows (s3://bucket/runs, or a folder) where each checkpoint is copied once it is here."""
    memory: MemorySettings = MemorySettings()
    grace: Positive = 120
    """Seconds that saving may take when the run is asked to stop; then it leaves with the last checkpoint before."""
    resume: Literal["auto", "never"] = "auto"
    """auto: go on from the newest complete checkpoint of the run; never: refuse if there is one."""


class RunConfig(Settings):
    """A run: everything that `jingu` needs to go from raw text to a trained model."""

    name: Annotated[
        str,
        Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=200),
        Words("up to 200 letters, digits, dots, dashes and underscores, beginning with a letter or digit"),
    ] = "run"
    """Name of the run; it lives in RUNS/NAME."""
    runs: Place = "runs"
    """Folder that holds the runs."""
    seed: Annotated[int, Field(ge=0, lt=2**63), Words("a whole number (from 0 to 2^63 - 1)")] = 0
    """Seed of the initial weights and of the order of the data."""
    tokenizer: TokenizerSettings = TokenizerSettings()
    data: DataSettings = DataSettings()
    model: ModelSettings = ModelSettings()
    initialize: InitializeSettings = InitializeSettings()
    tune: Tune = FullSettings()
    batch: BatchSettings = BatchSettings()
    optimizer: Optimizer = AdamWSettings()
    schedule: Schedule = CosineSettings()
    train: TrainSettings = TrainSettings()
    precision: Precision = PrecisionSettings()
    parallel: ParallelSettings = ParallelSettings()
    device: DeviceSettings = DeviceSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
