"""Pydantic models of the requests' JSON bodies, and their conversion to engine parameters.

Unknown fields are refused rather than ignored, and values are not converted: a string is not a number. The JSON itself
is read strictly as well: no NaN, no lone surrogates, limited nesting.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from fastapi import Request
from fastapi.responses import Response
from fastapi.routing import APIRoute
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import from_json
from starlette.types import Scope

from jingu.infer.inference_model import InferenceModel
from jingu.infer.request import Constraint
from jingu.infer.sampling import SamplingParams, sampling_params
from jingu.serve.http_errors import bad_request
from jingu.tables import read_table

# Lower temperatures select the most likely token anyway, but could overflow the logits.
_MIN_TEMPERATURE = 1e-4
# Sampling parameters with the same names in both protocols and in the engine.
_SHARED_PARAMS = ("top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed")


_FIELDS = read_table(__file__, "fields.toml")


class StrictRoute(APIRoute):
    """A route whose bodies pydantic parses as JSON."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the function that handles a request."""
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            _declare_json(request.scope)
            return await handler(_StrictRequest(request.scope, request.receive))

        return handle


def _declare_json(scope: Scope) -> None:
    """Set the type of a body to JSON where a client did not say it, as Ollama's clients and curl.

    Another type protects against web pages of other sites, which can send only some types without asking. But browsers
    name the page's site in such requests: without that, it is no page.
    """
    headers = dict(scope["headers"])
    is_lax = b"content-type" not in headers or scope["path"].startswith("/api/")
    if is_lax and b"origin" not in headers:
        other_headers = [(name, value) for name, value in scope["headers"] if name != b"content-type"]
        scope["headers"] = [*other_headers, (b"content-type", b"application/json")]


class _StrictRequest(Request):
    async def json(self) -> Any:
        try:
            return from_json(await self.body(), allow_inf_nan=False)
        except ValueError as error:
            raise json.JSONDecodeError(str(error), "", 0) from None


class RequestBody(BaseModel):
    """A JSON object in a request."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    # Names in fields.toml of the further fields that the class accepts or refuses.
    FIELDS: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def read_fields(cls, kind: Literal["hints", "neutral", "refused"]) -> dict[str, Any]:
        """Return the fields of this kind in fields.toml, of the class and of its base classes."""
        names = [name for base in reversed(cls.__mro__) for name in vars(base).get("FIELDS", ())]
        return {key: value for name in names for key, value in _FIELDS[name].get(kind, {}).items()}

    @model_validator(mode="before")
    @classmethod
    def _drop_fields_without_effect(cls, value: Any) -> Any:
        """Leave out fields that cannot change the answer, since clients also send fields that they do not set.

        Raises:
            ApiError: a published field has a value that jingu does not support.
        """
        if not isinstance(value, dict):
            return value
        names = {field.alias or name for name, field in cls.model_fields.items()}
        names |= {alias for field in cls.model_fields.values() for alias in _aliases(field)}
        hints = cls.read_fields("hints")
        neutral = cls.read_fields("neutral")
        refused_fields = cls.read_fields("refused")
        result = {}
        for key, item in value.items():
            if key in names:
                result[key] = item
                continue
            has_no_effect = (
                item is None or item in ("", []) or (item == {} and key not in refused_fields) or key in hints
            )
            if has_no_effect or (key in neutral and type(item) is type(neutral[key]) and item == neutral[key]):
                continue
            if key in refused_fields:
                raise bad_request(f"`{key}` is not supported: {refused_fields[key]}", key)
            if key in neutral:
                raise bad_request(f"`{key}` is only supported as {json.dumps(neutral[key])}", key)
            result[key] = item
        return result


def _aliases(field: FieldInfo) -> list[str]:
    """Return the names of a field in requests besides its own."""
    choices = field.validation_alias
    return [str(name) for name in choices.choices] if isinstance(choices, AliasChoices) else []


Temperature = Annotated[float, Field(ge=0, le=100)]
Fraction = Annotated[float, Field(gt=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
RepetitionPenalty = Annotated[float, Field(ge=0.01, le=100)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
PositiveInt = Annotated[int, Field(ge=1, lt=2**31)]
StopString = Annotated[str, Field(min_length=1)]
StopStrings = Annotated[list[StopString], Field(max_length=16)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Choices = Annotated[list[str], Field(min_length=1, max_length=256)]
# Longer grammars would delay the engine's other requests while they are compiled.
GrammarText = Annotated[str, Field(max_length=65_536)]
Prompts = str | list[TokenId] | list[str] | list[list[TokenId]]
# The most texts to embed or to score in one request, as OpenAI documents it. Clients send batches of this size.
MAX_TEXTS = 2048
Texts = Annotated[list[str], Field(min_length=1, max_length=MAX_TEXTS)]


def _build_sampling_params(
    body: RequestBody, model: InferenceModel, options: Mapping[str, Any], temperature: float
) -> SamplingParams:
    """Return sampling parameters: `options`, and the parameters that both protocols share.

    Parameters that are None have the model's recommended values; a missing seed is random.

    Args:
        temperature: the temperature if neither the body nor the model has one.
    """
    values = {**options, **{name: getattr(body, name, None) for name in _SHARED_PARAMS}}
    params: Any = {"seed": secrets.randbits(31)} | {name: value for name, value in values.items() if value is not None}
    if params.get("top_k", 1) < 1:
        # OpenAI's clients send -1 or 0 for no limit.
        params["top_k"] = None
    sampling = sampling_params(params, model.default_sampling, temperature)
    return sampling if sampling.temperature >= _MIN_TEMPERATURE else replace(sampling, temperature=0.0)


def _build_constraint(kind: str, value: Any, field: str) -> Constraint:
    """Return the constraint of a regular expression (kind `regex`) or of a JSON schema."""
    if kind != "regex":
        return Constraint("json_schema", value if isinstance(value, str) else json.dumps(value))
    if not isinstance(value, str):
        raise bad_request(f"`{field}.value` of a regex must be a string", field)
    return Constraint("regex", value)


# text-generation-inference


class GrammarField(RequestBody):
    """A constraint on the generated text."""

    type: Literal["json", "regex", "json_schema"]
    value: Any

    def constraint(self) -> Constraint:
        """Return the engine's constraint."""
        value = self.value
        if self.type == "json_schema" and isinstance(value, dict) and value.get("schema") is not None:
            # OpenAI's form, in which the schema has a name.
            value = value["schema"]
        return _build_constraint(self.type, value, "grammar")


