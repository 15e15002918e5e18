"""Rows of every form as the model reads them, with ⟦trained⟧ tokens, written by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, processors, trainers

from jingu.chat.messages import ConversationError
from jingu.chat.template_sources import NAMED_TEMPLATES, load_template
from jingu.chat.templates import ChatTemplate
from jingu.chat.tokenization import (
    LossOn,
    TokenizedRow,
    encode_continuation,
    encode_prompt_and_answer,
    tokenize_row,
    tokenize_turns,
)
from jingu.text.tokenizer import Tokenizer
from jingu.text.tokenizer_training import train_tokenizer
from jingu.tune.row_formats import parse_row

TEXTS = [
    "user assistant system tool\nWhat is the weather? The quick brown fox.\n" * 9,
    "春眠不觉晓，处处闻啼鸟。\n" * 9,
]
SPECIAL = ["</s>", "<s>", "<|im_start|>", "<|im_end|>"]
CALL = {"name": "weather", "arguments": {"city": "北京"}}
TOOL = {"name": "weather", "description": "天气"}
TOOLS = (
    "<|im_start|>system\n# Tools\n\nYou can call these functions. Each line of JSON between the tags describes one of "
    'them:\n<tools>\n{"name": "weather", "description": "天气"}\n</tools>\n\nTo call a function, write its name and '
    'its arguments as JSON between these tags:\n<tool_call>\n{"name": "the function", "arguments": {"the argument": '
    '"its value"}}\n</tool_call><|im_end|>\n'
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
        user("你好") + said("好"),
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
    row = train_tokenizer(iter(TEXTS), 360, SPECIAL)
    return Tokenizer(row.content, {"bos_token": "<s>", "eos_token": "</s>"})


def shown(row: TokenizedRow, tokenizer: Tokenizer) -> str:
    """Return a row's text with its trained parts between ⟦ and ⟧."""
    borders = np.flatnonzero(np.diff(row.weights > 0)) + 1
    text = ""
    for part in np.split(np.arange(len(row.ids)), borders):
        piece = tokenizer.decode([row.ids[place] for place in part], keep_special_tokens=True)
        text += f"⟦{piece}⟧" if row.weights[part[0]] else piece
    return text


@pytest.mark.parametrize(("template", "value", "expected"), ROWS)
def test_tokenized_rows(template: str, value: dict[str, Any], expected: str, tokenizer: Tokenizer) -> None:
    named = load_template("chatml" if template == "any" else template, tokenizer)
    assert shown(tokenize_row(parse_row(value), named, tokenizer, "assistant"), tokenizer) == expected


@pytest.mark.parametrize(
    ("train_on", "expected"),
    [
        ("all", f"⟦{user('a')}<|im_start|>assistant\nb<|im_end|>\n{user('c')}<|im_start|>assistant\nd<|im_end|>\n⟧"),
        ("last_assistant", user("a") + "<|im_start|>assistant\nb<|im_end|>\n" + user("c") + said("d")),
    ],
)
def test_loss_on(train_on: LossOn, expected: str, tokenizer: Tokenizer) -> None:
    row = parse_row({"type": "conversation", "rounds": [["ask", "a"], ["ans", "b"], ["ask", "c"], ["ans", "d", 0.5]]})
    built = tokenize_row(row, load_template("chatml", tokenizer), tokenizer, train_on)
    assert shown(built, tokenizer) == expected
    if train_on == "last_assistant":
        assert set(built.weights.tolist()) == {0, 50}


