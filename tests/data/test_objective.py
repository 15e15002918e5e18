"""Prefixes with bidirectional attention or for an encoder: no text is lost, and samples are deterministic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jingu.config.schema import RunConfig
from jingu.data.batch import Batch
from jingu.data.objective import Continuation, PrefixLM, PromptsToAnswers, SplitPoint, build_objective
from jingu.errors import JinguError
from jingu.text.tokenizer import Tokenizer

SHARES = st.tuples(st.floats(0, 1), st.floats(0, 1)).map(sorted)


def rows_of(lengths: list[int], rows: int = 2, padding: int = 0) -> Batch:
    total = sum(lengths)
    tokens = torch.arange(rows * (total + 1)).view(rows, -1) + 5
    documents = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)]).repeat(rows, 1)
    labels = tokens[:, 1:].clone()
    if padding:
        documents[:, -padding:], labels[:, -padding:] = -1, -100
    return Batch(tokens[:, :-1], labels, documents=documents)


@given(st.integers(2, 60), SHARES, st.integers(0, 2**40), st.integers(0, 2**63 - 1))
def test_a_prefix_attends_to_itself_and_the_rest_is_predicted(tokens: int, shares: Any, first: int, seed: int) -> None:
    prefix = PrefixLM(SplitPoint(*shares, seed), tokens)
    batch = rows_of([tokens])
    built = prefix.apply(Batch(batch.tokens, batch.labels), first)
    assert built.prefix_lengths is not None and torch.equal(built.tokens, batch.tokens)
    for row in range(2):
        end = int(built.prefix_lengths[row, 0])
        low, high = (min(max(round(tokens * share), 1), tokens - 1) for share in shares)
        assert low <= end <= high
        assert built.prefix_lengths[row].tolist() == [end] * end + [0] * (tokens - end)
        assert built.labels[row].tolist() == [-100] * (end - 1) + batch.labels[row, end - 1 :].tolist()
    assert torch.equal(
        prefix.apply(Batch(batch.tokens[1:], batch.labels[1:]), first + 1).prefix_lengths, built.prefix_lengths[1:]
    )


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(0, 3))
def test_every_document_has_its_own_prefix(lengths: list[int], padding: int) -> None:
    batch = rows_of([*lengths, *([padding] if padding else [])], padding=padding)
    built = PrefixLM(SplitPoint(0.2, 0.9, 3), 1).apply(batch, 40)
    assert built.prefix_lengths is not None
    at = 0
    for size in lengths:
        reach, labels = built.prefix_lengths[0, at : at + size].tolist(), built.labels[0, at : at + size]
        end = reach[0] - at if size > 1 else 0
        assert reach == [at + end] * end + [0] * (size - end)
        assert (labels >= 0).tolist() == [place >= end - 1 for place in range(size)]
        at += size
    assert not built.prefix_lengths[:, at:].any()


def test_prefix_lengths_are_uniform() -> None:
    cut = SplitPoint(0.25, 0.75, 9)
    result = np.bincount([cut.draw(40, sample) for sample in range(4200)])
    assert result[:10].sum() == result[31:].sum() == 0
    assert abs(result[10:31] - 200).max() < 60
    # And it stays what it is: runs go on with another release.
    assert [cut.draw(40, sample) for sample in range(6)] == [22, 25, 11, 26, 12, 16]


@given(st.integers(2, 50), SHARES, st.integers(0, 99))
def test_the_text_can_be_restored_from_inputs_and_targets(tokens: int, shares: Any, first: int) -> None:
    plan = Continuation(SplitPoint(*shares, 7), tokens, start_id=1, eos_token_id=2)
    batch = rows_of([tokens], rows=3)
    labels = batch.labels.clone()
    labels[1, tokens // 2] = -100  # of a document that is left out
    built = plan.apply(Batch(batch.tokens, labels), first)
    assert built.source is not None
    assert built.source.tokens.shape == (3, plan.source_length) and built.labels.shape == (3, plan.target_length)
    for row in range(3):
        read = built.source.tokens[row]
        if built.source.documents is not None:
            size = int((built.source.documents[row] == 0).sum())
            assert (built.source.documents[row, size:] == -1).all()
            read = read[:size]
        assert read[-1] == 2
        written = built.labels[row][built.labels[row] >= 0]
        if row == 1:
            assert not len(written)
            continue
        assert torch.equal(torch.cat([read[:-1], written]), batch.tokens[row])
        assert built.tokens[row, : len(written)].tolist() == [1, *written[:-1].tolist()]


def test_a_fixed_prefix_length_needs_no_padding() -> None:
    built = Continuation(SplitPoint(0.5, 0.5, 7), 20, 1, 2).apply(rows_of([20]), 0)
    assert built.source is not None and built.source.documents is None
    assert built.source.tokens.shape == (2, 11) and bool((built.labels >= 0).all())


def test_prompts_of_packed_rows_become_sources() -> None:
    # Two rows of instruction data, 10 to 14 and 20 to 22 with EOS (2), and one of which nothing is trained.
    tokens = torch.tensor([[10, 11, 12, 13, 14, 20, 21, 22, 30, 0, 0]])
    labels = torch.tensor([[-100, -100, 13, 14, 2, 21, -100, 2, -100, -100, -100]])
    documents = torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1, 2, -1, -1]])
    weights = (labels >= 0) * 0.5
    built = PromptsToAnswers(11, 1, 2).apply(Batch(tokens, labels, None, documents, weights=weights), 0)
    assert built.source is not None and built.source.documents is not None
    assert built.documents is not None and built.positions is not None and built.weights is not None
    assert built.source.tokens[0].tolist() == [10, 11, 12, 2, 20, 2, *[2] * 5]
    assert built.source.documents[0].tolist() == [0, 0, 0, 0, 1, 1, *[-1] * 5]
    # What is not trained within an answer is read.
    assert built.tokens[0].tolist() == [1, 13, 14, 1, 21, 22, *[1] * 5]
    assert built.labels[0].tolist() == [13, 14, 2, 21, -100, 2, *[-100] * 5]
    assert built.documents[0].tolist() == [0, 0, 0, 1, 1, 1, *[-1] * 5]
    assert built.positions[0].tolist() == [0, 1, 2, 0, 1, 2, *[0] * 5]
    assert built.weights[0].tolist() == [0.5, 0.5, 0.5, 0.5, 0, 0.5, *[0] * 5]


def config_of(tokenizer_folder: Path, length: int = 20, **objective: Any) -> RunConfig:
    data = {"tokenizer": {"path": str(tokenizer_folder)}, "data": {"objective": objective}}
    return RunConfig.model_validate(data | {"batch": {"sequence_length": length}})


@pytest.mark.parametrize("kind", ["prefix_lm", "continuation", "span_corruption"])
def test_incompatible_settings_are_refused(tokenizer_folder: Path, data_tokenizer: Tokenizer, kind: str) -> None:
    source: Any = None  # what it is of does not matter
    with pytest.raises(JinguError, match=r"batch\.sequence_length: a text of one token cannot be split\. Set it to 2"):
        build_objective(config_of(tokenizer_folder, 1, type=kind), source, data_tokenizer)
    if kind != "span_corruption":
        wrong = config_of(tokenizer_folder, type=kind, min_prefix=0.5, max_prefix=0.4)
        with pytest.raises(JinguError, match=r"min_prefix \(0\.5\) is larger than max_prefix \(0\.4\)"):
            build_objective(wrong, source, data_tokenizer)
