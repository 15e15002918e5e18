"""Tokenize rows of instruction data, and give each token its weight in the loss."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from jingu.chat.messages import ConversationError, Message, Row
from jingu.chat.templates import ChatTemplate, RenderedChat, Turns
from jingu.chat.tracing import Span
from jingu.data.supervised import WEIGHT_SCALE
from jingu.text.tokenizer import Tokenizer

LossOn = Literal["assistant", "last_assistant", "all"]
# Texts that are hardly ever part of a token of the text after them.
_ANCHORS = ("\n", "。", "0")


@dataclass(frozen=True)
class TokenizedRow:
    """A row as token ids.

    Attributes:
        kind: `Row.kind`.
        weights: loss weight of each token as a label, times `WEIGHT_SCALE`, [tokens]. 0: the token is not trained;
            below 0: training decreases its probability.
        mentions_special: whether the row contains special tokens that are tokenized as text.
    """

    kind: str
    ids: list[int]
    weights: npt.NDArray[Any]
    mentions_special: bool = field(default=False, kw_only=True)

    @property
    def split_ids(self) -> list[int]:
        """Ids whose hash assigns the row to the training or the validation split."""
        return self.ids

    @property
    def sidecar(self) -> npt.NDArray[Any]:
        """The values that a data set stores beside the ids, one per id."""
        return self.weights


def tokenize_row(
    row: Row, template: ChatTemplate, tokenizer: Tokenizer, loss_on: LossOn, *, parse_special_tokens: bool = False
) -> TokenizedRow:
    """Return the token ids of a row and their loss weights, in one text.

    Args:
        loss_on: which tokens are trained: those of all answers, of the last answer, or all tokens. Weights of messages
            apply to each of these.
        parse_special_tokens: whether special tokens in texts without a template act as special tokens. For messages,
            the template decides.

    Raises:
        ConversationError: the template refuses the row or leaves out a part of it, an answer cannot be located, or the
            weights contradict `loss_on`.
    """
    turns: Turns = "auto" if loss_on == "last_assistant" else "whole"
    return tokenize_turns(row, template, tokenizer, loss_on, turns, parse_special_tokens=parse_special_tokens)[0]


def tokenize_turns(
    row: Row,
    template: ChatTemplate,
    tokenizer: Tokenizer,
    loss_on: LossOn,
    turns: Turns,
    *,
    parse_special_tokens: bool = False,
) -> list[TokenizedRow]:
    """Return the token ids of a row and their loss weights, in the texts in which its answers are trained.

    Args:
        loss_on: as for `tokenize_row`. With `all`, the whole conversation is one text.
        turns: as for `ChatTemplate.render_answers`.
        parse_special_tokens: as for `tokenize_row`.

    Raises:
        ConversationError: as for `tokenize_row`.
    """
    if row.segments:
        return [_tokenize_segments(row, tokenizer, loss_on, parse_special_tokens)]
    answers = [index for index, message in enumerate(row.messages) if message.role == "assistant"]
    if loss_on == "last_assistant":
        answers = answers[-1:]
    context_weight = _context_weight(row) if loss_on == "all" else 0.0
    # Only answers whose weight differs from that of the text around them must be located.
    located_answers = [index for index in answers if _answer_weight(row.messages[index], loss_on) != context_weight]
    if not located_answers:
        rendered_chats = [template.render(row.messages, row.tools, row.variables, locate_answers=False)]
    else:
        texts: Turns = "whole" if loss_on == "all" else turns
        rendered_chats = template.render_answers(row.messages, located_answers, row.tools, row.variables, turns=texts)
    rows = []
    for rendered_chat in rendered_chats:
        ids, spans = encode_rendered(rendered_chat, tokenizer)
        weights = np.zeros(len(ids), np.uint8)
        if context_weight:
            weights[:] = round(context_weight * WEIGHT_SCALE)
        for (start, end), index in zip(spans, rendered_chat.messages, strict=True):
            weights[start:end] = round(_answer_weight(row.messages[index], loss_on) * WEIGHT_SCALE)
        rows.append(TokenizedRow(row.kind, ids, weights, mentions_special=bool(rendered_chat.mentions)))
    return rows


def _answer_weight(message: Message, loss_on: LossOn) -> float:
    return 0.0 if message.is_prompt and loss_on != "all" else message.weight


def _context_weight(row: Row) -> float:
    """Return the weight of what is not an answer, if the loss is on all tokens: that of all other messages.

    Raises:
        ConversationError: they have different weights.
    """
    weights = {message.weight for message in row.messages if message.role != "assistant"}
    if len(weights) > 1:
        raise ConversationError(
            "data.objective.loss_on=all trains the messages between the answers alike, but the row leaves out some of "
            "them"
        )
    return weights.pop() if weights else 1.0


def _tokenize_segments(row: Row, tokenizer: Tokenizer, loss_on: LossOn, parse_special_tokens: bool) -> TokenizedRow:
    """Tokenize segments of plain text: the tokenizer's prefix (such as BOS), the texts, EOS. EOS is always trained.

    The whole text is tokenized at once, so that its ids are those that a model reads and writes. A token that is part
    of two segments belongs to the later one. A text that has a prefix or EOS of its own gets no second one.
    """
    text = "".join(part for part, _ in row.segments)
    highest = max(weight for _, weight in row.segments)
    # 1. Tokenize, and find the first id of each segment.
    if len(row.segments) == 1:
        ids = tokenizer.encode(text, parse_special_tokens=parse_special_tokens)
        starts = [0]
    else:
        ends = list(accumulate(len(part) for part, _ in row.segments))
        later = [(start, ends[-1]) for start in ends[:-1]]
        ids, spans = tokenizer.encode_spans(text, later, parse_special_tokens=parse_special_tokens)
        starts = [0, *(start for start, _ in spans)]
    # 2. Add the prefix and EOS.
    prefix = tokenizer.prompt_prefix_ids
    if parse_special_tokens and ids[: len(prefix)] == prefix:
        prefix = []
    if not (parse_special_tokens and ids[-1:] == [tokenizer.eos_token_id]):
        ids.append(tokenizer.eos_token_id)
    ids = [*prefix, *ids]
    # 3. A segment's weight applies up to the next segment, and the last one's to EOS too.
    weights = np.zeros(len(ids), np.uint8)
    for start, (_, weight) in zip(starts, row.segments, strict=True):
        weights[len(prefix) + start :] = round(weight * WEIGHT_SCALE)
    weights[-1] = round(highest * WEIGHT_SCALE)
    if loss_on == "all":
        weights[:] = weights[-1]
    mentions_special = not parse_special_tokens and tokenizer.mentions_special(text)
    return TokenizedRow(row.kind, ids, weights, mentions_special=mentions_special)


def encode_prompt_and_answer(
    tokenizer: Tokenizer, prompt: str, answer: str, *, parse_special_tokens: bool = False
) -> tuple[list[int], list[int]]:
    """Return the ids of a text prompt and of an answer: those of both as one text, divided.

    A token that is part prompt, part answer belongs to the answer.
    """
    text = prompt + answer
    ids, [(start, _)] = tokenizer.encode_spans(
        text, [(len(prompt), len(text))], parse_special_tokens=parse_special_tokens
    )
    return ids[:start], ids[start:]


def encode_continuation(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the ids of a text that follows other ids: without the space that some tokenizers put before a text."""
    for anchor in _ANCHORS:
        before, after = encode_prompt_and_answer(tokenizer, anchor, text)
        if before == tokenizer.encode(anchor):
            return after
    return tokenizer.encode(text)


