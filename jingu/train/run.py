"""The run as a folder: what must be true before the first step, and what is written before it."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path

from jingu.checkpoint.files import read_state
from jingu.checkpoint.manifest import CheckpointError
from jingu.checkpoint.remote import Place
from jingu.checkpoint.resume import checkpoints_of, complete_steps, step_folder
from jingu.config.compare import differences, harmful_differences
from jingu.config.load import dump_yaml, load_config
from jingu.config.schema import RunConfig
from jingu.config.sections.data import FOR_ENCODERS, SupervisedSettings
from jingu.data.batches import BatchSource
from jingu.data.dataset import joined, open_dataset
from jingu.data.objective import Objective, plan_objective
from jingu.data.sources import open_sources
from jingu.data.supervised import join_rows, open_supervised
from jingu.errors import JinguError
from jingu.infer.load import encode_prompt
from jingu.infer.request import room_after
from jingu.model.decoder import parameter_shapes
from jingu.model.spec import ModelSpec
from jingu.runtime import files
from jingu.runtime.files import new_folder, replace_text
from jingu.text.tokenizer import Tokenizer
from jingu.train.begin import spec_of_run, trained_spec
from jingu.train.optimizer import check_groups, check_moments
from jingu.train.task import HeldOut


@dataclass(frozen=True)
class Going:
    """How a run may go on from its checkpoint."""

    allow: tuple[str, ...] = ()
    """Keys and sections of the configuration that may have changed though they make it another run."""
    fresh_optimizer: bool = False
    """Whether the optimizer begins anew, with the weights as they are."""

    @property
    def other_samples(self) -> bool:
        """Whether what decides about samples may have changed."""
        return bool({"data", "seed", "batch"} & {key.partition(".")[0] for key in self.allow})


@dataclass(frozen=True)
class Run:
    """Everything the loop reads, opened and checked. Opening writes nothing."""

    config: RunConfig
    folder: Path
    spec: ModelSpec
    tokenizer: Tokenizer
    source: BatchSource
    held_out: HeldOut | None
    objective: Objective | None
    going: Going
    changes: list[str] = field(default_factory=list)
    """What of the configuration has changed since the run was last started."""

    @property
    def checkpoints(self) -> Place:
        return checkpoints_of(self.folder, self.config)

    @property
    def data_receipt(self) -> list[str]:
        """What the training data is: checksums of its shards, source by source."""
        splits = [each.dataset.manifest.train for each in self.source.sources]
        return [shard.bin_xxh3 for split in splits for shard in (*split.shards, *split.beside)]


def open_run(config: RunConfig, going: Going | None = None) -> Run:
    """Open tokenizer and data set, build the spec, and check that they fit each other and the run's folder.

    Raises:
        JinguError: something is missing, or two things do not belong together.
    """
    folder = Path(config.runs) / config.name
    going = going or Going()
    changes = _changes(folder, config, going.allow)
    tokenizer = Tokenizer.load(Path(config.tokenizer.path))
    source = open_sources(config, tokenizer)
    spec = trained_spec(spec_of_run(config, folder, tokenizer), config)
    check_groups(config.optimizer, parameter_shapes(spec).keys())
    check_moments(config)
    if config.train.noise and spec.encoder_layers is not None:
        raise JinguError(
            f"noise is put on the tokens that a decoder reads, and {spec.family} has an encoder.",
            where="train.noise",
            fix="Set it to 0.",
        )
    held_out = _held_out(config, spec, [each.dataset.path for each in source.sources])
    objective = _objective(config, spec, source, tokenizer)
    _check_prompts(config, spec, tokenizer)
    if config.train.tensorboard and find_spec("tensorboard") is None:
        raise JinguError(
            "train.tensorboard is on, but the tensorboard package is not installed.",
            fix="Install it (`pip install tensorboard`), or set train.tensorboard=false.",
        )
    held_out = held_out and replace(held_out, objective=objective)
    run = Run(config, folder, spec, tokenizer, source, held_out, objective, going, changes)
    _check_checkpoints(run)
    return run


def _objective(config: RunConfig, spec: ModelSpec, source: BatchSource, tokenizer: Tokenizer) -> Objective | None:
    """What the text is made into; None: it is trained on as it is. JinguError where the model cannot be."""
    settings = config.data.objective
    reads = isinstance(settings, FOR_ENCODERS)
    if reads != (spec.encoder_layers is not None):
        raise JinguError(
            f"{spec.family} has {'no' if reads else 'an'} encoder, and {settings.type} gives "
            f"{'it a' if reads else 'that no'} source to read.",
            where="data.objective.type",
            fix=f"Set it to {'causal' if reads else 'span_corruption'}, or choose a model.family "
            f"{'with' if reads else 'without'} an encoder ({'t5' if reads else 'llama'}).",
        )
    return plan_objective(config, source, tokenizer)


def _held_out(config: RunConfig, spec: ModelSpec, places: Sequence[Path]) -> HeldOut | None:
    """What evaluations read, of all data sets. JinguError where it does not fill one row of an encoder."""
    if not (config.evaluation.every and config.data.held_out):
        return None
    text, length, rows = joined([open_dataset(at, "held_out") for at in places]), config.batch.sequence_length, None
    if isinstance(settings := config.data.objective, SupervisedSettings):
        rows = join_rows([open_supervised(at, "held_out", settings, config.batch, config.seed) for at in places])
    if spec.encoder_layers is not None and text.tokens < length:
        raise JinguError(
            f"the data set holds {text.tokens:,} tokens out, which do not fill one sequence of {length:,}.",
            where=config.data.path,
            fix="Build it with a larger data.held_out, set batch.sequence_length lower, or evaluation.every to 0.",
        )
    return HeldOut(text, length, config.data.keeps_apart, rows, spec)


def _changes(folder: Path, config: RunConfig, allowed: Collection[str]) -> list[str]:
    """What has changed since the run was last started. Raises JinguError for what must not, unless it is allowed."""
    stored = folder / "config.yaml"
    if not stored.exists():
        return []
    before = load_config(stored, [])
    harmful = harmful_differences(before, config, allowed)
    if harmful:
        keys = " ".join(f"--allow {text.partition(':')[0]}" for text in harmful)
        raise JinguError(
            f"this run was started with another configuration: {'; '.join(harmful)}.",
            where=folder,
            fix="Going on would mix two runs. Choose another name (name=...), delete the folder to start over, or, "
            f"where that is what you want, go on with {keys}.",
        )
    return list(differences(before, config).values())


def _check_prompts(config: RunConfig, spec: ModelSpec, tokenizer: Tokenizer) -> None:
    settings = config.evaluation
    for number, prompt in enumerate(settings.prompts if settings.every else []):
        size = len(encode_prompt(spec, tokenizer, prompt)) or 1
        if settings.prompt_tokens > room_after(spec, size):
            raise JinguError(
                f"the prompt has {size} tokens and {settings.prompt_tokens} more (evaluation.prompt_tokens) follow, "
                f"but the model's context is {spec.context} tokens.",
                where=f"evaluation.prompts[{number}]",
                fix="Shorten the prompt, lower evaluation.prompt_tokens, or raise model.context.",
            )


def _check_checkpoints(run: Run) -> None:
    """What the run has already been trained with must be what it goes on with."""
    steps = complete_steps(run.checkpoints)
    if steps and run.config.checkpoint.resume == "never":
        raise JinguError(
            f"the run has a checkpoint at step {steps[-1]}, and checkpoint.resume is never.",
            where=run.folder,
            fix="Set checkpoint.resume=auto to go on, or choose another name (name=...).",
        )
    for step in reversed(steps):
        try:
            state = read_state(step_folder(run.checkpoints, step))
        except CheckpointError:
            continue  # a damaged one is passed over when the run resumes
        if state["data"] != run.data_receipt and not run.going.other_samples:
            raise JinguError(
                f"the run was trained until step {step} on another data set than the one in "
                f"{', '.join(str(each.dataset.path) for each in run.source.sources)}.",
                where=run.folder,
                fix="Put that data set back, start a new run (name=...), or go on all the same with --allow data.",
            )
        return


@contextmanager
def held(run: Run) -> Iterator[None]:
    """Make the run's folder and keep other processes from training the same run, while inside.

    Raises:
        JinguError: the folder cannot be made, or another process trains the run.
    """
    try:
        run.folder.mkdir(parents=True, exist_ok=True)
        if isinstance(run.checkpoints, Path):
            run.checkpoints.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(error, run.folder) from error
    fix = "Wait for it, stop it, or choose another name (name=...)."
    with files.locked(run.folder, "another process is training this run now.", fix):
        yield


def write_run(run: Run) -> None:
    """Write what belongs to the whole run into its folder: configuration, spec, tokenizer.

    Raises:
        JinguError: the folder cannot be written.
    """
    try:
        replace_text(run.folder / "config.yaml", dump_yaml(run.config))
        replace_text(run.folder / "model.json", run.spec.to_json())
        _copy_tokenizer(run)
    except OSError as error:
        raise cannot_write(error, run.folder) from error


def _copy_tokenizer(run: Run) -> None:
    tokenizer = run.folder / "tokenizer"
    if tokenizer.exists() and Tokenizer.load(tokenizer).fingerprint() == run.tokenizer.fingerprint():
        return
    with new_folder(tokenizer) as partial:
        run.tokenizer.save(partial)
        shutil.rmtree(tokenizer, ignore_errors=True)


def cannot_write(error: OSError, where: Path) -> JinguError:
    """The words for a run's file or folder that cannot be written."""
    return files.cannot_write(error, Path(error.filename or where), "choose another folder for runs (runs=...)")
