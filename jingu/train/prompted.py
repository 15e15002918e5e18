"""Prompt tokens in the rows of a batch. The same prompt stands before every document of a row, and is there once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from jingu.data.batch import IGNORED, Batch
from jingu.model.attention import SHARED
from jingu.model.spec import ModelSpec


def prompted(batch: Batch, spec: ModelSpec) -> Batch:
    """A batch with the prompt tokens of a model, of which none is trained to be predicted."""
    read, encoded = spec.prompts
    if read:
        before = {"tokens": [*spec.prompted(())], "labels": [IGNORED] * read, "positions": list(range(read))}
        before |= {"documents": [SHARED] * read, **dict.fromkeys(("reach", "weights", "noise"), [0] * read)}
        moved = {name: x + read for name in ("positions", "reach") if (x := getattr(batch, name)) is not None}
        batch = replace(batch, **moved)
        held = {name: getattr(batch, name) for name in before}
        longer: dict[str, Any] = {name: _before(x, before[name]) for name, x in held.items() if x is not None}
        batch = replace(batch, **longer)
    if encoded and batch.source is not None:
        tokens = torch.tensor([spec.prompted(row, encoder=True) for row in batch.source.tokens.tolist()])
        batch = replace(batch, source=replace(batch.source, tokens=tokens))
    return batch


def _before(x_BT: Tensor, values: list[int]) -> Tensor:
    return torch.cat([torch.tensor(values, dtype=x_BT.dtype).expand(*x_BT.shape[:-1], -1), x_BT], -1)