class GenerateParameters(RequestBody):
    """Parameters of text-generation-inference."""

    FIELDS = ("generate",)

    adapter_id: str | None = None
    best_of: Annotated[int, Field(ge=1, le=16)] | None = None
    decoder_input_details: bool | None = None
    details: bool | None = None
    do_sample: bool | None = None
    frequency_penalty: Penalty | None = None
    grammar: GrammarField | None = None
    max_new_tokens: PositiveInt | None = 100
    repetition_penalty: RepetitionPenalty | None = None
    return_full_text: bool | None = None
    seed: Seed | None = None
    stop: StopStrings | None = None
    temperature: Annotated[float, Field(gt=0, le=100)] | None = None
    top_k: PositiveInt | None = None
    top_n_tokens: Annotated[int, Field(ge=0, le=20)] | None = None
    top_p: Fraction | None = None
    truncate: PositiveInt | None = None
    typical_p: Fraction | None = None
    watermark: bool | None = None

    def sampling_params(self, model: InferenceModel) -> SamplingParams:
        """Return the engine's sampling parameters. As in text-generation-inference, some of them imply `do_sample`; if
        the request leaves it out, the model's recommended temperature decides."""
        has_top_p = self.top_p is not None and self.top_p < 1
        samples = self.do_sample or self.temperature not in (None, 1.0) or self.top_k is not None or has_top_p
        temperature = self.temperature if samples else None
        if not samples and self.do_sample is False:
            temperature = 0.0
        options = {"temperature": temperature, "top_k": self.top_k}
        return _build_sampling_params(self, model, options, temperature=1.0 if samples else 0.0)


class GenerateRequest(RequestBody):
    """A prompt to continue."""

    inputs: str
    parameters: GenerateParameters | None = None
    stream: bool | None = None


class TokenizeRequest(GenerateRequest):
    """A text to tokenize. The other fields are those of a request to generate, and have no effect."""

    add_special_tokens: bool = True


class DetokenizeRequest(RequestBody):
    """Token ids to decode, as for vLLM."""

    FIELDS = ("detokenize",)

    tokens: list[TokenId]


# OpenAI


