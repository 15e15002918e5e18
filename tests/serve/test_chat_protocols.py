"""Unmodified clients of further chat protocols: OpenAI's Responses API, Anthropic's Messages API, Ollama."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import ollama
import openai
import pytest

from jingu.infer.inference_model import InferenceModel
from jingu.infer.request import Constraint
from jingu.serve.openai_responses import ResponsesRequest
from jingu.serve.protocol import ChatRequest
from tests.serve.conftest import Running, ScriptedEngine, Serve

ANSWER = "你好，世界！🙂 naïve café"
PARAMETERS = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
QUESTION = "The weather of 北京?"


def says(prompt: str) -> str:
    """Answer the last message."""
    if "<tool_response>" in prompt:
        return "It is 21 °C."
    if "<tools>" in prompt and "weather of" in prompt.rsplit("user\n", 1)[1]:
        return 'Let me look.\n<tool_call>\n{"name": "weather", "arguments": {"place": "北京"}}\n</tool_call>'
    if "system prompt" in prompt:
        return "as the system says"
    return ANSWER


@pytest.fixture(scope="module")
def server(serve: Serve, tiny_model: InferenceModel) -> Running:
    return serve(ScriptedEngine(tiny_model, says), keys=("a-key",))


@pytest.fixture(scope="module")
def openai_client(server: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="a-key", max_retries=0)


@pytest.fixture(scope="module")
def anthropic_client(server: Running) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="a-key", max_retries=0)


@pytest.fixture(scope="module")
def ollama_client(server: Running) -> ollama.Client:
    return ollama.Client(host=server.url, headers={"Authorization": "Bearer a-key"})


# OpenAI's Responses API


def test_responses_answer(openai_client: openai.OpenAI) -> None:
    response = openai_client.responses.create(model="tiny", input="Hi")
    assert (response.output_text, response.status) == (ANSWER, "completed")
    assert response.usage is not None and response.usage.output_tokens > 10
    answer = openai_client.responses.create(model="tiny", instructions="system prompt", input="Hi")
    assert answer.output_text == "as the system says"
    short = openai_client.responses.create(model="tiny", input="Hi", max_output_tokens=2)
    assert short.status == "incomplete" and short.incomplete_details is not None
    assert short.incomplete_details.reason == "max_output_tokens"


def test_responses_stream(openai_client: openai.OpenAI) -> None:
    with openai_client.responses.stream(model="tiny", input="Hi") as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == ANSWER
    assert final.output_text == ANSWER
    assert [event.sequence_number for event in events] == sorted(event.sequence_number for event in events)
    kinds = [event.type for event in events]
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"


@pytest.mark.parametrize("stream", [False, True])
def test_responses_call_a_tool_and_take_its_result(openai_client: openai.OpenAI, stream: bool) -> None:
    tools: list[Any] = [{"type": "function", "name": "weather", "parameters": PARAMETERS}]
    conversation: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": QUESTION}]}]
    response: Any
    if stream:
        with openai_client.responses.stream(model="tiny", input=conversation, tools=tools) as events:
            response = events.get_final_response()
    else:
        response = openai_client.responses.create(model="tiny", input=conversation, tools=tools)
    message, call = response.output
    assert message.content[0].text.strip() == "Let me look."
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "weather", {"place": "北京"})
    conversation += [item.model_dump(exclude_none=True) for item in response.output]
    conversation.append({"type": "function_call_output", "call_id": call.call_id, "output": "21 °C"})
    assert openai_client.responses.create(model="tiny", input=conversation, tools=tools).output_text == "It is 21 °C."


def test_responses_give_json(serve: Serve, tiny_model: InferenceModel) -> None:
    engine = ScriptedEngine(tiny_model, lambda _: '{"place": "北京"}')
    constraints: list[Constraint | None] = []
    submit = engine.submit
    engine.submit = lambda request: constraints.append(request.constraint) or submit(request)  # type: ignore[func-returns-value]
    client = openai.OpenAI(base_url=f"{serve(engine).url}/v1", api_key="none")
    text: Any = {"format": {"type": "json_schema", "name": "place", "schema": PARAMETERS}}
    assert json.loads(client.responses.create(model="tiny", input="Hi", text=text).output_text) == {"place": "北京"}
    assert constraints == [Constraint("json_schema", json.dumps(PARAMETERS))]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input_image"),
        ({"input": [{"type": "computer_call"}]}, "computer_call"),
        ({"input": []}, "no message"),
        ({"truncation": "auto"}, "truncation"),
        ({"tools": [{"type": "web_search"}]}, "web_search"),
    ],
)
def test_responses_refuse_what_would_change_the_answer(server: Running, fields: dict[str, Any], message: str) -> None:
    key = {"Authorization": "Bearer a-key"}
    status, answer, _ = server.call("/v1/responses", {"model": "tiny", "input": "Hi", **fields}, headers=key)
    assert status == 400 and message in answer["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"stop": ""}, "`stop`"),
        ({"stop": ["a", ""]}, "`stop.1`"),
        ({"input": [{"type": "reasoning", "id": "r", "summary": []}]}, "`input` has no message"),
        ({"tools": [{"type": "function", "name": ""}]}, "`tools.0.name`"),
    ],
)
def test_responses_refuse_what_chat_completions_refuse(server: Running, fields: dict[str, Any], message: str) -> None:
    test_responses_refuse_what_would_change_the_answer(server, fields, message)


def test_a_value_that_only_a_chat_completion_refuses_is_no_server_error(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests of other protocols become chat completions after their own fields were checked."""
    monkeypatch.setattr(ResponsesRequest, "to_chat_request", lambda body: ChatRequest(model=body.model, messages=[]))
    test_responses_refuse_what_would_change_the_answer(server, {}, "`messages`: List should have at least 1 item")


