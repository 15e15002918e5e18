"""What requests look like, as pydantic checks it and the OpenAPI description tells it.

Unknown fields are refused: what is not understood is not ignored. Nothing is converted: text is no number.
JSON is read strictly, too: no NaN, no halves of surrogate pairs, no endless nesting.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Annotated, Any, Literal

from fastapi import Request
from fastapi.responses import Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict, Field, field_validator
from pydantic_core import from_json


class StrictRoute(APIRoute):
    """A route whose bodies are read as JSON by pydantic."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """What answers a request."""
        handler = super().get_route_handler()

        async def strict(request: Request) -> Response:
            return await handler(_StrictRequest(request.scope, request.receive))

        return strict


class _StrictRequest(Request):
    async def json(self) -> Any:
        try:
            return from_json(await self.body(), allow_inf_nan=False)
        except ValueError as error:
            raise json.JSONDecodeError(str(error), "", 0) from None


class Body(BaseModel):
    """A JSON object of a request."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


Temperature = Annotated[float, Field(ge=0, le=100)]
Share = Annotated[float, Field(gt=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Repetition = Annotated[float, Field(ge=0.01, le=100)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Count = Annotated[int, Field(ge=1, lt=2**31)]
Stops = Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=16)]
Id = Annotated[int, Field(ge=0, lt=2**31)]


# text-generation-inference


class Grammar(Body):
    """What a text must be."""

    type: Literal["json", "regex", "json_schema"]
    value: Any


class GenerateParameters(Body):
    """Parameters of text-generation-inference."""

    adapter_id: str | None = None
    best_of: Annotated[int, Field(ge=1, le=16)] | None = None
    decoder_input_details: bool | None = None
    details: bool | None = None
    do_sample: bool | None = None
    frequency_penalty: Penalty | None = None
    grammar: Grammar | None = None
    max_new_tokens: Count | None = 100
    repetition_penalty: Repetition | None = None
    return_full_text: bool | None = None
    seed: Seed | None = None
    stop: Stops | None = None
    temperature: Annotated[float, Field(gt=0, le=100)] | None = None
    top_k: Count | None = None
    top_n_tokens: Annotated[int, Field(ge=0, le=20)] | None = None
    top_p: Share | None = None
    truncate: Count | None = None
    typical_p: Share | None = None
    watermark: bool | None = None


class GenerateRequest(Body):
    """A prompt to continue."""

    inputs: str
    parameters: GenerateParameters | None = None
    stream: bool | None = None


class TokenizeRequest(GenerateRequest):
    """A text to tokenize; the rest is as in a request to generate, and not looked at."""

    add_special_tokens: bool = True


# OpenAI


class StreamOptions(Body):
    """How a stream is sent."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class Sampled(Body):
    """Fields of completions and of chat alike."""

    model: str
    frequency_penalty: Penalty | None = None
    ignore_eos: bool | None = None
    logit_bias: Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=1024)] | None = None
    max_tokens: Count | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1, le=16)] | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: Repetition | None = None
    seed: Seed | None = None
    stop: str | Stops | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Temperature | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    top_p: Share | None = None
    user: str | None = None

    @field_validator("stop")
    @classmethod
    def _not_empty(cls, stop: str | list[str] | None) -> str | list[str] | None:
        if stop == "":
            raise ValueError("a stop string is empty")
        return stop


class CompletionRequest(Sampled):
    """OpenAI's completions."""

    prompt: str | list[Id] | list[str] | list[list[Id]]
    best_of: Annotated[int, Field(ge=1, le=16)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    suffix: str | None = None


class FunctionCall(Body):
    """A call that the model made before."""

    name: str
    arguments: str | dict[str, Any]
    description: Any = None


class ToolCall(Body):
    """A call of a tool that the model made before."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


class Part(Body):
    """A part of a message; only text is taken."""

    type: str
    text: str | None = None
    image_url: Any = None
    input_audio: Any = None
    file: Any = None
    refusal: Any = None


class ChatMessage(Body):
    """A turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: Any = None
    audio: Any = None
    function_call: Any = None
    annotations: Any = None
    reasoning_content: Any = None


class Function(Body):
    """A function that the model may call."""

    name: Annotated[str, Field(min_length=1, max_length=128)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    arguments: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """A tool that the model may use."""

    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    """The name of a function."""

    name: str


class ToolChoice(Body):
    """The tool that the model must use."""

    type: Literal["function"] = "function"
    function: NamedFunction


class JsonSchema(Body):
    """A schema of JSON that an answer must fit."""

    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | bool | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(Body):
    """What an answer must be; `value` is how text-generation-inference says it."""

    type: Literal["text", "json_object", "json_schema", "regex"]
    json_schema: JsonSchema | None = None
    value: Any = None


class ChatRequest(Sampled):
    """OpenAI's chat completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    logprobs: bool | None = None
    max_completion_tokens: Count | None = None
    metadata: Any = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    service_tier: Any = None
    store: bool | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    tool_prompt: str | None = None
    tools: list[Tool] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None


class EmbeddingRequest(Body):
    """OpenAI's embeddings."""

    input: str | list[Id] | list[str] | list[list[Id]]
    model: str
    dimensions: Count | None = None
    encoding_format: Literal["float", "base64"] | None = None
    user: str | None = None
