"""Sampling against transformers' logits processors, and against the distribution it promises."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from jingu.errors import JinguError
from jingu.infer.sampling import SamplingParams, apply_penalties, sample_token, token_probs


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1000),
    vocabulary=st.integers(2, 60),
    temperature=st.floats(0.1, 3),
    top_k=st.none() | st.integers(1, 70),
    top_p=st.floats(0.01, 1),
    penalty=st.floats(0.5, 2),
    min_p=st.just(0.0) | st.floats(0, 1),
    count=st.integers(1, 12),
)
def test_logits_processors_equal_transformers(
    seed: int,
    vocabulary: int,
    temperature: float,
    top_k: int | None,
    top_p: float,
    penalty: float,
    min_p: float,
    count: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(vocabulary, generator=generator) * 3
    seen = torch.randint(vocabulary, (count,), generator=generator)
    steps = [RepetitionPenaltyLogitsProcessor(penalty), TemperatureLogitsWarper(temperature)]
    if top_k is not None:
        steps.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        steps.append(TopPLogitsWarper(top_p))
    if min_p > 0:
        steps.append(MinPLogitsWarper(min_p))
    expected = LogitsProcessorList(steps)(seen[None], logits.clone()[None])[0].softmax(0)
    sampling = SamplingParams(temperature, top_k, top_p, penalty, min_p=min_p)
    actual = token_probs(apply_penalties(logits, seen.tolist(), [], sampling), sampling)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-7)


def test_samples_follow_the_distribution() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 5.0])
    sampling = SamplingParams(temperature=0.9, top_k=4, top_p=0.9, repetition_penalty=4.0, seed=3)
    generator = torch.Generator().manual_seed(3)
    draws, scores = 4000, apply_penalties(logits, [4], [], sampling)
    counts = torch.zeros(5)
    for _ in range(draws):
        counts[sample_token(scores, sampling, generator)] += 1
    expected = token_probs(scores, sampling) * draws
    remaining = expected > 0
    assert not counts[~remaining].any()
    # 99.9% quantile of chi-square with 2 degrees of freedom (3 tokens are left).
    assert int(remaining.sum()) == 3
    assert float(((counts - expected)[remaining] ** 2 / expected[remaining]).sum()) < 13.82


def test_greedy_selects_the_most_likely_token_after_the_penalty() -> None:
    logits = torch.tensor([1.0, 1.5, -2.0])
    generator = torch.Generator()
    assert sample_token(logits, SamplingParams(), generator) == 1
    sampling = SamplingParams(repetition_penalty=2.0)
    assert sample_token(apply_penalties(logits, [1], [], sampling), sampling, generator) == 0
    assert sample_token(apply_penalties(logits, [], [1], sampling), sampling, generator) == 0


def test_bias_presence_and_frequency() -> None:
    """mu[j] -> mu[j] + bias[j] - c[j] * frequency - (c[j] > 0) * presence, where c counts the generated text."""
    logits = torch.tensor([1.0, 1.5, -2.0, 0.5])
    sampling = SamplingParams(presence_penalty=0.25, frequency_penalty=0.5, logit_bias={0: -1.0, 3: float("-inf")})
    actual = apply_penalties(logits, [0, 0, 1, 2], [1, 2, 1, 1], sampling)
    torch.testing.assert_close(actual, torch.tensor([0.0, 1.5 - 0.25 - 1.5, -2.0 - 0.25 - 0.5, float("-inf")]))
    assert logits.tolist() == [1.0, 1.5, -2.0, 0.5]


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"temperature": -1.0}, "temperature: it is -1.0, and should be 0 (greedy) or more."),
        ({"top_k": 0}, "top_k: it is 0, and should be 1 or more."),
        ({"top_p": 0.0}, "top_p: it is 0.0, and should be above 0 and at most 1."),
        ({"temperature": float("nan")}, "temperature: it is nan, and should be 0 (greedy) or more."),
        ({"min_p": 1.1}, "min_p: it is 1.1, and should be from 0 to 1."),
        ({"repetition_penalty": 0.0}, "repetition_penalty: it is 0.0, and should be above 0 (1: none)."),
    ],
)
def test_settings_out_of_range(setting: dict[str, float], words: str) -> None:
    with pytest.raises(JinguError) as error:
        SamplingParams(**setting)  # type: ignore[arg-type]
    assert str(error.value) == words
