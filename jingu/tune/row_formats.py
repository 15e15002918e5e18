"""Recognize the formats of instruction data (OpenAI, ShareGPT, Alpaca, ...), and convert each row to a `Row`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

from jingu.chat.messages import ConversationError, JsonObject, Message, Role, Row
from jingu.tune.row_fields import WEIGHT_NAMES, Fields, find_field, is_empty, rename_columns
from jingu.tune.row_values import (
    MAX_WEIGHT,
    check_list,
    check_text,
    check_weight,
    is_negative,
    optional_text,
    parse_switch,
    parse_tool_call,
    quote_value,
    take_text,
    take_tools,
    take_variables,
    take_weight,
    unexpected_value,
)

# Roles by their names in OpenAI's messages and ShareGPT's conversations.
ROLES: dict[str, Role] = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard"), "assistant"),
    **dict.fromkeys(("tool", "function", "observation"), "tool"),
}
# Roles that may follow a role; None stands for the start of a conversation.
_ALLOWED_NEXT: dict[str | None, tuple[Role, ...]] = {
    None: ("system", "user"),
    "system": ("user",),
    "user": ("assistant",),
    "assistant": ("user", "tool"),
    "tool": ("assistant",),
}
_PLAIN_TURN = {"role", "content"}
_HINT = "; remove it, or leave it out with data.objective.columns={{{name}: ''}}"


def parse_row(value: Any, columns: Mapping[str, str] | None = None, *, num_prompt: int = 0) -> Row:
    """Convert a row of any known format.

    The format is recognized by the row's `type`, or else by its fields that have a value. Every field is used, refused,
    or listed in `Row.carried` (`jingu.tune.row_fields`).

    Args:
        value: the parsed JSON of the row.
        columns: names of fields in the row, by the names that jingu uses.
        num_prompt: number of messages of the field `messages` that are the prompt.

    Raises:
        ConversationError: the format is unknown, a field is not as expected or cannot be used, or nothing of the row is
            trained.
    """
    fields = read_fields(value, columns)
    fields.num_prompt = num_prompt
    if "chosen" in fields and "rejected" in fields:
        raise ConversationError("fields chosen and rejected: this is a preference row, not an example to imitate")
    for name in ("label", "kto_tag"):
        # A data set for classification may have other labels.
        if name in fields and (parse_switch(fields[name]) is False or is_negative(fields[name])):
            raise ConversationError(f"field {name}: false marks an answer not to be imitated, which tuning cannot use")
    weight = take_weight(fields, "")
    if not weight:
        raise ConversationError("fields weight and train: nothing of the row is to be trained")
    row = _parse_form(fields)
    if fields or fields.carried:
        texts = [message.content for message in row.messages] or [text for text, _ in row.segments]
        fields.account_for_rest(f"a row of the format {row.kind}", texts, hint=_HINT)
        row = replace(row, carried=tuple(fields.carried))
    return _multiply_weights(row, weight)


def parse_prompt(value: Any) -> Row:
    """Convert the `prompt` of a row, a text or messages that an answer is to follow, with the fields that shape it.

    If the messages end with one of the assistant, the answer continues it. Other fields of the row are for rewards.

    Raises:
        ConversationError: there is no prompt, or a field is not as expected or cannot be used.
    """
    fields = read_fields(value)
    prompt = fields.pop("prompt", None)
    if is_empty(prompt):
        raise ConversationError("expected an object with the field prompt, a text or messages")
    if isinstance(prompt, str):
        row = Row("prompt", segments=((check_text(prompt, "prompt"), 0.0),))
    else:
        messages = _messages(fields, "prompt", prompt if isinstance(prompt, list) else [prompt])
        row = _conversation("prompt", fields, messages, is_prompt=True)
    shaping = Fields({name: item for name, item in fields.items() if _shapes_prompt(name)})
    texts = [message.content for message in row.messages] or [prompt]
    shaping.account_for_rest("a prompt that is a text" if row.segments else "a prompt", texts)
    return row


def parse_messages(value: Any) -> tuple[Message, ...]:
    """Convert a list of messages of a conversation, of which every field has to be used.

    Raises:
        ConversationError: a field is not as expected, or is unknown.
    """
    fields = Fields({})
    messages = _messages(fields, "messages", list(value))
    if fields.carried:
        raise ConversationError(f"field {next(iter(fields.carried))}: a message has no such field")
    return tuple(messages)


def _shapes_prompt(name: str) -> bool:
    field = find_field(name)
    return field is not None and field.shapes_prompt


def read_fields(value: Any, columns: Mapping[str, str] | None = None) -> Fields:
    """Return the fields of a row that have a value. Raises ConversationError unless the row is an object."""
    if not isinstance(value, dict):
        raise ConversationError(f"expected an object with fields, not {quote_value(value)}")
    return Fields(rename_columns(value, columns) if columns else value)


def _multiply_weights(row: Row, weight: float) -> Row:
    """Return a row whose messages or texts have their weights multiplied by that of the row."""
    if weight == 1.0:
        return row
    messages = tuple(replace(message, weight=message.weight * weight) for message in row.messages)
    highest = max((message.weight for message in messages if message.role == "assistant"), default=0.0)
    if highest > MAX_WEIGHT:
        expected_value = f"at most {MAX_WEIGHT:g} when multiplied with the weight of a message"
        raise ConversationError(f"field weight: expected {expected_value}, not {highest:g}")
    return replace(row, messages=messages, segments=tuple((text, factor * weight) for text, factor in row.segments))


def _parse_form(fields: Fields) -> Row:
    """Convert a row without regard to its weight. Raises ConversationError if its format is unknown."""
    kind = fields.get("type")
    if isinstance(kind, str) and kind in _PARSERS_BY_TYPE:
        field, parse = _PARSERS_BY_TYPE[kind]
        # A data set of another format may use that column for something else.
        if field in fields or not any(name in fields for name, _ in _PARSERS_BY_FIELD.values()):
            del fields["type"]
            return parse(fields)
    # A field without content does not decide, unless there is no other.
    for may_be_empty in (False, True):
        for name, (field, parse) in _PARSERS_BY_FIELD.items():
            if field in fields and (may_be_empty or not is_empty(fields[field])):
                return replace(parse(fields), kind=name)
    if kind is not None:
        raise unexpected_value("type", ", ".join(_PARSERS_BY_TYPE), kind)
    known_fields = ", ".join([*(field for field, _ in _PARSERS_BY_FIELD.values()), "type"])
    raise ConversationError(
        f"expected one of the fields {known_fields}; it has {', '.join(map(str, fields)) or 'none'}"
    )


# Forms


def _pretrain(fields: Fields) -> Row:
    return Row("pretrain", segments=((take_text(fields, "text"), 1.0),))


def _completion(fields: Fields) -> Row:
    if not isinstance(fields["prompt"], list):
        prompt = take_text(fields, "prompt")
        return Row("completion", segments=((prompt, 0.0), (take_text(fields, "completion"), 1.0)))
    # The prompt is a list of messages: one conversation, divided into prompt and completion.
    prompt = fields.pop("prompt")
    completion = fields.pop("completion", [])
    if isinstance(completion, str):
        completion = {"role": "assistant", "content": completion}
    if isinstance(completion, dict):
        completion = [completion]
    if not isinstance(completion, list):
        raise unexpected_value("completion", "a text, a message or a list of messages", completion)
    context = [replace(message, is_prompt=True) for message in _messages(fields, "prompt", prompt)]
    return _conversation("completion", fields, [*context, *_messages(fields, "completion", completion)])


def _question(instruction: str, text: str) -> Message:
    return Message("user", f"{instruction}\n{text}" if text else instruction)


def _instruct(fields: Fields) -> Row:
    question = _question(take_text(fields, "instruct"), optional_text(fields.pop("input", None), "input"))
    return _conversation("instruct", fields, [question, _answer(fields, "output")])


def _answer(fields: Fields, name: str) -> Message:
    """Return the answer of a row that has a single one."""
    spelling = fields.spelling("reasoning_content")
    reasoning = optional_text(fields.take("reasoning_content"), spelling)
    return Message("assistant", take_text(fields, name), reasoning_content=reasoning)


def _alpaca(fields: Fields, question: str = "instruction", answer: str = "output") -> Row:
    """Parse a question, perhaps with an input, and its answer.

    Args:
        question: the field of the question.
        answer: the field of the answer.
    """
    text = optional_text(fields.pop("input", None), "input")
    if text and is_empty(fields.get(question)):
        # Some data sets put the whole question into `input`.
        fields.pop(question, None)
        message = Message("user", text)
    else:
        message = _question(take_text(fields, question), text)
    return _conversation("alpaca", fields, [message, _answer(fields, answer)])


def _rounds(fields: Fields, kind: str) -> Row:
    """Parse a list of rounds: ["ask", text], ["ans", text, weight?] or ["api", call, result?]."""
    messages = []
    for index, turn in enumerate(check_list(fields.pop("rounds", None), "rounds")):
        name = f"rounds[{index}]"
        match turn:
            case ["ask", text]:
                messages.append(Message("user", check_text(text, name)))
            case ["ans", text]:
                messages.append(Message("assistant", check_text(text, name)))
            case ["ans", text, weight]:
                weight = check_weight(weight, f"{name}[2]")
                message = Message("assistant", check_text(text, name), weight=weight)
                messages.append(message)
            case ["api", call, *results] if len(results) <= 1:
                messages.append(Message("assistant", "", (parse_tool_call(call, f"{name}[1]"),)))
                messages += [Message("tool", _tool_result(result, name)) for result in results]
            case _:
                raise ConversationError(f'field {name}: expected ["ask", text], ["ans", text] or ["api", call, return]')
    if kind == "ref_qa":
        # The first question is about a reference text, which goes before it.
        reference = take_text(fields, "reference")
        first = next((index for index, message in enumerate(messages) if message.role == "user"), None)
        if first is not None:
            messages[first] = Message("user", f"{reference}\n\n{messages[first].content}")
    return _conversation(kind, fields, messages)


def _tool_result(value: Any, name: str) -> str:
    return check_text(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False), name)


def _chat(fields: Fields, field: str) -> Row:
    """Parse messages in OpenAI's or in ShareGPT's form."""
    messages = _messages(fields, field, fields.pop(field))
    for index in range(fields.num_prompt):
        messages[index] = replace(messages[index], is_prompt=True)
    return _conversation(field, fields, messages)


def _messages(fields: Fields, field: str, turns: Any) -> list[Message]:
    """Return messages from a list of objects with `role` and `content`, or `from` and `value`.

    Args:
        fields: the row's; fields of its messages that are not used are added to `carried`.
        field: name of the list, for error messages.
    """
    messages = []
    for index, turn in enumerate(check_list(turns, field)):
        name = f"{field}[{index}]"
        if isinstance(turn, dict) and turn.keys() == _PLAIN_TURN and isinstance(turn["content"], str):
            # Most messages have nothing else, and are read faster.
            role = turn["role"]
            if isinstance(role, str) and role in ROLES:
                messages.append(Message(ROLES[role], check_text(turn["content"], f"{name}.content")))
                continue
        keys = ("from", "value") if isinstance(turn, dict) and "from" in turn and "role" not in turn else None
        role_key, content_key = keys or ("role", "content")
        if not isinstance(turn, dict) or role_key not in turn:
            expected_keys = ("from", "value") if field == "conversations" else ("role", "content")
            raise unexpected_value(name, "an object with {} and {}".format(*expected_keys), turn)
        turn = Fields(turn, "message")
        message = _message(turn, name, role_key, content_key)
        if turn:
            turn.account_for_rest("a message", [message.content], prefix=f"{name}.")
            fields.carried |= turn.carried
        messages.append(message)
    return messages


def _message(turn: Fields, name: str, role_key: str, content_key: str) -> Message:
    """Return a message.

    Args:
        turn: its fields; those that are read are removed.
        name: path of the message in its row, for error messages.
    """
    role = turn.pop(role_key, None)
    content = turn.pop(content_key, None)
    calls = turn.pop("tool_calls", None) or []
    if role == "function_call":
        # ShareGPT has a role for tool calls; the content is the call.
        role, calls, content = "assistant", [content], None
    if not isinstance(role, str) or role not in ROLES:
        raise unexpected_value(f"{name}.{role_key}", ", ".join([*ROLES, "function_call"]), role)
    if "function_call" in turn and not calls:
        calls = [turn.pop("function_call")]
    if not isinstance(calls, list):
        raise unexpected_value(f"{name}.tool_calls", "a list", calls)
    tool_calls = tuple(parse_tool_call(call, f"{name}.tool_calls[{place}]") for place, call in enumerate(calls))
    if isinstance(content, list):
        content = "".join(_content_part(part, f"{name}.{content_key}[{at}]") for at, part in enumerate(content))
    text = check_text(content, f"{name}.{content_key}") if content or not tool_calls else ""
    if not turn and not tool_calls:
        return Message(ROLES[role], text)
    spelling = turn.spelling("reasoning_content")
    reasoning = optional_text(turn.take("reasoning_content"), f"{name}.{spelling}")
    author, call_id = (optional_text(turn.pop(key, None), f"{name}.{key}") for key in ("name", "tool_call_id"))
    has_weight = not WEIGHT_NAMES.isdisjoint(turn)
    weight = take_weight(turn, f"{name}.")
    if ROLES[role] != "assistant":
        forbidden = {"have reasoning": reasoning, "have tool calls": tool_calls, "be trained": has_weight and weight}
        for what, value in forbidden.items():
            if value:
                raise ConversationError(f"field {name}: only an assistant's turn can {what}, not that of {role}")
    return Message(ROLES[role], text, tool_calls, weight, reasoning, author, call_id)


def _content_part(part: Any, name: str) -> str:
    """Return the text of one part of a message's content: a text, or an object with type `text`."""
    if isinstance(part, dict):
        part = Fields(part, "message")
        kind = part.pop("type", "text")
        if kind != "text":
            raise ConversationError(f"field {name}: only text can be trained on, not {quote_value(kind)}")
        text = part.pop("text", None)
        part.account_for_rest("a message", [str(text)], prefix=f"{name}.")
        part = text
    return check_text(part, name)


