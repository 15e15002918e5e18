"""Environments: what a model reads between its turns."""

from __future__ import annotations

from pathlib import Path

import pytest

from jingu.align.environment import encode_reply
from jingu.align.prompt_set import Prompt, PromptSet
from jingu.chat.chat_format import find_chat_format
from jingu.chat.messages import Message
from jingu.text.tokenizer_training import train_tokenizer

MARKS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


@pytest.mark.parametrize("template", ["chatml", "alpaca"])
def test_replies_are_what_the_template_writes_after_an_answer(template: str) -> None:
    """The ids so far and those of a reply are the prompt that the template makes of the whole conversation."""
    tokenizer = train_tokenizer(iter(["the user asks, the assistant answers. " * 3]), 300, MARKS)
    chat_format = find_chat_format(Path("nowhere"), tokenizer, template)
    assert chat_format is not None
    start = (Message("system", "rules"), Message("user", "first"))
    prompt = Prompt(0, chat_format.encode_prompt(start), "first", {}, messages=start)
    prompts = PromptSet([prompt], [], chat_format.eos_token_ids, (), chat_format)
    ids = (*prompt.ids, *tokenizer.encode("an answer"), *chat_format.eos_token_ids)
    reply = encode_reply("a <|im_end|> reply", prompt, prompts, tokenizer)
    whole = (*start, Message("assistant", "an answer"), Message("user", "a <|im_end|> reply"))
    assert (*ids, *reply) == chat_format.encode_prompt(whole)