# Anthropic's Messages API


def test_messages_answer(anthropic_client: anthropic.Anthropic) -> None:
    messages: list[Any] = [{"role": "user", "content": "Hi"}]
    answer = anthropic_client.messages.create(model="tiny", max_tokens=200, messages=messages)
    assert answer.content[0].type == "text" and answer.content[0].text == ANSWER
    assert answer.stop_reason == "end_turn" and answer.usage.output_tokens > 10
    blocks: list[Any] = [{"type": "text", "text": "system prompt", "cache_control": {"type": "ephemeral"}}]
    answer = anthropic_client.messages.create(model="tiny", max_tokens=200, messages=messages, system=blocks)
    assert answer.content[0].type == "text" and answer.content[0].text == "as the system says"
    count = anthropic_client.messages.count_tokens(model="tiny", messages=messages, system=blocks)
    assert count.input_tokens == answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)
    short = anthropic_client.messages.create(model="tiny", max_tokens=2, messages=messages)
    assert short.stop_reason == "max_tokens"
    stopped = anthropic_client.messages.create(model="tiny", max_tokens=99, messages=messages, stop_sequences=["世"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "世")


@pytest.mark.parametrize("beginning", ["The end is", "<", ""])
def test_messages_continue_a_last_message_of_the_assistant(
    beginning: str, serve: Serve, tiny_model: InferenceModel
) -> None:
    prompts: list[str] = []
    server = serve(ScriptedEngine(tiny_model, lambda prompt: prompts.append(prompt) or "near"))  # type: ignore[func-returns-value]
    question = {"role": "user", "content": "Hi"}
    body = {"model": "tiny", "max_tokens": 9, "messages": [question, {"role": "assistant", "content": beginning}]}
    status, answer, _ = server.call("/v1/messages", body)
    assert (status, answer["content"]) == (200, [{"type": "text", "text": "near"}])
    assert prompts[0].endswith(f"user\nHi<|im_end|>\n<|im_start|>assistant\n{beginning}")
    del body["max_tokens"]
    assert server.call("/v1/messages/count_tokens", body)[1]["input_tokens"] == answer["usage"]["input_tokens"]
    use = {"type": "tool_use", "id": "1", "name": "weather", "input": {}}
    body |= {"max_tokens": 9, "messages": [question, {"role": "assistant", "content": [use]}]}
    assert server.call("/v1/messages", body)[0] == 200
    assert prompts[1].endswith("<|im_end|>\n<|im_start|>assistant\n")


def test_messages_stream(anthropic_client: anthropic.Anthropic) -> None:
    messages: list[Any] = [{"role": "user", "content": "Hi"}]
    with anthropic_client.messages.stream(model="tiny", max_tokens=200, messages=messages) as stream:
        assert "".join(stream.text_stream) == ANSWER
        final = stream.get_final_message()
    assert final.stop_reason == "end_turn" and final.usage.output_tokens > 10


@pytest.mark.parametrize("stream", [False, True])
def test_messages_call_a_tool_and_take_its_result(anthropic_client: anthropic.Anthropic, stream: bool) -> None:
    tools: list[Any] = [{"name": "weather", "description": "The weather.", "input_schema": PARAMETERS}]
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    body: dict[str, Any] = {"model": "tiny", "max_tokens": 200, "tools": tools}
    if stream:
        with anthropic_client.messages.stream(**body, messages=messages) as events:
            answer: Any = events.get_final_message()
    else:
        answer = anthropic_client.messages.create(**body, messages=messages)
    text, call = answer.content
    assert answer.stop_reason == "tool_use" and text.text.strip() == "Let me look."
    assert (call.name, call.input) == ("weather", {"place": "北京"})
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "21 °C"}]}
    messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    answer = anthropic_client.messages.create(**body, messages=messages)
    assert answer.content[0].text == "It is 21 °C."


