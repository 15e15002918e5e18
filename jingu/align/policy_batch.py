"""Batches of answers to train on. Prompts are shared: all answers to a prompt follow a single copy of it in one row.

Shapes: R answers, A tokens of the longest one, B rows, T tokens of a row.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from jingu.align.rollouts import Sample
from jingu.config.sections.policies import PolicySettings
from jingu.data.batch import IGNORE_INDEX, Batch

# Rows are padded to a multiple of this many tokens, so that the result of a matmul for one token does not depend on
# the number of tokens.
_LENGTH_MULTIPLE = 16


@dataclass(frozen=True)
class PolicyBatch(Batch):
    """Answers, with the values [R, A] that the loss needs for each token; 0 after the end of an answer.

    Only the model's own tokens count as tokens of an answer here, not the replies of an environment.

    Attributes:
        places: [R, A] index in the flattened rows of the position that predicts a token; -1 after the end of an answer.
        advantages: advantage of each token.
        sampled: log-probabilities during generation.
        old: log-probabilities before the first update of the step; None: use those of this forward pass.
        reference: log-probabilities under the reference model; None if there is none.
        values: predictions of the critic before the first update of the step; None if there is no critic.
        returns: targets of the critic; NaN where unknown.
    """

    places: Tensor | None = None
    advantages: Tensor | None = None
    sampled: Tensor | None = None
    old: Tensor | None = None
    reference: Tensor | None = None
    values: Tensor | None = None
    returns: Tensor | None = None

    @property
    def mask(self) -> Tensor:
        """[R, A] whether there is a token, as opposed to padding after the end of an answer."""
        assert self.places is not None
        return self.places >= 0

    def by_answer(self, values_BT: Tensor) -> Tensor:
        """Select the values [R, A] of the answers' tokens from the values of all positions; 0 for padding."""
        assert self.places is not None
        return values_BT.flatten()[self.places.clamp_min(0)].where(self.mask, 0.0)


def row_length(samples: Iterable[Sample]) -> int:
    """Return the tokens of a row with these answers, in which neighbors with equal prompts share one copy of it."""
    total, prompt_ids = 0, None
    for sample in samples:
        if sample.prompt_ids != prompt_ids:
            prompt_ids = sample.prompt_ids
            total += len(prompt_ids) - 1
        total += len(sample.ids)
    return total


def make_policy_batch(
    samples: Sequence[Sample], columns: Mapping[str, Tensor], length: int, *, shares_prompts: bool
) -> PolicyBatch:
    """Return a batch of answers.

    Args:
        columns: fields of `PolicyBatch` [R, A]; A may also be that of longer answers.
        length: minimum tokens of a row; rows are padded at the end.
        shares_prompts: put all answers into one row, where neighbors with equal prompts share one copy of it;
            otherwise each answer has a row of its own.
    """
    # 1. Tokens, and the position that predicts each answer's first token: the last token of its prompt, of which every
    # answer has its own copy.
    pieces: list[_Piece] = []
    starts: list[int] = []
    length += -length % _LENGTH_MULTIPLE
    if shares_prompts:
        pieces, starts = _share_prompts(samples)
        rows = 1
    else:
        rows = len(samples)
        for index, sample in enumerate(samples):
            ids = (*sample.prompt_ids, *sample.ids)[:-1]
            pieces.append(_Piece(index * length, ids))
            starts.append(index * length + len(sample.prompt_ids) - 1)
    tokens_N = torch.zeros(rows * length, dtype=torch.int64)
    positions_N, documents_N, parents_N = torch.zeros_like(tokens_N), tokens_N - 1, tokens_N - 1
    for number, piece in enumerate(pieces):
        place = slice(piece.start, piece.start + len(piece.ids))
        tokens_N[place] = torch.tensor(piece.ids)
        positions_N[place] = torch.arange(piece.position, piece.position + len(piece.ids))
        documents_N[place] = number
        parents_N[place] = piece.parent

    # 2. Labels, and the columns without what only longer answers need.
    shape = len(samples), max(len(sample.logprobs) for sample in samples)
    places_RA = torch.full(shape, -1)
    labels_N = torch.full_like(tokens_N, IGNORE_INDEX)
    values: dict[str, Any] = {name: value_RA[:, : shape[1]].contiguous() for name, value_RA in columns.items()}
    for index, sample in enumerate(samples):
        own_tokens = torch.tensor(sample.own)
        places_RA[index, : len(own_tokens)] = starts[index] + own_tokens
        labels_N[starts[index] + own_tokens] = torch.tensor(sample.ids)[own_tokens]
    fields: dict[str, Any] = {"tokens": tokens_N, "labels": labels_N}
    if shares_prompts:
        fields |= {"positions": positions_N, "documents": documents_N, "parents": parents_N}
    fields = {name: value_N.view(rows, length) for name, value_N in fields.items()}
    return PolicyBatch(**fields, **values, places=places_RA)


def longest_batch(
    settings: PolicySettings, sequence_length: int, count: int, *, shares_prompts: bool = True
) -> PolicyBatch:
    """Return a batch of `count` answers of zeros, of the maximum length, to measure its memory or compile for it."""
    num_new = min(settings.max_new_tokens, sequence_length)
    num_prompt = sequence_length + 1 - num_new
    zeros = (0.0,) * num_new
    # Groups must have different prompts, or they would share one copy.
    prompts = [(index // settings.answers_per_prompt % 2,) * num_prompt for index in range(count)]
    samples = [Sample("", 0, 0, prompt, (0,) * num_new, zeros, "", "") for prompt in prompts]
    zero_RA = torch.zeros(count, num_new, dtype=torch.float64)
    columns = dict.fromkeys(("advantages", "sampled", "reference", "values", "returns"), zero_RA)
    length = row_length(samples) if shares_prompts else sequence_length
    return make_policy_batch(samples, columns, length, shares_prompts=shares_prompts)


@dataclass(frozen=True)
class _Piece:
    """A run of token ids in the flattened rows.

    Attributes:
        start: index of the first id in the flattened rows.
        position: position (for the position embedding) of the first id.
        parent: index of the piece that this one continues and attends to; -1 for none.
    """

    start: int
    ids: Sequence[int]
    position: int = 0
    parent: int = -1


def _share_prompts(samples: Sequence[Sample]) -> tuple[list[_Piece], list[int]]:
    """Return prompts and answers as pieces of one row, and the start of each answer: its copy of the prompt's last
    token."""
    pieces: list[_Piece] = []
    starts: list[int] = []
    start, parent = 0, 0
    for index, sample in enumerate(samples):
        *prompt, last = sample.prompt_ids
        if index == 0 or sample.prompt_ids != samples[index - 1].prompt_ids:
            parent = len(pieces)
            pieces.append(_Piece(start, prompt, 0, parent))
            start += len(prompt)
        pieces.append(_Piece(start, (last, *sample.ids[:-1]), len(prompt), parent))
        starts.append(start)
        start += len(sample.ids)
    return pieces, starts
