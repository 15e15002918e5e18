"""Fill-in-the-middle: the text can be restored from every row, wherever documents were cut."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jingu.config.sections.data import FillInTheMiddleSettings
from jingu.data.dataset import open_dataset
from jingu.data.fill_in_the_middle import FillInTheMiddle, build_fill_in_the_middle
from jingu.data.mixture import MixtureDataset, plan_mixture
from jingu.data.row_sources import WindowDataset
from jingu.errors import JinguError
from jingu.text.tokenizer import Tokenizer
from jingu.text.tokenizer_training import train_tokenizer

PREFIX, SUFFIX, MIDDLE, END = 901, 902, 903, 0


def undone(row: list[int]) -> tuple[list[int], int]:
    """Return the text of a row that was not truncated, and the number of its rearranged documents."""
    text: list[int] = []
    anew = 0
    document: list[int] = []
    for id_ in [*row, None]:
        if id_ is not None and id_ != END:
            document.append(id_)
            continue
        if document and document[0] == PREFIX:
            suffix, middle = document.index(SUFFIX), document.index(MIDDLE)
            document = document[1:suffix] + document[middle + 1 :] + document[suffix + 1 : middle]
            anew += 1
        text += document + ([END] if id_ == END else [])
        document = []
    return text, anew


def fill(rate: float, seed: int = 5, prompt_prefix_ids: tuple[int, ...] = ()) -> FillInTheMiddle:
    return FillInTheMiddle(rate, PREFIX, SUFFIX, MIDDLE, END, seed, prompt_prefix_ids)


def test_the_bos_token_stays_in_front() -> None:
    row = np.array([5, 6, 7, 8, END, *[END] * 5])
    plain = fill(1.0).transform_row(row, np.zeros_like(row), 3)[0]
    prefixed = fill(1.0, prompt_prefix_ids=(77, 78)).transform_row(
        np.array([77, 78, *row]), np.zeros(len(row) + 2, int), 3
    )[0]
    assert prefixed.tolist() == [77, 78, *plain.tolist()]


@given(
    st.lists(st.lists(st.integers(1, 50), max_size=12), min_size=1, max_size=6), st.integers(0, 10**9), st.booleans()
)
def test_the_text_can_be_restored(documents: list[list[int]], sample: int, ended: bool) -> None:
    ids = [id_ for document in documents for id_ in [*document, END]][: None if ended else -1]
    if not ids:
        return
    row = np.array(ids + [END] * 3 * len(documents))  # with room, so that nothing is cut off
    transformed = fill(0.7).transform_row(row, np.zeros_like(row), sample)[0]
    assert len(transformed) == len(row)
    text, count = undone(transformed.tolist())
    assert text[: len(ids)] == ids
    assert np.array_equal(fill(0.7).transform_row(row, np.zeros_like(row), sample)[0], transformed)
    assert np.array_equal(fill(0.0).transform_row(row, np.zeros_like(row), sample)[0], row)
    always = fill(1.0).transform_row(row, np.zeros_like(row), sample)[0]
    assert undone(always.tolist())[1] == sum(map(bool, documents)) >= count


def test_share_and_positions_follow_the_settings() -> None:
    row = np.tile(np.array([*range(1, 10), END]), 40)
    built = np.stack([fill(0.3, seed=1).transform_row(row, np.zeros_like(row), sample)[0] for sample in range(100)])
    documents = [[*ids] for each in built.tolist() for ids in _documents(each)]
    share = sum(ids[0] == PREFIX for ids in documents) / len(documents)
    assert 0.27 < share < 0.33
    middles = [len(ids) - 1 - ids.index(MIDDLE) for ids in documents if ids[0] == PREFIX and MIDDLE in ids]
    # Two places by chance among 10: a third of the text on average.
    assert 2.6 < float(np.mean(middles)) < 3.4


def _documents(row: list[int]) -> list[list[int]]:
    result: list[list[int]] = [[]]
    for id_ in row:
        result[-1].append(id_) if id_ != END else result.append([])
    return [ids for ids in result[:-1] if ids]


def test_batches_are_pure_and_labels_follow(built_folder: Path) -> None:
    dataset = open_dataset(built_folder, "train")
    fill = FillInTheMiddle(0.5, PREFIX, SUFFIX, MIDDLE, dataset.eos_token_id, 3)
    mixture = plan_mixture([(0, [1.0])], [None])
    source = MixtureDataset((WindowDataset(dataset, 64, 1),), mixture, 6, True, None, fill)
    whole = source.batch(5, 0, 6)
    for name in ("tokens", "labels", "positions", "documents"):
        assert torch.equal(torch.cat([getattr(source.batch(5, at, 2), name) for at in (0, 2, 4)]), getattr(whole, name))
    assert torch.equal(whole.tokens[:, 1:], whole.labels[:, :-1])
    assert (whole.tokens == MIDDLE).any()
    assert whole.documents is not None
    ends = (whole.tokens == dataset.eos_token_id).long()
    assert torch.equal(whole.documents, ends.cumsum(1) - ends)


def test_missing_special_tokens_are_refused(data_tokenizer: Tokenizer) -> None:
    with pytest.raises(JinguError) as caught:
        build_fill_in_the_middle(FillInTheMiddleSettings(), data_tokenizer, 0)
    assert str(caught.value) == (
        "data.objective: the tokenizer has no special token <|fim_prefix|>, which fill-in-the-middle needs. Train a "
        "tokenizer with it (tokenizer.special_tokens), or name tokens that this one has."
    )
    names = ["<|endoftext|>", "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]
    built = build_fill_in_the_middle(FillInTheMiddleSettings(), train_tokenizer(iter(["text"]), 270, names), 7)
    assert (built.prefix_id, built.suffix_id, built.middle_id, built.eos_token_id) == (1, 2, 3, 0)