def test_weights_are_those_of_the_answers(tokenizer: Tokenizer) -> None:
    row = parse_row({"type": "conversation", "rounds": [["ask", "a"], ["ans", "b", 0.5], ["ask", "c"], ["ans", "d"]]})
    # The number of messages changes with each: an answer is trained after its prompt, which has one message less.
    source = f"{{{{ messages | length }}}}{NAMED_TEMPLATES['chatml']}"
    rows = tokenize_turns(row, ChatTemplate(source, tokenizer, "counts"), tokenizer, "assistant", "auto")
    assert [shown(item, tokenizer) for item in rows] == [
        "1" + user("a") + said("b"),
        "3" + user("a") + "<|im_start|>assistant\nb<|im_end|>\n" + user("c") + said("d"),
    ]
    assert [set(item.weights.tolist()) for item in rows] == [{0, 50}, {0, 100}]
    unweighted = replace(row, messages=tuple(replace(message, weight=0.0) for message in row.messages[:2]))
    (context,) = tokenize_turns(unweighted, ChatTemplate(source, tokenizer, "counts"), tokenizer, "assistant", "auto")
    assert not context.weights.any()
    with pytest.raises(ConversationError, match="does not write this user message"):
        tokenize_row(row, ChatTemplate("{{ messages[-1].content }}", tokenizer, "last"), tokenizer, "all")


def test_turns_keep_their_order(tokenizer: Tokenizer) -> None:
    """Two turns of the assistant, of which the first has a call."""
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "tool_calls": [{"function": CALL}]},
        {"role": "assistant", "content": "c"},
    ]
    row = parse_row({"messages": turns, "tools": [TOOL]})
    called = CALLED.replace("⟦", "⟦b\n")
    assert shown(tokenize_row(row, load_template("qwen", tokenizer), tokenizer, "assistant"), tokenizer) == (
        TOOLS + user("a") + called + said("c")
    )
    alternating = (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('no') }}"
    )
    with pytest.raises(ConversationError, match="refuses it"):
        tokenize_row(row, ChatTemplate(f"{alternating}{{% endif %}}{{% endfor %}}", tokenizer, "a"), tokenizer, "all")


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        ([{}, {"train": False}, {}, {}], "⟦{a}{head}⟧b<|im_end|>⟦\n{c}{head}d<|im_end|>\n⟧"),
        ([{"train": False}, {}, {"loss": False}, {}], "{a}{head}⟦b<|im_end|>⟧\n{c}{head}⟦d<|im_end|>⟧\n"),
    ],
)
def test_loss_on_all_obeys_masks(turns: list[dict[str, Any]], expected: str, tokenizer: Tokenizer) -> None:
    texts = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    messages = [{"role": role, "content": text, **mask} for (role, text), mask in zip(texts, turns, strict=True)]
    template = load_template("chatml", tokenizer)
    row = tokenize_row(parse_row({"messages": messages}), template, tokenizer, "all")
    parts = {"a": user("a"), "c": user("c"), "head": "<|im_start|>assistant\n"}
    assert shown(row, tokenizer) == expected.format(**parts)
    # Of a whole row, every token has the weight; a row that is left out in part contradicts the setting.
    row = tokenize_row(
        parse_row({"messages": [*messages[2:3], messages[1]], "weight": 0.5}), template, tokenizer, "all"
    )
    assert set(row.weights.tolist()) <= {0, 50}
    text = tokenize_row(parse_row({"prompt": "a", "completion": "b", "weight": 0.5}), template, tokenizer, "all")
    assert set(text.weights.tolist()) == {50}
    messages[0] = {"role": "user", "content": "a", "train": False}
    messages[2] = {"role": "user", "content": "c"}
    with pytest.raises(ConversationError, match="loss_on=all trains the messages between the answers alike"):
        tokenize_row(parse_row({"messages": messages}), template, tokenizer, "all")


TURNS = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "What?"},
    {"role": "assistant", "content": "The fox."},
    {"role": "user", "content": "Which?"},
    {"role": "assistant", "content": "The brown fox."},
]


