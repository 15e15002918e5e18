"""Sampling of the next tokens of many sequences at once, on the device of their logits.

Sampling parameters are defined, and applied in the same order, as in transformers' logits processors. Presence and
frequency penalties and the logit bias are defined as in OpenAI's API. Each token is sampled by inverting the cumulative
distribution at one uniform random number, a function of the seed and of the token's position in the output. A sample
therefore depends neither on the batch nor on draft tokens. On a GPU, the host waits once, for the tokens.

Shapes: N rows of logits, V vocabulary, M the rows that a parameter applies to.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict

import torch
from torch import Tensor

from jingu.data.permutation import random_uint64
from jingu.errors import refuse
from jingu.runtime.device import copy_to_device

NON_FINITE_LOGITS = "the model's logits are not finite"


class SamplingOptions(TypedDict, total=False):
    """The fields of `SamplingParams`. Missing ones are as the model recommends, or else have the defaults there."""

    temperature: float
    top_k: int | None
    top_p: float
    repetition_penalty: float
    seed: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]


@dataclass(frozen=True)
class SamplingParams:
    """Parameters of sampling, applied in this order: bias, penalties, temperature, top-k, top-p, min-p.

    Attributes:
        temperature: divides the logits; 0 takes the most likely token (greedy).
        top_k: sample among this many most likely tokens; None: all.
        top_p: sample among the most likely tokens whose probabilities first reach this sum; 1: all.
        repetition_penalty: above 1 makes tokens of the prompt and of the output so far less likely (Keskar et al.,
            2019).
        seed: seed of the random numbers; the same seed gives the same text.
        min_p: sample among tokens whose probability is at least this fraction of the largest (Nguyen et al., 2024).
        presence_penalty: subtracted once from the logits of tokens that the output already contains.
        frequency_penalty: subtracted from a token's logit for each time that the output contains it.
        logit_bias: token id → value added to its logit; -inf forbids the token.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    seed: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        refuse(not self.temperature >= 0, "temperature", self.temperature, "0 (greedy) or more")
        refuse(self.top_k is not None and self.top_k < 1, "top_k", self.top_k, "1 or more")
        refuse(not 0 < self.top_p <= 1, "top_p", self.top_p, "above 0 and at most 1")
        refuse(not self.repetition_penalty > 0, "repetition_penalty", self.repetition_penalty, "above 0 (1: none)")
        refuse(not 0 <= self.min_p <= 1, "min_p", self.min_p, "from 0 to 1")

    @property
    def changes_logits(self) -> bool:
        """Whether bias or penalties change the logits."""
        penalizes = self.repetition_penalty != 1.0 or self.presence_penalty != 0 or self.frequency_penalty != 0
        return penalizes or bool(self.logit_bias)


def sampling_params(
    options: Mapping[str, Any], defaults: Mapping[str, Any], temperature: float = 0.0
) -> SamplingParams:
    """Return the parameters that `options` name, then those of `defaults`, then `temperature`."""
    return SamplingParams(**{"temperature": temperature, **defaults, **options})


class SamplingError(Exception):
    """No token can be sampled: the sequence ends with this finish reason."""

    def __init__(self, reason: Literal["error", "refused"], message: str) -> None:
        super().__init__(message)
        self.reason: Literal["error", "refused"] = reason


