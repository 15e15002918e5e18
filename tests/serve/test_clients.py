"""Unmodified clients: huggingface_hub, openai, curl."""

from __future__ import annotations

import base64
import json
import shutil
import struct
import subprocess
from typing import Any

import openai
import pydantic
import pytest
from huggingface_hub import InferenceClient
from huggingface_hub.errors import OverloadedError, ValidationError

from jingu.infer.inference_model import InferenceModel
from jingu.infer.request import Constraint
from tests.serve.conftest import Running, ScriptedEngine, Serve

CHINESE = "你好，世界！🙂👩‍👩‍👧 naïve café 的数据"
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a place.",
            "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
        },
    }
]


def says(prompt: str) -> str:
    """Answer the last message."""
    if "<tool_response>" in prompt:
        return "It is 21 °C. 晴"
    if "<tools>" in prompt and "weather of" in prompt.rsplit("user\n", 1)[1]:
        return 'Let me look.\n<tool_call>\n{"name": "weather", "arguments": {"place": "北京"}}\n</tool_call>'
    return CHINESE


@pytest.fixture(scope="module")
def server(serve: Serve, tiny_model: InferenceModel) -> Running:
    return serve(ScriptedEngine(tiny_model, says), keys=("a-key", "another"))


@pytest.fixture(scope="module")
def hub(server: Running) -> InferenceClient:
    return InferenceClient(model=server.url, token="a-key")


@pytest.fixture(scope="module")
def client(server: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="another", max_retries=0)


# huggingface_hub


def test_hub_generates_text(hub: InferenceClient) -> None:
    assert hub.text_generation("Hi", max_new_tokens=200) == CHINESE
    assert hub.text_generation("Hi", max_new_tokens=200, stop=["世界"]) == "你好，"


def test_hub_generates_details(hub: InferenceClient) -> None:
    answer = hub.text_generation("Hi", max_new_tokens=200, details=True, decoder_input_details=True)
    assert answer.generated_text == CHINESE and answer.details is not None
    assert answer.details.finish_reason == "eos_token" and answer.details.tokens[-1].special
    assert answer.details.generated_tokens == len(answer.details.tokens)
    assert "".join(token.text for token in answer.details.tokens) == CHINESE


def test_hub_streams_whole_characters(hub: InferenceClient) -> None:
    pieces = list(hub.text_generation("Hi", max_new_tokens=200, stream=True))
    assert "".join(pieces) == CHINESE and len(pieces) > 20
    assert all("\ufffd" not in piece for piece in pieces)
    *_, last = hub.text_generation("Hi", max_new_tokens=200, stream=True, details=True)
    assert last.generated_text == CHINESE and last.details is not None and last.details.finish_reason == "eos_token"


def test_hub_reports_errors(serve: Serve, tiny_model: InferenceModel, hub: InferenceClient) -> None:
    with pytest.raises(ValidationError, match="too long"):
        hub.text_generation("a" * 9000)
    with pytest.raises(ValidationError, match="watermark"):
        list(hub.text_generation("a", watermark=True, stream=True))
    busy = serve(ScriptedEngine(tiny_model), max_concurrent_requests=1)
    busy.server.engine.num_requests = 1
    with pytest.raises(OverloadedError, match="busy"):
        InferenceClient(model=busy.url).text_generation("a")
    busy.server.engine.num_requests = 0


def test_hub_queries_the_endpoint(server: Running) -> None:
    hub = InferenceClient(model=server.url, token="a-key", provider="hf-inference")
    assert hub.health_check()
    assert hub.get_endpoint_info()["model_id"] == "tiny"


