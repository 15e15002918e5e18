"""Sampling of many sequences at once, where their logits are: the host waits for the card once, for the tokens.

The distribution is that of `jingu.infer.sampling`, which draws an exponential time for each token of the vocabulary. So
many random numbers for every sequence would have to be copied to the card; here one uniform number for each picks its
token by the cumulative probabilities.

Shapes: N rows of logits, V vocabulary, M rows with a grammar.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from jingu.infer.sampling import SamplingParams
from jingu.runtime.device import copy_to_device


@dataclass(frozen=True)
class SamplingRow:
    """What decides the token that follows one row of logits.

    Attributes:
        prompt: ids of the prompt, which the repetition penalty counts.
        output: ids generated so far.
        uniform: random number in [0, 1).
        forbidden: ids that may not follow.
        bitmask: a bit for each token that the grammar allows, in 32-bit words on the host; None: all are allowed.
        num_logprobs: how many likely tokens' log-probabilities are needed beside the token's own; None: not even that.
        logprob_temperature: divides the logits of which these are.
    """

    params: SamplingParams
    prompt: Sequence[int]
    output: Sequence[int]
    uniform: float = 0.0
    forbidden: tuple[int, ...] = ()
    bitmask: Tensor | None = None
    num_logprobs: int | None = None
    logprob_temperature: float = 1.0


@dataclass(frozen=True)
class SampledToken:
    """A token that was sampled.

    Attributes:
        is_finite: whether the logits are; if not, the token means nothing.
        logprob: None if it was not asked for.
        top: the most likely tokens with their log-probabilities, best first.
    """

    token_id: int
    is_finite: bool
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


def sample_rows(logits_NV: Tensor, rows: Sequence[SamplingRow]) -> list[SampledToken]:
    """Return the token that follows each row."""
    changed_NV = _mask_by_grammars(_apply_penalties(logits_NV.clone(), rows), rows)
    # NaN and +inf fail this test; so does a row in which every token is forbidden.
    is_finite_N = changed_NV.amax(1).isfinite()
    token_N = changed_NV.argmax(1)
    if any(row.params.temperature for row in rows):
        token_N = _draw(changed_NV, token_N, rows)
    # All that the host needs travels in one table.
    wide = _widest(logits_NV)
    columns = [token_N.unsqueeze(1).to(wide), is_finite_N.unsqueeze(1).to(wide)]
    most = max((row.num_logprobs for row in rows if row.num_logprobs is not None), default=None)
    if most is not None:
        temperatures = [[row.logprob_temperature] for row in rows]
        logprob_NV = (logits_NV / copy_to_device(temperatures, logits_NV.device, logits_NV.dtype)).log_softmax(1)
        top = logprob_NV.topk(min(most, logprob_NV.shape[1]), dim=1)
        columns += [logprob_NV.gather(1, token_N.unsqueeze(1)).to(wide), top.indices.to(wide), top.values.to(wide)]
    return [_read(row, values) for row, values in zip(rows, torch.cat(columns, 1).tolist(), strict=True)]


def _read(row: SamplingRow, values: list[float]) -> SampledToken:
    """Return the token of one row of the table."""
    token_id, is_finite, *others = values
    if row.num_logprobs is None:
        return SampledToken(int(token_id), bool(is_finite))
    logprob, *tops = others
    half = len(tops) // 2
    top = [(int(token), value) for token, value in zip(tops[:half], tops[half:], strict=True)]
    return SampledToken(int(token_id), bool(is_finite), logprob, tuple(top[: row.num_logprobs]))


def _widest(like: Tensor) -> torch.dtype:
    return torch.float32 if like.device.type == "mps" else torch.float64  # Apple's GPUs have no fp64


def _apply_penalties(logits_NV: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Apply bias and penalties in place, in the order of `sampling.apply_penalties`."""
    biases = [(n, token, value) for n, row in enumerate(rows) for token, value in row.params.logit_bias.items()]
    _add(logits_NV, biases)
    repeated = [
        (n, token, row.params.repetition_penalty)
        for n, row in enumerate(rows)
        if row.params.repetition_penalty != 1.0
        for token in {*row.prompt, *row.output}
    ]
    if repeated:
        where, penalty = _entries(logits_NV, repeated)
        old = logits_NV[where]
        logits_NV.index_put_(where, torch.where(old < 0, old * penalty, old / penalty))
    counted = [
        (n, token, -row.params.presence_penalty - row.params.frequency_penalty * count)
        for n, row in enumerate(rows)
        if row.params.presence_penalty or row.params.frequency_penalty
        for token, count in Counter(row.output).items()
    ]
    _add(logits_NV, counted)
    _add(logits_NV, [(n, token, -torch.inf) for n, row in enumerate(rows) for token in row.forbidden])
    return logits_NV


