"""The validation splits of a run's sources, as rows for evaluation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from jingu.config.schema import RunConfig
from jingu.config.sections.data import RowSettings
from jingu.data.batch import IGNORE_INDEX, Batch
from jingu.data.dataset import TokenDataset, open_dataset
from jingu.data.mixture import MixtureDataset
from jingu.data.objective import Objective
from jingu.data.open_sources import count_epochs, open_supervised
from jingu.data.row_sources import count_validation_windows, validation_batch
from jingu.data.supervised import SupervisedDataset
from jingu.errors import JinguError
from jingu.model.spec import ModelSpec
from jingu.training.batch_transforms import prepend_virtual_tokens


@dataclass(frozen=True)
class ValidationRows:
    """Validation rows of one source.

    Together they predict each token of the split once. For objectives with an encoder, they are the whole windows of
    the split.

    Attributes:
        name: name of the source.
        share: share of the run's samples that come from the source.
        dataset: the validation split.
        document_mask: whether attention stays within documents.
        supervised_rows: the rows of a supervised objective; None for text.
        spec: spec of the model, whose virtual tokens are added to the rows.
        objective: transforms the rows; None: every token predicts the next one.
    """

    name: str
    share: float
    dataset: TokenDataset
    sequence_length: int
    document_mask: bool
    supervised_rows: SupervisedDataset | None
    spec: ModelSpec
    objective: Objective | None = None

    @property
    def has_encoder_inputs(self) -> bool:
        """Whether an encoder reads a part of each row."""
        return self.objective is not None and self.objective.source_length > 0

    def __len__(self) -> int:
        if self.supervised_rows is not None:
            return len(self.supervised_rows)
        if self.has_encoder_inputs:
            return self.dataset.tokens // self.sequence_length
        return count_validation_windows(self.dataset, self.sequence_length)

    def count(self, limit: int | Literal["all"]) -> int:
        """Return the number of these rows that an evaluation reads: its share of `limit`, at least 1.

        Args:
            limit: number of rows over all sources.
        """
        return len(self) if limit == "all" else min(max(round(limit * self.share), 1), len(self))

    def batch(self, first: int, count: int, end: int) -> Batch:
        """Return rows [first, first + count). Rows from `end` on are padding without labels."""
        if self.supervised_rows is not None:
            batch = self.supervised_rows.batch(first, count)
        else:
            batch = validation_batch(self.dataset, self.sequence_length, first, count, document_mask=self.document_mask)
        if self.has_encoder_inputs and self.supervised_rows is None:
            # The objective reads the text of a window from its tokens: replace them by the labels, which are the text.
            # Positions after the end of the split have no labels (-100).
            batch = replace(batch, tokens=batch.labels.clamp_min(0))
        if self.objective is not None:
            batch = self.objective.apply(batch, first)
        batch.labels[max(0, end - first) :] = IGNORE_INDEX
        return prepend_virtual_tokens(batch, self.spec)


def open_validation(
    config: RunConfig, spec: ModelSpec, source: MixtureDataset, objective: Objective | None
) -> tuple[ValidationRows, ...]:
    """Open the validation split of each source that the run trains on; empty if the run never evaluates.

    Raises:
        JinguError: a data set has no validation split, or no split fills a row of an encoder.
    """
    if not source.sources:
        return ()
    data, length = config.data, config.batch.sequence_length
    validation = []
    for settings, part, (name, share, _) in zip(
        data.all_sources, source.sources, count_epochs(config, source), strict=True
    ):
        if not (config.evaluation.every and data.for_source(settings).validation_fraction and share):
            continue
        path = part.dataset.path
        dataset = open_dataset(path, "validation")
        supervised_rows = None
        if isinstance(data.objective, RowSettings):
            supervised_rows = open_supervised(path, "validation", data.objective, config.batch, config.seed)
        rows = ValidationRows(name, share, dataset, length, data.separates_documents, supervised_rows, spec, objective)
        if len(rows):
            validation.append(rows)
            continue
        what = f"the validation split has {dataset.tokens:,} tokens, fewer than one sequence of {length:,}."
        fix = "Rebuild the data set with a larger data.validation_fraction, or lower batch.sequence_length."
        raise JinguError(what, where=path, fix=fix)
    return tuple(validation)