def _conversation(kind: str, fields: Fields, messages: list[Message], *, is_prompt: bool = False) -> Row:
    """Return a conversation with what its row says beside the messages: system message, history, tools, variables.

    Args:
        is_prompt: whether an answer is to follow the messages.

    Raises:
        ConversationError: a field is not as expected, the roles are in a wrong order, or the last message is not an
            answer (of a prompt: not one that an answer can follow or continue).
    """
    tools: tuple[JsonObject, ...] = ()
    variables: JsonObject = {}
    if fields:
        messages = _add_context(fields, messages)
        tools = take_tools(fields)
        variables = take_variables(fields)
    messages_merged = _continue_prefill(_merge(messages))
    last = messages_merged[-1]
    if not is_prompt and last.role != "assistant":
        raise ConversationError(f"expected an answer at the end; the last turn is of {last.role}")
    if is_prompt and (last.role == "system" or last.tool_calls):
        what = "a tool call without its result" if last.tool_calls else "the system message"
        raise ConversationError(f"an answer cannot follow the last message of the prompt, {what}")
    return Row(kind, tuple(messages_merged), tools, variables=variables)


def _add_context(fields: Fields, messages: list[Message]) -> list[Message]:
    """Return messages after the system message and the history that stand beside them in the row."""
    name = fields.spelling("system")
    system = optional_text(fields.take("system"), name)
    history = fields.take("history")
    if not system and is_empty(history):
        return messages
    start = [message for message in messages[:1] if message.role == "system"]
    if system and start and start[0].content.strip() != system.strip():
        raise ConversationError(f"field {name}: the messages begin with another system message")
    if system and not start:
        start = [Message("system", system, is_prompt=messages[0].is_prompt)]
        messages = [*start, *messages]
    turns = [replace(turn, is_prompt=messages[0].is_prompt) for turn in _history(fields, history or [])]
    return [*messages[: len(start)], *turns, *messages[len(start) :]]


