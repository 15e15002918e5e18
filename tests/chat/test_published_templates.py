"""The templates in TRL's package: what is trained is what a model generates after its prompt, and TRL's marks agree.

The reference texts and prompts are those of transformers; TRL has, for most models, a version with marks.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
import trl

from jingu.chat.chat_format import find_chat_format
from jingu.chat.messages import ConversationError, JsonObject, Message
from jingu.chat.template_renderer import RenderedChat
from jingu.chat.templates import ChatTemplate
from jingu.text.tokenizer import Tokenizer
from jingu.text.tokenizer_training import train_tokenizer
from tests.chat.conversations import CONVERSATIONS, PLAIN, to_variables

FILES = sorted((Path(trl.__file__).parent / "chat_templates").glob("*.jinja"))
SOURCES = {file.stem: file.read_text(encoding="utf-8") for file in FILES}
ORIGINALS = [name for name in SOURCES if not name.endswith("_training")]
SPECIAL = re.compile(
    r"<\|[\w/\-▁ ]+\|>|<｜[^｜\s]+｜>|<(?:start|end)_of_turn>|<end_of_utterance>|<\|?(?:turn|tool_call|tool_response|"
    r"channel)\|?>(?<!<turn>)(?<!<tool_call>)(?<!<tool_response>)"
)
# How a model may begin an answer without reasoning, which is not trained.
EMPTY_REASONING = re.compile(r"\s*(<think>)?\s*</think>\s*")
# What a prompt may end with, for a model that begins with reasoning or does not reason.
PROMPTED_REASONING = re.compile(r"<think>\s*(</think>\s*)?$")
# Each refuses none of the plain conversations but these.
REFUSED = {
    "gemma": {"system", "a short system message", "system and two rounds"},
}


@cache
def tokenizer_of(name: str) -> Tokenizer:
    tokens = ["</s>", "<s>", *sorted(set(SPECIAL.findall(SOURCES[name])))]
    row = train_tokenizer(iter(["user assistant\nThe quick brown fox.\n" * 9]), 300 + len(tokens), tokens)
    return Tokenizer(row.content, {"bos_token": "<s>", "eos_token": "</s>"})


def expected_text(
    name: str, messages: tuple[Message, ...], tools: tuple[JsonObject, ...], *, prompt: bool = False, **form: bool
) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    (text,), _ = render_jinja_template(
        [to_variables(messages, **form)],
        chat_template=SOURCES[name],
        tools=list(tools) or None,
        add_generation_prompt=prompt,
        bos_token="<s>",
        eos_token="</s>",
        documents=None,
    )
    return text


@cache
def takes_parts(name: str) -> bool:
    return "jxqzw" not in expected_text(name, (Message("user", "jxqzw"),), (), as_parts=False)


def find_form(name: str, messages: tuple[Message, ...], tools: tuple[JsonObject, ...]) -> dict[str, bool]:
    """Return the form of messages that a template expects: contents in parts, or arguments as JSON text."""
    form = {"as_parts": takes_parts(name)}
    try:
        text = expected_text(name, messages, tools, **form)
    except TypeError:
        text = "{'a'"
    return form | {"as_text": "{'a'" in text}


def check_answer(
    name: str, rendered: RenderedChat, place: int, messages: tuple[Message, ...], tools: tuple[JsonObject, ...]
) -> None:
    """Check that an answer begins where its prompt ends, and ends with its end token."""
    index = rendered.messages[place]
    start, end = rendered.answers[place]
    form = find_form(name, messages[: index + 1], tools)
    whole = expected_text(name, messages[: index + 1], tools, **form)
    prompt = expected_text(name, messages[:index], tools, prompt=True, **form)
    text = rendered.text[:end]
    # 1. The text is that of transformers; the token of the next turn that ends an answer may follow.
    if whole.startswith(text):
        # Nothing follows the end token but white space, or the end of the whole text.
        assert whole[end:].strip() in ("", "</s>")
    elif text.startswith(whole.rstrip()):
        assert SPECIAL.fullmatch(text[len(whole.rstrip()) :])
    else:
        # The template writes earlier messages differently once this answer follows: the prompt decides.
        assert text.startswith(prompt) and whole.rstrip().endswith(rendered.text[start:].rstrip())
    # 2. The prompt precedes it, except for a block of reasoning at its end that the answer lacks.
    if "add_generation_prompt" not in SOURCES[name]:
        assert rendered.text[:start] == prompt
        return
    before = prompt if text.startswith(prompt) else PROMPTED_REASONING.sub("", prompt)
    assert text.startswith(before)
    between = text[len(before) : start]
    # Without a generation prompt after a tool's result, the header comes with the answer.
    has_late_header = between == "<|turn>model\n" and messages[index - 1].role == "tool"
    assert has_late_header or start == len(before) or EMPTY_REASONING.fullmatch(between), between


@pytest.mark.parametrize("name", ORIGINALS)
def test_what_a_model_generates_is_trained(name: str) -> None:
    template = ChatTemplate(SOURCES[name], tokenizer_of(name), name)
    refused = set()
    for title, (messages, tools) in CONVERSATIONS.items():
        answers = [index for index, message in enumerate(messages) if message.role == "assistant"]
        try:
            texts = template.render_answers(messages, answers, tools)
        except ConversationError:
            refused.add(title)
            continue
        assert [index for rendered in texts for index in rendered.messages] == answers
        for rendered in texts:
            for place in range(len(rendered.answers)):
                check_answer(name, rendered, place, messages, tools)
    assert refused & PLAIN.keys() == REFUSED.get(name, set())


def marked_text(name: str, messages: tuple[Message, ...], tools: tuple[JsonObject, ...]) -> tuple[str, list[list[int]]]:
    """Return the text of TRL's version with marks, and the marked spans."""
    from transformers.utils.chat_template_utils import render_jinja_template

    form = find_form(name, messages, tools)
    (text,), (spans,) = render_jinja_template(
        [to_variables(messages, **form)],
        chat_template=SOURCES[f"{name}_training"],
        tools=list(tools) or None,
        return_assistant_tokens_mask=True,
        bos_token="<s>",
        eos_token="</s>",
        documents=None,
    )
    return text, spans


