"""Rows of prompts: what of a row reaches the prompt, what reaches the rewards, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jingu.align.prompt_set import Prompt, load_prompts
from jingu.chat.template_sources import load_template
from jingu.config.sections.policies import GrpoSettings
from jingu.errors import JinguError
from jingu.text.tokenizer import Tokenizer
from jingu.text.tokenizer_training import train_tokenizer
from jingu.tune.row_formats import parse_row

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
USER = {"role": "user", "content": "hi"}
CALL = {"type": "function", "function": {"name": "add", "arguments": "{}"}, "id": "call00001"}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    marks = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"]
    return train_tokenizer(iter(["the user asks, the assistant answers. " * 3]), 400, marks)


def read(tmp_path: Path, tokenizer: Tokenizer, row: dict[str, Any], template: str = "qwen") -> Prompt:
    file = tmp_path / "prompts.jsonl"
    file.write_text(f"\n{json.dumps(row)}\n")
    settings = GrpoSettings(prompts=str(file), template=template, max_new_tokens=4)
    (prompt,) = load_prompts(settings, tokenizer, 4096).prompts
    return prompt


def text_of(prompt: Prompt, tokenizer: Tokenizer) -> str:
    return tokenizer.decode([*prompt.ids], keep_special_tokens=True)


@pytest.mark.parametrize(
    "prompt",
    [
        [USER, {"role": "assistant", "content": "The answer is"}],
        [{"role": "system", "content": "s"}, USER, {"role": "assistant", "content": "<b>"}],
        [USER, {"role": "assistant", "content": "one"}, USER, {"role": "assistant", "content": "two"}],
        [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "It"}, {"from": "gpt", "value": "is"}],
    ],
)
def test_a_last_message_of_the_assistant_is_continued(
    prompt: list[dict[str, Any]], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    parsed = read(tmp_path, tokenizer, {"prompt": prompt})
    start = parse_row({"messages": prompt}).messages[-1].content
    assert text_of(parsed, tokenizer).endswith(f"hi<|im_end|>\n<|im_start|>assistant\n{start}")
    assert parsed.text == "hi"
    assert parsed.messages is not None and parsed.messages[-1] == {"role": "assistant", "content": start}


@pytest.mark.parametrize("name", ["tools", "functions", "available_tools"])
@pytest.mark.parametrize("value", [TOOLS, json.dumps(TOOLS)])
def test_context_reaches_prompts_as_it_reaches_rows_of_tuning(
    name: str, value: Any, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    row = {"prompt": [USER], name: value, "system": "Be brief.", "history": [["q", "a"]], "answer": "42"}
    prompt = read(tmp_path, tokenizer, row)
    tuned = parse_row(
        {
            **{key: item for key, item in row.items() if key != "prompt"},
            "messages": [USER, {"role": "assistant", "content": "42"}],
        }
    )
    rendered = load_template("qwen", tokenizer).render_prompt(tuned.messages[:-1], tuned.tools)
    assert text_of(prompt, tokenizer) == rendered.text
    assert '"add"' in rendered.text and "Be brief." in rendered.text
    assert prompt.messages is not None
    assert [message["content"] for message in prompt.messages] == ["Be brief.", "q", "a", "hi"]
    assert prompt.columns["answer"] == "42"


def test_variables_and_results_of_tools_reach_the_prompt(tokenizer: Tokenizer, tmp_path: Path) -> None:
    template = tmp_path / "variables.jinja"
    template.write_text(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}{% for call in m.tool_calls %}{{ call.function.name }}"
        "{% endfor %}<|im_end|>{% endfor %}{{ mood }}{{ 'assistant: ' if add_generation_prompt }}"
    )
    result = {"role": "tool", "content": "5", "tool_call_id": "call00001"}
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}, result]
    row = {"prompt": messages, "chat_template_kwargs": {"mood": "calm "}}
    prompt = read(tmp_path, tokenizer, row, str(template))
    assert text_of(prompt, tokenizer) == "user: hi<|im_end|>assistant: add<|im_end|>tool: 5<|im_end|>calm assistant: "
    assert prompt.text == "5"
    # What rewards see are messages that rows can have.
    assert prompt.messages is not None
    parsed = parse_row({"messages": [*prompt.messages, {"role": "assistant", "content": "so 5"}]}).messages
    assert (parsed[1].tool_calls, parsed[2].tool_call_id) == (
        ({"name": "add", "arguments": {}, "id": "call00001"},),
        "call00001",
    )


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "hi", "system": "Be brief."}, "field system: a prompt that is a text has no place for it"),
        ({"prompt": "hi", "tools": TOOLS}, "field tools: a prompt that is a text has no place for it"),
        ({"prompt": "hi", "history": [["a", "b"]]}, "field history: a prompt that is a text"),
        ({"prompt": "hi", "chat_template_kwargs": {"a": 1}}, "field chat_template_kwargs: a prompt that is a text"),
        ({"prompt": "hi", "images": ["a.png"]}, "only text can be trained on"),
        ({"prompt": [USER], "enable_thinking": True}, "stands in chat_template_kwargs"),
        ({"prompt": [USER], "toolS": TOOLS}, "it is spelled tools"),
        ({"prompt": [{**USER, "images": ["a.png"]}]}, r"field prompt\[0\].images: only text"),
        (
            {"prompt": [{"role": "system", "content": "s"}]},
            "an answer cannot follow the last message of the prompt, the sy",
        ),
        ({"prompt": [USER, {"role": "assistant", "tool_calls": [CALL]}]}, "a tool call without its result"),
        ({"prompt": None, "messages": [USER]}, "expected an object with the field prompt"),
        ([1], "expected an object with fields"),
    ],
)
def test_prompts_that_cannot_be_used(row: Any, words: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(JinguError, match=f"line 2: .*{words}"):
        read(tmp_path, tokenizer, row)


@pytest.mark.parametrize("prompt", ["xyz", "é", [{"role": "user", "content": "?!"}]])
def test_prompts_without_tokens_are_refused(prompt: Any, tmp_path: Path) -> None:
    """A tokenizer of few characters, without one for unknown ones."""
    content = {
        "version": "1.0",
        "added_tokens": [
            {
                "id": 3,
                "content": "</s>",
                "special": True,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
            }
        ],
        "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "c": 2}, "merges": []},
    }
    tokenizer = Tokenizer(json.dumps(content), {"eos_token": "</s>"})
    template = tmp_path / "plain.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    with pytest.raises(JinguError, match="line 2: the tokenizer has no token for any character of the prompt"):
        read(tmp_path, tokenizer, {"prompt": prompt}, str(template))
