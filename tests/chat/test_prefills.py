"""Answers that continue the last message of their prompt: only what follows it is trained, as a model generates it.

The reference is what transformers renders with `continue_final_message`, for the templates in TRL's package.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jingu.chat.messages import ConversationError, JsonObject, Message, Row
from jingu.chat.templates import ChatTemplate
from jingu.chat.tokenization import tokenize_row
from jingu.tune.row_formats import parse_prompt, parse_row
from tests.chat.conversations import to_variables
from tests.chat.test_published_templates import ORIGINALS, SOURCES, takes_parts, tokenizer_of

QUESTION: JsonObject = {"role": "user", "content": "What is 2 + 2?"}
ROUND = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "The fox."}]
SYSTEM = {"role": "system", "content": "Be brief please."}
PREFILLS = {
    "a word": ("The sum is", " four."),
    "a part of a word": ("The sum is f", "our."),
    "a space": ("The sum is ", "four."),
    "a line": ("Sum:\n", "four\n"),
    "code": ("```json\n{", '"sum": 4}\n```'),
    "the word of the question": ("What is", " What is?"),
    "the answer again": ("four", "four"),
    "white space at the start": ("  The sum", " is four"),
    "special tokens": ("It is <|im_end|> or", " </s> or <|end|>."),
}


def expected_text(name: str, messages: tuple[Message, ...], *, continues: bool) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    (text,), _ = render_jinja_template(
        [to_variables(messages, as_parts=takes_parts(name))],
        chat_template=SOURCES[name],
        continue_final_message=continues,
        bos_token="<s>",
        eos_token="</s>",
        documents=None,
    )
    return str(text)


@pytest.mark.parametrize("name", ORIGINALS)
def test_only_what_follows_a_prefill_is_trained(name: str) -> None:
    template = ChatTemplate(SOURCES[name], tokenizer_of(name), name)
    num_accepted = 0
    for prefill, answer in PREFILLS.values():
        for before in ([], ROUND, [SYSTEM]):
            prompt = [*before, QUESTION, {"role": "assistant", "content": prefill}]
            row = parse_row({"prompt": prompt, "completion": answer})
            index = len(row.messages) - 1
            assert row.messages[index].prefill_length == len(prefill)
            try:
                (rendered,) = template.render_answers(row.messages, [index])
            except ConversationError as error:
                # A template may have no place for a system message, or change the text at its start.
                is_trimmed = prefill == PREFILLS["white space at the start"][0]
                assert before == [SYSTEM] or is_trimmed or "changes the text" in str(error), (prefill, str(error))
                continue
            num_accepted += 1
            [(start, end)] = rendered.answers
            whole = expected_text(name, row.messages, continues=False)
            prompted = (*row.messages[:index], Message("assistant", prefill))
            expected = expected_text(name, prompted, continues=True)
            # White space at the end of the prefill, which transformers leaves out, belongs to the prompt.
            assert rendered.text[:start].rstrip() == expected.rstrip()
            assert rendered.text[start:end].startswith(answer.rstrip())
            # What follows the answer is its end token, which the next message may write.
            assert whole.rstrip().startswith(rendered.text[: start + len(answer.rstrip())])
            continued = template.render_prompt(prompted, continue_final=True).text
            assert rendered.text[:start].rstrip() == continued.rstrip()
            unmarked = (*row.messages[:index], Message("assistant", prefill + answer))
            (one,) = template.render_answers(unmarked, [index])
            assert one.text == rendered.text and one.answers[0][1] == end
    assert num_accepted >= 15


FOX = {"role": "assistant", "content": "fox"}


@pytest.mark.parametrize("completion", ["fox", FOX, [FOX]])
@pytest.mark.parametrize("loss_on", ["assistant", "last_assistant", "all"])
def test_ids_and_weights(completion: Any, loss_on: Any) -> None:
    tokenizer = tokenizer_of("qwen2_5")
    template = ChatTemplate(SOURCES["qwen2_5"], tokenizer, "qwen2_5")
    row = parse_row(
        {"prompt": [*ROUND, QUESTION, {"role": "assistant", "content": "a brown "}], "completion": completion}
    )
    tokens = tokenize_row(row, template, tokenizer, loss_on)
    plain = Row("messages", (*row.messages[:-1], Message("assistant", "a brown fox")))
    assert tokens.ids == tokenize_row(plain, template, tokenizer, loss_on).ids
    trained = np.array(tokens.ids)[tokens.weights > 0].tolist()
    text = tokenizer.decode(trained, keep_special_tokens=True)
    if loss_on == "all":
        assert len(trained) == len(tokens.ids)
    else:
        assert text.strip() in ("fox<|im_end|>", "brown fox<|im_end|>") and text.rstrip().endswith("fox<|im_end|>")


def test_the_prefill_of_a_long_conversation() -> None:
    """More turns may follow; each of them is trained, and nothing of the prompt is."""
    tokenizer = tokenizer_of("qwen3")
    template = ChatTemplate(SOURCES["qwen3"], tokenizer, "qwen3")
    completion = [{"role": "assistant", "content": " c"}, QUESTION, {"role": "assistant", "content": "d"}]
    row = parse_row({"prompt": [*ROUND, QUESTION, {"role": "assistant", "content": "a b"}], "completion": completion})
    texts = template.render_answers(row.messages, [3, 5])
    spans = [one.text[slice(*span)] for one in texts for span in one.answers]
    assert spans == [" c<|im_end|>", "d<|im_end|>"]


@pytest.mark.parametrize(
    ("source", "prefill"),
    [
        ("{{ m.content | upper }}", "ab"),
        ("{{ m.content | replace('b', '') }}", "ab"),
        ("{{ m.content | replace('bc', 'x') }}", "ab"),
        ("{{ m.content }} {{ m.content }}", "ab"),
        ("{{ m.content[:1] }}", "ab"),
        ("{{ m.content.split('b')[-1] }}", "ab"),
    ],
)
def test_templates_that_change_a_prefill_are_refused(source: str, prefill: str) -> None:
    tokenizer = tokenizer_of("qwen2_5")
    whole = "{% for m in messages %}<|im_start|>{{ m.role }}\n" + source + "<|im_end|>\n{% endfor %}"
    whole += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    template = ChatTemplate(whole, tokenizer, "t.jinja")
    row = parse_row({"prompt": [QUESTION, {"role": "assistant", "content": prefill}], "completion": "cd"})
    with pytest.raises(ConversationError, match=r"t\.jinja (changes the text of message 2|does not write)"):
        template.render_answers(row.messages, [1])


def test_a_prefill_that_ends_inside_a_special_token() -> None:
    tokenizer = tokenizer_of("qwen2_5")
    template = ChatTemplate(SOURCES["qwen2_5"], tokenizer, "qwen2_5")
    row = parse_row({"prompt": [QUESTION, {"role": "assistant", "content": "a <|im_"}], "completion": "end|> b"})
    with pytest.raises(ConversationError, match="ends inside a special token"):
        template.render_answers(row.messages, [1])


def test_a_prompt_and_a_row_continue_alike() -> None:
    """A prompt for rewards is what precedes the answer of the same row in tuning."""
    tokenizer = tokenizer_of("llama3")
    template = ChatTemplate(SOURCES["llama3"], tokenizer, "llama3")
    prompt = [SYSTEM, QUESTION, {"role": "assistant", "content": "Let me"}, {"role": "assistant", "content": "see:"}]
    row = parse_row({"prompt": prompt, "completion": " 4"})
    (rendered,) = template.render_answers(row.messages, [2])
    continued = template.render_prompt(parse_prompt({"prompt": prompt}).messages, continue_final=True)
    assert rendered.text[: rendered.answers[0][0]] == continued.text