def _add(logits_NV: Tensor, entries: Sequence[tuple[int, int, float]]) -> None:
    if entries:
        where, values = _entries(logits_NV, entries)
        logits_NV.index_put_(where, logits_NV[where] + values)


def _entries(logits_NV: Tensor, entries: Iterable[tuple[int, int, float]]) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Return row and token of each entry, and its value, on the card."""
    row, token, value = zip(*entries, strict=True)
    row_E, token_E = copy_to_device([row, token], logits_NV.device)
    return (row_E, token_E), copy_to_device(value, logits_NV.device, logits_NV.dtype)


def _mask_by_grammars(logits_NV: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    masks = {number: row.bitmask for number, row in enumerate(rows) if row.bitmask is not None}
    if not masks:
        return logits_NV
    bits_MW = torch.cat(list(masks.values())).to(logits_NV.device, non_blocking=True)
    shift = torch.arange(32, dtype=torch.int32, device=logits_NV.device)
    allowed_MV = (bits_MW.unsqueeze(2) >> shift & 1).flatten(1)[:, : logits_NV.shape[1]]
    rows_M = copy_to_device(list(masks), logits_NV.device)
    masked_MV = logits_NV.index_select(0, rows_M).masked_fill(allowed_MV == 0, -torch.inf)
    return logits_NV.index_copy(0, rows_M, masked_MV)


def _draw(logits_NV: Tensor, greedy_N: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Return the sampled token of each row; the most likely one where the temperature is 0."""
    size = logits_NV.shape[1]
    settings = [
        (row.params.temperature, row.params.top_k or size, row.params.top_p, row.params.min_p, row.uniform)
        for row in rows
    ]
    wide = _widest(logits_NV)
    # Each [N, 1].
    temperature, top_k, top_p, min_p, uniform = copy_to_device(settings, logits_NV.device, wide).split(1, 1)
    scaled_NV = logits_NV / temperature.where(temperature > 0, 1.0).to(logits_NV.dtype)
    order_NV = None
    if any(row.params.top_k is not None or row.params.top_p < 1 for row in rows):
        # In ascending order; one token always stays.
        scaled_NV, order_NV = scaled_NV.sort(1)
        threshold_N1 = scaled_NV.gather(1, (size - top_k.long()).clamp_min(0))
        scaled_NV = scaled_NV.masked_fill(scaled_NV < threshold_N1, -torch.inf)
        is_tail_NV = (scaled_NV.softmax(1).cumsum(1) <= 1.0 - top_p) & (top_p < 1)
        is_tail_NV[:, -1] = False
        scaled_NV = scaled_NV.masked_fill(is_tail_NV, -torch.inf)
    probs_NV = scaled_NV.softmax(1).to(wide)
    probs_NV = probs_NV.where(probs_NV >= min_p * probs_NV.amax(1, keepdim=True), 0)
    # The first token whose cumulative probability is above the random number.
    cumulative_NV = probs_NV.cumsum(1)
    picked_N1 = torch.searchsorted(cumulative_NV, uniform * cumulative_NV[:, -1:], right=True).clamp_max(size - 1)
    token_N1 = picked_N1 if order_NV is None else order_NV.gather(1, picked_N1)
    return torch.where(temperature > 0, token_N1, greedy_N.unsqueeze(1)).squeeze(1)
