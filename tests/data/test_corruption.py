"""Span corruption: no text is lost, the settings determine how much is removed, and samples are deterministic."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jingu.config.sections.data import SpanCorruptionSettings
from jingu.data.batch import Batch
from jingu.data.objective import SpanCorruption, batch_function, build_span_corruption
from jingu.errors import JinguError
from jingu.text.tokenizer import Tokenizer, sentinel_tokens
from jingu.text.tokenizer_training import train_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(iter(["some text"]), 400, ["<|endoftext|>", *sentinel_tokens(100)])


def planned(tokenizer: Tokenizer, length: int, rate: float = 0.15, mean: float = 3.0, seed: int = 7) -> SpanCorruption:
    settings = SpanCorruptionSettings(noise_density=rate, mean_span_length=mean, num_sentinels=100)
    return build_span_corruption(settings, length, tokenizer, seed)


def restored(plan: SpanCorruption, source: list[int], target: list[int]) -> list[int]:
    """Restore the text: replace each sentinel of the encoder input by its span in the target."""
    assert source[-1] == target[-1] == plan.eos_token_id
    spans: dict[int, list[int]] = {}
    for token in target[:-1]:
        if token in plan.sentinel_ids:
            assert token not in spans
            spans[token] = current = []
        else:
            current.append(token)
    assert list(spans) == list(plan.sentinel_ids) == [token for token in source if token in plan.sentinel_ids]
    assert all(spans.values())
    return [token for remaining in source[:-1] for token in spans.get(remaining, [remaining])]


@given(st.integers(2, 700), st.floats(0.01, 0.9), st.floats(1.0, 9.0), st.integers(0, 2**40), st.integers(0, 2**63 - 1))
def test_the_text_can_be_restored(tokenizer, length, rate, mean, sample, seed):
    try:
        plan = planned(tokenizer, length, rate, mean, seed)
    except JinguError as error:
        assert "each of which needs a sentinel" in str(error)
        return
    text = np.random.default_rng(0).integers(101, 357, length)
    source, target = plan.corrupt(text, sample)
    assert (len(source), len(target)) == (plan.source_length, plan.target_length)
    assert restored(plan, source.tolist(), target.tolist()) == text.tolist()
    removed = len(target) - 1 - len(plan.sentinel_ids)
    assert removed == min(max(round(length * rate), 1), length - 1)
    # As many spans as the mean length asks for, where that many can be apart from each other.
    assert len(plan.sentinel_ids) == min(max(round(removed / mean), 1), length - removed)
    assert source[0] == text[0] and text[-1] == target[-2]


def test_lengths_equal_those_of_the_paper(tokenizer):
    """15% in spans of 3 of 568 tokens leave 512 for the encoder and 114 for the decoder, as T5 was trained."""
    plan = planned(tokenizer, 568)
    assert (plan.source_length, plan.target_length) == (512, 114)


def test_positions_are_removed_uniformly_with_the_mean_span_length(tokenizer):
    plan = planned(tokenizer, 40, rate=0.3, mean=3.0)
    text = np.arange(1000, 1040)
    gone, sizes = np.zeros(40), Counter[int]()
    for sample in range(4000):
        _, target = plan.corrupt(text, sample)
        gone[target[target >= 1000] - 1000] += 1
        marks = np.flatnonzero(np.isin(target, plan.sentinel_ids))
        sizes.update(np.diff(marks, append=len(target) - 1) - 1)
    assert gone.sum() / 4000 == 12  # 30% of 40
    assert sum(size * count for size, count in sizes.items()) / sum(sizes.values()) == 3
    assert set(sizes) == set(range(1, 10))  # 4 spans of 12 tokens: any length that leaves 1 for each other
    # A text begins with what stays and ends with what goes; between, removal is even from the 8th place on.
    assert gone[0] == 0 and gone[-1] == 4000
    middle = gone[8:-8] / 4000
    assert abs(middle.mean() - 0.3) < 0.03 and middle.std() < 0.05


def test_a_sample_is_a_pure_function_of_seed_and_number(tokenizer):
    plan, text = planned(tokenizer, 64), np.arange(200, 264)
    rows = {tuple(plan.corrupt(text, sample)[0]) for sample in range(50)}
    assert len(rows) > 45
    again, other = planned(tokenizer, 64), planned(tokenizer, 64, seed=8)
    same = [np.array_equal(plan.corrupt(text, n)[0], again.corrupt(text, n)[0]) for n in range(50)]
    differ = [not np.array_equal(plan.corrupt(text, n)[0], other.corrupt(text, n)[0]) for n in range(50)]
    assert all(same) and sum(differ) > 45
    # And it stays what it is: runs go on with another release.
    assert np.flatnonzero(np.isin(plan.corrupt(text, 3)[0], plan.sentinel_ids)).tolist() == [16, 20, 56]


def test_a_batch_is_its_rows_shifted(tokenizer):
    plan = planned(tokenizer, 20)
    texts = torch.arange(200, 260).view(3, 20)
    batch = plan.apply(Batch(texts, texts), 5)
    assert batch.source is not None and batch.documents is None
    for row in range(3):
        source, target = plan.corrupt(texts[row].numpy(), 5 + row)
        assert batch.source.tokens[row].tolist() == source.tolist()
        assert batch.labels[row].tolist() == target.tolist()
        assert batch.tokens[row].tolist() == [plan.start_id, *target[:-1].tolist()]
    assert torch.equal(plan.apply(Batch(texts[1:], texts[1:]), 6).labels, batch.labels[1:])


def test_batches_use_global_sample_numbers_and_respect_dropped_documents(tokenizer):
    class Source:
        global_batch_size = 4

        def batch(self, step: int, first: int, count: int) -> Batch:
            texts = torch.arange(200, 200 + 21 * count).view(count, 21)
            labels = texts[:, 1:].clone()
            labels[1, 7] = -100
            return Batch(texts[:, :-1], labels)

    plan = planned(tokenizer, 20)
    batch = batch_function(Source(), plan)(3, 1, 3)
    texts = Source().batch(3, 1, 3).tokens
    expected = plan.apply(Batch(texts, texts), 13)
    assert (batch.labels[1] == -100).all()
    assert torch.equal(batch.labels[::2], expected.labels[::2]) and torch.equal(batch.tokens, expected.tokens)
    assert batch.source is not None and torch.equal(batch.source.tokens, expected.source.tokens)


def test_incompatible_settings_are_refused(tokenizer):
    with pytest.raises(JinguError) as error:
        planned(tokenizer, 2100)
    assert str(error.value) == (
        "data.objective.num_sentinels: a text of 2,100 tokens has 105 spans, each of which needs a sentinel, and there "
        "are 100. Set it to 105, or use shorter sequences, a lower noise_density or a larger mean_span_length."
    )
    few = train_tokenizer(iter(["some text"]), 300, ["<|endoftext|>", *sentinel_tokens(2)])
    with pytest.raises(JinguError) as error:
        planned(few, 100)
    assert str(error.value).startswith(
        "tokenizer.path: the tokenizer lacks 3 of the 5 sentinels that span corruption needs, such as <extra_id_2>. "
        "Train one with this file"
    )
