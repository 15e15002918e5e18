"""Opening a run: the spec of its model, the checks before it starts, and the files in its folder."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
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
from jingu.config.load import dump_yaml, load_stored_config
from jingu.config.schema import RunConfig
from jingu.config.sections import tune
from jingu.config.sections.data import ENCODER_OBJECTIVES, PreferenceSettings, SupervisedSettings
from jingu.config.sections.policies import PpoSettings, RolloutSettings, SharedCriticSettings
from jingu.config.sections.tasks import RewardSettings
from jingu.data.mixture import MixtureDataset
from jingu.data.objective import Objective, build_objective
from jingu.data.open_sources import open_sources
from jingu.errors import JinguError, join_words
from jingu.evaluate.task_file import TaskIndex
from jingu.formats.description import write_description
from jingu.formats.models import open_model, update_description
from jingu.formats.provenance import Record, extend_provenance
from jingu.formats.run_inputs import RunInputs
from jingu.infer.inference_model import encode_prompt
from jingu.infer.request import max_new_tokens
from jingu.model.adapter_layers import check_saved_modules, check_targets
from jingu.model.decoder import parameter_shapes
from jingu.model.parameter_table import matches_any
from jingu.model.resolve import expand_targets, spec_from_settings
from jingu.model.spec import Adapter, DeepPrompt, Ia3, Lora, ModelSpec, SoftPrompt, flatten_fields
from jingu.runtime import files
from jingu.runtime.files import create_folder_atomically, write_text_atomically
from jingu.text.tokenizer import Tokenizer
from jingu.text.tokenizer_files import copy_tokenizer
from jingu.training.idle_settings import find_idle_settings
from jingu.training.input_checks import check_data, check_inputs, load_run_template, record_inputs
from jingu.training.optimizer import check_param_groups, check_state_dtype
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
            return [xxhash.xxh3_64_hexdigest(Path(self.config.task.prompts).read_bytes())]
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
    stored = folder / "config.yaml"
    if not stored.exists():
        return []
    previous = load_stored_config(stored)
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


@contextmanager
def lock_run(run: Run) -> Iterator[None]:
    """Create the run's folder, and keep other processes from training the same run within the block.

    Raises:
        JinguError: the folder cannot be created, or another process trains the run.
    """
    try:
        run.folder.mkdir(parents=True, exist_ok=True)
        if isinstance(run.checkpoints, Path):
            run.checkpoints.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise run_write_error(error, run.folder) from error
    fix = "Wait for it, stop it, or choose another name (name=...)."
    owner = run.folder / ".trained-by"
    name = "another process"
    with suppress(OSError):
        name = owner.read_text(encoding="utf-8") or name
    with files.lock_folder(run.folder, f"{name} is training this run now.", fix):
        with suppress(OSError):  # the file serves only the message above
            owner.write_text(f"process {os.getpid()} on {socket.gethostname()}", encoding="utf-8")
        try:
            yield
        finally:
            with suppress(OSError):
                owner.unlink(missing_ok=True)


def record_run_inputs(run: Run) -> RunInputs:
    """Return the contents of what a run reads beside its data sets. Raises JinguError if a file cannot be read."""
    return record_inputs(run.config, run.folder, run.tokenizer)


def write_run_files(run: Run, inputs: RunInputs) -> None:
    """Write configuration, spec, tokenizer, chat template, and records of what the run reads into the run's folder.

    Args:
        inputs: what the run reads beside its data sets.

    Raises:
        JinguError: the folder cannot be written.
    """
    try:
        write_text_atomically(run.folder / "config.yaml", dump_yaml(run.config))
        write_text_atomically(run.folder / "model.json", run.spec.to_json())
        settings = run.config.tune
        adapter = None if isinstance(settings, tune.FullSettings) else settings.initial_adapter
        start = [None if path is None else Path(path) for path in (run.config.initialize.from_, adapter)]
        extend_provenance(run.folder, run.data_records, *start)
        _write_description(run)
        inputs.save(run.folder)
    except OSError as error:
        raise run_write_error(error, run.folder) from error


def _write_description(run: Run) -> None:
    """Write the tokenizer, with the chat templates that the run trains with, and what the initial model's files say.

    Files that are there already and need no change stay as they are.
    """
    description = update_description(run.folder, run.config, run.tokenizer, run.spec)
    write_description(run.folder, description)
    folder = run.folder / "tokenizer"
    templates = run.tokenizer.chat_templates if description.chat_templates is None else description.chat_templates
    if folder.exists():
        stored = Tokenizer.load(folder)
        if stored.fingerprint() == run.tokenizer.fingerprint() and stored.chat_templates == templates:
            return
    with create_folder_atomically(folder) as partial:
        copy_tokenizer(Path(run.config.tokenizer.path), partial, templates)
        shutil.rmtree(folder, ignore_errors=True)


def run_write_error(error: OSError, where: Path) -> JinguError:
    """Return the error for a file of the run that cannot be written.

    Args:
        where: path that the error names, unless `error` has one.
    """
    return files.write_error(error, Path(error.filename or where), "choose another folder for runs (runs_dir=...)")


def build_run_spec(config: RunConfig, folder: Path, tokenizer: Tokenizer) -> ModelSpec:
    """Return the spec of a run's model, from its settings or from the initial model (`initialize.from`).

    Settings of `model` override those of the initial model, as long as the parameters keep their shapes. A run that has
    a checkpoint no longer needs the initial model: it reads the stored spec instead.

    Args:
        folder: folder of the run.

    Returns:
        The spec without adapters and frozen parameters, which `apply_tuning` adds.

    Raises:
        JinguError: the settings are wrong; or the initial model cannot be opened, has parameters of other names or
            shapes, or was trained with another tokenizer.
    """
    settings = config.model
    length = config.document_length
    # 1. Random weights: the settings alone determine the spec.
    if config.initialize.from_ is None:
        return spec_from_settings(settings, tokenizer.vocab_size, length)
    # 2. A run with a checkpoint: read the spec that its first start stored.
    stored_spec = folder / "model.json"
    if complete_steps(checkpoints_path(folder, config)) and stored_spec.is_file():
        # The stored spec includes the adapter. Remove it, because `apply_tuning` adds it again.
        spec = ModelSpec.from_json(stored_spec.read_bytes(), stored_spec).model_copy(update={"adapter": None})
        return spec_from_settings(settings, tokenizer.vocab_size, length, spec)
    # 3. A new run: start from the spec of the initial model.
    initial = open_model(Path(config.initialize.from_))
    if initial.spec.adapter is not None:
        raise JinguError(
            "the initial model has a trained prompt, which cannot be merged into its weights.",
            where="initialize.from",
            fix="Start from the model that the prompt was trained for; tune.initial_adapter can start from the prompt.",
        )
    if initial.tokenizer_folder is not None:
        _check_tokenizers(tokenizer, Tokenizer.load(initial.tokenizer_folder), config)
    spec = spec_from_settings(settings, tokenizer.vocab_size, length, initial.spec)
    # If there is also a preset, it must describe the same parameters as the initial model.
    described = spec if settings.preset is None else spec_from_settings(settings, tokenizer.vocab_size, length)
    if parameter_shapes(described) != parameter_shapes(initial.spec):
        initial_fields = flatten_fields(initial.spec)
        differences = [
            f"{key} is {value}, there {initial_fields.get(key)}"
            for key, value in flatten_fields(described).items()
            if initial_fields.get(key) != value
        ]
        raise JinguError(
            f"the run's model differs from the one that it starts from: {'; '.join(differences)}.",
            where=config.initialize.from_,
            fix="Leave out of `model` what the initial model decides; `jingu model grow` makes a larger one of it.",
        )
    return spec


def _check_tokenizers(tokenizer: Tokenizer, initial: Tokenizer, config: RunConfig) -> None:
    """Raise JinguError unless each token of the initial model has the same id in the run's tokenizer."""
    ids = tokenizer.vocab()
    initial_ids = initial.vocab()
    moved = sum(ids.get(piece) != token_id for piece, token_id in initial_ids.items())
    if moved:
        raise JinguError(
            f"{moved:,} of the {len(initial_ids):,} tokens of the initial model have other ids, or none, in the run's "
            "tokenizer.",
            where=config.tokenizer.path,
            fix="Set tokenizer.path to the model's own tokenizer (and build the data set with it), or start from what "
            f"`jingu model grow {config.initialize.from_} --tokenizer {config.tokenizer.path}` writes.",
        )


