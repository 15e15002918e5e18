"""Rows to ids, and which of them are trained."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from jingu.data.supervised import WHOLE
from jingu.errors import counted
from jingu.text.tokenizer import Tokenizer
from jingu.tune.rows import Row, RowError
from jingu.tune.templates import Rendered, Template

TrainOn = Literal["answers", "last_answer", "all"]


@dataclass(frozen=True)
class Supervised:
    """A row as ids."""

    kind: str
    ids: list[int]
    weights: npt.NDArray[np.uint8]
    """Of each id where it is to be predicted, in hundredths; 0 where it is not trained."""


def supervise(row: Row, template: Template | None, tokenizer: Tokenizer, train_on: TrainOn) -> Supervised:
    """The ids of a row, and which of them are trained.

    Raises:
        RowError: the row does not fit the template, or weights do not fit the answers that the template marks.
        JinguError: it cannot be proved what the model said.
    """
    if row.parts:
        return _parts(row, tokenizer, train_on)
    assert template is not None
    shown = template.render(row, marks=train_on != "all")
    ids, answers = encode(shown, tokenizer)
    if train_on == "all":
        return Supervised(row.kind, ids, np.full(len(ids), WHOLE, np.uint8))
    given = [message.weight for message in row.messages if message.role == "assistant"]
    if len(answers) != len(given):
        # Some templates leave out earlier answers, or mark several as one.
        if train_on == "last_answer" or set(given) != {1.0}:
            raise RowError(
                f"the template marks {len(answers)} of {counted(len(given), 'answer')}: their weights have no place"
            )
        given = [1.0] * len(answers)
    if train_on == "last_answer":
        given = [0.0] * (len(given) - 1) + given[-1:]
    weights = np.zeros(len(ids), np.uint8)
    for (first, last), weight in zip(answers, given, strict=True):
        weights[first:last] = round(weight * WHOLE)
    return Supervised(row.kind, ids, weights)


def _parts(row: Row, tokenizer: Tokenizer, train_on: TrainOn) -> Supervised:
    """Text that stands as it is, begun and ended as the model knows texts."""
    ids = list(tokenizer.beginning)
    trained = [train_on == "all"] * len(ids)
    for text, answer in row.parts:
        part = tokenizer.encode(text)
        ids += part
        trained += [answer or train_on == "all"] * len(part)
    return Supervised(row.kind, [*ids, tokenizer.end_id], np.array([*trained, True], np.uint8) * np.uint8(WHOLE))


def encode(shown: Rendered, tokenizer: Tokenizer) -> tuple[list[int], list[tuple[int, int]]]:
    """Ids of a text whose special tokens are such, but for those that are only mentioned; and the first id of each
    answer, and the first after it."""
    if not shown.mentioned:
        return tokenizer.encode_spans(shown.text, shown.answers, special=True)
    ids: list[int] = []
    found: list[list[int]] = [[] for _ in shown.answers]
    for start, end, special in _pieces(shown, tokenizer):
        # Of each answer what is in this piece; of one that is not, nothing.
        spans = [(min(max(a, start), end) - start, min(max(b, start), end) - start) for a, b in shown.answers]
        if special is None:
            part, places = tokenizer.encode_spans(shown.text[start:end], spans)
        else:
            part, places = [special], [(0, 1)] * len(spans)
        for number, (first, last) in enumerate(places):
            if spans[number][0] < spans[number][1]:
                found[number] += [len(ids) + first, len(ids) + last]
        ids += part
    return ids, [(places[0], places[-1]) if places else (0, 0) for places in found]


def _pieces(shown: Rendered, tokenizer: Tokenizer) -> Iterator[tuple[int, int, int | None]]:
    """Where each piece begins and ends, and the special token that it is."""
    mentioned, special = dict(shown.mentioned), tokenizer.special_tokens
    pattern = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))))
    begun, here = 0, 0
    while found := pattern.search(shown.text, here):
        here = mentioned.get(found.start(), found.end())
        if found.start() not in mentioned:
            if begun < found.start():
                yield begun, found.start(), None
            yield *found.span(), special[found[0]]
            begun = here
    if begun < len(shown.text):
        yield begun, len(shown.text), None
