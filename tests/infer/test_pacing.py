"""Long prompts beside sequences that generate: how many of their tokens a step computes, and in which order."""

from __future__ import annotations

import pytest

from jingu.config.sections.model import ModelSettings
from jingu.infer.engine import Engine
from jingu.infer.engine_interface import EngineSettings
from jingu.infer.inference_model import InferenceModel
from jingu.infer.pacing import PrefillPacer
from jingu.infer.request import Event, Request
from jingu.infer.sampling import SamplingParams
from jingu.text.tokenizer import Tokenizer
from tests.infer.conftest import filled

CONTEXT = 600


@pytest.fixture(scope="module")
def model(tokenizer: Tokenizer) -> InferenceModel:
    return filled(ModelSettings(hidden_size=24, num_heads=3, num_layers=2, initializer_range=0.4), tokenizer, CONTEXT)


@pytest.mark.parametrize(
    ("base", "per_token", "expected"),
    # A machine that computes 1,000 tokens of prompts a second, one that computes 4,000, and one that is fast enough.
    [(0.1, 1e-3, 200), (0.5, 0.25e-3, 800), (0.01, 1e-6, 2048)],
)
def test_tokens_follow_the_time_that_they_add(base: float, per_token: float, expected: int) -> None:
    pacer = PrefillPacer(0.2, 2048)
    added, without = [], 0
    for _ in range(60):
        tokens = pacer.num_tokens(generates=True)
        pacer.observe(tokens, base + per_token * tokens)
        added.append(per_token * tokens)
        without += not tokens
    assert max(added) <= 0.2 * 1.01 and pacer.num_tokens(generates=True) == pytest.approx(expected, rel=0.01)
    # Steps without prompts show how long generation takes by itself, and are rare.
    assert 1 <= without <= 60 // 16
    assert pacer.num_tokens(generates=False) == 2048


def test_a_slow_step_and_short_prompts_do_not_stop_long_ones() -> None:
    pacer = PrefillPacer(0.2, 512)
    pacer.observe(0, 0.1)
    pacer.observe(64, 90.0)
    assert pacer.num_tokens(generates=True) == 32
    for _ in range(5):
        pacer.observe(pacer.num_tokens(generates=True), 0.101)
    assert pacer.num_tokens(generates=True) == 512
    pacer.observe(5, 0.4)
    assert pacer.num_tokens(generates=True) == 512
    # A slow step without prompts does not make them look free.
    pacer.observe(0, 30.0)
    pacer.observe(512, 2.15)
    assert pacer.num_tokens(generates=True) == 51


def answers(engine: Engine, requests: list[Request]) -> tuple[dict[int, list[int]], dict[int, int]]:
    """Return the tokens of each request, and the step after which each had its first one."""
    for request in requests[:2]:
        engine.submit(request)
    events: list[Event] = [event for _ in range(4) for event in engine.step()]
    for request in requests[2:]:
        engine.submit(request)
    firsts: dict[int, int] = {}
    step = 0
    while engine.busy:
        step += 1
        for event in engine.step():
            events.append(event)
            firsts.setdefault(event.request_id, step)
    tokens: dict[int, list[int]] = {}
    for event in events:
        if event.token is not None:
            tokens.setdefault(event.request_id, []).append(event.token.id)
    return tokens, firsts


def test_short_prompts_pass_long_ones_and_answers_stay(model: InferenceModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sequences generate, then two prompts of 400 tokens come, and then short ones."""
    monkeypatch.setattr(PrefillPacer, "observe", lambda self, num_tokens, seconds: None)
    prompts = [(5, 6), (7,), *(tuple((3 * i + k) % 270 for i in range(400)) for k in (1, 2)), (9, 10, 11), (20,) * 20]
    requests = [Request(prompt, SamplingParams(), 20, ignore_eos=True) for prompt in prompts]
    plain, plain_firsts = answers(Engine(model, EngineSettings(prefill_chunk_size=64)), requests)
    paced, firsts = answers(Engine(model, EngineSettings(max_prefill_seconds=0.2)), requests)
    assert paced == plain and all(len(tokens) == 20 for tokens in paced.values())
    # The first prompt has half of the 64 tokens of a step; the other half is the short prompts' first.
    assert (firsts[4], firsts[5]) == (1, 1) and firsts[2] <= firsts[3]
    # Without a pacer they wait for all long prompts.
    assert min(plain_firsts[4], plain_firsts[5]) > plain_firsts[2]