def apply_tuning(spec: ModelSpec, config: RunConfig) -> ModelSpec:
    """Return the spec with the heads that `task` needs, and with the adapters or frozen parameters of `tune`.

    Raises:
        JinguError: model, task and `tune` do not fit each other.
    """
    settings = config.tune
    # 1. Heads: a score head for reward models, a value head for PPO with a shared critic.
    has_score_head = isinstance(config.task, RewardSettings)
    if spec.score_head and not has_score_head:
        raise JinguError(
            f"the initial model is a reward model, which gives no logits for the task {config.task.type}.",
            where="initialize.from",
            fix="Start from the model that it was trained from.",
        )
    has_value_head = isinstance(config.task, PpoSettings) and isinstance(config.task.critic, SharedCriticSettings)
    spec = spec.model_copy(update={"score_head": has_score_head, "value_head": has_value_head})
    # 2. Full fine-tuning: all parameters are trained, except for frozen ones.
    if isinstance(settings, tune.FullSettings):
        return _freeze(spec, settings)
    # 3. Adapters: build their spec, and check that it fits the model.
    if config.initialize.from_ is None:
        raise JinguError(
            "adapters are trained for an existing model, but the run starts from random weights.",
            where="initialize.from",
            fix="Name one, or set tune.type=full.",
        )
    if isinstance(settings, tune.SoftPromptBase) and settings.position == "back" and spec.num_encoder_layers is None:
        raise JinguError(
            f"{spec.family} is a decoder, whose prompt must stand before the text.",
            where="tune.position",
            fix="Set it to front.",
        )
    adapter = _build_adapter(settings, spec)
    tuned = spec.model_copy(update={"adapter": adapter, "quantization": settings.quantization})
    check_targets(list(parameter_shapes(tuned)), adapter)
    if isinstance(adapter, Lora):
        check_saved_modules(list(parameter_shapes(tuned)), adapter, is_quantized=settings.quantization is not None)
        if adapter.init_lora_weights == "loftq" and settings.quantization is None:
            raise JinguError(
                "LoftQ starts from the quantization error, but nothing is quantized.",
                where="tune.init_lora_weights",
                fix="Set tune.quantization, or choose another initialization.",
            )
    # 4. Virtual tokens occupy positions of the model's context.
    length = config.batch.sequence_length
    virtual_tokens = max(tuned.prompts)
    room = spec.max_position_embeddings - virtual_tokens
    if virtual_tokens and length > room:
        raise JinguError(
            f"{virtual_tokens} virtual tokens and sequences of {length} are more than the model's context of "
            f"{spec.max_position_embeddings} tokens.",
            where="tune.num_virtual_tokens",
            fix=f"Set batch.sequence_length to {room} or less, or train fewer virtual tokens.",
        )
    return tuned


