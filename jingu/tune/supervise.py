"""Rows to ids, and which of them are trained."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from jingu.text.tokenizer import Tokenizer
from jingu.tune.rows import Row, RowError
from jingu.tune.templates import Rendered, Template

TrainOn = Literal["answers", "last_answer", "all"]


@dataclass(frozen=True)
class Supervised:
    """A row as ids."""

    kind: str
    ids: list[int]
    trained: list[bool]
    """Whether each is to be predicted."""


def supervise(row: Row, template: Template | None, tokenizer: Tokenizer, train_on: TrainOn) -> Supervised:
    """The ids of a row, and which of them are trained.

    Raises:
        RowError: the row does not fit the template, or weights do not fit the answers that the template marks.
        JinguError: it cannot be proved what the model said.
    """
    if row.parts:
        return _parts(row, tokenizer, train_on)
    assert template is not None
    shown = template.render(row)
    ids, places = encode(shown, tokenizer)
    spans = list(shown.answers)
    weights = [message.weight for message in row.messages if message.role == "assistant"]
    if train_on != "all" and len(spans) != len(weights):
        # Some templates leave out earlier answers, or mark several as one.
        if train_on == "last_answer" or 0.0 in weights:
            raise RowError(f"the template marks {len(spans)} answers of {len(weights)}: their weights have no place")
        weights = [1.0] * len(spans)
    if train_on == "last_answer":
        weights = [0.0] * (len(weights) - 1) + weights[-1:]
    taught = [span for span, weight in zip(spans, weights, strict=False) if weight]
    trained = [train_on == "all"] * len(ids) if train_on == "all" else _within(places, taught)
    return Supervised(row.kind, ids, trained)


def _parts(row: Row, tokenizer: Tokenizer, train_on: TrainOn) -> Supervised:
    """Text that stands as it is, begun and ended as the model knows texts."""
    ids = list(tokenizer.beginning)
    trained = [train_on == "all"] * len(ids)
    for text, answer in row.parts:
        part = tokenizer.encode(text)
        ids += part
        trained += [answer or train_on == "all"] * len(part)
    return Supervised(row.kind, [*ids, tokenizer.end_id], [*trained, True])


def _within(places: list[tuple[int, int]], spans: list[tuple[int, int]]) -> list[bool]:
    """Whether each token has a character within one of the spans, which are in order."""
    inside, number = [], 0
    for start, end in places:
        while number < len(spans) and spans[number][1] <= start:
            number += 1
        inside.append(number < len(spans) and spans[number][0] < max(end, start + 1))
    return inside


def encode(shown: Rendered, tokenizer: Tokenizer) -> tuple[list[int], list[tuple[int, int]]]:
    """Ids and places of a text whose special tokens are such, but for those that are only mentioned."""
    if not shown.mentioned:
        return tokenizer.encode_places(shown.text, special=True)
    mentioned = dict(shown.mentioned)
    special = tokenizer.special_tokens
    pattern = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))))
    ids: list[int] = []
    places: list[tuple[int, int]] = []

    def plain(start: int, end: int) -> None:
        found, where = tokenizer.encode_places(shown.text[start:end])
        ids.extend(found)
        places.extend((first + start, last + start) for first, last in where)

    begun, here = 0, 0
    while found := pattern.search(shown.text, here):
        here = mentioned.get(found.start(), found.end())
        if found.start() not in mentioned:
            plain(begun, found.start())
            ids.append(special[found[0]])
            places.append(found.span())
            begun = here
    plain(begun, len(shown.text))
    return ids, places