class StreamOptions(RequestBody):
    """Options of a stream."""

    FIELDS = ("stream options",)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class StructuredOutputs(RequestBody):
    """vLLM's constraints of the answer, of which a request has one. JSON never has optional whitespace."""

    FIELDS = ("structured outputs",)

    choice: Choices | None = None
    grammar: GrammarText | None = None
    json_: Annotated[str | dict[str, Any] | None, Field(alias="json")] = None
    json_object: Literal[True] | None = None
    regex: str | None = None

    def constraint(self) -> Constraint | None:
        """Return the engine's constraint; None: there is none. Raises ApiError if there are several."""
        constraints = []
        if self.choice is not None:
            constraints.append(Constraint("regex", "|".join(map(re.escape, self.choice))))
        if self.grammar is not None:
            constraints.append(Constraint("grammar", self.grammar))
        if self.json_ is not None:
            constraints.append(_build_constraint("json_schema", self.json_, "structured_outputs"))
        if self.json_object is not None:
            constraints.append(Constraint("json"))
        if self.regex is not None:
            constraints.append(Constraint("regex", self.regex))
        if len(constraints) > 1:
            raise bad_request("the answer can only have one constraint", "structured_outputs")
        return constraints[0] if constraints else None


class VllmFields(RequestBody):
    """The fields that all routes under /v1 take which generate text: those of vLLM, and some of OpenAI's."""

    FIELDS = ("sampling",)

    frequency_penalty: Penalty | None = None
    guided_choice: Choices | None = None
    guided_grammar: GrammarText | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    ignore_eos: bool | None = None
    logit_bias: Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=1024)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    seed: Seed | None = None
    skip_special_tokens: bool | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=64)] | None = None
    structured_outputs: StructuredOutputs | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None


class VllmChatFields(VllmFields):
    """vLLM's fields of further chat protocols."""

    chat_template_kwargs: dict[str, Any] | None = None

    def chat_fields(self) -> dict[str, Any]:
        """Return these fields for a chat completion."""
        return {name: getattr(self, name) for name in VllmChatFields.model_fields}


class SamplingFields(VllmFields):
    """The fields that completions and chat completions share."""

    model: str
    max_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    n: Annotated[int, Field(ge=1, le=16)] | None = None
    stop: StopString | StopStrings | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Temperature | None = None
    top_p: Fraction | None = None

    def sampling_params(self, model: InferenceModel) -> SamplingParams:
        """Return the engine's sampling parameters."""
        bias = _parse_logit_bias(self.logit_bias or {}, model.spec.vocab_size)
        options = {"temperature": self.temperature, "top_k": self.top_k, "logit_bias": bias}
        return _build_sampling_params(self, model, options, temperature=1.0)

    def guided_constraint(self) -> Constraint | None:
        """Return the constraint of vLLM's fields; None: there is none."""
        if self.structured_outputs is not None:
            return self.structured_outputs.constraint()
        constraints = {name: getattr(self, f"guided_{name}") for name in ("choice", "grammar", "json", "regex")}
        return StructuredOutputs.model_validate(constraints).constraint()


def _parse_logit_bias(biases: dict[str, float], vocab_size: int) -> dict[int, float]:
    parsed_biases = {}
    for token, bias in biases.items():
        if not (token.isascii() and token.isdecimal() and len(token) < 10 and int(token) < vocab_size):
            raise bad_request(
                f"`logit_bias` has {token[:40]!r}, which is not a token id below {vocab_size}", "logit_bias"
            )
        parsed_biases[int(token)] = bias
    return parsed_biases