@dataclass(frozen=True)
class SamplingRow:
    """Everything beside the logits that determines the next token of one row.

    Attributes:
        prompt: ids of the prompt, for the repetition penalty.
        output: ids generated so far.
        uniform: random number in [0, 1).
        forbidden: ids that may not follow.
        bitmask: a bit for each token that the grammar allows, in 32-bit words on the host; None allows all tokens.
        num_logprobs: number of most likely tokens to return with log-probabilities, besides the token's own one; None
            returns no log-probabilities.
        logprob_temperature: divides the logits before these log-probabilities are computed.
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
    """A sampled token.

    Attributes:
        is_finite: whether the logits are finite; if not, the token is meaningless.
        logprob: log-probability of the token; None if it was not requested.
        top: the most likely tokens with their log-probabilities, best first.
    """

    token_id: int
    is_finite: bool
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


def random_uniform(seed: int, position: int) -> float:
    """Return the random number in [0, 1) that selects the token at a position of the output."""
    number = int(random_uint64("sampling", 1, seed, position)[0])
    # Keep 53 bits, which fp64 represents exactly.
    return (number >> 11) / 2**53


def sample_rows(logits_NV: Tensor, rows: Sequence[SamplingRow]) -> list[SampledToken]:
    """Return the token that follows each row."""
    changed_NV = _mask_by_grammars(apply_penalties(logits_NV, rows), rows)
    # A row with NaN or +inf fails this test, as does one in which every token is forbidden.
    is_finite_N = changed_NV.amax(1).isfinite()
    token_N = _argmax(changed_NV)
    if any(row.params.temperature for row in rows):
        token_N = _draw(changed_NV, token_N, rows)
    # Copy all results to the host in one table, so that it waits only once.
    wide = widest_dtype(logits_NV)
    columns = [token_N.unsqueeze(1).to(wide), is_finite_N.unsqueeze(1).to(wide)]
    most = max((row.num_logprobs for row in rows if row.num_logprobs is not None), default=None)
    if most is not None:
        temperatures = [[row.logprob_temperature] for row in rows]
        logprob_NV = (logits_NV / copy_to_device(temperatures, logits_NV.device, logits_NV.dtype)).log_softmax(1)
        top = logprob_NV.topk(min(most, logprob_NV.shape[1]), dim=1)
        columns += [logprob_NV.gather(1, token_N.unsqueeze(1)).to(wide), top.indices.to(wide), top.values.to(wide)]
    return [_read(row, values) for row, values in zip(rows, torch.cat(columns, 1).tolist(), strict=True)]


def _read(row: SamplingRow, values: list[float]) -> SampledToken:
    """Return the sampled token from its row of the table."""
    token_id, is_finite, *candidates = values
    if row.num_logprobs is None:
        return SampledToken(int(token_id), bool(is_finite))
    logprob, *tops = candidates
    half = len(tops) // 2
    top = [(int(token), value) for token, value in zip(tops[:half], tops[half:], strict=True)]
    return SampledToken(int(token_id), bool(is_finite), logprob, tuple(top[: row.num_logprobs]))


def widest_dtype(like: Tensor) -> torch.dtype:
    """Return the most precise floating-point dtype of a tensor's device."""
    return torch.float32 if like.device.type == "mps" else torch.float64  # Apple's GPUs have no fp64


