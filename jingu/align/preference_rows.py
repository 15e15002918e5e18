"""Rows of preference data: a chosen and a rejected answer to a prompt, a ranking, or an answer with a label."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt

from jingu.chat.messages import ConversationError, JsonObject, Message, Row
from jingu.chat.tokenization import TokenizedRow, tokenize_row
from jingu.config.sections.data import PreferenceSettings
from jingu.data.supervised import MARGIN_SCALE, encode_part
from jingu.text.document_reader import ReadCounts
from jingu.tune.prepare import DROPPED_PREFIX, TRUNCATED, RowKind, RowTokenizer
from jingu.tune.row_formats import parse_row, rename_columns

# Margins are stored as multiples of 1 / MARGIN_SCALE, in 30 bits with sign.
MAX_MARGIN = 2**29 // MARGIN_SCALE
# Fields that say whether an answer is desirable; LLaMA-Factory uses the second.
LABELS = ("label", "kto_tag")
# Fields with a conversation, without its last message.
CONVERSATIONS = ("messages", "conversations")
# The field of the answer, by the field of the question.
ANSWER_FIELDS = {"instruction": "output", "question": "answer", "query": "response"}


@dataclass(frozen=True)
class PreferenceRow:
    """Answers to one prompt, each as a conversation that ends with it.

    Attributes:
        kind: name of the row's format.
        answers: the chosen and the rejected answer; all answers of a ranking, the best first; or a single one.
        ranks: rank of each answer of a ranking, 0 for the best; answers with equal ranks are not compared.
        is_desirable: the label of a single answer.
        margin: by how much the chosen answer is better, in units of reward.
    """

    kind: str
    answers: tuple[Row, ...]
    is_desirable: bool = True
    margin: float = 0.0
    ranks: tuple[int, ...] = (0, 1)

    @property
    def messages(self) -> tuple[Message, ...]:
        return self.answers[0].messages

    @property
    def segments(self) -> tuple[tuple[str, bool], ...]:
        return self.answers[0].segments


def parse_preference_row(value: Any, columns: Mapping[str, str] | None = None) -> PreferenceRow:
    """Convert a row of any known form: chosen and rejected answers (texts, messages, or lists of them, with the prompt
    or without), a ranking of such answers, or an answer with a label in any form that tuning knows.

    Raises:
        ConversationError: the row has no known form, or one of its fields is invalid.
    """
    if not isinstance(value, dict):
        raise ConversationError("expected an object with fields")
    value = rename_columns(value, columns or {})
    if "ranking" in value:
        return _parse_ranking(value)
    answers = [name for name in ("chosen", "rejected") if name in value]
    if len(answers) == 1:
        raise ConversationError(f"expected the fields chosen and rejected; it has only {answers[0]}")
    if answers:
        return _parse_pair(value)
    label = next((name for name in LABELS if name in value), None)
    if label is None:
        fields = ", ".join(map(str, value)) or "none"
        known = f"ranking or {' or '.join(LABELS)}"
        raise ConversationError(f"expected the fields chosen and rejected, or {known}; it has {fields}")
    if value[label] not in (True, False):
        raise ConversationError(f"field {label}: expected true or false")
    row = parse_row({name: item for name, item in value.items() if name != label})
    return PreferenceRow(f"{row.kind} with {label}", (row,), bool(value[label]))


def _parse_pair(value: JsonObject) -> PreferenceRow:
    margin = value.get("margin") or 0.0
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not abs(margin) < MAX_MARGIN:
        raise ConversationError(f"field margin: expected a number below {MAX_MARGIN:,}")
    rest = {name: item for name, item in value.items() if name not in ("chosen", "rejected", "margin")}
    chosen = value["chosen"]
    rejected = value["rejected"]
    if (
        isinstance(chosen, str)
        and isinstance(rejected, str)
        and not rest.keys() & {"prompt", *CONVERSATIONS, *ANSWER_FIELDS}
    ):
        # Two whole texts: their common prefix is the prompt.
        size = _common_prefix(chosen, rejected)
        rest = {"prompt": chosen[:size]}
        chosen = chosen[size:]
        rejected = rejected[size:]
    rows = []
    for name, answer in (("chosen", chosen), ("rejected", rejected)):
        try:
            rows.append(_parse_answer(rest, answer))
        except ConversationError as error:
            raise ConversationError(f"field {name}: {error}") from error
    return PreferenceRow(f"{rows[0].kind} pair", tuple(rows), margin=margin)


def _parse_ranking(value: JsonObject) -> PreferenceRow:
    """Return answers from the best to the worst: in the order of the list, or of their `scores`."""
    answers = value["ranking"]
    if not isinstance(answers, list) or len(answers) < 2:
        raise ConversationError("field ranking: expected a list of two answers or more")
    if "margin" in value:
        raise ConversationError("field margin: a ranking has none; write its pairs as rows of chosen and rejected")
    scores = value.get("scores", [-number for number in range(len(answers))])
    numbers = isinstance(scores, list) and all(type(score) in (int, float) for score in scores)
    if not numbers or len(scores) != len(answers):
        raise ConversationError("field scores: expected a number for each answer of the ranking")
    levels = sorted(set(scores), reverse=True)
    if len(levels) < 2:
        raise ConversationError("field scores: all are equal, so there is nothing to compare")
    rest = {name: item for name, item in value.items() if name not in ("ranking", "scores")}
    rows = []
    ranks = []
    for rank, answer in sorted(zip(map(levels.index, scores), answers, strict=True), key=lambda pair: pair[0]):
        try:
            rows.append(_parse_answer(rest, answer))
        except ConversationError as error:
            raise ConversationError(f"field ranking: {error}") from error
        ranks.append(rank)
    return PreferenceRow(f"{rows[0].kind} ranking", tuple(rows), ranks=tuple(ranks))


def _common_prefix(first: str, second: str) -> int:
    """Return the length of the common prefix of two texts, without a space at its end, which belongs to the answers."""
    size = next((index for index, pair in enumerate(zip(first, second, strict=False)) if len(set(pair)) > 1), 0)
    return size - 1 if size and first[size - 1] == " " else size


def _parse_answer(rest: JsonObject, answer: Any) -> Row:
    """Return the conversation that ends with an answer, from the other fields of its row."""
    prompt = rest.get("prompt")
    if isinstance(answer, str):
        if isinstance(prompt, list):
            answer = [{"role": "assistant", "content": answer}]
        elif "conversations" in rest:
            answer = {"from": "gpt", "value": answer}
        elif "messages" in rest:
            answer = {"role": "assistant", "content": answer}
        else:
            field = next((own for question, own in ANSWER_FIELDS.items() if question in rest), "completion")
            return parse_row({**rest, field: answer})
    if isinstance(answer, dict):
        # LLaMA-Factory: the row has the conversation without its last message, and the answer is that message.
        field = "conversations" if "conversations" in rest else "messages"
        return parse_row({**rest, field: [*(rest.get(field) or []), answer]})
    if not isinstance(answer, list) or not answer:
        raise ConversationError("expected a text, a message, or a list of messages")
    messages = _join_messages(prompt, answer)
    system = rest.get("system")
    # The field `system` goes first, unless the messages begin with the same text.
    if system and not (_role(messages[0]) == "system" and messages[0].get("content") == system):
        messages = [{"role": "system", "content": system}, *messages]
    return parse_row({"messages": messages, "tools": rest.get("tools")})


def _join_messages(prompt: Any, answer: list[Any]) -> list[Any]:
    """Return the conversation of a prompt (a text, messages or None) and an answer, whose messages may repeat it.

    Raises:
        ConversationError: the prompt is neither a text nor messages, or the answer begins with another prompt.
    """
    # A list that starts with an assistant message is only the answer; otherwise it is a conversation with its prompt.
    if isinstance(prompt, str):
        is_answer = _role(answer[0]) == "assistant"
        return [{"role": "user", "content": prompt}, *answer] if is_answer else answer
    if not isinstance(prompt or [], list):
        raise ConversationError("field prompt: expected a text or a list of messages")
    first = _role(answer[0])
    if not prompt:
        return answer
    if first not in ("user", "system"):
        return [*prompt, *answer]
    if answer[: len(prompt)] == prompt:
        return answer
    # A question may follow a system message or an answer. Anything else would merge two prompts into one.
    if first == "user" and _role(prompt[-1]) != "user":
        return [*prompt, *answer]
    raise ConversationError("its messages begin with another prompt than that of the field prompt")


def _role(message: Any) -> Any:
    """Return the role of a message; None if it has none."""
    return message.get("role") if isinstance(message, dict) else None


@dataclass(frozen=True)
class TokenizedAnswers(TokenizedRow):
    """Token ids of answers with their prompts, one after the other. Weights are negative for rejected answers.

    Attributes:
        parts: code stored with each id (`encode_part`).
        best_ids: ids of the best answer of a ranking. They decide the split, so that all pairs of a ranking are in the
            same one.
    """

    parts: npt.NDArray[np.int32]
    best_ids: list[int] | None = None

    @property
    def split_ids(self) -> list[int]:
        return self.ids if self.best_ids is None else self.best_ids

    @property
    def sidecar(self) -> npt.NDArray[Any]:
        return self.parts


class PreferenceTokenizer(RowTokenizer):
    """Turns rows of preference data into token ids."""

    @cached_property
    def _settings(self) -> PreferenceSettings:
        assert isinstance(self.objective, PreferenceSettings)
        return self.objective

    def parse(self, value: Any) -> PreferenceRow:
        row = parse_preference_row(value, self.objective.columns)
        if self._settings.rows == "pairs" and len(row.answers) == 1:
            raise ConversationError(
                "an answer with a label is no pair; set data.objective.rows=labels and task.type=kto"
            )
        if self._settings.rows == "labels" and len(row.answers) > 2:
            raise ConversationError("a ranking does not say which answers are desirable; set data.objective.rows=pairs")
        return row

    def tokenize(self, row: PreferenceRow, counts: ReadCounts) -> Sequence[TokenizedRow]:
        parts = [tokenize_row(answer, self.template, self.tokenizer, "last_assistant") for answer in row.answers]
        if len(parts) < 2:
            return self._tokenize_answers(row, parts, counts)
        # Each answer of a ranking is compared with each that is worse (Ouyang et al., 2022).
        pairs = [
            (better, worse)
            for (better, rank), (worse, other) in combinations(zip(parts, row.ranks, strict=True), 2)
            if rank < other
        ]
        answers = [part for pair in pairs for part in self._tokenize_answers(row, pair, counts)]
        return [replace(part, best_ids=parts[0].ids) for part in answers] if len(parts) > 2 else answers

    def _tokenize_answers(
        self, row: PreferenceRow, parts: Sequence[TokenizedRow], counts: ReadCounts
    ) -> list[TokenizedAnswers]:
        """Return the stored form of a pair or of a single answer."""
        _check_prompts(parts)
        # Each answer of a pair may take half of a sequence. With labels, every answer is a row of its own.
        is_pair = self._settings.rows == "pairs"
        limit = (self.max_length - 1) // (2 if is_pair else 1)
        longest = max(len(part.ids) for part in parts)
        if longest > limit and self._settings.overflow == "drop":
            counts.count(f"{DROPPED_PREFIX}too long")
            return []
        if longest > limit:
            counts.count(TRUNCATED)
            parts = [TokenizedRow(part.kind, part.ids[:limit], part.weights[:limit]) for part in parts]
            _check_prompts(parts)
        sides = [not row.is_desirable, True][: len(parts)]
        if is_pair:
            return [_join(parts, sides, row.margin)]
        return [_join([part], [side], row.margin) for part, side in zip(parts, sides, strict=True)]


def _check_prompts(parts: Sequence[TokenizedRow]) -> None:
    """Raise ConversationError unless the answers differ and have the same non-empty prompt."""
    starts = []
    for part in parts:
        trained = part.weights.nonzero()[0]
        if not len(trained):
            raise ConversationError("no token of an answer is left to train on")
        starts.append(int(trained[0]))
    if not min(starts):
        raise ConversationError("the prompt has no tokens")
    first, last = parts[0], parts[-1]
    if first.ids[: starts[0]] != last.ids[: starts[-1]]:
        raise ConversationError("chosen and rejected have different prompts when the template renders them")
    if len(parts) > 1 and first.ids == last.ids:
        raise ConversationError("chosen and rejected are the same")


def _join(parts: Sequence[TokenizedRow], sides: Sequence[bool], margin: float) -> TokenizedAnswers:
    """Return answers to one prompt as one row.

    The row ends with an extra id that serves only as a label: the last id of a row is never an input.

    Args:
        sides: whether each answer is rejected or undesirable.
    """
    ids = [token_id for part in parts for token_id in part.ids]
    weights = [part.weights.astype(np.int16) * (-1 if side else 1) for part, side in zip(parts, sides, strict=True)]
    codes = [encode_part(part.weights > 0, side, margin) for part, side in zip(parts, sides, strict=True)]
    return TokenizedAnswers(
        parts[0].kind,
        [*ids, ids[-1]],
        np.concatenate([*weights, [0]]),
        np.concatenate([*codes, encode_part(np.array([False]), sides[-1], margin)]),
    )


PREFERENCES = RowKind(PreferenceSettings, PreferenceTokenizer)