class CompletionRequest(SamplingFields):
    """OpenAI's completions."""

    FIELDS = ("completion",)

    prompt: Prompts
    best_of: Annotated[int, Field(ge=1, le=16)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    return_token_ids: bool | None = None


class FunctionCall(RequestBody):
    """The function and arguments of an earlier tool call."""

    FIELDS = ("called function",)

    name: str
    arguments: str | dict[str, Any]


class MessageToolCall(RequestBody):
    """A tool call of the assistant in an earlier turn."""

    FIELDS = ("tool call",)

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class ContentPart(RequestBody):
    """A part of a message, of which only text is supported. The others are refused by their type."""

    FIELDS = ("content part",)

    type: str
    text: str | None = None
    refusal: str | None = None


class ChatMessage(RequestBody):
    """A message of a conversation."""

    FIELDS = ("chat message",)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    tool_call_id: str | None = None
    # vLLM and others call the reasoning `reasoning` in their answers.
    reasoning_content: Annotated[str | None, Field(validation_alias=AliasChoices("reasoning_content", "reasoning"))] = (
        None
    )


class FunctionDefinition(RequestBody):
    """A function that the model may call."""

    name: Annotated[str, Field(min_length=1, max_length=128)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    arguments: dict[str, Any] | None = None
    strict: bool | None = None


def check_function_type(value: Any) -> Any:
    """Return the description of a tool. Raise ApiError, with the reason, if it is no function."""
    kind = value.get("type") if isinstance(value, dict) else None
    if kind not in (None, "function"):
        raise bad_request(f"a tool of type {str(kind)[:40]!r} is not supported: models here call functions", "tools")
    return value


class ToolDefinition(RequestBody):
    """A tool that the model may call."""

    type: Literal["function"]
    function: FunctionDefinition

    @model_validator(mode="before")
    @classmethod
    def _check_type(cls, value: Any) -> Any:
        return check_function_type(value)


class FunctionName(RequestBody):
    """The name of a function."""

    name: str


class ToolChoice(RequestBody):
    """The tool that the model must call."""

    type: Literal["function"] = "function"
    function: FunctionName


class AllowedTools(RequestBody):
    """The tools that the model may call."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[ToolChoice], Field(min_length=1)]


class AllowedToolsChoice(RequestBody):
    """A choice among some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


class JsonSchema(RequestBody):
    """A JSON schema that the answer must satisfy."""

    FIELDS = ("response schema",)

    schema_: Annotated[dict[str, Any] | bool | None, Field(alias="schema")] = None


class ResponseFormat(RequestBody):
    """The form of the answer; `value` is text-generation-inference's way to give a schema or expression."""

    type: Literal["text", "json_object", "json_schema", "regex"]
    json_schema: JsonSchema | None = None
    value: Any = None

    def constraint(self) -> Constraint | None:
        """Return the engine's constraint; None for plain text."""
        value = self.value if self.json_schema is None else self.json_schema.schema_
        if self.type == "text":
            return None
        if value is not None:
            return _build_constraint(self.type, value, "response_format")
        if self.type == "json_schema":
            raise bad_request("`response_format.json_schema.schema` is missing", "response_format")
        return Constraint("json")


class ChatRequest(SamplingFields):
    """OpenAI's chat completions."""

    FIELDS = ("chat",)

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    logprobs: bool | None = None
    max_completion_tokens: PositiveInt | None = None
    modalities: list[Literal["text"]] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    # Whether the model reasons before it answers; None: as the template has it.
    enable_thinking: bool | None = None
    response_format: ResponseFormat | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | AllowedToolsChoice | None = None
    tools: list[ToolDefinition] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None


class LoadAdapterRequest(RequestBody):
    """An adapter to load, as for vLLM."""

    FIELDS = ("load adapter",)

    lora_name: str
    lora_path: str


class UnloadAdapterRequest(RequestBody):
    """An adapter to unload, as for vLLM, which ignores its number as well."""

    FIELDS = ("unload adapter",)

    lora_name: str


class EmbeddingRequest(RequestBody):
    """OpenAI's embeddings."""

    FIELDS = ("embedding",)

    input: Prompts
    model: str
    dimensions: PositiveInt | None = None
    encoding_format: Literal["float", "base64"] | None = None


class ScoringRequest(RequestBody):
    """What both requests for scores share. Scores are logits: vLLM's with `use_activation` false."""

    FIELDS = ("scoring",)

    model: str
    use_activation: Literal[False] | None = None


class ScoreRequest(ScoringRequest):
    """vLLM's scores. A list of messages is one prompt."""

    text_1: str | Texts | Annotated[list[ChatMessage], Field(min_length=1)]
    text_2: str | Texts


class RerankRequest(ScoringRequest):
    """Jina's and Cohere's reranking, as vLLM has it."""

    query: str | Annotated[list[ChatMessage], Field(min_length=1)]
    documents: Texts
    return_documents: bool | None = None
    top_n: Annotated[int, Field(ge=0, lt=2**31)] | None = None

    @field_validator("documents", mode="before")
    @classmethod
    def _read_texts(cls, documents: Any) -> Any:
        """Replace documents that are objects with a text, as Jina and Cohere have them, by their texts."""
        if not isinstance(documents, list):
            return documents
        is_text = [isinstance(each, dict) and each.keys() == {"text"} for each in documents]
        return [each["text"] if has_text else each for each, has_text in zip(documents, is_text, strict=True)]
