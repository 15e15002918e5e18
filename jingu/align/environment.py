"""Environments for multi-turn answers. After each turn of the model, tools answer its calls, or a class of the user
replies or ends the answer.

Token ids are only ever appended: neither generated text nor replies are tokenized a second time.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jingu.align.prompt_set import Prompt, PromptSet
from jingu.align.worker import START_SECONDS, Worker
from jingu.chat.messages import ConversationError, JsonObject, Message
from jingu.chat.tokenization import encode_continuation
from jingu.chat.tool_calls import OPEN_TAG, ToolCall, ToolCallParser
from jingu.config.sections.policies import EnvironmentSettings
from jingu.errors import JinguError
from jingu.text.tokenizer import Tokenizer

# The reply to a turn of the model: messages, or a text if the prompt is a text.
Reply = tuple[Message, ...] | str
_PLAIN_ANSWER = Message("assistant", "answer")


class Environments:
    """The environments of a step's answers and their tools, in a process of their own.

    Each environment is an object of the user's class, which has the methods `begin(row)`, with the prompt (also as
    `messages`) and the columns of its row; `step(answer)`, which returns a text for the model to read, or None to end
    the answer; and `score()`, which returns the reward of the answer.

    Attributes:
        tools: definitions of the tools.
    """

    def __init__(self, settings: EnvironmentSettings) -> None:
        self._settings = settings
        self._worker = Worker()
        if settings.path is None and not settings.tools:
            fix = "Set path to a class, tools to functions, or both."
            raise JinguError("there is neither a class nor a tool.", where="task.environment", fix=fix)
        # Import them now rather than after the first answers.
        self.tools: tuple[JsonObject, ...] = tuple(
            self._exchange("load", [], START_SECONDS, environment=settings.path, tools=settings.tools)
        )
        self._names = {tool["function"]["name"] for tool in self.tools}

    @property
    def has_score(self) -> bool:
        """Whether the environments give rewards."""
        return self._settings.path is not None

    def begin(self, prompts: Mapping[int, Prompt]) -> None:
        """Start an environment for each answer, replacing all earlier ones."""
        if self._settings.path is not None:
            rows = {
                key: {**prompt.columns, "prompt": prompt.text, "messages": prompt.conversation}
                for key, prompt in prompts.items()
            }
            self._call("begin", rows)

    def reply(self, turns: Mapping[int, str], prompts: Mapping[int, Prompt]) -> dict[int, tuple[Message, Reply] | None]:
        """Return the reply to the last turn of each answer; None if the answer has ended.

        With each reply comes the model's turn as the chat template takes it, reduced to its tool calls.
        """
        calls_by_key = {key: self._parse_calls(text) for key, text in turns.items()}
        calls = {key: values for key, values in calls_by_key.items() if values}
        results = self._call("call", {key: [vars(call) for call in calls[key]] for key in calls}) if calls else {}
        replies: dict[int, tuple[Message, Reply] | None] = dict.fromkeys(turns)
        for key, texts in results.items():
            replies[key] = tool_messages(calls[key], texts)
        plain = {key: text for key, text in turns.items() if key not in calls}
        if self._settings.path is not None and plain:
            for key, text in self._call("step", plain).items():
                if text is not None:
                    replies[key] = _PLAIN_ANSWER, text if prompts[key].messages is None else (Message("user", text),)
        return replies

    def score(self, keys: list[int]) -> dict[int, float]:
        """Return the rewards of answers by key."""
        return self._call("score", dict.fromkeys(keys))

    def without_calls(self, turn: str, finish_reason: str) -> str:
        """Return the text of a turn without its tool calls, and without one that was cut off."""
        if not self._names:
            return turn
        parser = ToolCallParser(self._names)
        text = parser.push(turn) + parser.finish()[0]
        return text.partition(OPEN_TAG)[0] if finish_reason == "length" else text

    def _parse_calls(self, turn: str) -> list[ToolCall]:
        parser = ToolCallParser(self._names)
        parser.push(turn)
        return parser.finish()[1] if self._names else []

    def _call(self, method: str, arguments: Mapping[int, Any]) -> dict[int, Any]:
        return dict(self._exchange(method, list(arguments.items()), self._settings.timeout))

    def _exchange(self, method: str, arguments: list[Any], timeout: float, **options: Any) -> list[Any]:
        where = "task.environment"
        try:
            reply = self._worker.exchange({"method": method, "arguments": arguments, **options}, timeout)
        except TimeoutError:
            what = f"{'a tool' if method == 'call' else method} did not return within {timeout:g} seconds."
            raise JinguError(what, where=where, fix="Make it faster, or raise task.environment.timeout.") from None
        if "error" in reply:
            what = self._settings.path or ", ".join(self._settings.tools)
            raise JinguError(f"{reply['error']}.", where=where, fix=f"Correct {what}.")
        return list(reply["values"])


def tool_messages(calls: Sequence[ToolCall], results: Sequence[str]) -> tuple[Message, tuple[Message, ...]]:
    """Return a turn reduced to its tool calls, and the messages with their results."""
    # Mistral's templates require ids of exactly nine letters and digits.
    ids = [f"call{number:05}" for number in range(len(calls))]
    turn = Message("assistant", "", tuple(map(_template_call, calls, ids)))
    parts = zip(calls, ids, results, strict=True)
    return turn, tuple(Message("tool", text, name=call.name, tool_call_id=call_id) for call, call_id, text in parts)


def _template_call(call: ToolCall, call_id: str) -> JsonObject:
    """Return a tool call as chat templates take it."""
    try:
        arguments = json.loads(call.arguments)
    except ValueError:
        arguments = call.arguments
    return {"name": call.name, "arguments": arguments, "id": call_id}


def reply_messages(reply: Reply) -> list[JsonObject]:
    """Return a reply as messages of the conversation that rewards see."""
    if isinstance(reply, str):
        return [{"role": "user", "content": reply}]
    return [
        {"role": message.role, "content": message.content, **({"name": message.name} if message.name else {})}
        for message in reply
    ]


def reply_text(reply: Reply) -> str:
    """Return a reply as rewards and readers see it."""
    return reply if isinstance(reply, str) else "\n".join(message.content for message in reply)


def encode_reply(turn: Message, reply: Reply, prompts: PromptSet, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the ids between the end token of a turn of the model and the start of its next turn.

    Messages are rendered by the chat template; a text reply, after a text prompt, is tokenized as a continuation.

    Raises:
        JinguError: the template cannot render the messages after a turn of the model.
    """
    if isinstance(reply, str):
        return tuple(encode_continuation(tokenizer, reply))
    chat_format = prompts.chat_format
    assert chat_format is not None and chat_format.eos_token_ids
    # Render a conversation with the turn and the reply, and take what follows the turn's end token. The start of the
    # conversation may contain end tokens of its own.
    start = (Message("user", "question"),)
    end_id = chat_format.eos_token_ids[0]
    try:
        num_before = chat_format.encode_prompt(start, prompts.tools).count(end_id)
        ids = chat_format.encode_prompt((*start, turn, *reply), prompts.tools)
    except ConversationError as error:
        fix = "Correct what the environment or the tool returns, or choose another task.template."
        raise JinguError(f"{error}.", where="task.environment", fix=fix) from error
    ends = [place for place, token_id in enumerate(ids) if token_id == end_id]
    if len(ends) <= num_before:
        what = "the template does not end the turn of a model with its end token before the result of a tool."
        raise JinguError(what, where="task.template", fix="Choose another one, such as qwen.")
    return ids[ends[num_before] + 1 :]
