"""The tree of settings. One YAML file is one run; every section is a frozen model that rejects unknown keys.

The docstring of a section documents its settings: `jingu config schema` and the configuration guide show it.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from jingu.config.sections.base import Description, NonNegative, PathText, Positive, Settings, check_file_name
from jingu.config.sections.data import DataSettings, PreferenceSettings, TokenizerSettings
from jingu.config.sections.model import InitializeSettings, ModelSettings
from jingu.config.sections.optimizers import AdamWSettings, Optimizer
from jingu.config.sections.parallel import DeviceSettings, ParallelSettings
from jingu.config.sections.policies import RolloutSettings
from jingu.config.sections.schedules import CosineSettings, Schedule
from jingu.config.sections.tasks import PretrainingSettings, Task
from jingu.config.sections.train import BatchSettings, Precision, PrecisionSettings, TrainSettings
from jingu.config.sections.tune import FullSettings, Tune


class EvaluationSettings(Settings):
    """Evaluation on the validation split.

    Attributes:
        every: Steps between evaluations, with one more at the end of the run; 0: no evaluations at all.
        num_sequences: Validation sequences per evaluation; all: the whole split.
        num_sequences_at_end: Validation sequences in the evaluation at the end of the run; null: `num_sequences`.
        sample_prompts: Prompts that the model continues at each evaluation, as samples of its text.
        max_new_tokens: Tokens to generate per prompt.
        tasks: Tasks to evaluate at each evaluation: names of tasks, groups or tags, or .yaml files.
        task_documents: Number of documents per task, from the first on; all: all of them.
        patience: Training ends after this many evaluations in a row that do not improve `checkpoint.best_metric`; 0:
            never.
    """

    every: NonNegative = 100
    num_sequences: Positive | Literal["all"] = 64
    num_sequences_at_end: Positive | Literal["all"] | None = None
    sample_prompts: list[str] = []
    max_new_tokens: Positive = 48
    tasks: list[str] = []
    task_documents: Positive | Literal["all"] = 100
    patience: NonNegative = 0

    def limit(self, *, final: bool) -> int | Literal["all"]:
        """Return the number of validation sequences in an evaluation.

        Args:
            final: whether it is the evaluation at the end of the run.
        """
        if final and self.num_sequences_at_end is not None:
            return self.num_sequences_at_end
        return self.num_sequences


class MemorySettings(Settings):
    """In-memory checkpoints: copies of the newest state on each rank's own node and on a neighbor node.

    Attributes:
        every: Steps between copies; 0: none. Training waits during a copy.
        folder: Folder on an in-memory file system, on every node.
    """

    every: NonNegative = 0
    folder: PathText = "/dev/shm"


class CheckpointSettings(Settings):
    """Saving checkpoints, and resuming from them.

    Attributes:
        every: Steps between checkpoints, with one more at the end of the run; 0: only the one at the end.
        every_minutes: Also save when the last checkpoint is this many minutes old; 0: never.
        async_save: Write from a copy in host memory while training continues. If false, or with offload to disk,
            training waits.
        when_busy: What to do if a save is due while the previous one is still being written: wait for it, or skip the
            new save.
        keep_last: Number of newest checkpoints to keep; older ones are deleted.
        keep_every: Also keep checkpoints whose step is a multiple of this; 0: none.
        keep_best: Also keep this many checkpoints with the best last evaluation; 0: none.
        best_metric: Metric that decides which checkpoint is best: loss, bits_per_byte, or with `evaluation.tasks` one
            of tasks/NAME/bits_per_byte, margin, p_gold or acc.
        url: URL (s3://bucket/runs, or any that fsspec supports) where checkpoints are stored instead of in the run's
            folder.
        copy_to: URL that fsspec supports (s3://bucket/runs, or a folder), to which each complete checkpoint is copied.
        grace_seconds: Seconds that saving may take when the run is asked to stop. After that, it exits with the
            previous checkpoint.
        resume: auto: resume from the newest complete checkpoint of the run; never: refuse to start if there is one.
    """

    every: NonNegative = 200
    every_minutes: Annotated[float, Field(ge=0)] = 0.0
    async_save: bool = True
    when_busy: Literal["wait", "skip"] = "wait"
    keep_last: Positive = 2
    keep_every: NonNegative = 0
    keep_best: NonNegative = 0
    best_metric: Annotated[
        str,
        Field(pattern="^(loss|bits_per_byte|tasks/.+/(bits_per_byte|margin|p_gold|acc))$"),
        Description("loss, bits_per_byte or tasks/NAME/MEASURE"),
    ] = "loss"
    url: Annotated[str, Field(min_length=1)] | None = None
    copy_to: Annotated[str, Field(min_length=1)] | None = None
    in_memory: MemorySettings = MemorySettings()
    grace_seconds: Positive = 120
    resume: Literal["auto", "never"] = "auto"


class RunConfig(Settings):
    """A run: all settings from raw text to a trained model.

    Attributes:
        name: Name of the run; its folder is RUNS_DIR/NAME.
        runs_dir: Folder that holds all runs.
        seed: Seed of the initial weights and of the order of the data.
    """

    name: Annotated[
        str,
        # Of ASCII only letters, digits, dots, dashes and underscores; beyond ASCII, anything but whitespace. The syntax
        # is one that every regular expression engine supports, because the JSON schema contains the pattern.
        Field(pattern=r"^[^\s\x00-/:-@\[-`{-\x7f][^\s\x00-,/:-@\[-^`{-\x7f]*$", max_length=200),
        AfterValidator(check_file_name),
        Description("up to 200 letters, digits, dots, dashes and underscores, beginning with a letter or digit"),
    ] = "run"
    runs_dir: PathText = "runs"
    seed: Annotated[int, Field(ge=0, lt=2**63), Description("a whole number (from 0 to 2^63 - 1)")] = 0
    tokenizer: TokenizerSettings = TokenizerSettings()
    data: DataSettings = DataSettings()
    model: ModelSettings = ModelSettings()
    initialize: InitializeSettings = InitializeSettings()
    tune: Tune = FullSettings()
    task: Task = PretrainingSettings()
    batch: BatchSettings = BatchSettings()
    optimizer: Optimizer = AdamWSettings()
    schedule: Schedule = CosineSettings()
    train: TrainSettings = TrainSettings()
    precision: Precision = PrecisionSettings()
    parallel: ParallelSettings = ParallelSettings()
    device: DeviceSettings = DeviceSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()

    @model_validator(mode="after")
    def _derive_batch(self) -> RunConfig:
        """Set the global batch size of a task that generates answers to its answers per update, unless it is given."""
        if isinstance(self.task, RolloutSettings) and "global_batch_size" not in self.batch.model_fields_set:
            batch = self.batch.model_copy(update={"global_batch_size": self.task.rows_per_update})
            object.__setattr__(self, "batch", batch)
        return self

    @property
    def document_length(self) -> int:
        """Maximum tokens of a document in a sequence. With preference pairs, each answer has half of the sequence."""
        objective = self.data.objective
        is_halved = isinstance(objective, PreferenceSettings) and objective.rows == "pairs"
        return self.batch.sequence_length // 2 if is_halved else self.batch.sequence_length