def test_hub_chats(hub: InferenceClient) -> None:
    answer = hub.chat_completion([{"role": "user", "content": "Hi"}], max_tokens=200)
    assert answer.choices[0].message.content == CHINESE
    chunks = hub.chat_completion([{"role": "user", "content": "Hi"}], max_tokens=200, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == CHINESE


# openai


def test_openai_lists_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "jingu"


def test_openai_completes(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt="Hi", max_tokens=200, logprobs=2)
    assert answer.choices[0].text == CHINESE and answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None and answer.usage.completion_tokens > 20
    stream = client.completions.create(model="tiny", prompt="Hi", max_tokens=200, stream=True)
    pieces = [chunk.choices[0].text for chunk in stream]
    assert "".join(pieces) == CHINESE and all("\ufffd" not in piece for piece in pieces)


def test_openai_chats(client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    answer = client.chat.completions.create(model="tiny", messages=messages, n=2, logprobs=True, top_logprobs=1)
    assert [choice.message.content for choice in answer.choices] == [CHINESE, CHINESE]
    stream = client.chat.completions.create(
        model="tiny", messages=messages, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == CHINESE
    assert last.usage is not None and answer.usage is not None
    assert last.usage.prompt_tokens == answer.usage.prompt_tokens


def test_openai_calls_a_tool_and_returns_its_result(client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "The weather of 北京?"}]
    first = client.chat.completions.create(model="tiny", messages=messages, tools=TOOLS)
    choice = first.choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content == "Let me look."
    (call,) = choice.message.tool_calls or []
    assert call.type == "function" and call.function.name == "weather"
    assert json.loads(call.function.arguments) == {"place": "北京"}
    messages += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": "21 °C, 晴"}]
    second = client.chat.completions.create(model="tiny", messages=messages, tools=TOOLS)
    assert second.choices[0].message.content == "It is 21 °C. 晴" and second.choices[0].finish_reason == "stop"


def test_openai_streams_a_tool_call(client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "The weather of 北京?"}]
    stream = client.chat.completions.create(model="tiny", messages=messages, tools=TOOLS, stream=True)  # type: ignore[call-overload]
    text, calls, reasons = "", [], []
    for chunk in stream:
        text += chunk.choices[0].delta.content or ""
        calls += chunk.choices[0].delta.tool_calls or []
        reasons.append(chunk.choices[0].finish_reason)
    assert text.strip() == "Let me look." and reasons[-1] == "tool_calls"
    assert [(call.index, call.function.name) for call in calls if call.function.name] == [(0, "weather")]
    assert len(calls) > 5 and {call.index for call in calls} == {0} and len({call.id for call in calls} - {None}) == 1
    assert json.loads("".join(call.function.arguments for call in calls)) == {"place": "北京"}


class Location(pydantic.BaseModel):
    place: str
    degrees: int


def test_openai_requests_json(serve: Serve, tiny_model: InferenceModel) -> None:
    engine = ScriptedEngine(tiny_model, lambda _: '{"place": "北京", "degrees": 21}')
    server, observed, submit = serve(engine), list[Constraint | None](), engine.submit
    engine.submit = lambda request: observed.append(request.constraint) or submit(request)  # type: ignore[func-returns-value]
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    body: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "The weather?"}]}
    answer = client.chat.completions.create(**body, response_format={"type": "json_object"})
    assert json.loads(answer.choices[0].message.content) == {"place": "北京", "degrees": 21}
    parsed = client.chat.completions.parse(**body, response_format=Location)
    assert parsed.choices[0].message.parsed == Location(place="北京", degrees=21)
    named = client.chat.completions.create(**body, tools=TOOLS, tool_choice="required")
    (call,) = named.choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)["place"]) == ("weather", "北京")
    assert named.choices[0].message.content is None and named.choices[0].finish_reason == "tool_calls"
    InferenceClient(model=server.url).text_generation("a", grammar={"type": "regex", "value": "[0-9]+"})
    kinds = [
        item and (item.kind, json.loads(item.value) if item.kind == "json_schema" else item.value) for item in observed
    ]
    assert kinds[0] == ("json", "") and kinds[3] == ("regex", "[0-9]+")
    assert kinds[1] is not None and kinds[1][1]["required"] == ["place", "degrees"]
    assert kinds[2] == ("json_schema", TOOLS[0]["function"]["parameters"])


def test_openai_embeds(serve: Serve) -> None:
    server = serve()
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none is asked for")
    result = client.embeddings.create(model="tiny", input=["the weather", "far"])  # asks for base64
    plain = server.call("/v1/embeddings", {"model": "tiny", "input": "far"})[1]
    assert result.data[1].embedding == pytest.approx(plain["data"][0]["embedding"], abs=1e-6)
    packed = client.embeddings.create(model="tiny", input="far", encoding_format="base64").data[0].embedding
    raw = base64.b64decode(str(packed))
    assert list(struct.unpack(f"<{len(raw) // 4}f", raw)) == pytest.approx(result.data[1].embedding, abs=1e-6)


def test_openai_reports_errors(server: Running, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="model 'gpt' does not exist"):
        client.completions.create(model="gpt", prompt="Hi")
    with pytest.raises(openai.BadRequestError, match="too long"):
        client.completions.create(model="tiny", prompt="a" * 9000)
    with pytest.raises(openai.AuthenticationError, match="API key"):
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong").models.list()


# curl


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
def test_curl_streams(server: Running) -> None:
    body = json.dumps({"inputs": "Hi", "parameters": {"max_new_tokens": 200}}, ensure_ascii=False)
    message = ["curl", "-sN", f"{server.url}/generate_stream", "-H", "Content-Type: application/json"]
    out = subprocess.run([*message, "-H", "Authorization: Bearer a-key", "-d", body], capture_output=True, check=True)
    events = [json.loads(line[5:]) for line in out.stdout.decode().splitlines() if line]
    assert events[-1]["generated_text"] == CHINESE
    plain = subprocess.run(["curl", "-s", server.url + "/generate", "-d", body], capture_output=True, check=True)
    assert "API key" in json.loads(plain.stdout)["error"]
