"""Reasoning in all chat protocols, with the protocols' clients: its parts, its events, its counts and its switches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anthropic
import ollama
import openai
import pytest

from jingu.infer.inference_model import InferenceModel
from tests.serve.conftest import Running, ScriptedEngine, Serve

# As Qwen's template: an empty block switches the reasoning off.
TEMPLATE = (
    "{% if reasoning_effort %}effort {{ reasoning_effort }}\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.reasoning_content %}<think>\n{{ message.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
REASONING, ANSWER = "First this, 然后 that.", "The answer is 4."
MESSAGES: list[Any] = [{"role": "user", "content": "Hi"}]
MORE: list[Any] = [{"role": "user", "content": "More?"}]


def says(prompt: str) -> str:
    """Reason, unless the prompt says otherwise; tell whether an earlier answer's reasoning is in the prompt."""
    if prompt.endswith("</think>\n\n"):
        return ANSWER
    if "More?" in prompt:
        return "seen" if f"<think>\n{REASONING}" in prompt else "not seen"
    return f"<think>\n{REASONING}\n</think>\n\n{ANSWER}"


def start(serve: Serve, model: InferenceModel, folder: Path, template: str) -> Running:
    (folder / "own.jinja").write_text(template, encoding="utf-8")
    return serve(ScriptedEngine(model, says), template=str(folder / "own.jinja"))


@pytest.fixture(scope="module")
def server(serve: Serve, tiny_model: InferenceModel, tmp_path_factory: pytest.TempPathFactory) -> Running:
    return start(serve, tiny_model, tmp_path_factory.mktemp("template"), TEMPLATE)


def test_messages_have_blocks_of_thinking(claude: anthropic.Anthropic) -> None:
    body: dict[str, Any] = {"model": "tiny", "max_tokens": 200}
    enabled: Any = {"type": "enabled", "budget_tokens": 1024}
    answer = claude.messages.create(**body, messages=MESSAGES, thinking=enabled)
    thinking, text = answer.content
    assert isinstance(thinking, anthropic.types.ThinkingBlock) and isinstance(text, anthropic.types.TextBlock)
    assert (thinking.thinking, text.text) == (REASONING, ANSWER)
    # The library joins the events of a stream to the same message.
    with claude.messages.stream(**body, messages=MESSAGES, thinking={"type": "adaptive"}) as stream:
        events = list(stream)
        final = stream.get_final_message()
    first, second = final.content
    assert (first, second.to_dict()["text"]) == (thinking, ANSWER)
    assert final.usage.output_tokens == answer.usage.output_tokens
    assert "".join(event.thinking for event in events if event.type == "thinking") == REASONING
    raw = [event.delta.type for event in events if event.type == "content_block_delta"]
    assert raw.index("signature_delta") == raw.count("thinking_delta") and raw[-1] == "text_delta"
    # An answer is sent back as it came, beside reasoning that only another server can read.
    content: Any = [{"type": "redacted_thinking", "data": "aGk="}, *answer.content]
    history: Any = [*MESSAGES, {"role": "assistant", "content": content}, *MORE]
    edits: Any = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    seen = claude.beta.messages.create(**body, messages=history, betas=["x"], context_management=edits)
    assert seen.content[0].to_dict()["text"] == "seen"
    edits = {"edits": [{"type": "clear_tool_uses_20250919"}]}
    with pytest.raises(anthropic.BadRequestError, match="clear_thinking"):
        claude.beta.messages.create(**body, messages=history, betas=["x"], context_management=edits)


def test_responses_have_items_of_reasoning(client: openai.OpenAI) -> None:
    answer = client.responses.create(model="tiny", input="Hi")
    reasoning, message = answer.output
    assert reasoning.type == "reasoning" and reasoning.content is not None and message.type == "message"
    assert (reasoning.content[0].text, answer.output_text) == (REASONING, ANSWER)
    assert answer.usage is not None
    assert 5 < answer.usage.output_tokens_details.reasoning_tokens < answer.usage.output_tokens
    with client.responses.stream(model="tiny", input="Hi") as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert "".join(event.delta for event in events if event.type == "response.reasoning_text.delta") == REASONING
    assert final.output[0].to_dict() | {"id": ""} == reasoning.to_dict() | {"id": ""}
    assert final.output_text == ANSWER and final.usage == answer.usage
    history: Any = [*MESSAGES, *(item.to_dict() for item in answer.output), *MORE]
    assert client.responses.create(model="tiny", input=history).output_text == "seen"


