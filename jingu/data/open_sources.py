"""Open the data of a run: check its sources, and mix them by the settings of the `data` section."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from jingu.config.schema import RunConfig
from jingu.config.sections.data import (
    ENCODER_OBJECTIVES,
    BlockOrderSettings,
    DataSettings,
    PreferenceSettings,
    RowSettings,
    TargetFilesSettings,
)
from jingu.config.sections.policies import RolloutSettings
from jingu.config.sections.train import BatchSettings
from jingu.data.dataset import check_tokenizer, open_dataset
from jingu.data.dataset_manifest import SplitName
from jingu.data.dropped_documents import load_dropped_documents
from jingu.data.fill_in_the_middle import build_fill_in_the_middle
from jingu.data.indexed_dataset import IndexedReader
from jingu.data.mixture import Mixture, MixtureDataset, plan_mixture
from jingu.data.preference_data import PreferenceDataset
from jingu.data.row_sources import PackedDataset, WindowDataset
from jingu.data.supervised import SupervisedDataset
from jingu.data.target_files import open_target_files
from jingu.errors import JinguError, pluralize
from jingu.text.build_record import refuse_changes
from jingu.text.corpus import validate_sources
from jingu.text.identity import content_settings
from jingu.text.tokenizer import Tokenizer

# Text repeated more often teaches little more (Muennighoff et al., "Scaling Data-Constrained Language Models", 2023).
MAX_USEFUL_EPOCHS = 4


def open_supervised(
    path: Path, split: SplitName, objective: RowSettings, batch: BatchSettings, seed: int
) -> SupervisedDataset:
    """Open a data set that `jingu tune prepare` or `jingu align prepare` made in `path`.

    Raises:
        JinguError: it is missing, or was made with other settings.
    """
    dataset = open_dataset(path, split, build_command=objective.BUILD_COMMAND)
    stored_settings = dataset.manifest.settings
    old = {
        **stored_settings.get("objective", {"type": "causal"}),
        "sequence_length": stored_settings.get("sequence_length"),
    }
    new = {**content_settings(objective), "sequence_length": batch.sequence_length}
    fix = f"Delete the folder and run `jingu {objective.BUILD_COMMAND}`, or set data.path to another folder."
    refuse_changes(old, new, "the data set here was made", path, fix)
    weights = [IndexedReader(path / entry.name).storage for entry in dataset.manifest.split(split).sidecars]
    # Validation reads every row once, in any order, for which packing is fastest. But some preference tasks read one
    # answer per row.
    is_preference = isinstance(objective, PreferenceSettings)
    is_packed = objective.packing == "packed" or (split == "validation" and not is_preference)
    group_size = None
    if objective.packing == "group_by_length" and not is_packed:
        group_size = batch.global_batch_size
    dataset_type = PreferenceDataset if is_preference else SupervisedDataset
    return dataset_type(
        dataset, batch.sequence_length, seed, replace(dataset, shards=weights, vocab_size=0), is_packed, group_size
    )


def open_sources(config: RunConfig, tokenizer: Tokenizer) -> MixtureDataset:
    """Open the training split of every source of the run, and plan their mixture.

    Raises:
        JinguError: a data set is missing, damaged or of another tokenizer, the stages do not match the sources, or the
            sources reach their maximum of epochs before the run ends.
    """
    if isinstance(config.task, RolloutSettings):
        # The run trains on answers that the model generates; its prompts are not a data set.
        return MixtureDataset((), Mixture((), None), config.batch.global_batch_size)
    data = config.data
    _check_packing(data)
    # Each source has its own seed, so that two sources of the same size have different orders.
    sources = [
        _open_source(config, Path(source.path), config.seed + number, tokenizer)
        for number, source in enumerate(validate_sources(data))
    ]
    fill_in_the_middle = None
    if data.objective.type == "fill_in_the_middle":
        fill_in_the_middle = build_fill_in_the_middle(data.objective, tokenizer, config.seed)
    dataset = MixtureDataset(
        tuple(sources),
        build_mixture(config, sources),
        config.batch.global_batch_size,
        data.separates_documents,
        load_dropped_documents(data.drop, [source.dataset for source in sources]),
        fill_in_the_middle,
        # Pipeline schedules need micro-batches of equal shapes.
        trim_padding=data.has_single_row_sequences and config.parallel.pipeline == 1,
    )
    end = dataset.mixture.end
    if end is not None and end < config.train.steps * config.batch.global_batch_size:
        raise JinguError(
            f"every source reaches its maximum of epochs at step {end // config.batch.global_batch_size:,} of "
            f"{config.train.steps:,}.",
            where="data.sources",
            fix="Raise the sources' max_epochs, add text, or set train.steps lower.",
        )
    return dataset


def _open_source(config: RunConfig, path: Path, seed: int, tokenizer: Tokenizer) -> WindowDataset | PackedDataset:
    """Open a source's training split in the order of the run."""
    data = config.data
    length = config.batch.sequence_length
    if isinstance(data.objective, TargetFilesSettings):
        return open_target_files(path, length, seed, data.reader, data.objective, tokenizer)
    if isinstance(data.objective, RowSettings):
        rows = open_supervised(path, "train", data.objective, config.batch, seed)
        check_tokenizer(rows.dataset, tokenizer)
        return rows
    dataset = open_dataset(path, "train", data.reader, tokenizer.eos_token_id)
    check_tokenizer(dataset, tokenizer)
    # Data sets that other tools wrote do not store the size of their vocabulary.
    dataset = replace(dataset, vocab_size=tokenizer.vocab_size)
    if data.packing == "best_fit":
        return PackedDataset(dataset, length, seed)
    if isinstance(data.order, BlockOrderSettings):
        block_windows = max(data.order.block_tokens // length, 1)
        return WindowDataset(dataset, length, seed, block_windows, data.order.open_blocks)
    return WindowDataset(dataset, length, seed)


def build_mixture(config: RunConfig, sources: Sequence[WindowDataset | PackedDataset]) -> Mixture:
    """Plan the mixture that the settings describe. Raises JinguError for stages that do not match the sources."""
    data = config.data
    stages = [(stage.start_step, stage.weights) for stage in data.stages]
    if not stages or stages[0][0] > 0:
        stages = [(0, [source.weight for source in data.all_sources]), *stages]
    _check_stages(stages, len(sources))
    # With a temperature T, each weight is scaled by size^(1 / T), relative to the largest source.
    factors = [1.0] * len(sources)
    if data.temperature is not None:
        largest = max(len(source) for source in sources)
        factors = [(len(source) / largest) ** (1 / data.temperature) for source in sources]
    scaled_stages = []
    for step, weights in stages:
        scaled_weights = [weight * factor for weight, factor in zip(weights, factors, strict=True)]
        scaled_stages.append((step * config.batch.global_batch_size, scaled_weights))
    max_samples = [
        None if settings.max_epochs is None else math.ceil(settings.max_epochs * len(source))
        for settings, source in zip(data.all_sources, sources, strict=True)
    ]
    return plan_mixture(scaled_stages, max_samples)


def count_epochs(config: RunConfig, dataset: MixtureDataset) -> list[tuple[str, float, float]]:
    """Return for each source its name, its share of the run's samples, and the epochs that the run takes of it."""
    if not dataset.sources:
        return []
    samples = config.train.steps * config.batch.global_batch_size
    paths = [Path(source.path) for source in config.data.all_sources]
    last_parts = [path.name for path in paths]
    names = [path.name if last_parts.count(path.name) == 1 else str(path) for path in paths]
    return [
        (name, count / samples, count / len(source))
        for name, count, source in zip(names, dataset.mixture.counts(samples), dataset.sources, strict=True)
    ]


def _check_packing(data: DataSettings) -> None:
    """Raise JinguError for settings that contradict each other."""
    is_packed = data.packing == "best_fit"
    if isinstance(data.objective, ENCODER_OBJECTIVES) and (is_packed or data.document_mask):
        what = f"{data.objective.type} takes every text whole, without a mask between documents."
        raise JinguError(what, where="data.objective", fix="Set data.packing=concat and data.document_mask=false.")
    if is_packed and data.objective.type == "fill_in_the_middle":
        what = "fill-in-the-middle makes documents longer than the room that best-fit packing gives them."
        raise JinguError(what, where="data.objective", fix="Set data.packing=concat.")
    if is_packed and data.order.type == "blocks":
        what = "packed documents cannot be ordered in blocks."
        raise JinguError(what, where="data.order", fix="Set data.order.type=full, or data.packing=concat.")


def _check_stages(stages: list[tuple[int, list[float]]], num_sources: int) -> None:
    """Raise JinguError for stages out of order, or with weights that do not match the sources."""
    steps = [step for step, _ in stages]
    if steps != sorted(set(steps)):
        raise JinguError("each stage must start at a later step than the one before.", where="data.stages")
    for step, weights in stages:
        if len(weights) != num_sources:
            raise JinguError(
                f"the stage from step {step} has {pluralize(len(weights), 'weight')} for "
                f"{pluralize(num_sources, 'source')}.",
                where="data.stages",
                fix="Give one weight for each of data.sources, in their order; 0 leaves a source out.",
            )
        if not any(weights):
            raise JinguError(f"every weight of the stage from step {step} is 0.", where="data")
