"""Choosing the next token. The definitions are those of transformers' logits processors, in their order; presence and
frequency penalties and the bias are those of OpenAI's interface.

Shapes: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from jingu.errors import JinguError, refuse


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. In this order: bias, penalties, temperature, top-k, top-p, min-p.

    Attributes:
        temperature: divides the logits; 0 takes the likeliest token (greedy).
        top_k: sample among this many likeliest tokens; None: all.
        top_p: sample among the likeliest tokens whose probabilities first reach this sum; 1: all.
        repetition_penalty: above 1 makes tokens of the prompt and of the text so far less likely (Keskar et al., 2019).
        seed: of the random choices; the same seed gives the same text.
        min_p: sample among tokens at least this share as likely as the likeliest (Nguyen et al., 2024).
        presence_penalty: subtracted from the logits of tokens that the text so far has, not counting the prompt.
        frequency_penalty: subtracted as often as the text so far has the token.
        logit_bias: token id → what is added to its logit; -inf forbids it.
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
    def penalises(self) -> bool:
        """Whether logits depend on the tokens so far, or have a bias."""
        plain = self.repetition_penalty == 1.0 and not self.presence_penalty and not self.frequency_penalty
        return not plain or bool(self.logit_bias)


def choose(scores_V: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """The next token's id.

    Args:
        scores_V: scores of the next token, after bias and penalties; fp32.
        generator: on the CPU; not used when greedy.
    """
    if sampling.temperature == 0:
        return int(scores_V.numpy().argmax())  # several times as fast as the tensor's own
    # The first of exponential waiting times at these rates. `torch.multinomial` draws so, too, and takes three times as
    # long to make the times. In fp64: in fp32 the shortest would be too long for what is very unlikely.
    waits_V = torch.rand(len(scores_V), dtype=torch.float64, generator=generator).log_().neg_()
    return int((probabilities(scores_V, sampling) / waits_V).numpy().argmax())


def penalised(logits_V: Tensor, prompt: Sequence[int], generated: Sequence[int], sampling: Sampling) -> Tensor:
    """Scores after bias and penalties.

    Repetition: scores of tokens of either text are divided by the penalty if positive, else multiplied.
    """
    if not sampling.penalises:
        return logits_V
    scores_V = logits_V.clone()
    if sampling.logit_bias:
        ids = torch.tensor(list(sampling.logit_bias))
        scores_V[ids] += torch.tensor(list(sampling.logit_bias.values()))
    if sampling.repetition_penalty != 1.0 and (prompt or generated):
        ids = torch.tensor(sorted({*prompt, *generated}))
        seen, penalty = scores_V[ids], sampling.repetition_penalty
        scores_V[ids] = torch.where(seen < 0, seen * penalty, seen / penalty)
    if generated and (sampling.presence_penalty or sampling.frequency_penalty):
        ids, counts = torch.tensor(generated).unique(return_counts=True)
        scores_V[ids] -= sampling.presence_penalty + sampling.frequency_penalty * counts
    return scores_V


def probabilities(scores_V: Tensor, sampling: Sampling) -> Tensor:
    """Probability of each token under temperature, then top-k, then top-p, then min-p."""
    scores_V = scores_V / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < scores_V.numel():
        least = scores_V.topk(sampling.top_k).values[-1]
        scores_V = scores_V.masked_fill(scores_V < least, -torch.inf)
    if sampling.top_p < 1.0:
        ascending_V, order_V = scores_V.sort()
        dropped_V = ascending_V.softmax(0).cumsum(0) <= 1.0 - sampling.top_p
        dropped_V[-1] = False
        scores_V = scores_V.masked_fill(dropped_V.scatter(0, order_V, dropped_V), -torch.inf)
    probability_V = scores_V.softmax(0)
    if sampling.min_p > 0:
        kept_V = probability_V.where(probability_V >= sampling.min_p * probability_V.max(), 0)
        return kept_V / kept_V.sum()
    return probability_V


def check_ids(sampling: Sampling, vocabulary: int) -> None:
    """JinguError for a bias of a token that the model has not."""
    if wrong := [id_ for id_ in sampling.logit_bias if not 0 <= id_ < vocabulary]:
        raise JinguError(
            f"there is no token {wrong[0]}; the model's vocabulary is {vocabulary}.",
            where="logit_bias",
            fix=f"Give ids from 0 to {vocabulary - 1}.",
        )