def _build_adapter(settings: tune.Tune, spec: ModelSpec) -> Adapter:
    """Return the spec of the adapter, with target modules as patterns of jingu's module names."""
    if isinstance(settings, tune.LoraSettings):
        fields = settings.model_dump(include=Lora.model_fields.keys() - {"type"})
        for name, values in (("rank_pattern", settings.rank_pattern), ("alpha_pattern", settings.alpha_pattern)):
            fields[name] = [(own, value) for key, value in values.items() for own in expand_targets([key], spec)]
        for name in ("target_modules", "modules_to_save"):
            fields[name] = expand_targets(fields[name], spec)
        return Lora.model_validate(fields)
    if isinstance(settings, tune.Ia3Settings):
        return Ia3(target_modules=expand_targets(settings.target_modules, spec))
    if isinstance(settings, tune.SoftPromptBase):
        prompt = SoftPrompt(num_virtual_tokens=settings.num_virtual_tokens, after_input=settings.position == "back")
        if isinstance(settings, tune.PTuningSettings):
            size = settings.encoder_hidden_size or spec.hidden_size
            return prompt.model_copy(update={"encoder": settings.encoder, "encoder_hidden_size": size})
        return prompt
    assert isinstance(settings, tune.DeepPromptBase)
    prefix_size = settings.encoder_hidden_size if isinstance(settings, tune.PrefixTuningSettings) else None
    return DeepPrompt(
        num_virtual_tokens=settings.num_virtual_tokens, encoder_hidden_size=prefix_size, in_encoder=settings.in_encoder
    )


def _freeze(spec: ModelSpec, settings: tune.FullSettings) -> ModelSpec:
    """Return the spec with frozen parameters.

    These are the parameters that match `tune.freeze`. With `tune.num_trainable_layers`, embeddings and encoder are
    frozen too, and all blocks but that many last ones.

    Raises:
        JinguError: a pattern matches no parameter, the model has fewer blocks, or nothing remains to train.
    """
    names = list(parameter_shapes(spec))
    patterns = list(settings.freeze)
    for pattern in patterns:
        if not any(matches_any(name, [pattern]) for name in names):
            is_tied_head = spec.tie_word_embeddings and not spec.score_head and matches_any("head.weight", [pattern])
            cause = ": the head is tied to the embedding, whose name is embedding.weight" if is_tied_head else ""
            raise JinguError(
                f"no parameter of the model matches {pattern}{cause}.",
                where="tune.freeze",
                fix="Names are such as embedding.weight and blocks.0.attention.q.weight; * matches anything.",
            )
    trainable = settings.num_trainable_layers
    if trainable is not None:
        if trainable > spec.num_layers:
            raise JinguError(
                f"the model has {spec.num_layers} blocks, not {trainable}.", where="tune.num_trainable_layers"
            )
        patterns += ["embedding*", "positions*", "relative_bias*", "encoder.*"]
        patterns += [f"blocks.{layer}.*" for layer in range(spec.num_layers - trainable)]
    if all(matches_any(name, patterns) for name in names):
        raise JinguError("all parameters of the model are frozen.", where="tune.freeze", fix="Freeze fewer.")
    return spec.model_copy(update={"frozen_parameters": tuple(patterns)})
