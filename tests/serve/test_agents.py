"""What agents and gateways send, with their own clients: Claude Code, Ollama's library, the hub."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import httpx
import ollama
import openai
import pydantic
import pytest
from huggingface_hub import InferenceClient

from jingu.infer.inference_model import InferenceModel
from tests.serve.conftest import Running, ScriptedEngine, Serve

ARGUMENTS = '{"file_path": "/a b/ü.py", "content": "x = \\"1\\"\\n🙂", "more": {"a": [1, {}]}}'
CALL = f'<tool_call>\n{{"name": "Write", "arguments": {ARGUMENTS}}}\n</tool_call>'
SCHEMA: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "properties": {"file_path": {"type": "string"}, "content": {"type": "string"}},
    "required": ["file_path", "content"],
    "additionalProperties": False,
}
FUNCTION: dict[str, Any] = {"type": "function", "function": {"name": "Write", "parameters": SCHEMA}}
MESSAGES: list[Any] = [{"role": "user", "content": "Write it."}]


def says(prompt: str) -> str:
    """Answer the last message."""
    last = prompt.rsplit("<|im_start|>user\n", 1)[-1]
    if "<tool_response>" in last:
        return "Written."
    if "as JSON" in last:
        return '{"place": "北京", "people": 3}'
    return CALL if "Write it." in last else "Hello, 世界!"


@pytest.fixture(scope="module")
def server(serve: Serve, tiny_model: InferenceModel) -> Running:
    return serve(ScriptedEngine(tiny_model, says))


# Anthropic


def claude_code_body(messages: list[Any]) -> dict[str, Any]:
    """Return a request as the coding agent sends it."""
    mark = {"type": "ephemeral", "ttl": "1h"}
    tool = {
        "name": "Write",
        "description": "Writes a file.",
        "input_schema": SCHEMA,
        "cache_control": mark,
        "eager_input_streaming": True,
        "defer_loading": False,
        "strict": False,
        "input_examples": [{"file_path": "a", "content": "b"}],
        "allowed_callers": ["direct"],
    }
    return {
        "model": "tiny",
        "max_tokens": 400,
        "temperature": 1,
        "stream": True,
        "system": [
            {"type": "text", "text": "You are an agent."},
            {"type": "text", "text": "Rules.", "cache_control": mark},
        ],
        "messages": messages,
        "tools": [tool, {**tool, "name": "Read", "defer_loading": True}],
        "tool_choice": {"type": "auto"},
        "metadata": {"user_id": "user_1_account__session_2"},
        "thinking": {"type": "enabled", "budget_tokens": 31999},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "medium"},
    }


def test_the_requests_of_a_coding_agent_are_answered(claude: anthropic.Anthropic) -> None:
    text = {"type": "text", "text": "Write it.", "cache_control": {"type": "ephemeral"}}
    messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "<system-reminder>"}, text]}]
    body = claude_code_body(messages)
    betas = ["claude-code-20250219", "interleaved-thinking-2025-05-14", "context-management-2025-06-27"]
    headers = {"anthropic-beta": ",".join(betas), "x-app": "cli"}
    # The library sets the one, and does not take the other.
    assert body.pop("stream")
    more = {"temperature": body.pop("temperature")}
    fragments = []
    with claude.beta.messages.stream(**body, betas=betas, extra_headers=headers, extra_body=more) as stream:
        for event in stream:
            if event.type == "input_json":
                fragments.append(event.partial_json)
        answer = stream.get_final_message()
    # The arguments come in many fragments, which the library joins to an object.
    assert len(fragments) > 10 and "".join(fragments) == ARGUMENTS
    (call,) = answer.content
    assert call.type == "tool_use" and (call.name, call.input) == ("Write", json.loads(ARGUMENTS))
    assert answer.stop_reason == "tool_use" and answer.usage.output_tokens > 10
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "", "is_error": False}
    messages += [{"role": "assistant", "content": [call.to_dict()]}, {"role": "user", "content": [result]}]
    answer = claude.beta.messages.create(**body, betas=betas)
    assert answer.content[0].to_dict()["text"] == "Written." and answer.stop_reason == "end_turn"
    names = ("messages", "model", "system", "tools", "tool_choice", "thinking")
    count = claude.beta.messages.count_tokens(**{name: body[name] for name in names})
    assert count.input_tokens == answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)
    assert answer._request_id


def test_tool_calls_stream_in_ollama_and_openai(client: openai.OpenAI, llama: ollama.Client) -> None:
    tools: Any = [FUNCTION]
    chunks = list(client.chat.completions.create(model="tiny", messages=MESSAGES, tools=tools, stream=True, n=2))
    for index in range(2):
        choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
        calls = [call for choice in choices for call in choice.delta.tool_calls or []]
        assert len(calls) > 10 and {call.index for call in calls} == {0} and calls[0].id and not calls[-1].id
        arguments = "".join(call.function.arguments or "" for call in calls if call.function)
        assert arguments == ARGUMENTS and choices[-1].finish_reason == "tool_calls"
    # The library's own accumulation.
    with client.chat.completions.stream(model="tiny", messages=MESSAGES, tools=tools) as stream:
        final = stream.get_final_completion()
    (call,) = final.choices[0].message.tool_calls or []
    assert call.function.arguments == ARGUMENTS
    with client.responses.stream(
        model="tiny", input="Write it.", tools=[{"type": "function", **FUNCTION["function"], "strict": False}]
    ) as events:
        kinds = [event.type for event in events]
        response = events.get_final_response()
    assert kinds.count("response.function_call_arguments.delta") > 10
    (item,) = response.output
    assert item.type == "function_call" and item.arguments == ARGUMENTS
    parts = list(llama.chat("tiny", MESSAGES, tools=[FUNCTION], stream=True))
    (whole,) = [call for part in parts for call in part.message.tool_calls or []]
    assert whole.function.arguments == json.loads(ARGUMENTS)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "Write"}}])
def test_a_forced_call_that_is_cut_off(choice: Any, serve: Serve, tiny_model: InferenceModel) -> None:
    engine = ScriptedEngine(tiny_model, lambda prompt: ARGUMENTS)
    client = openai.OpenAI(base_url=f"{serve(engine).url}/v1", api_key="a", max_retries=0)
    body: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "tools": [FUNCTION], "tool_choice": choice}
    whole = client.chat.completions.create(**body, max_tokens=12).choices[0]
    assert whole.finish_reason == "length" and whole.message.tool_calls is None
    assert whole.message.content and ARGUMENTS.startswith(whole.message.content)
    chunks = list(client.chat.completions.create(**body, max_tokens=12, stream=True))
    calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    assert "".join(call.function.arguments or "" for call in calls if call.function) == whole.message.content
    assert chunks[-1].choices[0].finish_reason == "length"
    assert not any(chunk.choices[0].delta.content for chunk in chunks)


# OpenAI


class Group(pydantic.BaseModel):
    place: str
    people: int


def test_answers_are_parsed_to_classes(client: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    wanted = Group(place="北京", people=3)
    messages: list[Any] = [{"role": "user", "content": "as JSON"}]
    chat = client.chat.completions.parse(model="tiny", messages=messages, response_format=Group)
    assert chat.choices[0].message.parsed == wanted
    response = client.responses.parse(model="tiny", input="as JSON", text_format=Group)
    assert response.output_parsed == wanted
    message = claude.messages.parse(model="tiny", max_tokens=100, messages=messages, output_format=Group)
    assert message.parsed_output == wanted
    config: Any = {"effort": "low", "format": {"type": "json_schema", "schema": Group.model_json_schema()}}
    answer = claude.messages.create(model="tiny", max_tokens=100, messages=messages, output_config=config)
    assert Group.model_validate_json(answer.content[0].to_dict()["text"]) == wanted  # type: ignore[arg-type]


def test_a_response_repeats_the_request(client: openai.OpenAI) -> None:
    tool: Any = {"type": "function", **FUNCTION["function"], "strict": False}
    text: Any = {"format": {"type": "json_schema", "name": "a", "schema": Group.model_json_schema()}}
    response = client.responses.create(
        model="tiny",
        input="as JSON",
        text=text,
        tools=[tool],
        tool_choice="auto",
        reasoning={"effort": "low"},
        top_p=0.25,
        temperature=0.5,
        include=["message.output_text.logprobs"],
        top_logprobs=2,
        max_output_tokens=300,
        metadata={"a": "b"},
    )
    values = response.to_dict()
    assert values["text"]["format"]["schema"] == Group.model_json_schema()  # type: ignore[index]
    assert (response.top_p, response.temperature, response.tool_choice) == (0.25, 0.5, "auto")
    assert response.reasoning is not None and response.reasoning.effort == "low"
    assert (response.top_logprobs, response.max_output_tokens, response.metadata) == (2, 300, {"a": "b"})
    assert values["tools"][0]["name"] == "Write"  # type: ignore[index]
    part = response.output[0].content[0]  # type: ignore[union-attr, index]
    assert part.type == "output_text" and part.logprobs and len(part.logprobs[0].top_logprobs) == 2
    assert b"".join(bytes(entry.bytes) for entry in part.logprobs).startswith(part.text.encode())


def test_histories_of_other_servers_are_read(client: openai.OpenAI) -> None:
    call = {"id": "1", "type": "function", "index": 0, "function": {"name": "Write", "arguments": ""}}
    messages: list[Any] = [
        *MESSAGES,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [call],
            "reasoning": "Hm.",
            "refusal": None,
            "audio": None,
        },
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "done"}]},
    ]
    answer = client.chat.completions.create(model="tiny", messages=messages, tools=[FUNCTION])  # type: ignore[list-item]
    assert answer.choices[0].message.content == "Written."


# Ollama


def test_ollama_describes_and_loads_models(llama: ollama.Client) -> None:
    shown = llama.show("tiny:latest")
    assert shown.template and "tools" in (shown.capabilities or []) and shown.modelinfo
    assert [model.model for model in llama.ps().models] == ["tiny"]
    assert llama.generate("tiny").done_reason == "load"
    assert llama.chat("tiny", []).done_reason == "load"
    assert llama.generate("tiny", keep_alive=0).done
    with pytest.raises(ollama.ResponseError) as caught:
        llama.show("other")
    assert caught.value.status_code == 404


def test_ollama_embeds(llama: ollama.Client) -> None:
    assert llama.embed("tiny", ["a", "b"]).embeddings == [[0.6, 0.8]] * 2
    assert llama.embed("tiny", "a " * 3000, truncate=True, options={"num_ctx": 64}).embeddings == [[0.6, 0.8]]
    with pytest.raises(ollama.ResponseError, match="tokens"):
        llama.embed("tiny", "a " * 3000, truncate=False)
    assert llama.embeddings("tiny:latest", "a", keep_alive="5m").embedding == [0.6, 0.8]
    assert llama.embed("tiny", []).embeddings == []


def test_ollama_sends_all_its_options(llama: ollama.Client, server: Running) -> None:
    # Empty images, and no content type, as gateways send it.
    body = {"model": "tiny", "prompt": "Hi", "images": [], "stream": False, "options": {}}
    answer = httpx.post(f"{server.url}/api/generate", content=json.dumps(body).encode())
    assert answer.json()["response"] == "Hello, 世界!"
    machine = {"numa": False, "num_ctx": 1024, "num_batch": 2, "num_gpu": 1, "main_gpu": 0, "use_mmap": True}
    limits = {"num_thread": 8, "num_keep": 5, "seed": 42, "num_predict": 100, "stop": ["xx"], "repeat_last_n": -1}
    sampling = {"top_k": 20, "top_p": 0.9, "min_p": 0.0, "typical_p": 1.0, "temperature": 0.8, "penalize_newline": True}
    penalties = {"repeat_penalty": 1.2, "presence_penalty": 1.5, "frequency_penalty": 1.0}
    options = ollama.Options(**machine, **limits, **sampling, **penalties)  # type: ignore[arg-type]
    answer = llama.generate("tiny", "Hi", options=options, logprobs=True, top_logprobs=2)
    assert answer.response == "Hello, 世界!" and len(answer.logprobs[0].top_logprobs) == 2


# huggingface_hub


def test_hub_calls_tools(server: Running) -> None:
    hub = InferenceClient(base_url=f"{server.url}/v1", api_key="a")
    parts = list(hub.chat_completion(MESSAGES, model="tiny", tools=[FUNCTION], stream=True, max_tokens=300))
    calls = [call for part in parts for choice in part.choices for call in choice.delta.tool_calls or []]
    assert "".join(call.function.arguments or "" for call in calls) == ARGUMENTS
    answer = hub.chat_completion(MESSAGES, model="tiny", tools=[FUNCTION], tool_choice="auto", max_tokens=300)
    assert answer.choices[0].finish_reason == "tool_calls"


# guidellm, whose fields make the server generate as many tokens as the benchmark wants.


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "Hi", "max_tokens": 8, "stop": None, "ignore_eos": True}),
        (
            "/v1/chat/completions",
            {
                "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
                "max_completion_tokens": 8,
                "stop": None,
                "ignore_eos": True,
            },
        ),
        (
            "/v1/responses",
            {
                "input": [{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}],
                "max_output_tokens": 8,
                "stop": None,
                "ignore_eos": True,
            },
        ),
    ],
)
def test_bodies_of_guidellm(path: str, body: dict[str, Any], server: Running) -> None:
    status, answer, _ = server.call(path, {"model": "tiny", **body})
    usage = answer["usage"]
    assert status == 200 and usage.get("completion_tokens", usage.get("output_tokens")) == 8
    options = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    status, text, _ = server.call(
        path, {"model": "tiny", **body, "stream": True, **({} if "input" in body else options)}
    )
    assert status == 200 and ('"completion_tokens":8' in text or '"output_tokens":8' in text)