def apply_penalties(logits_NV: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Return logits after bias and penalties, with -inf for forbidden tokens.

    For tokens of prompt and output, the repetition penalty divides positive logits and multiplies negative ones.
    """
    if not any(row.params.changes_logits or row.forbidden for row in rows):
        return logits_NV
    logits_NV = logits_NV.clone()
    biases = [(n, token, value) for n, row in enumerate(rows) for token, value in row.params.logit_bias.items()]
    _add(logits_NV, biases)
    repetition_rows = [
        (n, token, row.params.repetition_penalty)
        for n, row in enumerate(rows)
        if row.params.repetition_penalty != 1.0
        for token in {*row.prompt, *row.output}
    ]
    if repetition_rows:
        where, penalty = _entries(logits_NV, repetition_rows)
        old = logits_NV[where]
        logits_NV.index_put_(where, torch.where(old < 0, old * penalty, old / penalty))
    count_rows = [
        (n, token, -row.params.presence_penalty - row.params.frequency_penalty * count)
        for n, row in enumerate(rows)
        if row.params.presence_penalty or row.params.frequency_penalty
        for token, count in Counter(row.output).items()
    ]
    _add(logits_NV, count_rows)
    _add(logits_NV, [(n, token, -torch.inf) for n, row in enumerate(rows) for token in row.forbidden])
    return logits_NV


def _add(logits_NV: Tensor, entries: Sequence[tuple[int, int, float]]) -> None:
    if entries:
        where, values = _entries(logits_NV, entries)
        logits_NV.index_put_(where, logits_NV[where] + values)


def _entries(logits_NV: Tensor, entries: Iterable[tuple[int, int, float]]) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Return row and token of each entry, and its value, on the device of the logits."""
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


def _argmax(logits_NV: Tensor) -> Tensor:
    """Return the most likely token of each row [N]."""
    if logits_NV.device.type == "cpu":
        return torch.from_numpy(logits_NV.numpy().argmax(1))  # ten times as fast as `Tensor.argmax`
    return logits_NV.argmax(1)


def _draw(logits_NV: Tensor, greedy_N: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Return the sampled token of each row; the most likely one where the temperature is 0."""
    wide = widest_dtype(logits_NV)
    choices = [(row.params.temperature, row.uniform) for row in rows]
    temperature_N1, uniform_N1 = copy_to_device(choices, logits_NV.device, wide).split(1, 1)
    # Select the first token whose cumulative probability exceeds the random number.
    cumulative_NV = token_probs(logits_NV, [row.params for row in rows]).to(wide).cumsum(1)
    token_N1 = torch.searchsorted(cumulative_NV, uniform_N1 * cumulative_NV[:, -1:], right=True)
    token_N1 = token_N1.clamp_max(logits_NV.shape[1] - 1)
    return torch.where(temperature_N1 > 0, token_N1, greedy_N.unsqueeze(1)).squeeze(1)


def token_probs(logits_NV: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Return the probability of each token under temperature, then top-k, then top-p, then min-p; not normalized after
    min-p."""
    device = logits_NV.device
    temperatures = [[one.temperature or 1.0] for one in params]
    logits_NV = logits_NV / copy_to_device(temperatures, device, logits_NV.dtype)
    size = logits_NV.shape[1]
    # 1. Mask all but the top_k most likely tokens.
    top_k = {row: min(one.top_k, size) for row, one in enumerate(params) if one.top_k is not None}
    if top_k:
        rows_M = copy_to_device(list(top_k), device)
        logits_MV = logits_NV.index_select(0, rows_M)
        last_M1 = copy_to_device([[count - 1] for count in top_k.values()], device)
        threshold_M1 = logits_MV.topk(max(top_k.values()), dim=1).values.gather(1, last_M1)
        logits_NV = logits_NV.index_copy(0, rows_M, logits_MV.masked_fill(logits_MV < threshold_M1, -torch.inf))
    # 2. Mask the tokens outside of top_p.
    top_p = {row: one.top_p for row, one in enumerate(params) if one.top_p < 1}
    if top_p:
        # In ascending order, this is the tail whose probabilities sum to at most 1 - top_p; one token always stays.
        rows_M = copy_to_device(list(top_p), device)
        ascending_MV, order_MV = logits_NV.index_select(0, rows_M).sort(1)
        tail_M1 = 1.0 - copy_to_device([[value] for value in top_p.values()], device, widest_dtype(logits_NV))
        is_tail_MV = ascending_MV.softmax(1).cumsum(1) <= tail_M1
        is_tail_MV[:, -1] = False
        masked_MV = ascending_MV.masked_fill(is_tail_MV, -torch.inf)
        logits_NV = logits_NV.index_copy(0, rows_M, torch.empty_like(masked_MV).scatter_(1, order_MV, masked_MV))
    # 3. Set probabilities below min_p times the largest one to 0.
    probs_NV = logits_NV.softmax(1)
    if any(one.min_p for one in params):
        min_p_N1 = copy_to_device([[one.min_p] for one in params], device, probs_NV.dtype)
        probs_NV = probs_NV.where(probs_NV >= min_p_N1 * probs_NV.amax(1, keepdim=True), 0)
    return probs_NV


def top_logprobs(logits_V: Tensor, token_id: int, count: int) -> tuple[float, tuple[tuple[int, float], ...]]:
    """Return the log-probability of a token, and the ids and log-probabilities of the `count` most likely ones."""
    logprobs_V = logits_V.log_softmax(0)
    top = logprobs_V.topk(min(count, len(logprobs_V)))
    return float(logprobs_V[token_id]), tuple(zip(top.indices.tolist(), top.values.tolist(), strict=True))
