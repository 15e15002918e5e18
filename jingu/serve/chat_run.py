"""Chat answers: the common part of the chat protocols (OpenAI, Anthropic, Ollama).

Each protocol converts its body to a `ChatRequest`, and formats the answers or their deltas in its own way.
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from fastapi import Request as HttpRequest
from pydantic_core import from_json

from jingu.chat.chat_format import ChatFormat
from jingu.chat.messages import ConversationError, JsonObject, Message, UnsupportedToolsError, check_characters
from jingu.chat.reasoning import OPEN_TAG, ReasoningParser
from jingu.chat.tool_calls import CallFragment, ToolCall, ToolCallParser, write_tools_as_text
from jingu.errors import JinguError
from jingu.infer.request import Constraint, FinishReason, Token
from jingu.serve.async_engine import RequestHandle
from jingu.serve.http_errors import bad_request
from jingu.serve.openai import build_engine_request
from jingu.serve.protocol import AllowedToolsChoice, ChatMessage, ChatRequest, FunctionDefinition, ToolChoice
from jingu.serve.service import Service, run_off_loop

# About the size of a function's description.
_FUNCTION_CHARACTERS = 200
LOGGER = logging.getLogger("jingu.serve")


@dataclass(frozen=True)
class ChatDelta:
    """The part of an answer that a token adds.

    Attributes:
        text: new text outside of tool calls and reasoning.
        reasoning: new text of the reasoning before the answer.
        calls: new parts of tool calls.
        finish_reason: why the answer ended; None before the last token.
    """

    choice: int
    token: Token
    text: str
    calls: tuple[CallFragment, ...] = ()
    finish_reason: FinishReason | None = None
    reasoning: str = ""


@dataclass(frozen=True)
class ChatAnswer:
    """A complete answer; `text` excludes tool calls and reasoning."""

    text: str
    calls: tuple[ToolCall, ...]
    tokens: list[Token]
    finish_reason: FinishReason
    reasoning: str = ""


class ChatRun:
    """A chat answer in progress, with one or more choices.

    Attributes:
        handle: handle of the engine's request.
    """

    def __init__(self, handle: RequestHandle, parsers: list[tuple[ReasoningParser | None, ToolCallParser]]) -> None:
        self.handle = handle
        # Each choice has its own parsers, since the tokens of choices are interleaved.
        self._parsers = parsers
        handle.stats.reasoning_tokens = 0

    async def deltas(self) -> AsyncIterator[list[ChatDelta]]:
        """Yield the deltas of each engine step. Raise ApiError if the request fails."""
        async for batch in self.handle.batches():
            deltas = []
            for _, event in batch:
                if event.token is None:
                    continue
                finish = event.finish_reason
                reasoning, text = self._push(event.choice, event.token.text, finish is not None)
                parser = self._parsers[event.choice][1]
                calls = parser.read_fragments()
                if finish is not None:
                    end, fragments = parser.finish_fragments()
                    text += end
                    calls += fragments
                deltas.append(ChatDelta(event.choice, event.token, text, tuple(calls), finish, reasoning))
            yield deltas

    async def collect(self) -> list[ChatAnswer]:
        """Wait until all choices have ended; return them in order. Raise ApiError if the request fails."""
        (completions,) = await self.handle.collect()
        answers = []
        for choice, completion in enumerate(completions):
            last = len(completion.tokens) - 1
            parts = [self._push(choice, token.text, place == last) for place, token in enumerate(completion.tokens)]
            end, calls = self._parsers[choice][1].finish()
            reasoning = "".join(part for part, _ in parts)
            text = "".join(part for _, part in parts) + end
            answers.append(ChatAnswer(text, tuple(calls), completion.tokens, completion.finish_reason, reasoning))
        return answers

    def _push(self, choice: int, text: str, is_last: bool) -> tuple[str, str]:
        """Parse a piece of a choice; return its reasoning and its text."""
        reasoning_parser, call_parser = self._parsers[choice]
        reasoning = ""
        if reasoning_parser is not None:
            reasoning, text = reasoning_parser.push(text, is_last=is_last)
            parsers = [parser for parser, _ in self._parsers if parser is not None]
            self.handle.stats.reasoning_tokens = sum(parser.num_pieces for parser in parsers)
        return reasoning, call_parser.push(text)


async def start_chat(body: ChatRequest, request: HttpRequest, service: Service) -> ChatRun:
    """Submit a conversation to the engine.

    Raises:
        ApiError: the conversation cannot be answered as requested, or the server does not accept it now.
        JinguError: the conversation does not fit the model.
    """
    # 1. Collect the constraints: a required tool call constrains the answer, and so does a response format.
    names = {function.name for function in allowed_functions(body)}
    forced_name, tool_constraint = forced_function(body)
    format_constraint = body.response_format.constraint() if body.response_format else body.guided_constraint()
    if format_constraint is not None and names and tool_constraint is None:
        format_constraint = _allow_calls(format_constraint, allowed_functions(body))
    # 2. Encode the conversation and submit it.
    prompt = await encode_conversation(body, service)
    limits = [limit for limit in (body.max_tokens, body.max_completion_tokens) if limit]
    engine_request = build_engine_request(
        body,
        prompt,
        service,
        n=body.n or 1,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        max_tokens=min(limits) if limits else service.max_new_tokens(prompt),
        constraint=tool_constraint or format_constraint,
        stop=service.chat_format.stop if service.chat_format else (),
    )
    try:
        handle = await service.submit(request, [engine_request])
    except JinguError as error:
        # The constraint was made from the tools' parameters, so the error may belong to `tools`.
        if error.where == "constraint" and not all(map(_is_compilable, allowed_functions(body))):
            raise JinguError(error.what, where="tools", fix=error.fix) from error
        raise
    # 3. Make the parsers of each choice. The template may have begun the reasoning; constrained answers have none.
    is_open = service.model.tokenizer.decode(list(prompt[-16:]), keep_special_tokens=True).rstrip().endswith(OPEN_TAG)
    parsers = [
        (
            ReasoningParser(is_open) if engine_request.constraint is None else None,
            ToolCallParser(names, forced_name, tool_constraint is not None, body.parallel_tool_calls is not False),
        )
        for _ in range(body.n or 1)
    ]
    return ChatRun(handle, parsers)


async def encode_conversation(body: ChatRequest, service: Service) -> tuple[int, ...]:
    """Return the token ids of a conversation."""
    chat_format = service.chat_format
    if chat_format is None:
        raise bad_request(
            "the model has no chat template: use /v1/completions, or start the server with --template", "messages"
        )
    functions = allowed_functions(body)
    num_characters = sum(map(_count_characters, body.messages)) + len(functions) * _FUNCTION_CHARACTERS
    messages = await run_off_loop(
        lambda: tuple(_parse_message(message, index) for index, message in enumerate(body.messages)), num_characters
    )
    # Templates may shorten earlier answers (by their reasoning), and strip messages; all else reaches the prompt.
    await service.check_length("".join(message.content.strip() for message in messages if message.role != "assistant"))
    variables = _template_variables(body)
    _check_reasoning_switch(chat_format, variables)
    continue_final = bool(body.continue_final_message)
    # Tool calls follow the content that is continued.
    if continue_final and (messages[-1].role != "assistant" or messages[-1].tool_calls):
        raise bad_request(
            "`continue_final_message` requires a last message of the assistant without tool calls", "messages"
        )

    def encode() -> tuple[int, ...]:
        tools: tuple[JsonObject, ...] = ()
        if functions:
            tools = tuple(tool.model_dump(exclude_none=True) for tool in body.tools or [])
        try:
            return _encode_prompt(chat_format, messages, tools, variables, continue_final)
        except ConversationError as error:
            if not tools and not isinstance(error, UnsupportedToolsError):
                raise
            texts = write_tools_as_text(messages, tools)
            try:
                ids = chat_format.encode_prompt(texts, (), variables, continue_final=continue_final)
            except ConversationError:
                raise ConversationError(f"{error}; start the server with --template qwen to use tools") from error
        _warn_of_tool_prompt(chat_format.template.where)
        return ids

    try:
        return await run_off_loop(encode, num_characters)
    except ConversationError as error:
        raise bad_request(str(error), "messages") from error


# Variables of templates that are given by a request's other fields.
_REQUEST_VARIABLES = {
    "messages",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "tokenize",
}


def _template_variables(body: ChatRequest) -> dict[str, Any]:
    """Return the variables of the chat template: how much to reason, under the names that templates have for it."""
    variables: dict[str, Any] = {}
    is_enabled = body.enable_thinking
    if body.reasoning_effort:
        variables["reasoning_effort"] = body.reasoning_effort
        is_enabled = body.reasoning_effort != "none" if is_enabled is None else is_enabled
    if is_enabled is not None:
        # `enable_thinking` in templates of Qwen and GLM, `thinking` in those of DeepSeek and Granite.
        variables |= {"enable_thinking": is_enabled, "thinking": is_enabled}
    options = body.chat_template_kwargs or {}
    for name in options.keys() & _REQUEST_VARIABLES:
        raise bad_request(
            f"`chat_template_kwargs` cannot have `{name}`, which the request says", "chat_template_kwargs"
        )
    return variables | options


def _check_reasoning_switch(chat_format: ChatFormat, variables: dict[str, Any]) -> None:
    """Refuse to switch the reasoning off where the template writes about reasoning but has no switch for it.

    The model would then reason all the same. A template without reasoning has nothing to switch off.
    """
    is_off = False in (variables.get("enable_thinking"), variables.get("thinking"))
    if not is_off or not any(OPEN_TAG in source for source in chat_format.template.sources):
        return
    on = {**variables, "enable_thinking": True, "thinking": True, "reasoning_effort": "high"}
    probe = (Message("user", "a"),)
    try:
        has_switch = chat_format.encode_prompt(probe, (), variables) != chat_format.encode_prompt(probe, (), on)
    except ConversationError:
        return  # the conversation itself may have what the template requires
    if not has_switch:
        raise bad_request("the chat template of this model cannot switch its reasoning off: leave that setting out")


def _encode_prompt(
    chat_format: ChatFormat,
    messages: tuple[Message, ...],
    tools: tuple[JsonObject, ...],
    variables: dict[str, Any],
    continue_final: bool,
) -> tuple[int, ...]:
    """Return the ids of a prompt. Reasoning of earlier answers is left out if the template has no place for it."""
    try:
        return chat_format.encode_prompt(messages, tools, variables, continue_final=continue_final)
    except ConversationError:
        if not any(message.reasoning_content for message in messages):
            raise
    for message in messages:
        check_characters(message.reasoning_content)
    plain = tuple(replace(message, reasoning_content="") for message in messages)
    return chat_format.encode_prompt(plain, tools, variables, continue_final=continue_final)


def _count_characters(message: ChatMessage) -> int:
    """Return about how many characters a message has in a prompt, with its role and the marks around it."""
    return 20 + len(message.content or ())


@cache
def _warn_of_tool_prompt(template: str) -> None:
    """Warn, once for each template, that tools are described as text."""
    LOGGER.warning(
        f"the chat template {template} does not support tools; jingu describes them in the first message of the prompt "
        "(--template qwen has a place for them)"
    )


def _parse_message(message: ChatMessage, index: int) -> Message:
    """Convert a message to the form that chat templates use."""
    label = f"messages[{index}]"
    content = message.content
    # Join the parts of a list; only text can be rendered.
    if isinstance(content, list):
        for part in content:
            if part.type not in ("text", "refusal", "thinking") or (part.type == "text" and part.text is None):
                raise bad_request(
                    f"`{label}.content` has a part of type {part.type[:40]!r}; only text is supported", "messages"
                )
        content = "".join(part.text or part.refusal or "" for part in content)
    calls: list[JsonObject] = []
    for call in message.tool_calls or []:
        # Other servers write a call without arguments with an empty text.
        arguments: Any = call.function.arguments or {}
        if isinstance(arguments, str):
            # OpenAI's protocol has arguments as JSON text, but templates expect an object. It is read as strictly as
            # bodies are.
            try:
                arguments = from_json(arguments, allow_inf_nan=False)
            except ValueError:
                arguments = None
        if not isinstance(arguments, dict):
            raise bad_request(f"`{label}.tool_calls` has arguments that are not a JSON object", "messages")
        calls.append({"name": call.function.name, "arguments": arguments, **({"id": call.id} if call.id else {})})
    if content is None and not calls:
        raise bad_request(f"`{label}` has no content", "messages")
    role = "system" if message.role == "developer" else message.role
    return Message(
        role,
        content or "",
        tuple(calls),
        reasoning_content=message.reasoning_content or "",
        name=message.name or "",
        tool_call_id=message.tool_call_id or "",
    )


# Tools: which functions the model may call, and constraints that make it call one.


def allowed_functions(body: ChatRequest) -> list[FunctionDefinition]:
    """Return the functions that the model may call."""
    choice = body.tool_choice
    if choice == "none":
        return []
    functions = [tool.function for tool in body.tools or []]
    if not isinstance(choice, AllowedToolsChoice):
        return functions
    allowed_names = {tool.function.name for tool in choice.allowed_tools.tools}
    unknown = sorted(allowed_names - {function.name for function in functions})
    if unknown:
        raise bad_request(f"`tool_choice` names {unknown[0]!r}, which is not in `tools`", "tool_choice")
    return [function for function in functions if function.name in allowed_names]


def forced_function(body: ChatRequest) -> tuple[str | None, Constraint | None]:
    """Return the name of the function that the model must call, and the constraint that makes it do so.

    If only one function is possible, the answer consists of its arguments. If there are several, the name is None, and
    the answer is an object with `name` and `arguments`. If no call is required, both are None.
    """
    functions = allowed_functions(body)
    choice = body.tool_choice
    if isinstance(choice, ToolChoice):
        functions = [function for function in functions if function.name == choice.function.name]
        if not functions:
            raise bad_request(f"`tool_choice` names {choice.function.name!r}, which is not in `tools`", "tool_choice")
    elif choice != "required" and not (
        isinstance(choice, AllowedToolsChoice) and choice.allowed_tools.mode == "required"
    ):
        return None, None
    if not functions:
        raise bad_request("`tool_choice` requires a tool, but there are no `tools`", "tool_choice")
    # With a single candidate there is no name to choose, so the model generates only the arguments.
    if len(functions) == 1:
        return functions[0].name, Constraint("json_schema", json.dumps(_parameters(functions[0])))
    return None, _combine_schemas(functions, [])


def _allow_calls(constraint: Constraint, functions: list[FunctionDefinition]) -> Constraint:
    """Extend a constraint so that it also allows a call of one of the functions."""
    if constraint.kind in ("regex", "grammar"):
        raise bad_request(
            "`tools` can only be combined with JSON, not with an expression or grammar", "response_format"
        )
    try:
        answer = {"type": "object"} if constraint.kind == "json" else json.loads(constraint.value)
    except (ValueError, RecursionError) as error:
        raise bad_request(f"the schema of the answer cannot be read as JSON ({error})", "response_format") from error
    return _combine_schemas(functions, [answer])


def _combine_schemas(functions: list[FunctionDefinition], answers: list[Any]) -> Constraint:
    """Return the constraint of an answer that is a call of one of the functions, or follows one of the other schemas.

    Each schema is embedded as a resource of its own (JSON Schema, 8.2.1): its references and anchors then mean what
    they mean in the schema alone.
    """
    schemas = [_parameters(function) for function in functions] + answers
    ids: dict[str, Any] = {}
    for schema in schemas:
        for identifier, resource in _find_ids(schema):
            if ids.setdefault(identifier, resource) != resource:
                raise bad_request(f"different schemas have the same $id, {identifier[:80]!r}", "tools")
    resources = [
        {"$id": f"jingu:schema/{index}", **schema} if isinstance(schema, dict) else schema
        for index, schema in enumerate(schemas)
    ]
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": function.name}, "arguments": resource},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for function, resource in zip(functions, resources, strict=False)
    ]
    alternatives: dict[str, Any] = {"anyOf": [*calls, *resources[len(calls) :]]}
    # The dialect of a schema is read at its root only.
    dialects = {schema["$schema"] for schema in schemas if isinstance(schema, dict) and "$schema" in schema}
    if len(dialects) == 1:
        alternatives["$schema"] = dialects.pop()
    return Constraint("json_schema", json.dumps(alternatives))


def _find_ids(schema: Any) -> Iterator[tuple[str, Any]]:
    """Yield each `$id` in a schema, and the schema that has it."""
    if isinstance(schema, dict) and isinstance(schema.get("$id"), str) and not schema["$id"].startswith("#"):
        yield schema["$id"], schema
    if isinstance(schema, dict | list):
        for item in schema.values() if isinstance(schema, dict) else schema:
            yield from _find_ids(item)


def _parameters(function: FunctionDefinition) -> dict[str, Any]:
    """Return the schema of a function's arguments. One without any property stands for a function without arguments."""
    schema = function.parameters or function.arguments or {"type": "object"}
    is_empty = schema.get("type") == "object" and not schema.get("properties")
    if is_empty and schema.keys() <= {"type", "properties", "required", "title", "description", "$schema", "strict"}:
        return {**schema, "additionalProperties": False}
    return schema


def _is_compilable(function: FunctionDefinition) -> bool:
    """Return whether llguidance can constrain an answer to a function's arguments."""
    from llguidance import LLMatcher

    try:
        return not LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(_parameters(function)))
    except (ValueError, RecursionError):
        return False
