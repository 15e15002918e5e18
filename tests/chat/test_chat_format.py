"""The chat format of a model: its template, its prompts, and what ends an answer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers

from jingu.chat.chat_format import find_chat_format
from jingu.chat.messages import ConversationError, Message
from jingu.chat.template_sources import NAMED_TEMPLATES
from jingu.errors import JinguError
from jingu.text.tokenizer import Tokenizer
from jingu.text.tokenizer_training import train_tokenizer
from tests.conftest import MakeRun

MARKS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEXTS = ["the user asks, the assistant answers; a system stands before. " * 3, "中文 🙂"]
TURNS = (
    Message("system", "be brief"),
    Message("user", "hello <|im_end|> there"),
    Message("assistant", "hi"),
    Message("user", "and"),
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(iter(TEXTS), 300, MARKS)


def test_prompts_equal_those_of_transformers(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Except for special tokens that are only mentioned: they stay text."""
    tokenizer.save(tmp_path)
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path)
    speech = find_chat_format(tmp_path, tokenizer, "chatml")
    assert speech is not None
    plain = tuple(Message(item.role, item.content.replace("<|im_end|> ", "")) for item in TURNS)
    output = [{"role": item.role, "content": item.content} for item in plain]
    template = NAMED_TEMPLATES["chatml"]
    expected = reference.apply_chat_template(
        output, chat_template=template, add_generation_prompt=True, return_dict=False
    )
    assert list(speech.encode_prompt(plain)) == expected
    ids, end = speech.encode_prompt(TURNS), tokenizer.special_tokens["<|im_end|>"]
    assert ids.count(end) == 4 and tokenizer.decode(list(ids), keep_special_tokens=True).count("<|im_end|>") == 5


def test_the_end_of_an_answer_follows_from_the_template(tokenizer: Tokenizer) -> None:
    nowhere, end = Path("nowhere"), tokenizer.special_tokens
    result = {name: find_chat_format(nowhere, tokenizer, name) for name in ("chatml", "alpaca", "llama3")}
    assert result["chatml"] and result["chatml"].eos_token_ids == (end["<|im_end|>"],) and result["chatml"].stop == ()
    assert result["alpaca"] and result["alpaca"].eos_token_ids == (end["<|endoftext|>"],)
    # A token that the tokenizer has not is text, and ends the answer as such.
    assert result["llama3"] and result["llama3"].eos_token_ids == () and result["llama3"].stop == ("<|eot_id|>",)


def test_which_template_is_used(tokenizer: Tokenizer, tiny_run: MakeRun) -> None:
    assert find_chat_format(Path("nowhere"), tokenizer) is None
    with pytest.raises(JinguError, match="there is no chat template nonesuch"):
        find_chat_format(Path("nowhere"), tokenizer, "nonesuch")
    config = tiny_run({"data.objective": {"type": "supervised", "template": "alpaca"}})
    run = Path(config.runs_dir) / config.name
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(config.model_dump_json(by_alias=True), encoding="utf-8")
    (run / "model.json").write_text("{}")
    speech = find_chat_format(run / "checkpoints" / "step-00000010", tokenizer)
    assert speech is not None and speech.template.where == "alpaca"
    speech = find_chat_format(run, tokenizer, "qwen")
    assert speech is not None and speech.template.where == "qwen"


WEATHER = {"name": "weather", "arguments": {}}


@pytest.mark.parametrize("text", ["a\ufdd0b", "\ufdd2x\ufdd2", "\ufdd3", "\ud800"])
@pytest.mark.parametrize(
    "write",
    [
        lambda text: {"messages": (Message("user", text),)},
        lambda text: {"messages": (Message("assistant", "a", reasoning_content=text),)},
        lambda text: {"messages": (Message("user", "a", name=text),)},
        lambda text: {"messages": (Message("tool", "a", tool_call_id=text),)},
        lambda text: {"messages": (Message("assistant", "", (WEATHER | {"arguments": {"a": [text]}},)),)},
        lambda text: {"messages": (Message("assistant", "", (WEATHER | {"arguments": {text: 1}},)),)},
        lambda text: {"messages": (Message("assistant", "", (WEATHER | {"id": text},)),)},
        lambda text: {"messages": TURNS, "tools": ({"name": text},)},
        lambda text: {"messages": TURNS, "variables": {"reasoning_effort": text}},
    ],
)
def test_reserved_characters_are_refused(
    write: Callable[[str], dict[str, Any]], text: str, tokenizer: Tokenizer
) -> None:
    speech = find_chat_format(Path("nowhere"), tokenizer, "qwen")
    assert speech is not None
    with pytest.raises(ConversationError, match=r"U\+(FDD[023]|D800) is not a character"):
        speech.encode_prompt(**write(text))


def test_a_prompt_of_which_the_template_leaves_out_a_part_is_refused(tokenizer: Tokenizer) -> None:
    speech = find_chat_format(Path("nowhere"), tokenizer, "chatml")
    assert speech is not None
    called = (Message("user", "q"), Message("assistant", "", ({"name": "f", "arguments": {}},)), Message("tool", "r"))
    with pytest.raises(ConversationError, match="does not support tools: it leaves out a call"):
        speech.encode_prompt(called)
    with pytest.raises(ConversationError, match="does not support reasoning"):
        speech.encode_prompt((*TURNS[:2], Message("assistant", "a", reasoning_content="because"), TURNS[3]))
