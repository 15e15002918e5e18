"""Rows of preference data: a chosen and a rejected answer to a prompt, a ranking, or an answer with a label."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt

from jingu.chat.messages import ConversationError, JsonObject, Message, Row
from jingu.chat.tokenization import TokenizedRow
from jingu.config.sections.data import PreferenceSettings
from jingu.data.preference_data import MAX_MARGIN, join_answers
from jingu.text.document_reader import ReadCounts
from jingu.tune.prepare import DROPPED_PREFIX, TRUNCATED, RowKind, RowTokenizer
from jingu.tune.row_fields import Fields, is_empty
from jingu.tune.row_formats import ROLES, parse_row, read_fields
from jingu.tune.row_values import parse_switch

# Fields that say whether an answer is desirable; LLaMA-Factory uses the second.
LABELS = ("label", "kto_tag")
# Fields with a conversation, without its last message.
CONVERSATIONS = ("messages", "conversations")
# What may stand before an answer in a text: the name of the assistant as the start of a line, or the header of a usual
# chat template.
_ANSWER_HEADER = re.compile(
    r"(?:^|\n)[#\s]{0,8}(?i:assistant|ai|bot|gpt|response|answer|model|a|助手|回答|答)[ \t]*[:：]\n*"
    r"|\bASSISTANT:|<\|im_start\|>assistant\n|<\|assistant\|>\n?|<start_of_turn>model\n|\[/INST\]"
    r"|<\|start_header_id\|>assistant<\|end_header_id\|>\n\n"
)
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
    def segments(self) -> tuple[tuple[str, float], ...]:
        return self.answers[0].segments

    @property
    def carried(self) -> tuple[str, ...]:
        """Names of fields that have no effect."""
        return self.answers[0].carried


def parse_preference_row(value: Any, columns: Mapping[str, str] | None = None) -> PreferenceRow:
    """Convert a row of any known form: chosen and rejected answers (texts, messages, or lists of them, with the prompt
    or without), a ranking of such answers, or an answer with a label in any form that tuning knows.

    Raises:
        ConversationError: the row has no known form, or one of its fields is invalid or cannot be used.
    """
    fields = read_fields(value, columns)
    if "ranking" in fields:
        row = _parse_ranking(fields)
    else:
        answers = [name for name in ("chosen", "rejected") if name in fields]
        if len(answers) == 1:
            raise ConversationError(f"expected the fields chosen and rejected; it has only {answers[0]}")
        row = _parse_pair(fields) if answers else _parse_labeled(fields)
    for answer in row.answers:
        weights = (
            [answer.messages[-1].weight] if answer.messages else [weight for _, weight in answer.segments if weight]
        )
        if set(weights) != {1.0}:
            raise ConversationError("fields weight and train: an answer that is compared has no loss weight")
    return row


def _parse_labeled(fields: Fields) -> PreferenceRow:
    name = next((name for name in LABELS if name in fields), None)
    if name is None:
        names = ", ".join(map(str, fields)) or "none"
        known_labels = f"ranking or {' or '.join(LABELS)}"
        raise ConversationError(f"expected the fields chosen and rejected, or {known_labels}; it has {names}")
    label = parse_switch(fields.take("label"))
    if label is None:
        raise ConversationError(f"field {name}: expected true or false")
    row = parse_row(fields)
    return PreferenceRow(f"{row.kind} with {name}", (row,), label)


def _parse_pair(fields: Fields) -> PreferenceRow:
    margin = fields.pop("margin", None) or 0.0
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not abs(margin) < MAX_MARGIN:
        raise ConversationError(f"field margin: expected a number below {MAX_MARGIN:,}")
    chosen = fields.pop("chosen")
    rejected = fields.pop("rejected")
    has_prompt = any(not is_empty(fields.get(name)) for name in ("prompt", *CONVERSATIONS, *ANSWER_FIELDS))
    if isinstance(chosen, str) and isinstance(rejected, str) and not has_prompt:
        # Two whole texts begin with the prompt.
        size = _find_prompt(chosen, rejected)
        fields["prompt"] = chosen[:size]
        chosen = chosen[size:]
        rejected = rejected[size:]
    for name in CONVERSATIONS:
        # Some data sets repeat an answer with its prompt as `messages`.
        if name in fields and fields[name] in (chosen, rejected):
            del fields[name]
    rows = []
    for name, answer in (("chosen", chosen), ("rejected", rejected)):
        try:
            rows.append(_parse_answer(fields, answer))
        except ConversationError as error:
            raise ConversationError(f"field {name}: {error}") from error
    return PreferenceRow(f"{rows[0].kind} pair", tuple(rows), margin=margin)


def _parse_ranking(fields: Fields) -> PreferenceRow:
    """Return answers from the best to the worst: in the order of the list, or of their `scores`."""
    answers = fields.pop("ranking")
    if not isinstance(answers, list) or len(answers) < 2:
        raise ConversationError("field ranking: expected a list of two answers or more")
    if "margin" in fields:
        raise ConversationError("field margin: a ranking has none; write its pairs as rows of chosen and rejected")
    scores = fields.pop("scores", [-number for number in range(len(answers))])
    numbers = isinstance(scores, list) and all(type(score) in (int, float) for score in scores)
    if not numbers or len(scores) != len(answers):
        raise ConversationError("field scores: expected a number for each answer of the ranking")
    levels = sorted(set(scores), reverse=True)
    if len(levels) < 2:
        raise ConversationError("field scores: all are equal, so there is nothing to compare")
    rows = []
    ranks = []
    for rank, answer in sorted(zip(map(levels.index, scores), answers, strict=True), key=lambda pair: pair[0]):
        try:
            rows.append(_parse_answer(fields, answer))
        except ConversationError as error:
            raise ConversationError(f"field ranking: {error}") from error
        ranks.append(rank)
    return PreferenceRow(f"{rows[0].kind} ranking", tuple(rows), ranks=tuple(ranks))


def _find_prompt(first: str, second: str) -> int:
    """Return the number of characters of the prompt with which two texts begin.

    It ends with the header of an assistant's turn, if one can be seen in what both begin with; else where they differ,
    without white space at its end, which belongs to the answers.

    Raises:
        ConversationError: the texts have no common beginning, or one is the beginning of the other.
    """
    if first == second:
        raise ConversationError("chosen and rejected are the same")
    size = next(
        (
            index
            for index, (one, second_message) in enumerate(zip(first, second, strict=False))
            if one != second_message
        ),
        None,
    )
    common = first[: min(len(first), len(second)) if size is None else size]
    headers = [match.end() for match in _ANSWER_HEADER.finditer(common)]
    if headers and headers[-1] < min(len(first.rstrip()), len(second.rstrip())):
        return headers[-1]
    if size is None:
        raise ConversationError(
            "chosen and rejected: one text is the beginning of the other, so where the answers begin cannot be seen; "
            "add the field prompt"
        )
    if not common.strip():
        raise ConversationError("chosen and rejected: the texts have no common beginning; add the field prompt")
    return len(common.rstrip(" "))


def _parse_answer(fields: Fields, answer: Any) -> Row:
    """Return the conversation that ends with an answer, from the other fields of its row."""
    prompt = fields.get("prompt")
    if isinstance(answer, str):
        if isinstance(prompt, list) or not (is_empty(fields.get("messages")) and is_empty(fields.get("conversations"))):
            answer = {"role": "assistant", "content": answer}
        else:
            field = next(
                (answer_field for question, answer_field in ANSWER_FIELDS.items() if question in fields), "completion"
            )
            return parse_row({**fields, field: answer})
    if isinstance(answer, dict):
        # LLaMA-Factory: the row has the conversation without its last message, and the answer is that message.
        answer = [answer]
    if not isinstance(answer, list) or not answer:
        raise ConversationError("expected a text, a message, or a list of messages")
    other_fields = dict(fields)
    names = ("prompt", *CONVERSATIONS, *ANSWER_FIELDS)
    name = next((name for name in names if not is_empty(fields.get(name))), "messages")
    prompt = other_fields.pop(name, None)
    if "messages" in other_fields:
        # It has to repeat what the prompt and the answer say.
        other_fields["conversations"] = other_fields.pop("messages")
    messages = _join_messages(name, prompt, answer)
    size = len(prompt) if isinstance(prompt, list) else 0
    # If a prompt ends with a message of the assistant, the answer continues it.
    is_continued = size > 0 and [_role(item) for item in messages[size - 1 : size + 1]] == ["assistant", "assistant"]
    return parse_row({**other_fields, "messages": messages}, num_prompt=size if is_continued else 0)


def _join_messages(name: str, prompt: Any, answer: list[Any]) -> list[Any]:
    """Return the conversation of a prompt (a text, messages or None) and an answer, whose messages may repeat it.

    Args:
        name: the field of the prompt.

    Raises:
        ConversationError: the prompt is neither a text nor messages, or the answer begins with another prompt.
    """
    # A list that starts with an assistant message is only the answer; otherwise it is a conversation with its prompt.
    is_answer = _role(answer[0]) not in ("user", "system")
    another = ConversationError(f"its messages begin with another prompt than that of the field {name}")
    if isinstance(prompt, str):
        if is_answer:
            return [{"role": "user", "content": prompt}, *answer]
        questions = [_content(message).strip() for message in answer if _role(message) == "user"]
        if prompt.strip() not in questions:
            raise another
        return answer
    if not isinstance(prompt or [], list):
        raise ConversationError(f"field {name}: expected a text or a list of messages")
    if not prompt:
        return answer
    repeats_prompt = answer[: len(prompt)] == prompt
    messages = answer if repeats_prompt else [*prompt, *answer]
    if is_answer or repeats_prompt:
        return messages
    # A question may follow a system message or an answer. Anything else would merge two prompts into one.
    if _role(answer[0]) == "user" and _role(prompt[-1]) != "user":
        return messages
    raise another


def _role(message: Any) -> Any:
    """Return the role of a message as templates name it; None if it has none."""
    role = (message.get("role") or message.get("from")) if isinstance(message, dict) else None
    return ROLES.get(role) if isinstance(role, str) else None


def _content(message: JsonObject) -> str:
    return str(message.get("content") or message.get("value") or "")


@dataclass(frozen=True)
class TokenizedAnswers(TokenizedRow):
    """Token ids of answers with their prompts, one after the other. Weights are negative for rejected answers.

    Attributes:
        parts: code stored with each id (`jingu.data.preference_data`).
        prompt_ids: ids of the prompt. They decide the split, so that a prompt of the validation split is not trained
            with other answers.
    """

    parts: npt.NDArray[np.int32]
    prompt_ids: list[int]

    @property
    def split_ids(self) -> list[int]:
        return self.prompt_ids

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
        parts = [self.tokenize_conversation(answer, "last_assistant") for answer in row.answers]
        if row.segments or row.messages[-1].prefill_length:
            parts = _align_prompts(parts)
        if len(parts) < 2:
            return self._tokenize_answers(row, parts, counts)
        # Each answer of a ranking is compared with each that is worse (Ouyang et al., 2022).
        pairs = [
            (better, worse)
            for (better, rank), (worse, worse_rank) in combinations(zip(parts, row.ranks, strict=True), 2)
            if rank < worse_rank
        ]
        return [part for pair in pairs for part in self._tokenize_answers(row, pair, counts)]

    def _tokenize_answers(
        self, row: PreferenceRow, parts: Sequence[TokenizedRow], counts: ReadCounts
    ) -> list[TokenizedAnswers]:
        """Return the stored form of a pair or of a single answer; nothing if it is dropped."""
        num_prompt = _check_prompts(parts)
        # Each answer of a pair may take half of a sequence. With labels, every answer is a row of its own.
        is_pair = self._settings.rows == "pairs"
        limit = (self.max_length - 1) // (2 if is_pair else 1)
        longest = max(len(part.ids) for part in parts)
        if longest > limit and self._settings.overflow == "drop":
            counts.count(f"{DROPPED_PREFIX}too long")
            return []
        if longest > limit:
            if num_prompt >= limit:
                counts.count(f"{DROPPED_PREFIX}with a prompt that leaves no room for an answer in {limit:,} tokens")
                return []
            parts = [replace(part, ids=part.ids[:limit], weights=part.weights[:limit]) for part in parts]
            if len(parts) > 1 and parts[0].ids == parts[-1].ids:
                counts.count(f"{DROPPED_PREFIX}with answers that are equal in {limit:,} tokens")
                return []
            counts.count(TRUNCATED)
        sides = [not row.is_desirable, True][: len(parts)]
        prompt_ids = parts[0].ids[:num_prompt]
        if is_pair:
            return [_join(parts, sides, row.margin, prompt_ids)]
        return [_join([part], [side], row.margin, prompt_ids) for part, side in zip(parts, sides, strict=True)]


def _answer_start(part: TokenizedRow) -> int:
    """Return the index of the first id of an answer. Raises ConversationError if it has no token to train."""
    trained_positions = part.weights.nonzero()[0]
    if not len(trained_positions):
        raise ConversationError("no token of an answer is left to train on")
    return int(trained_positions[0])


def _align_prompts(parts: Sequence[TokenizedRow]) -> list[TokenizedRow]:
    """Return answers whose prompts are the same ids.

    A token that is part prompt, part answer belongs to the answer. If only some of the answers have such a token, the
    others begin at the same place.
    """
    starts = [_answer_start(part) for part in parts]
    size = min(starts)
    first = parts[0].ids
    while any(part.ids[:size] != first[:size] for part in parts):
        size -= 1
    aligned_rows = []
    for part, start in zip(parts, starts, strict=True):
        weights = part.weights.copy()
        weights[size:start] = weights[start]
        aligned_rows.append(replace(part, weights=weights))
    return aligned_rows


def _check_prompts(parts: Sequence[TokenizedRow]) -> int:
    """Return the number of ids of the prompt.

    Raises:
        ConversationError: the answers are equal, or their prompts differ or are empty.
    """
    starts = [_answer_start(part) for part in parts]
    if not min(starts):
        raise ConversationError("the prompt has no tokens")
    first, last = parts[0], parts[-1]
    if first.ids[: starts[0]] != last.ids[: starts[-1]]:
        raise ConversationError("chosen and rejected have different prompts when the template renders them")
    if len(parts) > 1 and first.ids == last.ids:
        raise ConversationError("chosen and rejected are the same")
    return starts[0]


def _join(
    parts: Sequence[TokenizedRow], sides: Sequence[bool], margin: float, prompt_ids: list[int]
) -> TokenizedAnswers:
    """Return answers to one prompt as one row.

    Args:
        sides: whether each answer is rejected or undesirable.
        prompt_ids: ids of the prompt.
    """
    ids, codes = join_answers([part.ids for part in parts], [part.weights > 0 for part in parts], sides, margin)
    weights = [part.weights.astype(np.int16) * (-1 if side else 1) for part, side in zip(parts, sides, strict=True)]
    return TokenizedAnswers(
        parts[0].kind,
        ids,
        np.concatenate([*weights, [0]]),
        codes,
        prompt_ids,
        mentions_special=any(part.mentions_special for part in parts),
    )


PREFERENCES = RowKind(PreferenceSettings, PreferenceTokenizer)
