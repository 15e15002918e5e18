"""Each published field of each protocol changes the answer, cannot change it, or is refused with a reason."""

from __future__ import annotations

import json
import re
import typing
from collections.abc import Iterable
from typing import Any

import ollama
import pytest
from anthropic.types import message_create_params, tool_param
from anthropic.types.beta import message_create_params as beta_message_create_params
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params
from pydantic import AliasChoices

from jingu.infer.inference_model import InferenceModel
from jingu.infer.request import Request
from jingu.serve import anthropic_messages, openai_responses, protocol
from jingu.serve import ollama as ollama_protocol
from tests.serve.conftest import Running, ScriptedEngine, Serve

# A template that writes all that a request can tell it.
TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}"
    "{{ reasoning_effort }}|{{ enable_thinking }}|{{ extra }}\n"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
    "{{ message.content }}{% if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FUNCTION = {"name": "weather", "parameters": {"type": "object", "properties": {"place": {"type": "string"}}}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
VLLM_VALUES: dict[str, Any] = {
    "frequency_penalty": 0.5,
    "guided_choice": ["a", "b"],
    "guided_grammar": 'root ::= "a"',
    "guided_json": SCHEMA,
    "guided_regex": "a+",
    "ignore_eos": True,
    "logit_bias": {"5": 3.0},
    "min_p": 0.2,
    "min_tokens": 2,
    "presence_penalty": 0.5,
    "repetition_penalty": 1.2,
    "seed": 77,
    "skip_special_tokens": False,
    "stop_token_ids": [7],
    "structured_outputs": {"regex": "b+"},
    "top_k": 3,
    "chat_template_kwargs": {"extra": "more"},
}
OPENAI_VALUES: dict[str, Any] = {
    **VLLM_VALUES,
    "model": "adapter",
    "n": 2,
    "stop": ["x"],
    "stream": True,
    "temperature": 0.3,
    "top_p": 0.4,
    "max_tokens": 3,
}
MESSAGE = {"role": "user", "content": "Hi"}
# By protocol: path, body class, a request, values of its carried fields that change the answer (with what they need
# besides), and the fields that the client's library publishes.
PROTOCOLS: dict[str, tuple[str, Any, dict[str, Any], dict[str, Any], Iterable[str]]] = {
    "completions": (
        "/v1/completions",
        protocol.CompletionRequest,
        {"model": "tiny", "prompt": "Hi", "seed": 1},
        {
            **{key: value for key, value in OPENAI_VALUES.items() if key != "chat_template_kwargs"},
            "prompt": "Ho",
            "best_of": 3,
            "echo": True,
            "logprobs": 2,
            "return_token_ids": True,
            "stream_options": ({"stream": True}, {"include_usage": True}),
        },
        typing.get_type_hints(completion_create_params.CompletionCreateParamsBase),
    ),
    "chat": (
        "/v1/chat/completions",
        protocol.ChatRequest,
        {"model": "tiny", "messages": [MESSAGE], "seed": 1},
        {
            **OPENAI_VALUES,
            "messages": [{"role": "user", "content": "Ho"}],
            "max_completion_tokens": 3,
            "modalities": ({}, ["audio"]),
            "enable_thinking": False,
            "reasoning_effort": "high",
            "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
            "tools": [{"type": "function", "function": FUNCTION}],
            "tool_choice": ({"tools": [{"type": "function", "function": FUNCTION}]}, "required"),
            "parallel_tool_calls": (
                {
                    "tools": [{"type": "function", "function": FUNCTION}],
                    "messages": [{"role": "user", "content": "call"}],
                },
                False,
            ),
            "logprobs": True,
            "top_logprobs": ({"logprobs": True}, 2),
            "continue_final_message": (
                {"messages": [MESSAGE, {"role": "assistant", "content": "I"}], "add_generation_prompt": None},
                True,
            ),
            "add_generation_prompt": ({"messages": [MESSAGE, {"role": "assistant", "content": "I"}]}, False),
            "stream_options": ({"stream": True}, {"include_usage": True}),
        },
        typing.get_type_hints(chat_create_params.CompletionCreateParamsBase),
    ),
    "responses": (
        "/v1/responses",
        openai_responses.ResponsesRequest,
        {"model": "tiny", "input": "Hi", "seed": 1},
        {
            **VLLM_VALUES,
            "model": "adapter",
            "input": "Ho",
            "include": ["message.output_text.logprobs"],
            "instructions": "Be brief",
            "max_output_tokens": 3,
            "metadata": {"a": "b"},
            "parallel_tool_calls": ({"tools": [{"type": "function", **FUNCTION}], "input": "call"}, False),
            "reasoning": {"effort": "high"},
            "stop": "x",
            "stream": True,
            "temperature": 0.3,
            "text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}},
            "tools": [{"type": "function", **FUNCTION}],
            "tool_choice": ({"tools": [{"type": "function", **FUNCTION}]}, {"type": "function", "name": "weather"}),
            "top_logprobs": 2,
            "top_p": 0.4,
        },
        typing.get_type_hints(response_create_params.ResponseCreateParamsBase),
    ),
    "messages": (
        "/v1/messages",
        anthropic_messages.MessagesRequest,
        {"model": "tiny", "messages": [MESSAGE], "max_tokens": 40, "seed": 1},
        {
            **VLLM_VALUES,
            "model": "adapter",
            "messages": [{"role": "user", "content": "Ho"}],
            "max_tokens": 3,
            "context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]},
            "output_config": {"effort": "high"},
            "output_format": {"type": "json_schema", "schema": SCHEMA},
            "stop_sequences": ["x"],
            "stream": True,
            "system": "Be brief",
            "temperature": 0.3,
            "thinking": {"type": "disabled"},
            "tools": [{"name": "weather", "input_schema": FUNCTION["parameters"]}],
            "tool_choice": ({"tools": [{"name": "weather", "input_schema": FUNCTION["parameters"]}]}, {"type": "any"}),
            "top_p": 0.4,
        },
        typing.get_type_hints(message_create_params.MessageCreateParamsBase).keys()
        | typing.get_type_hints(beta_message_create_params.MessageCreateParamsBase).keys(),
    ),
    "ollama chat": (
        "/api/chat",
        ollama_protocol.OllamaChatRequest,
        {"model": "tiny", "messages": [MESSAGE], "stream": False, "options": {"seed": 1}},
        {
            "model": "adapter",
            "messages": [{"role": "user", "content": "Ho"}],
            "format": "json",
            "logprobs": True,
            "top_logprobs": ({"logprobs": True}, 2),
            "options": {"seed": 1, "temperature": 0.3},
            "stream": True,
            "think": False,
            "tools": [{"type": "function", "function": FUNCTION}],
        },
        ollama._types.ChatRequest.model_fields,
    ),
    "ollama generate": (
        "/api/generate",
        ollama_protocol.OllamaGenerateRequest,
        {"model": "tiny", "prompt": "Hi", "stream": False, "options": {"seed": 1}},
        {
            "model": "adapter",
            "prompt": "Ho",
            "format": "json",
            "logprobs": True,
            "top_logprobs": ({"logprobs": True}, 2),
            "options": {"seed": 1, "top_p": 0.3},
            "raw": True,
            "stream": True,
            "system": "Be brief",
            "think": "high",
        },
        ollama._types.GenerateRequest.model_fields,
    ),
    "generate": (
        "/generate",
        protocol.GenerateRequest,
        {"inputs": "Hi", "parameters": {"seed": 1}},
        {"inputs": "Ho", "parameters": {"seed": 1, "temperature": 0.5}, "stream": True},
        [],
    ),
}
OPTION_VALUES = {
    "frequency_penalty": 0.5,
    "min_p": 0.3,
    "num_predict": 3,
    "presence_penalty": 0.5,
    "repeat_penalty": 1.2,
    "repeat_last_n": ({"repeat_penalty": 1.2}, 33),
    "seed": 7,
    "stop": ["x"],
    "temperature": 0.3,
    "top_k": 4,
    "top_p": 0.4,
}
PARAMETER_VALUES = {
    "adapter_id": "adapter",
    "best_of": ({"do_sample": True}, 2),
    "decoder_input_details": True,
    "details": True,
    "do_sample": True,
    "frequency_penalty": 0.5,
    "grammar": {"type": "regex", "value": "a+"},
    "max_new_tokens": 3,
    "repetition_penalty": 1.2,
    "return_full_text": True,
    "seed": 7,
    "stop": ["x"],
    "temperature": 0.3,
    "top_k": 4,
    "top_n_tokens": ({"details": True}, 2),
    "top_p": 0.4,
    "truncate": 1,
    "typical_p": 0.5,
    "watermark": True,
}
# Carried fields whose other values are refused: names of adapters, which the server lacks, and unsupported values.
REFUSED = {
    *((name, "model") for name in PROTOCOLS),
    ("chat", "modalities"),
    ("messages", "context_management"),
    ("options", "repeat_last_n"),
    ("parameters", "adapter_id"),
    ("parameters", "typical_p"),
    ("parameters", "watermark"),
}
CALLS = 2 * '<tool_call>{"name": "weather", "arguments": {}}</tool_call>'


