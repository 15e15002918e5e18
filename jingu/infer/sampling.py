"""Sampling of the next token. The definitions, and their order, are those of transformers' logits processors; presence
and frequency penalties and the logit bias are those of OpenAI's API.

Shapes: N rows of logits, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypedDict

import torch
from torch import Tensor

from jingu.errors import refuse

if TYPE_CHECKING:
    from jingu.infer.structured_output import Grammar

NON_FINITE_LOGITS = "the model's logits are not finite"


class SamplingOptions(TypedDict, total=False):
    """The fields of `SamplingParams`. What is left out is as the model recommends, or else the default there."""

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
        seed: of the random numbers; the same seed gives the same text.
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


class SamplingError(Exception):
    """No token can be sampled: the sequence ends with this finish reason."""

    def __init__(self, reason: Literal["error", "refused"], message: str) -> None:
        super().__init__(message)
        self.reason: Literal["error", "refused"] = reason


class Sampler:
    """Samples the tokens of one sequence, with random numbers and a grammar of its own.

    Args:
        grammar: of the output; None: any text.
    """

    def __init__(self, params: SamplingParams, seed: int, grammar: Grammar | None = None) -> None:
        self.params = params
        self._grammar = grammar
        self._generator = torch.Generator().manual_seed(seed & 0xFFFF_FFFF_FFFF_FFFF)

    def sample(self, logits_V: Tensor, prompt: Sequence[int], output: Sequence[int]) -> int:
        """Return the next token's id. Raise SamplingError where there is none.

        Args:
            logits_V: of the model, in fp32 or fp64 on the CPU.
            prompt: ids of the prompt, which the repetition penalty also counts.
            output: ids generated so far.
        """
        logits_V = apply_penalties(logits_V, prompt, output, self.params)
        if self._grammar is not None:
            logits_V = self._grammar.mask_logits(logits_V)
            self._check_grammar()
        # NaN and +inf fail this test; so does a row in which every token is forbidden.
        if not logits_V.max().isfinite():
            raise SamplingError("error", NON_FINITE_LOGITS)
        return sample_token(logits_V, self.params, self._generator)

    def random_numbers(self, count: int) -> list[float]:
        """Return the next uniform numbers, which `skip_random_number` passes over one by one; none if greedy."""
        if self.params.temperature == 0:
            return [0.0] * count
        numbers: list[float] = torch.rand(count, dtype=torch.float64, generator=self.clone_generator()).tolist()
        return numbers

    def skip_random_number(self) -> None:
        """Pass over one random number: its token is taken."""
        torch.rand(1, dtype=torch.float64, generator=self._generator)

    def grammar_bitmask(self) -> Tensor | None:
        """Return the bits of the tokens that may follow; None without a grammar. Raise SamplingError if it failed."""
        if self._grammar is None:
            return None
        bitmask = self._grammar.next_bitmask()
        self._check_grammar()
        return bitmask

    def _check_grammar(self) -> None:
        if self._grammar is not None and self._grammar.error is not None:
            raise SamplingError("refused", f"the output constraint was given up here ({self._grammar.error})")

    def accept(self, token_id: int) -> bool:
        """Advance the grammar by a token; return whether the output is complete."""
        return self._grammar is not None and self._grammar.accept(token_id)

    def clone_generator(self) -> torch.Generator:
        """Return a generator of the same random numbers, for draft tokens."""
        return torch.Generator().set_state(self._generator.get_state())

    def draft(
        self, logits_V: Tensor, prompt: Sequence[int], output: Sequence[int], generator: torch.Generator
    ) -> int | None:
        """Return the token that `sample` would return for a draft model's logits; None where they are not finite."""
        logits_V = apply_penalties(logits_V, prompt, output, self.params)
        return sample_token(logits_V, self.params, generator) if logits_V.max().isfinite() else None


def sample_token(logits_V: Tensor, params: SamplingParams, generator: torch.Generator) -> int:
    """Return the next token's id.

    Args:
        logits_V: after bias and penalties; fp32.
        generator: on the CPU; not used by greedy sampling.
    """
    if params.temperature == 0:
        return int(logits_V.numpy().argmax())  # several times as fast as the tensor's own
    # The exponential race: the first arrival among exponential waiting times at these rates is a sample.
    # `torch.multinomial` does the same, and takes three times as long to draw the times. In fp64: in fp32 the shortest
    # time would be too long for very unlikely tokens.
    times_V = torch.rand(len(logits_V), dtype=torch.float64, generator=generator).log_().neg_()
    return int((token_probs(logits_V, params) / times_V).numpy().argmax())


def apply_penalties(logits_V: Tensor, prompt: Sequence[int], output: Sequence[int], params: SamplingParams) -> Tensor:
    """Return logits after bias and penalties.

    The repetition penalty divides positive logits of tokens of prompt and output, and multiplies negative ones.
    """
    if not params.changes_logits:
        return logits_V
    logits_V = logits_V.clone()
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias))
        logits_V[ids] += torch.tensor(list(params.logit_bias.values()))
    if params.repetition_penalty != 1.0 and (prompt or output):
        ids = torch.tensor(sorted({*prompt, *output}))
        repeated = logits_V[ids]
        penalty = params.repetition_penalty
        logits_V[ids] = torch.where(repeated < 0, repeated * penalty, repeated / penalty)
    if output and (params.presence_penalty or params.frequency_penalty):
        ids, counts = torch.tensor(output).unique(return_counts=True)
        logits_V[ids] -= params.presence_penalty + params.frequency_penalty * counts
    return logits_V


def token_probs(logits_V: Tensor, params: SamplingParams) -> Tensor:
    """Return the probability of each token under temperature, then top-k, then top-p, then min-p."""
    logits_V = logits_V / params.temperature
    if params.top_k is not None and params.top_k < logits_V.numel():
        threshold = logits_V.topk(params.top_k).values[-1]
        logits_V = logits_V.masked_fill(logits_V < threshold, -torch.inf)
    if params.top_p < 1.0:
        # In ascending order, mask the tail whose probabilities sum to at most 1 - top_p; one token always stays.
        ascending_V, order_V = logits_V.sort()
        masked_V = ascending_V.softmax(0).cumsum(0) <= 1.0 - params.top_p
        masked_V[-1] = False
        logits_V = logits_V.masked_fill(masked_V.scatter(0, order_V, masked_V), -torch.inf)
    probs_V = logits_V.softmax(0)
    if params.min_p > 0:
        probs_V = probs_V.where(probs_V >= params.min_p * probs_V.max(), 0)
        probs_V = probs_V / probs_V.sum()
    return probs_V


def top_logprobs(logits_V: Tensor, token_id: int, count: int) -> tuple[float, tuple[tuple[int, float], ...]]:
    """Return the log-probability of a token, and the ids and log-probabilities of the `count` most likely ones."""
    logprobs_V = logits_V.log_softmax(0)
    top = logprobs_V.topk(min(count, len(logprobs_V)))
    return float(logprobs_V[token_id]), tuple(zip(top.indices.tolist(), top.values.tolist(), strict=True))