def test_messages_refuse_images_and_wrong_keys(anthropic_client: anthropic.Anthropic, server: Running) -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
    messages: list[Any] = [{"role": "user", "content": [image]}]
    with pytest.raises(anthropic.BadRequestError, match="image"):
        anthropic_client.messages.create(model="tiny", max_tokens=2, messages=messages)
    client = anthropic.Anthropic(base_url=server.url, api_key="another", max_retries=0)
    with pytest.raises(anthropic.AuthenticationError):
        client.messages.create(model="tiny", max_tokens=2, messages=[{"role": "user", "content": "Hi"}])


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        ("/v1/messages", {"max_tokens": 2, "messages": [{"role": "user", "content": []}]}, "messages"),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": []}]}, "messages"),
        ("/v1/responses", {"input": "Hi", "temperature": 1000.0}, "temperature"),
        ("/v1/responses", {"input": "Hi", "top_p": 0.0}, "top_p"),
        ("/api/generate", {"prompt": "Hi", "options": {"num_predict": 2**40}}, "num_predict"),
    ],
)
def test_values_out_of_range_are_errors_of_the_client(
    server: Running, path: str, fields: dict[str, Any], message: str
) -> None:
    key = {"Authorization": "Bearer a-key"}
    status, answer, _ = server.call(path, {"model": "tiny", **fields}, headers=key)
    assert status == 400 and message in json.dumps(answer["error"])


@pytest.mark.parametrize(
    "field", ['"metadata": {"a": 1e999}', '"tools": [{"type": "function", "name": "f", "parameters": {"a": [-1e999]}}]']
)
def test_numbers_that_json_cannot_repeat_are_refused(field: str, server: Running) -> None:
    headers = {"Authorization": "Bearer a-key", "Content-Type": "application/json"}
    body = f'{{"model": "tiny", "input": "Hi", {field}}}'.encode()
    status, answer, _ = server.call("/v1/responses", body, headers=headers)
    assert status == 400 and "not JSON compliant" in answer["error"]["message"], answer


# Ollama


def test_ollama_lists_models(ollama_client: ollama.Client) -> None:
    assert [model.model for model in ollama_client.list().models] == ["tiny"]


def test_ollama_chats(ollama_client: ollama.Client) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    answer = ollama_client.chat(model="tiny", messages=messages)
    assert (answer.message.content, answer.done_reason) == (ANSWER, "stop")
    chunks = list(ollama_client.chat(model="tiny", messages=messages, stream=True))
    assert "".join(chunk.message.content or "" for chunk in chunks) == ANSWER
    assert chunks[-1].done and chunks[-1].eval_count == answer.eval_count
    short = ollama_client.chat(model="tiny", messages=messages, options={"num_predict": 2, "seed": 1, "num_ctx": 512})
    assert (short.done_reason, short.eval_count) == ("length", 2)


@pytest.mark.parametrize("stream", [False, True])
def test_ollama_calls_a_tool_and_takes_its_result(ollama_client: ollama.Client, stream: bool) -> None:
    tools: list[Any] = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    result: Any = ollama_client.chat(model="tiny", messages=messages, tools=tools, stream=stream)  # type: ignore[call-overload]
    parts = list(result) if stream else [result]
    (call,) = [call for part in parts for call in part.message.tool_calls or []]
    assert (call.function.name, call.function.arguments) == ("weather", {"place": "北京"})
    messages += [{"role": "assistant", "content": "", "tool_calls": [call.model_dump()]}]
    messages += [{"role": "tool", "tool_name": "weather", "content": "21 °C"}]
    assert ollama_client.chat(model="tiny", messages=messages, tools=tools).message.content == "It is 21 °C."


def test_ollama_generates(ollama_client: ollama.Client) -> None:
    assert ollama_client.generate(model="tiny", prompt="Hi").response == ANSWER
    parts = ollama_client.generate(model="tiny", prompt="Hi", system="system prompt", stream=True)
    assert "".join(part.response for part in parts) == "as the system says"
    assert ollama_client.generate(model="tiny", prompt="system prompt", raw=True).response == "as the system says"


def test_ollama_reports_errors(ollama_client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError, match="does not exist"):
        ollama_client.chat(model="other", messages=[{"role": "user", "content": "Hi"}])


# vLLM


def test_tokens_are_decoded(server: Running) -> None:
    key = {"Authorization": "Bearer a-key"}
    tokens = [token["id"] for token in server.call("/tokenize", {"inputs": ANSWER}, headers=key)[1]]
    assert server.call("/detokenize", {"model": "tiny", "tokens": tokens}, headers=key)[1] == {"prompt": ANSWER}
    assert server.call("/detokenize", {"tokens": [10**6]}, headers=key)[0] == 422
