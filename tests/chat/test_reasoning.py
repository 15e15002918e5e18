"""Reasoning is separated from answers, however they are cut into pieces."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jingu.chat.reasoning import ReasoningParser

CASES = [
    ("plain text", False, "", "plain text"),
    (" leading space", False, "", " leading space"),
    ("<think>\nhm, <b>\n</think>\n\nThe answer</think>.", False, "hm, <b>", "The answer</think>."),
    ("\n<think>\n\n</think>\n\nyes", False, "", "yes"),
    ("hm\n</think>\n\nyes", True, "hm", "yes"),
    ("<think>\nnever closed </thi", False, "never closed </thi", ""),
    ("<thin", False, "", "<thin"),
    ("say <think>", False, "", "say <think>"),
    ("", True, "", ""),
    ("  ", False, "", "  "),
]


@pytest.mark.parametrize(("text", "is_open", "reasoning", "answer"), CASES)
@given(cuts=st.lists(st.integers(0, 60), max_size=12))
def test_any_pieces_give_the_same(text: str, is_open: bool, reasoning: str, answer: str, cuts: list[int]) -> None:
    parser = ReasoningParser(is_open)
    borders = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[start:end] for start, end in pairwise(borders)]
    parts = [parser.push(piece, is_last=place == len(pieces) - 1) for place, piece in enumerate(pieces)]
    assert ("".join(part[0] for part in parts), "".join(part[1] for part in parts)) == (reasoning, answer)
