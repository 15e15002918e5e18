"""Tokenize rows of instruction data, and give each token its weight in the loss."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from jingu.chat.messages import Row
from jingu.chat.templates import ChatTemplate, RenderedChat, Turns
from jingu.chat.tracing import Span
from jingu.data.supervised import WEIGHT_SCALE
from jingu.text.tokenizer import Tokenizer

LossOn = Literal["assistant", "last_assistant", "all"]


@dataclass(frozen=True)
class TokenizedRow:
    """A row as token ids.

    Attributes:
        kind: `Row.kind`.
        weights: loss weight of each token as a label, times `WEIGHT_SCALE`, [tokens]. 0: the token is not trained;
            below 0: training decreases its probability.
    """

    kind: str
    ids: list[int]
    weights: npt.NDArray[Any]

    @property
    def split_ids(self) -> list[int]:
        """Ids whose hash assigns the row to the training or the validation split."""
        return self.ids

    @property
    def sidecar(self) -> npt.NDArray[Any]:
        """The values that a data set stores beside the ids, one per id."""
        return self.weights


def tokenize_row(row: Row, template: ChatTemplate, tokenizer: Tokenizer, loss_on: LossOn) -> TokenizedRow:
    """Return the token ids of a row and their loss weights, in one text.

    Args:
        loss_on: which tokens are trained: those of all answers, of the last answer, or all tokens.

    Raises:
        ConversationError: the template refuses the row or leaves out a part of it, or an answer cannot be located.
    """
    turns: Turns = "auto" if loss_on == "last_assistant" else "whole"
    return tokenize_turns(row, template, tokenizer, loss_on, turns)[0]


def tokenize_turns(
    row: Row, template: ChatTemplate, tokenizer: Tokenizer, loss_on: LossOn, turns: Turns
) -> list[TokenizedRow]:
    """Return the token ids of a row and their loss weights, in the texts in which its answers are trained.

    Args:
        loss_on: as for `tokenize_row`. With `all`, the whole conversation is one text.
        turns: as for `ChatTemplate.render_answers`.

    Raises:
        ConversationError: as for `tokenize_row`.
    """
    if row.segments:
        return [_tokenize_segments(row, tokenizer, loss_on)]
    answers = [index for index, message in enumerate(row.messages) if message.role == "assistant"]
    if loss_on == "last_assistant":
        answers = answers[-1:]
    trained = [index for index in answers if row.messages[index].weight]
    if loss_on == "all" or not trained:
        rendered_chats = [template.render(row.messages, row.tools, row.variables, locate_answers=False)]
    else:
        rendered_chats = template.render_answers(row.messages, trained, row.tools, row.variables, turns=turns)
    rows = []
    for rendered in rendered_chats:
        ids, spans = encode_rendered(rendered, tokenizer)
        weights = np.full(len(ids), WEIGHT_SCALE if loss_on == "all" else 0, np.uint8)
        for (start, end), index in zip(spans, rendered.messages, strict=True):
            weights[start:end] = round(row.messages[index].weight * WEIGHT_SCALE)
        rows.append(TokenizedRow(row.kind, ids, weights))
    return rows


def _tokenize_segments(row: Row, tokenizer: Tokenizer, loss_on: LossOn) -> TokenizedRow:
    """Tokenize segments of plain text: the tokenizer's prefix (such as BOS), the texts, EOS. EOS is always trained."""
    ids = list(tokenizer.prompt_prefix_ids)
    is_trained = [loss_on == "all"] * len(ids)
    for text, is_answer in row.segments:
        segment_ids = tokenizer.encode(text)
        ids += segment_ids
        is_trained += [is_answer or loss_on == "all"] * len(segment_ids)
    ids.append(tokenizer.eos_token_id)
    is_trained.append(True)
    return TokenizedRow(row.kind, ids, np.array(is_trained, np.uint8) * np.uint8(WEIGHT_SCALE))


def encode_rendered(rendered: RenderedChat, tokenizer: Tokenizer) -> tuple[list[int], list[Span]]:
    """Tokenize a rendered conversation.

    The template's special tokens become their ids; mentions, which come from messages, are tokenized as text.

    Returns:
        The ids, and for each answer the index of its first id and of the first id after it.
    """
    if not rendered.mentions:
        return tokenizer.encode_spans(rendered.text, rendered.answers, parse_special_tokens=True)
    ids: list[int] = []
    # For each answer, the start and end of its ids in each piece of text that it overlaps; first and last delimit it.
    borders: list[list[int]] = [[] for _ in rendered.answers]
    for start, end, special_id in _split_at_special_tokens(rendered, tokenizer):
        # Clip each answer to this piece; an answer outside of it becomes empty.
        clipped = [
            (min(max(first, start), end) - start, min(max(last, start), end) - start)
            for first, last in rendered.answers
        ]
        if special_id is None:
            piece_ids, spans = tokenizer.encode_spans(rendered.text[start:end], clipped)
        else:
            piece_ids = [special_id]
            spans = [(0, 1)] * len(clipped)
        for index, (first, last) in enumerate(clipped):
            if first < last:
                borders[index] += [len(ids) + spans[index][0], len(ids) + spans[index][1]]
        ids += piece_ids
    return ids, [(positions[0], positions[-1]) if positions else (0, 0) for positions in borders]


def _split_at_special_tokens(rendered: RenderedChat, tokenizer: Tokenizer) -> Iterator[tuple[int, int, int | None]]:
    """Yield start, end and special token id of each piece of the text; the id is None for plain text."""
    mentions = dict(rendered.mentions)
    special_tokens = tokenizer.special_tokens
    pattern = re.compile("|".join(map(re.escape, sorted(special_tokens, key=len, reverse=True))))
    plain_start = 0
    position = 0
    while match := pattern.search(rendered.text, position):
        if match.start() in mentions:
            # A mention stays in the plain text around it.
            position = mentions[match.start()]
            continue
        if plain_start < match.start():
            yield plain_start, match.start(), None
        yield match.start(), match.end(), special_tokens[match[0]]
        plain_start = position = match.end()
    if plain_start < len(rendered.text):
        yield plain_start, len(rendered.text), None
