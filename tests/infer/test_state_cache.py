"""The prefix cache and draft tokens of models with states: the same answers, from less computation."""

from __future__ import annotations

from collections import abc
from collections.abc import Mapping

import pytest
from torch import Tensor

from jingu.infer.engine import Engine
from jingu.infer.engine_interface import EngineSettings
from jingu.infer.inference_model import InferenceModel
from jingu.infer.request import Event, Request
from jingu.infer.sampling import SamplingParams
from jingu.infer.sequence import Sequence
from jingu.text.tokenizer import Tokenizer
from tests.infer.test_batches import MIXERS, model_of

PROMPT = tuple(1 + (7 * n) % 200 for n in range(150))


def greedy(prompt: abc.Sequence[int], tokens: int = 12) -> Request:
    return Request(tuple(prompt), SamplingParams(temperature=0.0), tokens, logprobs=0, ignore_eos=True)


def answer(engine: Engine, request: Request) -> tuple[list[tuple[int, float | None]], Event]:
    """Return the tokens with their log-probabilities, and the last event."""
    (events,) = engine.run([request])
    tokens = [event.token for event in events if event.token is not None]
    return [(token.id, token.logprob) for token in tokens], events[-1]


@pytest.mark.parametrize("kind", MIXERS)
def test_a_prefix_continues_from_a_kept_state(kind: str, tokenizer: Tokenizer) -> None:
    """A conversation: each turn repeats the prompt and the answer before it. The last whole chunk of 64 is found."""
    model = model_of(kind, tokenizer)
    engine = Engine(model)
    prompt = PROMPT
    for hits in (0, 128, 128, 192):
        expected, _ = answer(Engine(model), greedy(prompt))
        actual, event = answer(engine, greedy(prompt))
        assert actual == expected
        assert event.cached_tokens == hits
        prompt = (*prompt, *(id_ for id_, _ in actual), *range(3, 23))


def test_least_recently_used_states_are_dropped(tokenizer: Tokenizer) -> None:
    engine = Engine(model_of("short_conv", tokenizer), EngineSettings(max_num_seqs=2))
    prompts = [(number, *PROMPT) for number in (1, 2, 3)]
    hits = [answer(engine, greedy(prompts[number]))[1].cached_tokens for number in (0, 1, 0, 2, 0, 1)]
    assert hits == [0, 0, 128, 0, 128, 0]
    assert engine.stats().used_blocks == 0


class Oracle:
    """Proposes the tokens of a known text, with a wrong one in every fifth place."""

    def __init__(self, ids: list[int]) -> None:
        self._ids = ids

    def observe(self, sequence: Sequence, first: int, states_ND: Tensor) -> None:
        """Receive nothing."""

    def propose(self, max_tokens: Mapping[Sequence, int]) -> dict[Sequence, list[int]]:
        return {sequence: self._drafts(len(sequence.token_ids), count) for sequence, count in max_tokens.items()}

    def _drafts(self, first: int, count: int) -> list[int]:
        return [self._ids[place] + (place % 5 == 0) for place in range(first, first + count)]


@pytest.mark.parametrize("kind", MIXERS)
def test_draft_tokens_do_not_change_answers(kind: str, tokenizer: Tokenizer) -> None:
    """The state returns to where it was before a rejected token."""
    model: InferenceModel = model_of(kind, tokenizer)
    expected, _ = answer(Engine(model), greedy(PROMPT, 60))
    engine = Engine(model, EngineSettings(num_speculative_tokens=3))
    engine._speculator = Oracle([*PROMPT, *(id_ for id_, _ in expected)])
    assert answer(engine, greedy(PROMPT, 60))[0] == expected
    stats = engine.stats()
    assert 30 < stats.accepted_tokens < stats.draft_tokens
    assert stats.steps < 40
