"""Sampling against transformers' logits processors, and against the distribution it promises."""

from __future__ import annotations

from dataclasses import replace

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
from jingu.infer.sampling import SamplingParams, SamplingRow, apply_penalties, random_uniform, sample_rows, token_probs


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
    # Beside a row with other settings.
    rows = [SamplingRow(sampling, seen.tolist(), []), SamplingRow(SamplingParams(1.0, 1), [], [])]
    changed = apply_penalties(logits.expand(2, -1), rows)
    actual, best = token_probs(changed, [row.params for row in rows])
    torch.testing.assert_close(actual / actual.sum(), expected, rtol=1e-5, atol=1e-7)
    assert best.tolist() == [float(logit == logits.max()) for logit in logits]


def test_samples_follow_the_distribution() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 5.0])
    sampling = SamplingParams(temperature=0.9, top_k=4, top_p=0.9, repetition_penalty=4.0)
    draws = 4000
    rows = [SamplingRow(sampling, [4], [], random_uniform(3, position)) for position in range(draws)]
    tokens = [token.token_id for token in sample_rows(logits.expand(draws, -1), rows)]
    counts = torch.tensor(tokens).bincount(minlength=5)
    expected = token_probs(apply_penalties(logits[None], rows[:1]), [sampling])[0] * draws
    remaining = expected > 0
    assert not counts[~remaining].any()
    # 99.9% quantile of chi-square with 2 degrees of freedom (3 tokens are left).
    assert int(remaining.sum()) == 3
    assert float(((counts - expected)[remaining] ** 2 / expected[remaining]).sum()) < 13.82


@given(
    st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.5, 1.0, 1.7]),
        top_k=st.sampled_from([None, 1, 3, 100]),
        top_p=st.sampled_from([1.0, 0.9, 0.3]),
        min_p=st.sampled_from([0.0, 0.2]),
        repetition_penalty=st.sampled_from([1.0, 1.5]),
        presence_penalty=st.sampled_from([0.0, 0.7]),
        frequency_penalty=st.sampled_from([0.0, -0.4]),
        logit_bias=st.sampled_from([{}, {2: 3.0, 5: -float("inf")}]),
    ),
    st.integers(0, 99),
)
def test_random_numbers_pick_tokens_by_their_probabilities(params: SamplingParams, seed: int) -> None:
    """Evenly spaced random numbers hit each token as often as its probability says."""
    logits_V = torch.randn(11, generator=torch.Generator().manual_seed(seed))
    prompt, output = [1, 2, 3], [3, 3, 7]
    count = 400
    row = SamplingRow(params, prompt, output)
    rows = [replace(row, uniform=number / count) for number in range(count)]
    tokens = [token.token_id for token in sample_rows(logits_V.expand(count, -1), rows)]
    (expected_V,) = token_probs(apply_penalties(logits_V[None], [row]), [params])
    shares_V = torch.tensor(tokens).bincount(minlength=11) / count
    torch.testing.assert_close(shares_V, expected_V / expected_V.sum(), rtol=0, atol=1.01 / count)


def test_greedy_selects_the_most_likely_token_after_the_penalty() -> None:
    logits = torch.tensor([[1.0, 1.5, -2.0]]).expand(3, -1)
    penalty = SamplingParams(repetition_penalty=2.0)
    rows = [SamplingRow(SamplingParams(), [1], []), SamplingRow(penalty, [1], []), SamplingRow(penalty, [], [1])]
    assert [token.token_id for token in sample_rows(logits, rows)] == [1, 0, 0]


def test_bias_presence_and_frequency() -> None:
    """mu[j] -> mu[j] + bias[j] - c[j] * frequency - (c[j] > 0) * presence, where c counts the generated text."""
    logits = torch.tensor([[1.0, 1.5, -2.0, 0.5]])
    sampling = SamplingParams(presence_penalty=0.25, frequency_penalty=0.5, logit_bias={0: -1.0, 3: float("-inf")})
    actual = apply_penalties(logits, [SamplingRow(sampling, [0, 0, 1, 2], [1, 2, 1, 1])])
    torch.testing.assert_close(actual, torch.tensor([[0.0, 1.5 - 0.25 - 1.5, -2.0 - 0.25 - 0.5, float("-inf")]]))
    assert logits.tolist() == [[1.0, 1.5, -2.0, 0.5]]


def test_random_numbers_are_uniform_and_independent() -> None:
    numbers = torch.tensor([[random_uniform(seed, position) for position in range(50)] for seed in range(40)])
    assert len(numbers.unique()) == 2000
    assert float(numbers.min()) >= 0 and float(numbers.max()) < 1
    # Four standard errors of the mean, and of the correlation of neighbours.
    assert abs(float(numbers.mean()) - 0.5) < 4 / (12 * 2000) ** 0.5
    for one, other in ((numbers[:, 1:], numbers[:, :-1]), (numbers[1:], numbers[:-1])):
        assert abs(float(torch.stack([one.flatten(), other.flatten()]).corrcoef()[0, 1])) < 4 / one.numel() ** 0.5


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
