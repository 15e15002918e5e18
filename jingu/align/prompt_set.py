"""The prompts of a run that generates answers: the rows of a JSON Lines file, and their order over the steps."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from jingu.chat.chat_format import ChatFormat, find_chat_format
from jingu.chat.messages import ConversationError, JsonObject, Message
from jingu.config.sections.policies import RolloutSettings
from jingu.data.permutation import Permutation
from jingu.errors import JinguError
from jingu.runtime.files import read_text
from jingu.runtime.hub import local_rows
from jingu.text.document_reader import describe_json_error
from jingu.text.tokenizer import Tokenizer
from jingu.tune.row_formats import parse_prompt

# Names of values that rewards receive for every answer, or for all answers. No column may have one of them.
ANSWER_NAMES = frozenset(
    ["prompt", "prompts", "prompt_ids", "completion", "completions", "completion_ids", "completion_mask", "messages"]
)
# A constant that seeds the order of resampled prompts, to make it independent of the ordinary order.
_RESAMPLING = 7


@dataclass(frozen=True)
class Prompt:
    """A row of the file.

    Attributes:
        row: index of the row, from 0.
        text: the prompt for rewards: the text, or the content of the last message that is not the assistant's.
        columns: the other fields of the row.
        messages: all messages of the prompt, with the system message and the history that stand beside them in the
            row; None if it is a text. A last message of the assistant is continued by the answer.
        line: number of its line in the file, from 1.
    """

    row: int
    ids: tuple[int, ...]
    text: str
    columns: Mapping[str, Any]
    messages: Sequence[Any] | None = None
    line: int = 0

    @property
    def conversation(self) -> list[Any]:
        """The messages of the prompt; a text is one of the user."""
        return [{"role": "user", "content": self.text}] if self.messages is None else list(self.messages)


@dataclass(frozen=True)
class PromptSet:
    """All prompts of a run.

    Attributes:
        columns: names of the columns that every row has.
        eos_token_ids: ids that end an answer.
        stop: texts that end an answer, for templates without an end token.
        chat_format: format of prompts that are messages.
        tools: definitions of the tools that an answer may call.
    """

    prompts: list[Prompt]
    columns: list[str]
    eos_token_ids: tuple[int, ...]
    stop: tuple[str, ...]
    chat_format: ChatFormat | None = None
    tools: tuple[JsonObject, ...] = ()

    def select(self, seed: int, first: int, count: int, resampling: int = 0) -> list[Prompt]:
        """Return `count` prompts from place `first` of the endless shuffled order; every epoch is shuffled anew.

        Args:
            resampling: number of the attempt to replace prompts of a step; every attempt has its own order.
        """
        size = len(self.prompts)
        prompts = []
        for place in range(first, first + count):
            order = Permutation(size, seed, place // size, *([_RESAMPLING, resampling] if resampling else []))
            prompts += [self.prompts[row] for row in order(np.array([place % size]))]
        return prompts


def load_prompts(
    settings: RolloutSettings,
    tokenizer: Tokenizer,
    sequence_length: int,
    model: str | None = None,
    tools: tuple[JsonObject, ...] = (),
) -> PromptSet:
    """Read and tokenize the prompts.

    Args:
        model: the model that the run starts from; the template `auto` is that of this model.
        tools: definitions of the tools that answers may call.

    Raises:
        JinguError: the file cannot be read, a row cannot be used, or a prompt leaves no room for the longest answer.
    """
    path = local_rows(settings.prompts)
    content = read_text(path)
    chat_format = find_prompt_format(settings, tokenizer, model)
    prompts: list[Prompt] = []
    for number, line in enumerate(content.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            prompt = _parse_prompt(len(prompts), line, tokenizer, chat_format, tools)
        except ConversationError as error:
            fix = (
                "Correct the row, or set task.template=qwen, which has a place for tools."
                if tools
                else "Correct the row."
            )
            raise JinguError(f"line {number}: {error}.", where=path, fix=fix) from error
        if len(prompt.ids) + settings.max_new_tokens > sequence_length:
            raise JinguError(
                f"line {number}: the prompt's {len(prompt.ids)} tokens and {settings.max_new_tokens} new ones exceed "
                f"batch.sequence_length {sequence_length}.",
                where=path,
                fix="Raise batch.sequence_length, lower task.max_new_tokens, or leave the row out.",
            )
        prompts.append(replace(prompt, line=number))
    if not prompts:
        raise JinguError("it has no rows.", where=path, fix="Write one prompt a line.")
    columns = common_columns([prompt.columns for prompt in prompts])
    eos_token_ids = (tokenizer.eos_token_id, *(chat_format.eos_token_ids if chat_format else ()))
    return PromptSet(
        prompts,
        columns,
        tuple(dict.fromkeys(eos_token_ids)),
        chat_format.stop if chat_format else (),
        chat_format,
        tools,
    )


def find_prompt_format(settings: RolloutSettings, tokenizer: Tokenizer, model: str | None) -> ChatFormat | None:
    """Return the format of prompts that are messages. Texts and messages may be mixed in a file.

    Args:
        model: as for `load_prompts`.
    """
    template = None if settings.template == "auto" else settings.template
    return find_chat_format(Path(model or settings.prompts), tokenizer, template)


def encode_prompt_row(
    value: Mapping[str, Any],
    tokenizer: Tokenizer,
    chat_format: ChatFormat | None,
    tools: tuple[JsonObject, ...] = (),
) -> Prompt:
    """Return the prompt of a row, as a run encodes it. Raises ConversationError if it has none."""
    return _parse_prompt(0, json.dumps(value), tokenizer, chat_format, tools)


def common_columns(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of the columns that every row has, without the values of an answer (`ANSWER_NAMES`)."""
    return [name for name in rows[0] if name not in ANSWER_NAMES and all(name in row for row in rows)]