def encode_rendered(chat: RenderedChat, tokenizer: Tokenizer) -> tuple[list[int], list[Span]]:
    """Tokenize a rendered conversation.

    The template's special tokens become their ids; mentions, which come from messages, are tokenized as text.

    Returns:
        The ids, and for each answer the index of its first id and of the first id after it.
    """
    if not chat.mentions:
        return tokenizer.encode_spans(chat.text, chat.answers, parse_special_tokens=True)
    ids: list[int] = []
    # For each answer, the start and end of its ids in each piece of text that it overlaps; first and last delimit it.
    borders: list[list[int]] = [[] for _ in chat.answers]
    for start, end, special_id in _split_at_special_tokens(chat, tokenizer):
        # Clip each answer to this piece; an answer outside of it becomes empty.
        clipped_spans = [
            (min(max(first, start), end) - start, min(max(last, start), end) - start) for first, last in chat.answers
        ]
        if special_id is None:
            piece_ids, spans = tokenizer.encode_spans(chat.text[start:end], clipped_spans)
        else:
            piece_ids = [special_id]
            spans = [(0, 1)] * len(clipped_spans)
        for index, (first, last) in enumerate(clipped_spans):
            if first < last:
                borders[index] += [len(ids) + spans[index][0], len(ids) + spans[index][1]]
        ids += piece_ids
    return ids, [(positions[0], positions[-1]) if positions else (0, 0) for positions in borders]


def _split_at_special_tokens(chat: RenderedChat, tokenizer: Tokenizer) -> Iterator[tuple[int, int, int | None]]:
    """Yield start, end and special token id of each piece of the text; the id is None for plain text."""
    mentions = dict(chat.mentions)
    special_tokens = tokenizer.special_tokens
    pattern = re.compile("|".join(map(re.escape, sorted(special_tokens, key=len, reverse=True))))
    plain_start = 0
    position = 0
    while match := pattern.search(chat.text, position):
        if match.start() in mentions:
            # A mention stays in the plain text around it.
            position = mentions[match.start()]
            continue
        if plain_start < match.start():
            yield plain_start, match.start(), None
        yield match.start(), match.end(), special_tokens[match[0]]
        plain_start = position = match.end()
    if plain_start < len(chat.text):
        yield plain_start, len(chat.text), None
