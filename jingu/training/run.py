"""Opening a run: its data, its settings, and the checks before it starts."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from jingu.checkpoint.manifest import CheckpointError
from jingu.checkpoint.remote import CheckpointPath
from jingu.checkpoint.resume import checkpoints_path, complete_steps, step_folder
from jingu.checkpoint.save_folder import read_state
from jingu.config.compare import breaking_changes, changed_settings, resume_options_for
from jingu.config.load import load_stored_config
from jingu.config.schema import RunConfig
from jingu.config.sections.data import ENCODER_OBJECTIVES, PreferenceSettings, SupervisedSettings
from jingu.config.sections.policies import RolloutSettings
from jingu.data.mixture import MixtureDataset
from jingu.data.objective import Objective, build_objective
from jingu.data.open_sources import open_sources
from jingu.errors import JinguError, join_words
from jingu.evaluate.task_file import TaskIndex
from jingu.formats.provenance import Record
from jingu.formats.run_inputs import RunInputs
from jingu.infer.inference_model import encode_prompt
from jingu.infer.request import max_new_tokens
from jingu.model.decoder import parameter_shapes
from jingu.model.spec import ModelSpec
from jingu.runtime.hub import local_rows
from jingu.text.tokenizer import Tokenizer
from jingu.training.idle_settings import find_idle_settings
from jingu.training.input_checks import check_data, check_inputs, load_run_template
from jingu.training.optimizer import check_param_groups, check_state_dtype
from jingu.training.run_spec import apply_tuning, build_run_spec
from jingu.training.schedule import check_schedule
from jingu.training.validation import ValidationRows, open_validation

if TYPE_CHECKING:
    from jingu.evaluate.evaluation import PreparedTask


@dataclass(frozen=True)
class ResumeOptions:
    """What may differ when a run resumes from its checkpoint.

    Attributes:
        allow: keys and sections of the configuration that may have changed (`--allow`), although resuming with another
            value of them mixes two runs.
        fresh_optimizer: whether to load only the weights, and to reset the optimizer (`--fresh-optimizer`).
    """

    allow: Collection[str] = ()
    fresh_optimizer: bool = False

    @property
    def allows_other_samples(self) -> bool:
        """Whether settings that determine the training samples may have changed."""
        return bool({"data", "seed", "batch"} & {key.partition(".")[0] for key in self.allow})


RESUME_UNCHANGED = ResumeOptions()


@dataclass(frozen=True)
class Run:
    """Everything that training reads, opened and checked. Opening a run writes nothing.

    Attributes:
        folder: `runs_dir`/`name`.
        spec: spec of the model, including adapters and frozen parameters.
        source: the training data.
        validation: validation rows of each source; empty without evaluation.
        objective: how rows of text become inputs and labels; None: every token predicts the next one.
        resume_options: what may differ from earlier starts of the run.
        changes: settings that have changed since the last start of the run, each as `key: old → new`.
        tasks: evaluation tasks that are measured during training.
        warnings: settings that have less effect than they say.
    """

    config: RunConfig
    folder: Path
    spec: ModelSpec
    tokenizer: Tokenizer
    source: MixtureDataset
    validation: tuple[ValidationRows, ...]
    objective: Objective | None
    resume_options: ResumeOptions
    changes: list[str] = field(default_factory=list)
    tasks: tuple[PreparedTask, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def checkpoints(self) -> CheckpointPath:
        return checkpoints_path(self.folder, self.config)

    @property
    def data_checksums(self) -> list[str]:
        """Checksums of the shards of the training data, source by source; for rollouts, the checksum of the prompts."""
        if isinstance(self.config.task, RolloutSettings):
            return [xxhash.xxh3_64_hexdigest(local_rows(self.config.task.prompts).read_bytes())]
        splits = [source.dataset.manifest.train for source in self.source.sources]
        return [shard.bin_xxh3 for split in splits for shard in (*split.shards, *split.sidecars)]

    @property
    def data_records(self) -> list[Record]:
        """Descriptions of the training data, one per source, for the record of what the model was trained on."""
        records = [
            {
                "path": str(dataset.path.absolute()),
                "checksums": [shard.bin_xxh3 for shard in dataset.manifest.train.shards],
                "mixture": dataset.manifest.settings.get("mixture"),
            }
            for dataset in (source.dataset for source in self.source.sources)
        ]
        if self.config.task.type != "pretraining":
            # Preferences and rewards have other data. The record names them, but has no checksums of them.
            records.append({"path": f"data of {self.config.task.type}", "checksums": [], "mixture": None})
        return records


def open_run(config: RunConfig, resume_options: ResumeOptions = RESUME_UNCHANGED) -> Run:
    """Open tokenizer and data sets, build the spec, and check that they fit each other and the run's folder.

    Raises:
        JinguError: a file or a package is missing, or parts of the run do not fit each other.
    """
    folder = Path(config.runs_dir) / config.name
    # A folder belongs to one run: a changed setting must not mix two runs in it.
    changes = _check_changes(folder, config, resume_options.allow)
    tokenizer = Tokenizer.load(Path(config.tokenizer.path))
    source = open_sources(config, tokenizer)
    spec = apply_tuning(build_run_spec(config, folder, tokenizer), config)
    # Settings that depend on the model.
    check_param_groups(config.optimizer, parameter_shapes(spec).keys())
    check_state_dtype(config)
    check_schedule(config)
    _check_train_settings(config, spec)
    _check_sample_prompts(config, spec, tokenizer)
    objective = _build_objective(config, spec, source, tokenizer)
    validation = open_validation(config, spec, source, objective)
    tasks = _prepare_tasks(config, spec, tokenizer)
    warnings = find_idle_settings(config, spec, has_validation=bool(validation))
    run = Run(config, folder, spec, tokenizer, source, validation, objective, resume_options, changes, tasks, warnings)
    _check_checkpoints(run)
    if not resume_options.allows_other_samples:
        check_data(config, tokenizer, RunInputs.load(folder).files)
    check_inputs(config, folder, tokenizer, tuple(resume_options.allow))
    return run


def _build_objective(
    config: RunConfig, spec: ModelSpec, source: MixtureDataset, tokenizer: Tokenizer
) -> Objective | None:
    """Build the objective. Raise JinguError if only one of objective and model has an encoder."""
    settings = config.data.objective
    needs_encoder = isinstance(settings, ENCODER_OBJECTIVES)
    has_encoder = spec.num_encoder_layers is not None
    if needs_encoder and not has_encoder:
        raise JinguError(
            f"the objective {settings.type} needs an encoder, and {spec.family} has none.",
            where="data.objective.type",
            fix="Set it to causal, or choose a model.family with an encoder (t5).",
        )
    if has_encoder and not needs_encoder and not isinstance(settings, SupervisedSettings):
        raise JinguError(
            f"{spec.family} has an encoder, for which the objective {settings.type} has no input.",
            where="data.objective.type",
            fix="Set it to span_corruption, or choose a model.family without an encoder (llama).",
        )
    return build_objective(config, source, tokenizer, has_encoder=has_encoder)


def _check_changes(folder: Path, config: RunConfig, allow: Collection[str]) -> list[str]:
    """Return the settings that have changed since the last start of the run.

    Raises:
        JinguError: a setting has changed with which resuming would mix two runs, and `allow` does not contain it.
    """
    config_file = folder / "config.yaml"
    if not config_file.exists():
        return []
    previous = load_stored_config(config_file)
    breaking = breaking_changes(previous, config, allow)
    if breaking:
        fix = "To resume it would mix two runs. Choose another name (name=...), or delete the folder to start over"
        options = resume_options_for(breaking)
        if options:
            fix = f"{fix}, or, if the change is intended, resume with {options}".replace(", or delete", ", delete")
        raise JinguError(
            f"this run was started with another configuration: {'; '.join(breaking)}.", where=folder, fix=f"{fix}."
        )
    return list(changed_settings(previous, config).values())


def _check_train_settings(config: RunConfig, spec: ModelSpec) -> None:
    """Raise JinguError if data and task or noise and model do not fit, or a package of a tracker is missing."""
    if isinstance(config.data.objective, PreferenceSettings) and config.task.type == "pretraining":
        raise JinguError(
            "preference data has rejected answers, which pretraining would imitate too.",
            where="task.type",
            fix="Set it to dpo, or to another task that compares answers.",
        )
    if config.train.neftune_alpha and spec.num_encoder_layers is not None:
        raise JinguError(
            f"embedding noise supports only decoders, and {spec.family} has an encoder.",
            where="train.neftune_alpha",
            fix="Set it to 0.",
        )
    packages: dict[str, str] = {name: f"train.trackers={name}" for name in config.train.trackers}
    packages |= {"tensorboard": "train.tensorboard"} if config.train.tensorboard else {}
    for name, setting in packages.items():
        if find_spec(name) is None:
            what = f"{setting} is on, but the {name} package is not installed."
            raise JinguError(what, fix=f"Install it (`pip install {name}`), or leave out the setting.")


def _check_sample_prompts(config: RunConfig, spec: ModelSpec, tokenizer: Tokenizer) -> None:
    """Raise JinguError if a sample prompt and its continuation are longer than the model's context."""
    settings = config.evaluation
    if not settings.every:
        return
    for number, prompt in enumerate(settings.sample_prompts):
        size = len(encode_prompt(spec, tokenizer, prompt)) or 1
        if settings.max_new_tokens > max_new_tokens(spec, size):
            raise JinguError(
                f"the prompt has {size} tokens and {settings.max_new_tokens} more (evaluation.max_new_tokens) follow, "
                f"but the model's context is {spec.max_position_embeddings} tokens.",
                where=f"evaluation.sample_prompts[{number}]",
                fix="Shorten the prompt, lower evaluation.max_new_tokens, or raise model.max_position_embeddings.",
            )