def describe_messages(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return a conversation as a text: the role of each message, and its content."""
    return "\n\n".join(f"{message.get('role')}: {_content(message)}" for message in messages)


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
    calls = message.get("tool_calls")
    return f"{text}\n{json.dumps(calls, ensure_ascii=False)}".strip() if calls else text


def encode_text_prompt(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    """Return the ids of a text prompt, with the tokens that the tokenizer puts before every text (such as BOS)."""
    return (*tokenizer.prompt_prefix_ids, *tokenizer.encode(text))


def _parse_prompt(
    number: int, line: str, tokenizer: Tokenizer, chat_format: ChatFormat | None, tools: tuple[JsonObject, ...]
) -> Prompt:
    """Return the prompt of a line. Raise ConversationError if it has none.

    Args:
        number: index of the row, from 0.
        tools: definitions of the tools of the run.
    """
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ConversationError(f"it is not JSON ({describe_json_error(error)})") from error
    row = parse_prompt(value)
    if names := sorted(ANSWER_NAMES & value.keys() - {"prompt"}):
        raise ConversationError(
            f"field {names[0]}: rewards receive a value of this name for the answer; give the column another name"
        )
    columns = {name: item for name, item in value.items() if name != "prompt"}
    if row.segments:
        if tools:
            raise ConversationError("the prompt is a text, but only the template of messages can describe tools")
        [(text, _)] = row.segments
        prompt = Prompt(number, encode_text_prompt(tokenizer, text), text, columns)
    else:
        if chat_format is None:
            raise ConversationError("the prompt has messages, but the tokenizer no chat template; set task.template")
        if tools and row.tools:
            raise ConversationError("field tools: the run has tools of its own (task.environment)")
        continues = row.messages[-1].role == "assistant"
        ids = chat_format.encode_prompt(row.messages, tools or row.tools, row.variables, continue_final=continues)
        text = next(message.content for message in reversed(row.messages) if message.role != "assistant")
        prompt = Prompt(number, ids, text, columns, [_describe(message) for message in row.messages])
    if not prompt.ids:
        raise ConversationError("the tokenizer has no token for any character of the prompt")
    return prompt


def _describe(message: Message) -> JsonObject:
    """Return a message as an object in OpenAI's form, which rows have."""
    value: JsonObject = {"role": message.role, "content": message.content}
    if message.tool_calls:
        value["tool_calls"] = [
            {"type": "function", "function": call} | {key: call[key] for key in ("id",) if key in call}
            for call in message.tool_calls
        ]
    for name in ("reasoning_content", "name", "tool_call_id"):
        if getattr(message, name):
            value[name] = getattr(message, name)
    return value
