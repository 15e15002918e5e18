"""Rows of every type as the model reads them, written out by hand: ⟦trained⟧ and not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jingu.text.tokenizer import Tokenizer
from jingu.text.training import train_tokenizer
from jingu.tune.rows import RowError, parse_row
from jingu.tune.supervise import Supervised, TrainOn, supervise
from jingu.tune.templates import Template, find_template

TEXTS = [
    "user assistant system tool\nWhat is the weather? The quick brown fox.\n" * 9,
    "春眠不觉晓，处处闻啼鸟。\n" * 9,
]
SPECIAL = ["</s>", "<s>", "<|im_start|>", "<|im_end|>"]
CALL = {"name": "weather", "arguments": {"city": "北京"}}
TOOL = {"name": "weather", "description": "天气"}
SYSTEM = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
TOOLS = (
    "<|im_start|>system\nYou are a helpful assistant.\n\n# Tools\n\nYou may call one or more functions to assist with "
    "the user query.\n\nYou are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
    '{"name": "weather", "description": "天气"}\n</tools>\n\nFor each function call, return a json object with '
    "function name and arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n'
)


def user(text: str) -> str:
    return f"<|im_start|>user\n{text}<|im_end|>\n"


def said(text: str) -> str:
    return f"<|im_start|>assistant\n⟦{text}<|im_end|>⟧\n"


CALLED = said('<tool_call>\n{"name": "weather", "arguments": {"city": "北京"}}\n</tool_call>')
RETURNED = user("\n<tool_response>\n3°\n</tool_response>").replace("user\n\n", "user\n")
ROWS: list[tuple[str, dict[str, Any], str]] = [
    ("any", {"type": "pretrain", "text": "The quick 春"}, "⟦The quick 春</s>⟧"),
    ("any", {"text": "春眠"}, "⟦春眠</s>⟧"),
    ("any", {"prompt": "1+1=", "completion": "2"}, "1+1=⟦2</s>⟧"),
    ("any", {"prompt": "一加一得", "completion": "二"}, "一加一得⟦二</s>⟧"),
    (
        "chatml",
        {"type": "instruct", "instruct": "翻译", "input": "fox", "output": "狐"},
        user("翻译\nfox") + said("狐"),
    ),
    ("chatml", {"type": "instruct", "instruct": "Say fox", "output": "fox"}, user("Say fox") + said("fox")),
    (
        "chatml",
        {"type": "conversation", "rounds": [["ask", "春"], ["ask", "眠"], ["ans", "不"], ["ask", "?"], ["ans", "fox"]]},
        user("春\n眠") + said("不") + user("?") + said("fox"),
    ),
    (
        "chatml",
        {"type": "conversation", "rounds": [["ask", "a"], ["ans", "b", 0], ["ask", "c"], ["ans", "d"]]},
        user("a") + said("b").replace("⟦", "").replace("⟧", "") + user("c") + said("d"),
    ),
    (
        "chatml",
        {"type": "ref_qa", "reference": "春眠不觉晓", "rounds": [["ask", "谁？"], ["ans", "孟浩然"]]},
        user("春眠不觉晓\n\n谁？") + said("孟浩然"),
    ),
    (
        "qwen",
        {
            "type": "conver_has_api",
            "tools": [TOOL],
            "rounds": [["ask", "天气？"], ["api", CALL, "3°"], ["ans", "三度"]],
        },
        TOOLS + user("天气？") + CALLED + RETURNED + said("三度"),
    ),
    (
        "chatml",
        {"instruction": "q", "input": "x", "output": "a", "history": [["问", "答"]], "system": "简洁"},
        "<|im_start|>system\n简洁<|im_end|>\n" + user("问") + said("答") + user("q\nx") + said("a"),
    ),
    (
        "qwen",
        {"conversations": [{"from": "human", "value": "你好"}, {"from": "gpt", "value": "好"}]},
        SYSTEM + user("你好") + said("好"),
    ),
    (
        "qwen",
        {
            "messages": [
                {"role": "user", "content": "What?"},
                {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": CALL}]},
                {"role": "tool", "content": "3°"},
                {"role": "assistant", "content": "三度"},
            ],
            "tools": [TOOL],
        },
        TOOLS + user("What?") + CALLED + RETURNED + said("三度"),
    ),
    (
        "alpaca",
        {"instruction": "翻译", "input": "", "output": "fox"},
        "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
        "### Instruction:\n翻译\n\n### Response:\n⟦fox</s>⟧",
    ),
    ("bloomz-plain", {"type": "instruct", "instruct": "翻译", "output": "狐"}, "翻译\n⟦狐</s>⟧"),
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    made = train_tokenizer(iter(TEXTS), 360, SPECIAL)
    return Tokenizer(made.content, {"bos_token": "<s>", "eos_token": "</s>"})


def shown(row: Supervised, tokenizer: Tokenizer) -> str:
    """A row's text, its trained stretches between ⟦ and ⟧."""
    borders = np.flatnonzero(np.diff(row.weights > 0)) + 1
    text = ""
    for part in np.split(np.arange(len(row.ids)), borders):
        piece = tokenizer.decode([row.ids[place] for place in part], special=True)
        text += f"⟦{piece}⟧" if row.weights[part[0]] else piece
    return text


@pytest.mark.parametrize(("template", "value", "expected"), ROWS)
def test_rows_as_the_model_reads_them(
    template: str, value: dict[str, Any], expected: str, tokenizer: Tokenizer
) -> None:
    named = find_template("chatml" if template == "any" else template, tokenizer)
    assert shown(supervise(parse_row(value), named, tokenizer, "answers"), tokenizer) == expected


@pytest.mark.parametrize(
    ("train_on", "expected"),
    [
        ("all", f"⟦{user('a')}<|im_start|>assistant\nb<|im_end|>\n{user('c')}<|im_start|>assistant\nd<|im_end|>\n⟧"),
        ("last_answer", user("a") + "<|im_start|>assistant\nb<|im_end|>\n" + user("c") + said("d")),
    ],
)
def test_what_is_trained(train_on: TrainOn, expected: str, tokenizer: Tokenizer) -> None:
    row = parse_row({"type": "conversation", "rounds": [["ask", "a"], ["ans", "b"], ["ask", "c"], ["ans", "d", 0.5]]})
    made = supervise(row, find_template("chatml", tokenizer), tokenizer, train_on)
    assert shown(made, tokenizer) == expected
    if train_on == "last_answer":
        assert set(made.weights.tolist()) == {0, 50}


def test_weights_need_answers_that_can_be_told_apart(tokenizer: Tokenizer) -> None:
    """A template that shows the last answer alone; and what nobody asks it to prove."""
    row = parse_row({"type": "conversation", "rounds": [["ask", "a"], ["ans", "b", 0.5], ["ask", "c"], ["ans", "d"]]})
    source = "{% generation %}{{ messages[-1].content }}{% endgeneration %}"
    with pytest.raises(RowError, match="the template marks 1 of 2 answers"):
        supervise(row, Template(source, tokenizer, "last"), tokenizer, "answers")
    unmarked = Template("{{ messages | length }}{{ messages[-1].content }}", tokenizer, "counts")
    assert shown(supervise(row, unmarked, tokenizer, "all"), tokenizer) == "⟦4d⟧"