class Observer:
    """A server, and the engine's requests."""

    def __init__(self, server: Running) -> None:
        self.server = server
        self.requests: list[Request] = []
        submit = server.engine.submit

        def observe(request: Request) -> int:
            self.requests.append(request)
            return int(submit(request))

        server.engine.submit = observe

    def answer(self, path: str, body: dict[str, Any], echo: str | None = None) -> tuple[int, Any, Any]:
        """Return status, the engine's requests, and the response without what differs each time.

        Args:
            echo: a key of the response that repeats the request, and is left out.
        """
        self.requests.clear()
        status, response, _ = self.server.call(path, body)
        if echo is not None and isinstance(response, dict):
            response.pop(echo, None)
        text = response if isinstance(response, str) else json.dumps(response, sort_keys=True)
        return status, tuple(self.requests), strip(text)


def strip(text: str) -> str:
    """Remove ids, times and names of models from a response."""
    keys = "id|item_id|call_id|created|created_at|total_duration|prompt_eval_duration|eval_duration|model"
    text = re.sub(rf'"({keys})": ?("[^"]*"|\d+)', "", text)
    return re.sub(r"(call|msg|resp|rs|fc|toolu|cmpl|chatcmpl)[_-][0-9a-f]{24}", "", text)


@pytest.fixture(scope="module")
def observer(serve: Serve, tiny_model: InferenceModel, tmp_path_factory: pytest.TempPathFactory) -> Observer:
    template = tmp_path_factory.mktemp("template") / "all.jinja"
    template.write_text(TEMPLATE, encoding="utf-8")
    engine = ScriptedEngine(tiny_model, lambda prompt: CALLS if "call<|im_end|>" in prompt else "An answer.")
    return Observer(serve(engine, template=str(template)))


