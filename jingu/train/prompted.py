"""Prompt tokens in the rows of a batch. The same prompt stands before every document of a row, and is there once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from jingu.data.batch import IGNORED, Batch
from jingu.model.attention import SHARED
from jingu.model.spec import ModelSpec, SoftPrompt


def prompted(batch: Batch, spec: ModelSpec) -> Batch:
    """A batch with the prompt tokens of a model, of which none is trained to be predicted."""
    read, encoded = spec.prompts
    if read:
        before = {"tokens": prompt_ids(spec, read), "labels": [IGNORED] * read, "positions": list(range(read))}
        before |= {"documents": [SHARED] * read, **dict.fromkeys(("reach", "weights", "noise"), [0] * read)}
        moved = {name: x + read for name in ("positions", "reach") if (x := getattr(batch, name)) is not None}
        batch = replace(batch, **moved)
        held = {name: getattr(batch, name) for name in before}
        longer: dict[str, Any] = {name: _before(x, before[name]) for name, x in held.items() if x is not None}
        batch = replace(batch, **longer)
    if encoded and batch.source is not None:
        tokens, ids = batch.source.tokens, prompt_ids(spec, encoded)
        behind = isinstance(spec.adapter, SoftPrompt) and spec.adapter.behind
        tokens = _before(tokens.flip(1), ids[::-1]).flip(1) if behind else _before(tokens, ids)
        batch = replace(batch, source=replace(batch.source, tokens=tokens))
    return batch


def prompt_ids(spec: ModelSpec, count: int) -> list[int]:
    """Ids of so many prompt tokens."""
    return list(range(spec.vocabulary, spec.vocabulary + count))


def _before(x_BT: Tensor, values: list[int]) -> Tensor:
    return torch.cat([torch.tensor(values, dtype=x_BT.dtype).expand(*x_BT.shape[:-1], -1), x_BT], -1)
