"""Choosing the next token. The definitions are those of transformers' logits processors, in their order.

Shapes: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from jingu.errors import JinguError


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen.

    Attributes:
        temperature: divides the logits; 0 takes the likeliest token (greedy).
        top_k: sample among this many likeliest tokens; None: all.
        top_p: sample among the likeliest tokens whose probabilities first reach this sum; 1: all.
        repetition_penalty: above 1 makes tokens of the prompt and of the text so far less likely (Keskar et al., 2019).
        seed: of the random choices; the same seed gives the same text.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        _refuse(self.temperature < 0, "temperature", self.temperature, "0 (greedy) or more")
        _refuse(self.top_k is not None and self.top_k < 1, "top_k", self.top_k, "1 or more")
        _refuse(not 0 < self.top_p <= 1, "top_p", self.top_p, "above 0 and at most 1")
        _refuse(self.repetition_penalty <= 0, "repetition_penalty", self.repetition_penalty, "above 0 (1: none)")


def choose(logits_V: Tensor, seen: Sequence[int], sampling: Sampling, generator: torch.Generator) -> int:
    """The next token's id.

    Args:
        logits_V: scores of the next token.
        seen: ids of the prompt and of the text so far.
        generator: on CPU; not used when greedy.
    """
    scores_V = penalised(logits_V.float().cpu(), seen, sampling.repetition_penalty)
    if sampling.temperature == 0:
        return int(scores_V.argmax())
    return int(torch.multinomial(probabilities(scores_V, sampling), 1, generator=generator))


def penalised(logits_V: Tensor, seen: Sequence[int], penalty: float) -> Tensor:
    """Scores of seen tokens made smaller: divided by the penalty if positive, else multiplied."""
    if penalty == 1.0 or not seen:
        return logits_V
    ids = torch.tensor(sorted(set(seen)), device=logits_V.device)
    scores = logits_V[ids]
    return logits_V.index_put((ids,), torch.where(scores < 0, scores * penalty, scores / penalty))


def probabilities(scores_V: Tensor, sampling: Sampling) -> Tensor:
    """Probability of each token under temperature, then top-k, then top-p."""
    scores_V = scores_V / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < scores_V.numel():
        least = scores_V.topk(sampling.top_k).values[-1]
        scores_V = scores_V.masked_fill(scores_V < least, -torch.inf)
    if sampling.top_p < 1.0:
        ascending_V, order_V = scores_V.sort()
        dropped_V = ascending_V.softmax(0).cumsum(0) <= 1.0 - sampling.top_p
        dropped_V[-1] = False
        scores_V = scores_V.masked_fill(dropped_V.scatter(0, order_V, dropped_V), -torch.inf)
    return scores_V.softmax(0)


def _refuse(wrong: bool, name: str, value: object, allowed: str) -> None:
    if wrong:
        raise JinguError(f"it is {value}, and should be {allowed}.", where=name)
