"""The validation split of a run's data sets, as rows to evaluate on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from jingu.config.schema import RunConfig
from jingu.config.sections.data import SupervisedSettings
from jingu.data.batch import IGNORE_INDEX, Batch
from jingu.data.dataset import TokenDataset, concatenate_datasets, open_dataset
from jingu.data.objective import Objective
from jingu.data.row_sources import count_validation_windows, validation_batch
from jingu.data.supervised import SupervisedDataset, concatenate_supervised, open_supervised
from jingu.errors import JinguError
from jingu.model.spec import ModelSpec
from jingu.training.batch_transforms import prepend_virtual_tokens


@dataclass(frozen=True)
class ValidationRows:
    """Rows that together predict each validation token once; for an encoder, the whole windows of the text.

    Attributes:
        document_mask: whether attention stays inside documents.
        supervised: the rows of a supervised objective.
        spec: spec of the model that the rows are for.
    """

    dataset: TokenDataset
    sequence_length: int
    document_mask: bool
    supervised: SupervisedDataset | None
    spec: ModelSpec
    objective: Objective | None = None

    @property
    def has_encoder_inputs(self) -> bool:
        """Whether an encoder reads a part of each row."""
        return self.objective is not None and self.objective.source_length > 0

    def __len__(self) -> int:
        if self.supervised is not None:
            return len(self.supervised)
        if self.has_encoder_inputs:
            return self.dataset.tokens // self.sequence_length
        return count_validation_windows(self.dataset, self.sequence_length)

    def batch(self, first: int, count: int, end: int) -> Batch:
        """Return rows [first, first + count); rows from `end` on are padding, without labels."""
        if self.supervised is not None:
            batch = self.supervised.batch(first, count)
        else:
            batch = validation_batch(self.dataset, self.sequence_length, first, count, document_mask=self.document_mask)
        if self.has_encoder_inputs:
            # The labels of a window are its text. Beyond the last whole window there are none.
            batch = replace(batch, tokens=batch.labels.clamp_min(0))
        if self.objective is not None:
            batch = self.objective.apply(batch, first)
        batch.labels[max(0, end - first) :] = IGNORE_INDEX
        return prepend_virtual_tokens(batch, self.spec)


def open_validation(
    config: RunConfig, spec: ModelSpec, paths: Sequence[Path], objective: Objective | None
) -> ValidationRows | None:
    """Open the validation split of all data sets; None where the run never evaluates or has no such split.

    Raises:
        JinguError: the split does not fill one row of an encoder.
    """
    if not (config.evaluation.every and config.data.validation_fraction):
        return None
    dataset = concatenate_datasets([open_dataset(path, "validation") for path in paths])
    length, settings = config.batch.sequence_length, config.data.objective
    supervised = None
    if isinstance(settings, SupervisedSettings):
        supervised = concatenate_supervised(
            [open_supervised(path, "validation", settings, config.batch, config.seed) for path in paths]
        )
    if spec.num_encoder_layers is not None and dataset.tokens < length:
        raise JinguError(
            f"the validation split has {dataset.tokens:,} tokens, fewer than one sequence of {length:,}.",
            where=config.data.path,
            fix="Rebuild the data set with a larger data.validation_fraction, lower batch.sequence_length, or set "
            "evaluation.every to 0.",
        )
    return ValidationRows(dataset, length, config.data.separates_documents, supervised, spec, objective)