def _history(fields: Fields, history: Any) -> list[Message]:
    """Return the messages of a history: pairs of question and answer, or messages."""
    if not isinstance(history, list):
        raise unexpected_value("history", "a list of [question, answer]", history)
    if history and isinstance(history[0], dict):
        return _messages(fields, "history", history)
    messages = []
    for index, pair in enumerate(history):
        name = f"history[{index}]"
        if not isinstance(pair, list) or len(pair) != 2:
            raise unexpected_value(name, "[question, answer]", pair)
        messages += [Message("user", check_text(pair[0], name)), Message("assistant", check_text(pair[1], name))]
    return messages


def _merge(messages: list[Message]) -> list[Message]:
    """Return messages with consecutive ones of one role merged where that is possible.

    Raises:
        ConversationError: the roles are in a wrong order.
    """
    merged_messages: list[Message] = []
    for number, message in enumerate(messages, start=1):
        last = merged_messages[-1] if merged_messages else None
        repeats = last is not None and last.role == message.role
        if last is not None and repeats and _can_merge(last, message):
            content = "\n".join(text for text in (last.content, message.content) if text)
            weight = min(last.weight, message.weight)
            calls = last.tool_calls + message.tool_calls
            merged_messages[-1] = replace(last, content=content, tool_calls=calls, weight=weight)
            continue
        # These may follow each other unmerged: results of several calls, and answers with different weights.
        may_repeat = repeats and message.role in ("tool", "assistant")
        answers_no_call = message.role == "tool" and last is not None and last.role != "tool" and not last.tool_calls
        allowed_roles = _ALLOWED_NEXT[last.role if last else None]
        if (message.role not in allowed_roles and not may_repeat) or answers_no_call:
            place = f"after {last.role}" if last else "first"
            raise ConversationError(
                f"roles out of order: {message.role} stands {place}, as turn {number};"
                f" expected {' or '.join(allowed_roles)}"
            )
        merged_messages.append(message)
    return merged_messages