@pytest.mark.parametrize("name", [name for name in ORIGINALS if f"{name}_training" in SOURCES])
def test_marks_agree(name: str) -> None:
    """Where TRL's version renders the same text, its marks are the same answers, up to the header."""
    template = ChatTemplate(SOURCES[name], tokenizer_of(name), name, train_empty_reasoning=True)
    num_compared = 0
    for messages, tools in CONVERSATIONS.values():
        try:
            rendered = template.render(messages, tools)
        except ConversationError:
            continue
        text, marks = marked_text(name, messages, tools)
        if text.rstrip() != rendered.text.rstrip():
            continue
        # A mark may end with the white space after the end token, and several may make up an answer.
        for start, end in rendered.answers:
            inside = [mark for mark in marks if mark[0] < end and mark[1] > start]
            assert inside and inside[0][0] <= start
            rest = text[inside[-1][1] : end]
            # Gemma ends a call with the token that begins its result, which TRL does not mark.
            assert not rest.strip() or (name == "diffusion_gemma" and rest == "<|tool_response>")
            assert not text[end : inside[-1][1]].strip()
            num_compared += 1
    assert num_compared > 10


@pytest.mark.parametrize("name", [name for name in SOURCES if name.endswith("_training")])
def test_marked_templates_are_accepted(name: str) -> None:
    template = ChatTemplate(SOURCES[name], tokenizer_of(name), name)
    for title in ("one round", "three rounds", "an empty answer", "quoted turns"):
        messages = CONVERSATIONS[title][0]
        answers = [index for index, message in enumerate(messages) if message.role == "assistant"]
        assert template.render_answers(messages, answers)


@pytest.mark.parametrize(
    ("name", "ends"),
    [
        ("qwen3", ["<|im_end|>"]),
        ("glm4moe", ["<|user|>", "<|observation|>"]),
        ("gptoss", ["<|return|>", "<|call|>"]),
        ("cohere2", ["<|END_OF_TURN_TOKEN|>"]),
        ("gemma4", ["<turn|>", "<|tool_response>"]),
        ("phi3", ["<|end|>"]),
        ("llama3_1", ["<|eot_id|>"]),
    ],
)
def test_what_ends_an_answer(name: str, ends: list[str], tmp_path: Path) -> None:
    tokenizer = tokenizer_of(name)
    file = tmp_path / "template.jinja"
    file.write_text(SOURCES[name], encoding="utf-8")
    chat_format = find_chat_format(tmp_path, tokenizer, str(file))
    assert chat_format is not None and chat_format.template.source == SOURCES[name]
    assert chat_format.eos_token_ids == tuple(tokenizer.special_tokens[end] for end in ends)
    assert chat_format.stop == ()
