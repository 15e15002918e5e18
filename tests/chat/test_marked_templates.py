"""Templates of known models, with marks: they render as the models' own do, and mark what the models generate.

`originals/` has the models' own templates, as TRL has collected them (Apache License 2.0).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jingu.chat.messages import JsonObject, Message
from jingu.chat.templates import ChatTemplate, find_marked_template, load_template
from jingu.text.tokenizer import Tokenizer
from jingu.text.tokenizer_training import train_tokenizer

ORIGINALS = {path.stem: path.read_text(encoding="utf-8") for path in (Path(__file__).parent / "originals").glob("*")}
CHATML = ("<|im_start|>assistant\n", "<|im_end|>")
# What stands right before an answer, and its end token.
ENDS = {
    "cohere": ("<|CHATBOT_TOKEN|>", "<|END_OF_TURN_TOKEN|>"),
    "cohere2": ("<|START_RESPONSE|>", "<|END_RESPONSE|><|END_OF_TURN_TOKEN|>"),
    "deepseekv3": ("<｜Assistant｜>", "<｜end▁of▁sentence｜>"),
    "gemma": ("<start_of_turn>model\n", "<end_of_turn>"),
    "gemma3": ("<start_of_turn>model\n", "<end_of_turn>"),
    "glm4moe": ("<|assistant|>", "<|user|>"),
    "gptoss": ("<|start|>assistant", ("<|end|>", "<|return|>", "<|call|>")),
    "llama3": ("<|start_header_id|>assistant<|end_header_id|>\n\n", "<|eot_id|>"),
    "phi3": ("<|assistant|>\n", "<|end|>"),
    "phi3_5": ("<|assistant|>\n", "<|end|>"),
}
THINKING = {"qwen3", "qwen3_5_nothink", "qwen3_5_think", "qwen3_6"}
REASONING = {*THINKING, "glm4moe", "gptoss", "nemotron_3_nano", "nemotron_3_super", "nemotron_3_ultra"}
TOOLS = {*REASONING, "qwen2_5", "qwen3_instruct_2507"}

CALL = {"name": "add", "arguments": {"a": 1, "b": "x"}}
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer", "description": "A number."}}}
ADD: JsonObject = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": PARAMETERS}}
SHORT = (Message("user", "Who?"), Message("assistant", "The fox."))
LONG = (*SHORT, Message("user", "How?"), Message("assistant", "It was quick."))
REASONED = (*SHORT[:1], Message("assistant", "The fox.", reasoning_content="It is brown."))
REASONED_LONG = (*REASONED, Message("user", "How?"), Message("assistant", "Quick.", reasoning_content="It jumps."))
USED = (
    Message("user", "1 + x?"),
    Message("assistant", "", (CALL,)),
    Message("tool", "42"),
    Message("assistant", "42!"),
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    tokens = ["<s>", "</s>", "<end_of_turn>", "<|im_end|>", "<|end|>", "<|eot_id|>"]
    row = train_tokenizer(iter(["user assistant\nThe quick brown fox.\n" * 9]), 340, tokens)
    return Tokenizer(row.content, {"bos_token": "<s>", "eos_token": "</s>"})


def theirs(source: str, messages: tuple[Message, ...], tools: list[JsonObject] | None) -> str:
    """Return what transformers renders."""
    from transformers.utils.chat_template_utils import render_jinja_template

    values: list[dict[str, Any]] = []
    for message in messages:
        value: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.tool_calls:
            value["tool_calls"] = [{"type": "function", "function": call} for call in message.tool_calls]
        if message.reasoning_content:
            value |= {"reasoning_content": message.reasoning_content, "thinking": message.reasoning_content}
        values.append(value)
    (text,), _ = render_jinja_template(
        [values], chat_template=source, tools=tools, bos_token="<s>", eos_token="</s>", documents=None
    )
    return text


@pytest.mark.parametrize("name", sorted(ORIGINALS))
def test_marked_templates_render_as_the_models_own(name: str, tokenizer: Tokenizer) -> None:
    source = find_marked_template(ORIGINALS[name])
    assert "generation %}" in source and source == find_marked_template(f"{ORIGINALS[name]}\n")
    template = ChatTemplate(source, tokenizer, name)
    header, end = ENDS.get(name, CHATML)
    conversations: list[tuple[Message, ...]] = [SHORT, LONG]
    conversations += [REASONED, REASONED_LONG] if name in REASONING else []
    conversations += [USED] if name in TOOLS else []
    for messages in conversations:
        tools = [ADD] if messages is USED else []
        chat = template.render(messages, tuple(tools))
        text = theirs(ORIGINALS[name], messages, tools or None)
        # Qwen's own templates drop earlier reasoning, also the empty one. GLM's end token is the next turn's header.
        if name == "glm4moe":
            assert chat.text == f"{text}<|user|>"
        elif name not in THINKING or len(messages) == 2:
            assert chat.text == text
        answers = [message for message in messages if message.role == "assistant"]
        assert len(chat.answers) == len(answers)
        for message, (start, stop) in zip(answers, chat.answers, strict=True):
            span = chat.text[start:stop]
            assert message.content in span and (not message.tool_calls or "add" in span)
            ends = ("<|observation|>",) if name == "glm4moe" and message.tool_calls else end
            assert chat.text[:start].endswith(header) and span.endswith(ends), (span, name)
            # Nemotron and GLM write the reasoning of the last answer only.
            if message.reasoning_content and (name in THINKING or message is answers[-1]):
                assert message.reasoning_content in span


def test_a_recognized_template_is_replaced_in_training_only(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": ORIGINALS["qwen3"]}))
    own = Tokenizer.load(tmp_path)
    marked = load_template("auto", own, for_training=True).render(LONG)
    assert [marked.text[start:end] for start, end in marked.answers] == [
        "<think>\n\n</think>\n\nThe fox.<|im_end|>",
        "<think>\n\n</think>\n\nIt was quick.<|im_end|>",
    ]
    served = load_template("auto", own).render(LONG, locate_answers=False).text
    assert served == theirs(ORIGINALS["qwen3"], LONG, None) != marked.text