@pytest.mark.parametrize("size", [2, 4])
def test_a_completion_of_messages_is_trained_as_in_trl(size: int, tokenizer: Tokenizer) -> None:
    """Nothing of the prompt is trained, not even earlier answers."""
    dataset_utils = pytest.importorskip("transformers")
    source = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    template = ChatTemplate(source, tokenizer, "chatml")
    row = parse_row({"prompt": TURNS[:size], "completion": TURNS[size:]})
    built = tokenize_row(row, template, tokenizer, "assistant")
    # As TRL's SFTTrainer: the prompt is rendered with the header of an answer, and the rest of the text is trained.
    fast = dataset_utils.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer.from_str(tokenizer.content), chat_template=source
    )
    prompt = fast.apply_chat_template(TURNS[:size], add_generation_prompt=True, return_dict=False)
    whole = fast.apply_chat_template(TURNS, return_dict=False)
    assert built.ids == whole
    trained = built.weights.nonzero()[0].tolist()
    assert trained[0] == len(prompt)
    context = tokenizer.decode(whole[: len(prompt)])
    assert ("The fox." in context) == (size == 4)


def llama_like() -> Tokenizer:
    """A tokenizer of Llama 2's kind: it puts ▁ before a text, and <s> before the ids."""
    inner: Any = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    specials = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=specials, show_progress=False)
    inner.train_from_iterator(
        [f"▁{text}".replace(" ", "▁") for text in [*TEXTS, "1 + 1 = 2\nThere is, Thursday"] * 9], trainer
    )
    inner.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return Tokenizer(inner.to_str(), {"eos_token": "</s>", "bos_token": "<s>"})


@pytest.mark.parametrize(
    ("prompt", "completion"),
    [
        ("1 + 1 =", "2"),
        ("1 + 1 = ", "2"),
        ("What is", " the weather?"),
        ("The qui", "ck brown fox"),
        ("weather\n", "fox"),
        ("春眠不", "觉晓"),
        (" The", "fox"),
        ("The fox?", "\n\nThe fox."),
    ],
)
def test_prompt_and_completion_are_tokenized_as_one_text(prompt: str, completion: str, tokenizer: Tokenizer) -> None:
    for each in (tokenizer, llama_like()):
        row = parse_row({"prompt": prompt, "completion": completion})
        built = tokenize_row(row, load_template("chatml", each), each, "assistant")
        prefix = each.prompt_prefix_ids
        assert built.ids == [*prefix, *each.encode(prompt + completion), each.eos_token_id]
        assert each.decode(built.ids) == prompt + completion
        # The answer begins with the first token that is not of the prompt alone.
        start = int(built.weights.nonzero()[0][0])
        assert prompt.startswith(each.decode(built.ids[:start]).rstrip(" ")) or start == len(prefix)
        assert completion in each.decode(built.ids[start:]) or completion.strip() in each.decode(built.ids[start:])
        before, after = encode_prompt_and_answer(each, prompt, completion)
        assert [*prefix, *before] == built.ids[:start] and after == built.ids[start:-1]


def test_a_reply_after_other_ids_begins_without_a_space() -> None:
    tokenizer = llama_like()
    ids = [*tokenizer.encode("1 + 1 ="), *encode_continuation(tokenizer, "2\nThere")]
    assert tokenizer.decode(ids) == "1 + 1 =2\nThere"


@pytest.mark.parametrize(
    "value",
    [
        {"text": "<s>The fox</s>"},
        {"prompt": "<s>The", "completion": " fox</s>"},
        {"prompt": "The", "completion": " fox"},
        {"text": "The fox"},
    ],
)
def test_special_tokens_in_texts(value: dict[str, Any], tokenizer: Tokenizer) -> None:
    """They act as such if the data set says so, and a text gets no second BOS or EOS."""
    for each in (tokenizer, llama_like()):
        template = load_template("chatml", each)
        parsed = tokenize_row(parse_row(value), template, each, "assistant", parse_special_tokens=True)
        plain = tokenize_row(parse_row(value), template, each, "assistant")
        special = [each.special_tokens["<s>"], each.eos_token_id]
        expected = [special[0]] * ("<s>" in json.dumps(value) or each is not tokenizer)
        assert [token for token in parsed.ids if token in special] == [*expected, special[1]]
        assert plain.mentions_special == ("<s>" in json.dumps(value))
        assert not parsed.mentions_special
        assert parsed.weights[-1] == 100