def field_names(body: Any) -> dict[str, str]:
    """Return the fields that a body class carries, by their names in requests."""
    names = {}
    for name, field in body.model_fields.items():
        if isinstance(field.validation_alias, AliasChoices):
            names |= {str(choice): name for choice in field.validation_alias.choices}
        names[field.alias or name] = name
    return names


CARRIED = [(name, field) for name, (_, body, *_) in PROTOCOLS.items() for field in field_names(body)]
TABLES = [
    (name, kind, field)
    for name, (_, body, *_) in PROTOCOLS.items()
    for kind in ("hints", "neutral", "refused")
    for field in body.read_fields(kind)
]


@pytest.mark.parametrize("name", PROTOCOLS)
def test_each_published_field_is_known(name: str) -> None:
    _, body, _, _, published = PROTOCOLS[name]
    known = {*field_names(body), *body.read_fields("hints"), *body.read_fields("neutral"), *body.read_fields("refused")}
    assert set(published) <= known, set(published) - known


@pytest.mark.parametrize(("name", "field"), CARRIED)
def test_a_carried_field_changes_the_answer_or_is_refused(observer: Observer, name: str, field: str) -> None:
    path, _, body, values, _ = PROTOCOLS[name]
    assert field in values, "the test needs a value"
    value = values[field]
    needs: dict[str, Any] = {}
    if isinstance(value, tuple):
        needs, value = value
    # Responses repeat the request: what they repeat must have an effect, too. That of metadata is to be repeated.
    echo = field if name == "responses" and field != "metadata" else None
    status, *before = observer.answer(path, {**body, **needs}, echo)
    # Two of them contradict each other without the other.
    assert status == 200 or field in ("continue_final_message", "add_generation_prompt"), before
    if field == "add_generation_prompt":
        needs = {**needs, "continue_final_message": True}
    status, *after = observer.answer(path, {**body, **needs, field: value}, echo)
    assert (status in (400, 404, 422)) if (name, field) in REFUSED else (status == 200 and before != after)


@pytest.mark.parametrize(("name", "kind", "field"), TABLES)
def test_other_fields_have_no_effect_or_are_refused(observer: Observer, name: str, kind: str, field: str) -> None:
    path, body_class, body, _, _ = PROTOCOLS[name]
    expected = observer.answer(path, body)
    neutral = body_class.read_fields("neutral")
    refused = body_class.read_fields("refused")
    assert observer.answer(path, {**body, field: None}) == expected
    if kind == "hints" and field not in neutral | refused:
        for value in ("some", {"a": 1}, 5, True):
            assert observer.answer(path, {**body, field: value}) == expected
    if kind == "neutral":
        assert observer.answer(path, {**body, field: neutral[field]}) == expected
    if kind in ("neutral", "refused"):
        status, _, text = observer.answer(path, {**body, field: ["another value"]})
        assert status in (400, 422) and f"`{field}` is" in text


@pytest.mark.parametrize("field", OPTION_VALUES)
@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_options_of_ollama_change_the_answer(observer: Observer, path: str, field: str) -> None:
    assert field_names(ollama_protocol.OllamaOptions).keys() == OPTION_VALUES.keys()
    _change_within(observer, path, "options", field, OPTION_VALUES[field])


@pytest.mark.parametrize("field", PARAMETER_VALUES)
def test_parameters_of_text_generation_inference_change_the_answer(observer: Observer, field: str) -> None:
    assert field_names(protocol.GenerateParameters).keys() == PARAMETER_VALUES.keys()
    _change_within(observer, "/generate", "parameters", field, PARAMETER_VALUES[field])