def _continue_prefill(messages: list[Message]) -> list[Message]:
    """Return messages in which an answer that continues the last message of its prompt is one message with it.

    Raises:
        ConversationError: the message to continue is not a text alone, or the answer has reasoning.
    """
    if not messages[0].is_prompt:
        return messages
    pairs = enumerate(pairwise(messages))
    place = next((number for number, (message, answer) in pairs if _is_continued(message, answer)), None)
    if place is None:
        return messages
    start, answer = messages[place : place + 2]
    label = "the prompt ends with a message of the assistant, which the answer continues"
    if start.tool_calls or start.reasoning_content:
        what = "tool calls" if start.tool_calls else "reasoning"
        raise ConversationError(f"{label}: that message cannot have {what}, only text")
    if answer.reasoning_content:
        raise ConversationError(f"{label}: reasoning cannot follow the text before it")
    joined_message = replace(
        answer,
        content=start.content + answer.content,
        name=answer.name or start.name,
        prefill_length=len(start.content),
    )
    return [*messages[:place], joined_message, *messages[place + 2 :]]


def _is_continued(first: Message, second: Message) -> bool:
    is_answer = first.role == second.role == "assistant"
    return is_answer and first.is_prompt and not second.is_prompt


def _can_merge(first: Message, second: Message) -> bool:
    """Return whether two messages of one role can be merged; in the result, the text stands before the tool calls."""
    if first.role == "tool" or (first.tool_calls and second.content) or second.reasoning_content:
        return False
    if first.role == "assistant" and first.weight != second.weight:
        return False
    return (first.name, first.is_prompt) == (second.name, second.is_prompt)


# By the `type` of a row: the field that identifies its format, and its parser.
_PARSERS_BY_TYPE: dict[str, tuple[str, Callable[[Fields], Row]]] = {
    "pretrain": ("text", _pretrain),
    "instruct": ("instruct", _instruct),
    **{kind: ("rounds", partial(_rounds, kind=kind)) for kind in ("conversation", "conver_has_api", "ref_qa")},
}
# By the kind of row: the field that identifies it, and its parser. The first field that a row has decides.
_PARSERS_BY_FIELD: dict[str, tuple[str, Callable[[Fields], Row]]] = {
    "messages": ("messages", partial(_chat, field="messages")),
    "sharegpt": ("conversations", partial(_chat, field="conversations")),
    "alpaca": ("instruction", _alpaca),
    "query and response": ("query", partial(_alpaca, question="query", answer="response")),
    "question and answer": ("question", partial(_alpaca, question="question", answer="answer")),
    "completion": ("prompt", _completion),
    "text": ("text", _pretrain),
}