def test_chat_completions_count_reasoning(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES)
    message = answer.choices[0].message.to_dict()
    assert (message["reasoning_content"], message["content"]) == (REASONING, ANSWER)
    usage = answer.usage
    assert usage is not None and usage.completion_tokens_details is not None
    response = client.responses.create(model="tiny", input="Hi")
    assert response.usage is not None
    counted = usage.completion_tokens_details.reasoning_tokens
    assert counted == response.usage.output_tokens_details.reasoning_tokens
    # Other servers call it `reasoning`, and have parts of refusals.
    refusal = {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}], "reasoning": REASONING}
    answer = client.chat.completions.create(model="tiny", messages=[*MESSAGES, refusal, *MORE])  # type: ignore[list-item]
    assert answer.choices[0].message.content == "seen"


def test_ollama_has_thinking(llama: ollama.Client) -> None:
    answer = llama.chat("tiny", MESSAGES, think=True)
    assert (answer.message.thinking, answer.message.content) == (REASONING, ANSWER)
    parts = list(llama.chat("tiny", MESSAGES, think="high", stream=True))
    assert "".join(part.message.thinking or "" for part in parts) == REASONING
    assert "".join(part.message.content or "" for part in parts) == ANSWER
    text = llama.generate("tiny", "Hi", think=True)
    assert (text.thinking, text.response) == (REASONING, ANSWER)
    pieces = list(llama.generate("tiny", "Hi", stream=True))
    assert "".join(piece.thinking or "" for piece in pieces) == REASONING
    history = [*MESSAGES, answer.message, *MORE]
    assert llama.chat("tiny", history).message.content == "seen"


# What switches the reasoning off in each protocol, and sets its effort.
OFF_AND_EFFORT = {
    "/v1/chat/completions": ({"messages": MESSAGES}, {"enable_thinking": False}, {"reasoning_effort": "high"}),
    "/v1/responses": ({"input": "Hi"}, {"reasoning": {"effort": "none"}}, {"reasoning": {"effort": "high"}}),
    "/v1/messages": (
        {"messages": MESSAGES, "max_tokens": 200},
        {"thinking": {"type": "disabled"}},
        {"output_config": {"effort": "high"}},
    ),
    "/api/chat": ({"messages": MESSAGES, "stream": False}, {"think": False}, {"think": "high"}),
    "/api/generate": ({"prompt": "Hi", "stream": False}, {"think": False}, {"think": "high"}),
}


def count_prompt(server: Running, path: str, body: dict[str, Any]) -> int:
    """Return the tokens of a request's prompt, as the response has them."""
    status, answer, _ = server.call(path, {"model": "tiny", **body})
    assert status == 200, answer
    usage = answer.get("usage", answer)
    names = ("prompt_tokens", "input_tokens", "prompt_eval_count")
    return next(usage[name] for name in names if name in usage) + usage.get("cache_read_input_tokens", 0)


def test_switches_of_reasoning_have_the_same_effect_in_all_protocols(server: Running) -> None:
    plain = {count_prompt(server, path, body) for path, (body, _, _) in OFF_AND_EFFORT.items()}
    # Responses has one field for both, which also reaches the template as an effort of none.
    off = {
        count_prompt(server, path, body | off) for path, (body, off, _) in OFF_AND_EFFORT.items() if "resp" not in path
    }
    high = {count_prompt(server, path, body | effort) for path, (body, _, effort) in OFF_AND_EFFORT.items()}
    assert len(plain) == len(off) == len(high) == 1 and len(plain | off | high) == 3
    none = {"messages": MESSAGES, "reasoning_effort": "none"}
    responses, fields, _ = OFF_AND_EFFORT["/v1/responses"]
    assert count_prompt(server, "/v1/chat/completions", none) == count_prompt(
        server, "/v1/responses", responses | fields
    )
    for path, (body, fields, _) in OFF_AND_EFFORT.items():
        _, answer, _ = server.call(path, {"model": "tiny", **body, **fields})
        assert ANSWER in str(answer) and REASONING not in str(answer)


@pytest.mark.parametrize("path", OFF_AND_EFFORT)
@pytest.mark.parametrize(
    ("end", "status"), [("<think>\n", 400), ("", 200), ("{% if thinking %}<think>\n{% endif %}", 200)]
)
def test_reasoning_without_a_switch_cannot_be_switched_off(
    path: str, end: str, status: int, serve: Serve, tiny_model: InferenceModel, tmp_path: Path
) -> None:
    server = start(serve, tiny_model, tmp_path, "{% for m in messages %}{{ m.content }}\n{% endfor %}" + end)
    body, off, _ = OFF_AND_EFFORT[path]
    assert server.call(path, {"model": "tiny", **body})[0] == 200
    answered, answer, _ = server.call(path, {"model": "tiny", **body, **off})
    assert answered == status and (status == 200 or "cannot switch its reasoning off" in str(answer))
