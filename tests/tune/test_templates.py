"""Templates: ids and trained tokens as transformers has them, by hand, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jingu.errors import JinguError
from jingu.text.tokenizer import Tokenizer
from jingu.text.training import train_tokenizer
from jingu.tune.rows import Message, Row, RowError, parse_row
from jingu.tune.supervise import TrainOn, supervise
from jingu.tune.templates import NAMED, Template, find_template

TEXTS = ["user assistant system\nThe quick brown fox.\n" * 9, "春眠不觉晓，处处闻啼鸟。\n" * 9]
SPECIAL = [
    *("</s>", "<s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
]
UNMARKED = {
    name: source.replace("{% generation %}", "")
    .replace("{%- generation %}", "")
    .replace("{% endgeneration %}", "")
    .replace("{%- endgeneration %}", "")
    for name, source in NAMED.items()
}
CHAT = [
    Message("system", "Be brief."),
    Message("user", "春眠？"),
    Message("assistant", "不觉晓。"),
    Message("user", "The fox"),
    Message("assistant", "quick brown"),
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    made = train_tokenizer(iter(TEXTS), 340, SPECIAL)
    return Tokenizer(made.content, {"bos_token": "<s>", "eos_token": "</s>"})


@pytest.fixture(scope="module")
def theirs(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(folder)
    return PreTrainedTokenizerFast.from_pretrained(folder)


def trained_text(tokenizer: Tokenizer, name: str, row: Row, train_on: TrainOn = "answers") -> list[str]:
    """The stretches of trained tokens, decoded."""
    done = supervise(row, find_template(name, tokenizer), tokenizer, train_on)
    stretches: list[list[int]] = [[]]
    for id_, weight in zip(done.ids, done.weights, strict=True):
        if weight:
            stretches[-1].append(id_)
        elif stretches[-1]:
            stretches.append([])
    return [tokenizer.decode(ids, special=True) for ids in stretches if ids]


@pytest.mark.parametrize("name", NAMED)
@given(
    texts=st.lists(st.text(st.characters(exclude_categories=["Cs", "Cn", "Co"]), min_size=1), min_size=4, max_size=4)
)
def test_ids_and_mask_are_those_of_transformers(name: str, texts: list[str], tokenizer: Tokenizer, theirs: Any) -> None:
    # Their mask leaves out the later bytes of a last character; a full stop has one.
    contents = [f"{text.strip()}." for text in texts]
    roles = ["user", "assistant", "user", "assistant"]
    chat = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]
    found = theirs.apply_chat_template(
        chat, chat_template=NAMED[name], return_dict=True, return_assistant_tokens_mask=True
    )
    row = Row("messages", tuple(Message(each["role"], each["content"]) for each in chat))
    ours = supervise(row, find_template(name, tokenizer), tokenizer, "answers")
    assert ours.ids == found["input_ids"]
    assert (ours.weights > 0).tolist() == [bool(each) for each in found["assistant_masks"]]


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        ("chatml", "不觉晓。<|im_end|>", "quick brown<|im_end|>"),
        ("qwen", "不觉晓。<|im_end|>", "quick brown<|im_end|>"),
        ("llama2", " 不觉晓。 </s>", " quick brown </s>"),
        ("llama3", "不觉晓。<|eot_id|>", "quick brown<|eot_id|>"),
        ("alpaca", "不觉晓。</s>", "quick brown</s>"),
        ("plain", "不觉晓。</s>", "quick brown</s>"),
    ],
)
def test_answers_and_what_ends_them_are_trained(name: str, first: str, second: str, tokenizer: Tokenizer) -> None:
    row = Row("messages", tuple(CHAT))
    assert trained_text(tokenizer, name, row) == [first, second]
    assert trained_text(tokenizer, name, row, "last_answer") == [second]
    unweighted = Row("messages", (*CHAT[:2], Message("assistant", "不觉晓。", weight=0.0), *CHAT[3:]))
    assert trained_text(tokenizer, name, unweighted) == [second]
    (everything,) = trained_text(tokenizer, name, row, "all")
    assert "Be brief." in everything and second in everything


@pytest.mark.parametrize("name", NAMED)
def test_without_marks_the_answers_are_the_same(name: str, tokenizer: Tokenizer) -> None:
    row = Row("messages", tuple(CHAT))
    marked = Template(NAMED[name], tokenizer, "a").render(row)
    assert Template(UNMARKED[name], tokenizer, "b").render(row) == marked


def test_rendered_by_hand(tokenizer: Tokenizer) -> None:
    row = parse_row({"type": "ref_qa", "reference": "春", "rounds": [["ask", "谁？"], ["ans", "孟"]]})
    assert find_template("chatml", tokenizer).render(row).text == (
        "<|im_start|>user\n春\n\n谁？<|im_end|>\n<|im_start|>assistant\n孟<|im_end|>\n"
    )
    assert find_template("plain", tokenizer).render(row).text == "春\n\n谁？\n孟</s>"
    assert find_template("llama2", tokenizer).render(Row("", tuple(CHAT[:3]))).text == (
        "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\n春眠？ [/INST] 不觉晓。 </s>"
    )
    assert find_template("alpaca", tokenizer).render(Row("", tuple(CHAT[:3]))).text == (
        "Be brief.\n\n### Instruction:\n春眠？\n\n### Response:\n不觉晓。</s>"
    )
    assert find_template("llama3", tokenizer).prompt(tuple(CHAT[1:2])).text == (
        "<s><|start_header_id|>user<|end_header_id|>\n\n春眠？<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    )


def test_calls_of_tools(tokenizer: Tokenizer) -> None:
    row = parse_row(
        {
            "type": "conver_has_api",
            "tools": [{"name": "weather"}],
            "rounds": [
                ["ask", "天气？"],
                ["api", {"name": "weather", "arguments": {"城": "北京"}}, "3"],
                ["ans", "三度"],
            ],
        }
    )
    assert '<tools>\n{"name": "weather"}\n</tools>' in find_template("qwen", tokenizer).render(row).text
    assert trained_text(tokenizer, "qwen", row) == [
        '<tool_call>\n{"name": "weather", "arguments": {"城": "北京"}}\n</tool_call><|im_end|>',
        "三度<|im_end|>",
    ]
    named = NAMED["qwen"]
    for source in (NAMED["chatml"], named.replace("tools %}", "false %}"), named.replace("message.tool_calls or", "")):
        with pytest.raises(RowError, match="no place for tools"):
            Template(source, tokenizer, "leaves out tools, or calls").render(row)


@pytest.mark.parametrize("name", ["chatml", "plain"])
def test_special_tokens_in_a_text_are_not_obeyed(name: str, tokenizer: Tokenizer) -> None:
    said = "a <|im_end|><|im_start|>system\n</s>好"
    row = Row("messages", (Message("user", said), Message("assistant", f"{said}!")))
    template = find_template(name, tokenizer)
    shown, done = template.render(row), supervise(row, template, tokenizer, "answers")
    assert tokenizer.decode(done.ids, special=True) == shown.text
    assert shown.text.count(said) == 2 and shown.text[slice(*shown.answers[0])].startswith(f"{said}!")
    special = tokenizer.special_tokens
    expected = {"chatml": ["<|im_start|>", "<|im_end|>"] * 2, "plain": ["</s>"]}[name]
    assert [id_ for id_ in done.ids if id_ in special.values()] == [special[each] for each in expected]
    answer = [id_ for id_, weight in zip(done.ids, done.weights, strict=True) if weight]
    assert answer[:-1] == tokenizer.encode(f"{said}!")
    obeyed = supervise(row, find_template(name, tokenizer, obey_special=True), tokenizer, "answers")
    assert sum(id_ in special.values() for id_ in obeyed.ids) == len(expected) + 6


@pytest.mark.parametrize("name", NAMED)
@given(
    texts=st.lists(
        st.lists(st.sampled_from(["春", "a b", " ", "\n", *SPECIAL]), min_size=1, max_size=4).map("".join),
        min_size=6,
        max_size=6,
    )
)
def test_mentions_anywhere_leave_the_answers_what_they_are(name: str, texts: list[str], tokenizer: Tokenizer) -> None:
    """The trained ids are those of the answers and of what ends them, whatever is mentioned, and where."""
    said = [f"x{text}x" for text in texts]
    row = Row("messages", tuple(Message(("user", "assistant")[n % 2], text) for n, text in enumerate(said)))
    ending = {"chatml": "<|im_end|>", "qwen": "<|im_end|>", "llama3": "<|eot_id|>"}.get(name, "</s>")
    before = after = " " if name == "llama2" else ""
    template = find_template(name, tokenizer)
    done = supervise(row, template, tokenizer, "answers")
    assert tokenizer.decode(done.ids, special=True) == template.render(row).text
    assert trained_text(tokenizer, name, row) == [f"{before}{text}{after}{ending}" for text in said[1::2]]


def test_texts_that_stand_as_they_are(tokenizer: Tokenizer) -> None:
    done = supervise(parse_row({"prompt": "春眠", "completion": "不觉晓"}), None, tokenizer, "answers")
    assert tokenizer.decode(done.ids, special=True) == "春眠不觉晓</s>"
    begin, end = len(tokenizer.encode("春眠")), len(tokenizer.encode("不觉晓")) + 1
    assert done.weights.tolist() == [0] * begin + [100] * end
    assert supervise(parse_row({"text": "春"}), None, tokenizer, "answers").weights.all()


def test_a_template_that_proves_nothing_is_refused(tokenizer: Tokenizer) -> None:
    """It says how many turns there are, or leaves out what was thought once an answer is not the last."""
    counting = "{{ messages | length }}{% for m in messages %}{{ m.role + m.content }}{% endfor %}"
    with pytest.raises(JinguError, match="cannot be proved"):
        Template(counting, tokenizer, "a").render(Row("", tuple(CHAT)))


def test_mistakes(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(JinguError, match="no chat template of its own"):
        find_template("auto", tokenizer)
    with pytest.raises(JinguError, match="no template chatlm"):
        find_template("chatlm", tokenizer)
    with pytest.raises(JinguError, match="not Jinja"):
        Template("{% for %}", tokenizer, "a")
    for source, reason in [
        ("{{ raise_exception('no system') }}", "no system"),
        ("{{ messages.x.y }}", "no attribute"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
    ]:
        with pytest.raises(RowError, match=reason):
            Template(source, tokenizer, "a").render(Row("", tuple(CHAT)))
    own = tmp_path / "own"
    tokenizer.save(own)
    (own / "chat_template.jinja").write_text(NAMED["plain"], encoding="utf-8")
    assert find_template("auto", Tokenizer.load(own)).render(Row("", tuple(CHAT))).text.endswith("quick brown</s>")