def _change_within(observer: Observer, path: str, group: str, field: str, value: Any) -> None:
    body = next(body for other, _, body, _, _ in PROTOCOLS.values() if other == path)
    needs: dict[str, Any] = {}
    if isinstance(value, tuple):
        needs, value = value
    before = observer.answer(path, {**body, group: {"seed": 1, **needs}})
    status, *after = observer.answer(path, {**body, group: {"seed": 1, **needs, field: value}})
    assert before[0] == 200
    is_refused = (group, field) in REFUSED
    assert (status in (400, 404, 422)) if is_refused else (status == 200 and before[1:] != tuple(after))


def test_all_options_that_ollama_documents_are_accepted_or_refused_for_a_reason(observer: Observer) -> None:
    known = {
        *field_names(ollama_protocol.OllamaOptions),
        *(
            field
            for kind in ("hints", "neutral", "refused")
            for field in ollama_protocol.OllamaOptions.read_fields(kind)
        ),
    }
    assert set(ollama._types.Options.model_fields) <= known
    body = {"model": "tiny", "prompt": "Hi", "stream": False}
    neutral = {
        "num_keep": 5,
        "num_ctx": 1024,
        "num_batch": 2,
        "num_gpu": 1,
        "main_gpu": 0,
        "use_mmap": True,
        "num_thread": 8,
    }
    assert (
        observer.answer("/api/generate", {**body, "options": {**neutral, "seed": 42, "penalize_newline": True}})[0]
        == 200
    )
    status, _, text = observer.answer("/api/generate", {**body, "options": {"typical_p": 0.7}})
    assert status == 400 and "use `top_p`" in text


def test_tools_of_anthropic_are_known() -> None:
    tool = anthropic_messages.AnthropicTool
    assert typing.get_type_hints(tool_param.ToolParam).keys() <= {*field_names(tool), *tool.read_fields("hints")}


def test_embeddings_are_known() -> None:
    published = typing.get_type_hints(embedding_create_params.EmbeddingCreateParams)
    body = protocol.EmbeddingRequest
    assert published.keys() <= {*field_names(body), *body.read_fields("hints")}


BODIES = {path: body for path, _, body, *_ in PROTOCOLS.values() if "seed" in body}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("value", [-1, 0])
def test_no_limit_of_top_k_is_accepted_everywhere(observer: Observer, path: str, value: int) -> None:
    plain = observer.answer(path, BODIES[path])
    assert plain[0] == 200 and observer.answer(path, {**BODIES[path], "top_k": value}) == plain


@pytest.mark.parametrize("path", [path for path in BODIES if path != "/v1/completions"])
@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "chat_template"])
def test_variables_of_the_request_are_no_further_variables(observer: Observer, path: str, name: str) -> None:
    status, _, text = observer.answer(path, {**BODIES[path], "chat_template_kwargs": {name: []}})
    assert status == 400 and f"cannot have `{name}`" in text


@pytest.mark.parametrize("path", BODIES)
def test_special_tokens_are_added_as_in_vllm(observer: Observer, path: str) -> None:
    """By default vLLM adds them to texts, and adds none to what a chat template writes."""
    is_text = path == "/v1/completions"
    assert observer.answer(path, {**BODIES[path], "add_special_tokens": is_text})[0] == 200
    status, _, text = observer.answer(path, {**BODIES[path], "add_special_tokens": not is_text})
    assert status == 400 and "`add_special_tokens` is" in text


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
@pytest.mark.parametrize("value", [True, False])
def test_truncate_of_ollama_changes_no_prompt_that_fits(observer: Observer, path: str, value: bool) -> None:
    body = next(body for other, _, body, *_ in PROTOCOLS.values() if other == path)
    assert observer.answer(path, {**body, "truncate": value}) == observer.answer(path, body)


@pytest.mark.parametrize(
    ("path", "tool"),
    [("/v1/responses", {"type": "web_search"}), ("/v1/chat/completions", {"type": "custom", "custom": {"name": "a"}})],
)
def test_other_tools_are_named_by_their_type(observer: Observer, path: str, tool: dict[str, Any]) -> None:
    status, _, text = observer.answer(path, {**BODIES[path], "tools": [tool]})
    assert status == 400 and f"a tool of type '{tool['type']}' is not supported" in text


def test_documents_to_rank_may_be_objects() -> None:
    body = {"model": "tiny", "query": "a", "documents": ["x", {"text": "y"}]}
    assert protocol.RerankRequest.model_validate(body).documents == ["x", "y"]
    with pytest.raises(ValueError, match="valid string"):
        protocol.RerankRequest.model_validate({**body, "documents": [{"image": "y"}]})
