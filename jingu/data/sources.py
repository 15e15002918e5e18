"""The data of a run: its sources opened, checked and mixed as `data` says."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from jingu.config.schema import RunConfig
from jingu.config.sections.data import (
    FOR_ENCODERS,
    BlockOrderSettings,
    DataSettings,
    SupervisedSettings,
    TargetFilesSettings,
)
from jingu.data.batches import BatchSource, Windows
from jingu.data.dataset import check_tokenizer, open_dataset
from jingu.data.drop import read_drop
from jingu.data.fill import plan_fill
from jingu.data.mixture import Mixture, plan_mixture
from jingu.data.packing import PackedRows
from jingu.data.supervised import open_supervised
from jingu.data.target_files import open_target_files
from jingu.errors import JinguError, counted
from jingu.text.corpus import checked_corpora
from jingu.text.tokenizer import Tokenizer

MANY_EPOCHS = 4
"""Text repeated more often than this teaches little more (Muennighoff et al., "Scaling Data-Constrained Language
Models", 2023)."""


def open_sources(config: RunConfig, tokenizer: Tokenizer) -> BatchSource:
    """Open the training split of every source of the run, and plan their mixture.

    Raises:
        JinguError: a data set is missing, damaged or of another tokenizer, the stages do not fit the sources, or
            the caps of epochs leave nothing to train on before the run's end.
    """
    data, batch = config.data, config.batch
    _check_packing(data)
    windows = [
        _opened(config, Path(source.path), config.seed + number, tokenizer)
        for number, source in enumerate(checked_corpora(data))
    ]
    dropped = read_drop(data.drop, [each.dataset for each in windows])
    mixture = mixture_of(config, windows)
    fill = plan_fill(data.objective, tokenizer, config.seed) if data.objective.type == "fill_in_the_middle" else None
    short = data.rows_alone and config.parallel.pipeline == 1  # the schedules know one shape
    source = BatchSource(tuple(windows), mixture, batch.global_size, data.keeps_apart, dropped, fill, short)
    samples = config.train.steps * batch.global_size
    if source.mixture.end is not None and source.mixture.end < samples:
        raise JinguError(
            f"every source has reached its cap of epochs at step {source.mixture.end // batch.global_size:,} of "
            f"{config.train.steps:,}.",
            where="data.sources",
            fix="Raise the sources' most_epochs, give more text, or set train.steps lower.",
        )
    return source


def _opened(config: RunConfig, path: Path, seed: int, tokenizer: Tokenizer) -> Windows | PackedRows:
    """A source's training split, in its order."""
    data, length, order = config.data, config.batch.sequence_length, config.data.order
    if isinstance(data.objective, TargetFilesSettings):
        return open_target_files(path, length, seed, data.reading, data.objective, tokenizer)
    if isinstance(data.objective, SupervisedSettings):
        rows = open_supervised(path, "train", data.objective, config.batch, seed)
        check_tokenizer(rows.dataset, tokenizer)
        return rows
    dataset = open_dataset(path, "train", data.reading, tokenizer.end_id)
    check_tokenizer(dataset, tokenizer)
    if data.packing == "best_fit":
        return PackedRows(dataset, length, seed)
    if isinstance(order, BlockOrderSettings):
        return Windows(dataset, length, seed, max(order.block_tokens // length, 1), order.open_blocks)
    return Windows(dataset, length, seed)


def mixture_of(config: RunConfig, windows: Sequence[Windows | PackedRows]) -> Mixture:
    """The mixture that the settings say, for sources with so many windows."""
    data = config.data
    sources = data.corpora
    stages = [(stage.from_step, stage.weights) for stage in data.stages]
    if not stages or stages[0][0] > 0:
        stages = [(0, [source.weight for source in sources]), *stages]
    _check_stages(stages, len(sources))
    factors = [1.0] * len(sources)
    if data.temperature is not None:
        largest = max(len(each) for each in windows)
        factors = [(len(each) / largest) ** (1 / data.temperature) for each in windows]
    caps = [
        None if source.most_epochs is None else math.ceil(source.most_epochs * len(each))
        for source, each in zip(sources, windows, strict=True)
    ]
    return plan_mixture(
        [
            (
                step * config.batch.global_size,
                [weight * factor for weight, factor in zip(weights, factors, strict=True)],
            )
            for step, weights in stages
        ],
        caps,
    )


def epochs_used(config: RunConfig, source: BatchSource) -> list[tuple[str, float, float]]:
    """For each source its name, its share of the run's samples, and how often its text is used."""
    samples = config.train.steps * config.batch.global_size
    counts = source.mixture.counts(samples)
    names = [Path(each.path).name for each in config.data.corpora]
    return [
        (name, count / samples, count / len(windows))
        for name, count, windows in zip(names, counts, source.sources, strict=True)
    ]


def _check_packing(data: DataSettings) -> None:
    packed = data.packing == "best_fit"
    if isinstance(data.objective, FOR_ENCODERS) and (packed or data.within_documents):
        what = f"{data.objective.type} takes every text whole, without a mask between documents."
        raise JinguError(what, where="data.objective", fix="Set data.packing=cut and data.within_documents=false.")
    if packed and data.objective.type == "fill_in_the_middle":
        what = "fill-in-the-middle makes documents longer than packing has room for."
        raise JinguError(what, where="data.objective", fix="Set data.packing=cut.")
    if packed and data.order.type == "blocks":
        what = "packed documents have no order in blocks."
        raise JinguError(what, where="data.order", fix="Set data.order.type=full, or data.packing=cut.")


def _check_stages(stages: list[tuple[int, list[float]]], sources: int) -> None:
    steps = [step for step, _ in stages]
    if steps != sorted(set(steps)):
        raise JinguError("the stages must begin at later and later steps.", where="data.stages")
    for step, weights in stages:
        if len(weights) != sources:
            raise JinguError(
                f"from step {step} on, {counted(len(weights), 'weight')} for {counted(sources, 'source')}.",
                where="data.stages",
                fix="Give one for each of data.sources, in their order; 0 leaves a source out.",
            )
        if not any(weights):
            raise JinguError(f"from step {step} on every weight is 0.", where="data")
