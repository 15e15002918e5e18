"""How a model is spoken with: which template, which ids, and what ends an answer."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers

from jingu.errors import JinguError
from jingu.text.tokenizer import Tokenizer
from jingu.text.training import train_tokenizer
from jingu.tune.rows import Message, RowError
from jingu.tune.speak import find_speech
from jingu.tune.templates import NAMED
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


def test_a_conversation_is_what_transformers_makes_of_it(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """But for a special token that is only mentioned: there it stays text."""
    tokenizer.save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    speech = find_speech(tmp_path, tokenizer, "chatml")
    assert speech is not None
    plain = tuple(Message(each.role, each.content.replace("<|im_end|> ", "")) for each in TURNS)
    told = [{"role": each.role, "content": each.content} for each in plain]
    template = NAMED["chatml"]
    expected = theirs.apply_chat_template(told, chat_template=template, add_generation_prompt=True, return_dict=False)
    assert list(speech.prompt(plain)) == expected
    ids, end = speech.prompt(TURNS), tokenizer.special_tokens["<|im_end|>"]
    assert ids.count(end) == 4 and tokenizer.decode(list(ids), special=True).count("<|im_end|>") == 5


def test_what_ends_an_answer_is_learned_from_the_template(tokenizer: Tokenizer) -> None:
    nowhere, end = Path("nowhere"), tokenizer.special_tokens
    found = {name: find_speech(nowhere, tokenizer, name) for name in ("chatml", "alpaca", "llama3")}
    assert found["chatml"] and found["chatml"].end_ids == (end["<|im_end|>"],) and found["chatml"].stop == ()
    assert found["alpaca"] and found["alpaca"].end_ids == (end["<|endoftext|>"],)
    # A token that the tokenizer has not is text, and ends the answer as such.
    assert found["llama3"] and found["llama3"].end_ids == () and found["llama3"].stop == ("<|eot_id|>",)


def test_the_template_is_the_one_asked_for_or_of_the_run_or_of_the_tokenizer(
    tokenizer: Tokenizer, tiny_run: MakeRun
) -> None:
    assert find_speech(Path("nowhere"), tokenizer) is None
    with pytest.raises(JinguError, match="there is no template nonesuch"):
        find_speech(Path("nowhere"), tokenizer, "nonesuch")
    config = tiny_run({"data.objective": {"type": "supervised", "template": "alpaca"}})
    run = Path(config.runs) / config.name
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(config.model_dump_json(by_alias=True), encoding="utf-8")
    (run / "model.json").write_text("{}")
    speech = find_speech(run / "checkpoints" / "step-00000010", tokenizer)
    assert speech is not None and speech.template.where == "alpaca"
    speech = find_speech(run, tokenizer, "qwen")
    assert speech is not None and speech.template.where == "qwen"


def test_what_is_no_character_is_refused(tokenizer: Tokenizer) -> None:
    speech = find_speech(Path("nowhere"), tokenizer, "chatml")
    assert speech is not None
    with pytest.raises(RowError, match="U\\+FDD0 is no character"):
        speech.prompt((Message("user", "a\ufdd0b"),))