def _prepare_tasks(config: RunConfig, spec: ModelSpec, tokenizer: Tokenizer) -> tuple[PreparedTask, ...]:
    """Return the evaluation tasks of a run.

    Raises:
        JinguError: a task does not exist or does not fit the model, or `checkpoint.best_metric` names a task that is
            not evaluated.
    """
    settings = config.evaluation
    index = TaskIndex()
    limit = None if settings.task_documents == "all" else settings.task_documents
    names = dict.fromkeys(name for task in settings.tasks if settings.every for name in index.load(task))
    metric = config.checkpoint.best_metric
    if metric.startswith("tasks/") and metric.split("/", 1)[1].rpartition("/")[0] not in names:
        what = f"{metric} is a measure of a task that evaluations do not include."
        fix = f"Name a task of evaluation.tasks: {join_words([*names])}." if names else "Add it to evaluation.tasks."
        raise JinguError(what, where="checkpoint.best_metric", fix=fix)
    if not names:
        return ()
    # Imported late, because these modules import the inference engine.
    from jingu.evaluate.evaluation import apply_chat_template, prepare_task
    from jingu.evaluate.smooth_measures import check_answers_fit

    tasks = tuple(prepare_task(index.tasks[name], limit=limit) for name in names)
    if any(task.settings.metadata.get("chat") for task in tasks):
        template = load_run_template(config, tokenizer)
        tasks = tuple(
            apply_chat_template(task, template) if task.settings.metadata.get("chat") else task for task in tasks
        )
    for task in tasks:
        check_answers_fit(task, tokenizer, spec)
    return tasks


def _check_checkpoints(run: Run) -> None:
    """Raise JinguError if the run may not resume (`checkpoint.resume=never`), or was trained on another data set."""
    steps = complete_steps(run.checkpoints)
    if steps and run.config.checkpoint.resume == "never":
        raise JinguError(
            f"the run has a checkpoint at step {steps[-1]}, and checkpoint.resume is never.",
            where=run.folder,
            fix="Set checkpoint.resume=auto to resume from it, or choose another name (name=...).",
        )
    for step in reversed(steps):
        try:
            state = read_state(step_folder(run.checkpoints, step))
        except CheckpointError:
            continue  # a damaged checkpoint is skipped when the run resumes
        if state["data"] != run.data_checksums and not run.resume_options.allows_other_samples:
            what = "another data set than the one in " + ", ".join(
                str(source.dataset.path) for source in run.source.sources
            )
            if isinstance(run.config.task, RolloutSettings):
                what = f"other prompts than those in {run.config.task.prompts}"
            raise JinguError(
                f"the run was trained until step {step} on {what}.",
                where=run.folder,
                fix=f"Restore {'the file' if not run.source.sources else 'that data set'}, start a new run (name=...), "
                "or resume on this one with --allow data.",
            )
        return
