"""Rows of preference data: every form becomes the same answers, and rows without a difference are refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jingu.align.commands import prepare, preview
from jingu.align.preference_rows import PREFERENCES, TokenizedAnswers, parse_preference_row
from jingu.chat.messages import ConversationError
from jingu.config.sections.data import DataSettings
from jingu.data.dataset_manifest import SplitName
from jingu.data.open_sources import open_sources, open_supervised
from jingu.data.preference_data import PreferenceDataset, decode_parts, encode_part
from jingu.errors import JinguError
from jingu.text.document_reader import ReadCounts
from jingu.text.tokenizer import Tokenizer
from jingu.text.tokenizer_training import train_tokenizer
from jingu.tune.prepare import build_row_tokenizer
from tests.conftest import MakeRun

USER = {"role": "user", "content": "Q"}


def message(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [USER], "chosen": [message("A")], "rejected": [message("B")]},
        {"prompt": [USER], "chosen": "A", "rejected": "B"},
        {"prompt": "Q", "chosen": [message("A")], "rejected": [message("B")]},
        {"prompt": "Q", "chosen": [USER, message("A")], "rejected": [USER, message("B")]},
        {"prompt": [USER], "chosen": [USER, message("A")], "rejected": [USER, message("B")]},
        {"prompt": [USER], "chosen": [USER, message("A")], "rejected": [message("B")]},
        {"chosen": [USER, message("A")], "rejected": [USER, message("B")]},
        {"instruction": "Q", "chosen": "A", "rejected": "B"},
        {"question": "Q", "chosen": "A", "rejected": "B"},
        {"messages": [USER], "chosen": message("A"), "rejected": message("B")},
        {
            "conversations": [{"from": "human", "value": "Q"}],
            "chosen": {"from": "gpt", "value": "A"},
            "rejected": {"from": "gpt", "value": "B"},
        },
        {"conversations": [{"from": "human", "value": "Q"}], "chosen": "A", "rejected": "B"},
        {"messages": [USER], "chosen": "A", "rejected": "B"},
    ],
)
def test_conversations(row: dict[str, Any]) -> None:
    pair = parse_preference_row({**row, "margin": 2})
    assert [[(item.role, item.content) for item in answer.messages] for answer in pair.answers] == [
        [("user", "Q"), ("assistant", "A")],
        [("user", "Q"), ("assistant", "B")],
    ]
    assert pair.margin == 2


SYSTEM = {"role": "system", "content": "S"}


@pytest.mark.parametrize(
    "row",
    [
        {"system": "S", "prompt": "Q", "chosen": [message("A")], "rejected": [message("B")]},
        {"system": "S", "prompt": [USER], "chosen": "A", "rejected": "B"},
        {"system": "S", "chosen": [USER, message("A")], "rejected": [USER, message("B")]},
        {"system": "S", "prompt": [SYSTEM, USER], "chosen": [message("A")], "rejected": [message("B")]},
        {"prompt": [SYSTEM, USER], "chosen": [SYSTEM, USER, message("A")], "rejected": "B"},
        {"prompt": [SYSTEM], "chosen": [USER, message("A")], "rejected": [USER, message("B")]},
    ],
)
def test_a_system_message_goes_first(row: dict[str, Any]) -> None:
    for answer, text in zip(parse_preference_row(row).answers, "AB", strict=True):
        assert [(item.role, item.content) for item in answer.messages] == [
            ("system", "S"),
            ("user", "Q"),
            ("assistant", text),
        ]


@pytest.mark.parametrize("field", ["prompt", "messages", "conversations"])
@pytest.mark.parametrize(
    "answers",
    [
        {"chosen": "A", "rejected": "B"},
        {"chosen": [message("A")], "rejected": [message("B")]},
        {"chosen": message("A"), "rejected": message("B")},
        {"chosen": [USER, message("P"), message("A")], "rejected": [USER, message("P"), message("B")]},
        {"ranking": ["A", "B"]},
    ],
)
def test_a_message_of_the_assistant_is_continued(field: str, answers: dict[str, Any]) -> None:
    pair = parse_preference_row({field: [USER, message("P")], **answers})
    for text, row in zip(("PA", "PB"), pair.answers, strict=True):
        assert [(item.role, item.content, item.prefill_length) for item in row.messages] == [
            ("user", "Q", 0),
            ("assistant", text, 1),
        ]


def test_a_ranking_is_all_of_its_pairs(tiny_run: MakeRun, tmp_path: Path) -> None:
    row = parse_preference_row({"prompt": [USER], "ranking": ["C", [message("A")], "B", "D"], "scores": [1, 3, 2.5, 1]})
    assert [answer.messages[-1].content for answer in row.answers] == ["A", "B", "C", "D"]
    assert row.ranks == (0, 1, 2, 2)
    rows: list[dict[str, Any]] = [{"prompt": [USER], "ranking": ["best", "good", "bad"]}]
    rows.append({"prompt": [USER], "ranking": ["x", "y", "z"], "scores": [1, 2, 1]})
    config = make(tiny_run, tmp_path, rows)
    prepare(config)
    tokenizer = Tokenizer.load(Path(config.tokenizer.path))
    (dataset,) = open_sources(config, tokenizer).sources
    texts = []
    for row_tokens, documents in zip(
        *(getattr(dataset.read(np.arange(5)), name) for name in ("tokens", "documents")), strict=True
    ):
        sides = [tokenizer.decode(row_tokens[documents == side].tolist()) for side in (0, 1)]
        texts.append(tuple(side.split("assistant\n")[1].split("<|im_end|>")[0] for side in sides))
    assert texts == [("best", "good"), ("best", "bad"), ("good", "bad"), ("y", "x"), ("y", "z")]


@pytest.mark.parametrize(
    ("row", "prompt", "answers"),
    [
        ({"prompt": "Human: Q Assistant:", "chosen": " A", "rejected": " B"}, "Human: Q Assistant:", [" A", " B"]),
        # Without a prompt, it is what both begin with, and the space belongs to the answers.
        ({"chosen": "Human: Q Assistant: A", "rejected": "Human: Q Assistant: B"}, "Human: Q Assistant:", [" A", " B"]),
    ],
)
def test_texts(row: dict[str, Any], prompt: str, answers: list[str]) -> None:
    pair = parse_preference_row(row)
    assert [answer.segments for answer in pair.answers] == [((prompt, False), (text, True)) for text in answers]


@pytest.mark.parametrize("label", ["label", "kto_tag"])
@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "Q", "completion": "A"},
        {"messages": [USER, message("A")]},
        {"instruction": "Q", "output": "A"},
    ],
)
def test_labels(row: dict[str, Any], label: str) -> None:
    for value in (True, False):
        parsed = parse_preference_row({**row, label: value})
        assert (len(parsed.answers), parsed.is_desirable) == (1, value)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ([], "expected an object with fields"),
        ({"prompt": "Q", "chosen": "A"}, "it has only chosen"),
        ({"prompt": "Q", "completion": "A"}, "expected the fields chosen and rejected, or ranking or label or kto_tag"),
        ({"prompt": "Q", "completion": "A", "label": "good"}, "field label: expected true or false"),
        ({"prompt": "Q", "chosen": "A", "rejected": ""}, "field rejected: field completion: expected text"),
        ({"prompt": "Q", "chosen": "A", "rejected": 3}, "field rejected: expected a text, a message, or a list"),
        ({"prompt": "Q", "chosen": "A", "rejected": "B", "margin": "x"}, "field margin: expected a number"),
        ({"prompt": "Q", "ranking": ["A"]}, "field ranking: expected a list of two answers or more"),
        ({"prompt": "Q", "ranking": ["A", ""]}, "field ranking: field completion: expected text"),
        ({"prompt": "Q", "ranking": ["A", "B"], "scores": [1]}, "field scores: expected a number for each answer"),
        ({"prompt": "Q", "ranking": ["A", "B"], "margin": 1}, "field margin: a ranking has none"),
        ({"prompt": "Q", "ranking": ["A", "B"], "scores": [1, 1]}, "field scores: all are equal"),
        (
            {"chosen": "A", "rejected": "B"},
            "chosen and rejected: the texts have no common beginning; add the field prompt",
        ),
        (
            {"prompt": [USER], "chosen": [{"role": "user", "content": "P"}, message("A")], "rejected": [message("B")]},
            "field chosen: its messages begin with another prompt than that of the field prompt",
        ),
        (
            {"prompt": [USER], "chosen": [message("A")], "rejected": [SYSTEM, USER, message("B")]},
            "field rejected: its messages begin with another prompt",
        ),
        ({"prompt": USER, "chosen": [USER, message("A")], "rejected": "B"}, "field prompt: expected a text or a list"),
        ({"system": 3, "prompt": [USER], "chosen": "A", "rejected": "B"}, "field system: expected text"),
        ({"prompt": [USER], "chosen": [USER], "rejected": [message("B")]}, "expected an answer at the end"),
    ],
)
def test_bad_rows_say_what_is_wrong(row: Any, words: str) -> None:
    with pytest.raises(ConversationError) as error:
        parse_preference_row(row)
    assert words in str(error.value)


@given(
    st.lists(st.booleans(), min_size=1, max_size=9),
    st.booleans(),
    st.integers(-500_000, 500_000).map(lambda n: n / 1000),
)
def test_parts_survive_storage(is_trained: list[bool], is_rejected: bool, margin: float) -> None:
    stored = encode_part(np.array(is_trained), is_rejected, margin).astype(np.int64)
    decoded = decode_parts(stored)
    assert decoded[0].tolist() == is_trained
    assert set(decoded[1].tolist()) == {is_rejected}
    np.testing.assert_allclose(decoded[2], margin, atol=1e-9)


def make(tiny_run: MakeRun, tmp_path: Path, rows: list[dict[str, Any]], **changes: Any) -> Any:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return tiny_run(
        {
            "data.input": str(file),
            "data.path": str(tmp_path / "data"),
            "data.validation_fraction": 0,
            "data.objective": {"type": "preference", "template": "chatml"},
            "batch.sequence_length": 256,
            "task": {"type": "dpo"},
            **changes,
        }
    )


GOOD = {"prompt": [USER], "chosen": "yes", "rejected": "not at all", "margin": 1.5}


def test_a_pair_is_a_row_of_two_documents(tiny_run: MakeRun, tmp_path: Path) -> None:
    config = make(tiny_run, tmp_path, [GOOD])
    prepare(config)
    tokenizer = Tokenizer.load(Path(config.tokenizer.path))
    (dataset,) = open_sources(config, tokenizer).sources
    rows = dataset.read(np.array([0]))
    tokens, labels, documents, weights = rows.tokens[0], rows.labels[0], rows.documents[0], rows.weights[0]
    prompt = "<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n"
    for number, answer in enumerate(["yes<|im_end|>", "not at all<|im_end|>"]):
        own = documents == number
        text = tokenizer.decode(tokens[own].tolist(), keep_special_tokens=True)
        assert text.startswith(prompt + answer)
        assert tokenizer.decode(labels[own & (labels >= 0)].tolist(), keep_special_tokens=True).startswith(answer)
        # Positions start again, and the last token of an answer is read: a reward is its score.
        assert rows.to_batch().positions[0][own].tolist() == list(range(own.sum()))
    assert (weights[documents >= 0] == 1.5).all()


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "Q", "chosen": "same", "rejected": "same"}, "chosen and rejected are the same"),
        ({"prompt": "Q", "completion": "A", "label": True}, "an answer with a label is no pair"),
        (
            {"chosen": [USER, message("A")], "rejected": [{"role": "user", "content": "other"}, message("B")]},
            "chosen and rejected have different prompts",
        ),
    ],
)
def test_rows_without_a_comparison_are_refused_or_skipped(
    row: dict[str, Any], words: str, tiny_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make(tiny_run, tmp_path, [GOOD, row])
    with pytest.raises(JinguError, match=f"row 2: {words}"):
        prepare(config)
    skipping = make(tiny_run, tmp_path, [GOOD, row], **{"data.on_error": "skip"})
    prepare(skipping)
    assert "dropped: 1 bad" in capsys.readouterr().out
    preview(config, rows=1)
    output = capsys.readouterr().out
    assert "⟦yes│" in output.replace("y│es", "yes").replace("y│e│s", "yes") and "⟦-1:" in output
    assert words in output


def test_answers_follow_the_prompt_as_the_model_sees_it(tiny_run: MakeRun, tmp_path: Path) -> None:
    """The template writes the question differently once an answer follows it, and for each answer."""
    template = tmp_path / "counting.jinja"
    template.write_text(
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}, in {{ messages[-1].content | length }}:\n"
        "{% else %}{% generation %}{{ m.content }}{% endgeneration %}{% endif %}{% endfor %}"
    )
    objective = {"type": "preference", "template": str(template)}
    rows = [{"prompt": [USER], "chosen": "yes", "rejected": "not"}, GOOD]
    prepare(make(tiny_run, tmp_path, rows, **{"data.objective": objective}))


def test_too_long_rows_are_dropped_or_truncated(
    tiny_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long = {"prompt": "Q:", "chosen": " yes" * 80, "rejected": " no"}
    prepare(make(tiny_run, tmp_path, [GOOD, long], **{"batch.sequence_length": 160}))
    assert "1 too long" in capsys.readouterr().out
    objective = {"type": "preference", "template": "chatml", "overflow": "truncate"}
    path = str(tmp_path / "truncated")
    changes = {"batch.sequence_length": 160, "data.objective": objective, "data.path": path}
    prepare(make(tiny_run, tmp_path, [GOOD, long], **changes))
    assert "1 truncated" in capsys.readouterr().out


WHOLE = [
    # The header of the last turn can be seen.
    (
        "\n\nHuman: Hi\n\nAssistant: There is a sign",
        "\n\nHuman: Hi\n\nAssistant: Thursday",
        "\n\nHuman: Hi\n\nAssistant:",
    ),
    ("Human: Q\n\nAssistant: Yes", "Human: Q\n\nAssistant: Yes, and more", "Human: Q\n\nAssistant:"),
    (
        "### Instruction:\nQ\n\n### Response:\nThis",
        "### Instruction:\nQ\n\n### Response:\nThat",
        "### Instruction:\nQ\n\n### Response:\n",
    ),
    ("USER: Q ASSISTANT: Th", "USER: Q ASSISTANT: To", "USER: Q ASSISTANT:"),
    ("问：什么？\n答：好的", "问：什么？\n答：好吧", "问：什么？\n答："),
    # It cannot: the prompt is what both begin with.
    ("2 + 2 = 4", "2 + 2 = 5", "2 + 2 ="),
    ("the user asks", "the users", "the user"),
]


@pytest.mark.parametrize(("chosen", "rejected", "prompt"), WHOLE)
def test_whole_texts_are_divided_between_tokens(
    chosen: str, rejected: str, prompt: str, tiny_run: MakeRun, tmp_path: Path
) -> None:
    """The ids are those of the texts, and prompts are the same tokens."""
    row = parse_preference_row({"chosen": chosen, "rejected": rejected})
    assert row.segments[0][0] == prompt
    config = make(
        tiny_run, tmp_path, [{"chosen": chosen, "rejected": rejected}], **{"data.objective.packing": "padded"}
    )
    tokenizer = Tokenizer.load(Path(config.tokenizer.path))
    rows = build_row_tokenizer(PREFERENCES, config.data, tokenizer, 257)
    [tokens] = rows.tokenize(row, ReadCounts())
    assert isinstance(tokens, TokenizedAnswers)
    texts = [
        [*tokenizer.prompt_prefix_ids, *tokenizer.encode(text), tokenizer.eos_token_id] for text in (chosen, rejected)
    ]
    assert tokens.ids[:-1] == [*texts[0], *texts[1]]
    size = len(tokens.prompt_ids)
    assert texts[0][:size] == texts[1][:size] == tokens.prompt_ids
    assert prompt.startswith(tokenizer.decode(tokens.prompt_ids))
    trained = tokens.weights[:-1] != 0
    assert not trained[:size].any() and trained[size : len(texts[0])].all()
    assert not trained[len(texts[0]) :][:size].any() and trained[len(texts[0]) + size :].all()


def test_a_token_that_crosses_the_border_in_one_answer_only() -> None:
    """The border moves to the same token of both."""
    tokenizer = train_tokenizer(iter(["there three thin the them " * 50]), 300, ["</s>"])
    row = parse_preference_row({"prompt": "the", "chosen": "re", "rejected": " fox"})
    data = DataSettings.model_validate({"objective": {"type": "preference", "template": "chatml"}})
    [tokens] = build_row_tokenizer(PREFERENCES, data, tokenizer, 100).tokenize(
        parse_preference_row({"prompt": "them the", "chosen": "re", "rejected": " fox"}), ReadCounts()
    )
    assert isinstance(tokens, TokenizedAnswers)
    assert tokenizer.decode(tokens.prompt_ids) == "them"
    assert tokens.ids[:-1] == [
        *tokenizer.encode("them there"),
        tokenizer.eos_token_id,
        *tokenizer.encode("them the fox"),
        tokenizer.eos_token_id,
    ]
    with pytest.raises(ConversationError, match="the prompt has no tokens"):
        build_row_tokenizer(PREFERENCES, data, tokenizer, 100).tokenize(row, ReadCounts())


@pytest.mark.parametrize(
    ("prefill", "chosen", "rejected"),
    [
        ("The sum is f", "our.", " five"),
        ("The sum is", " four", " five"),
        ("It is <|im_end|> or ", "not", "so"),
        ("```python\n", "x = 1\n```", "y"),
    ],
)
@pytest.mark.parametrize("kind", ["pairs", "labels"])
def test_answers_share_the_text_that_they_continue(prefill: str, chosen: str, rejected: str, kind: str) -> None:
    """All that is compared follows the prefill, but for a token that contains its end."""
    tokenizer = train_tokenizer(
        iter(["The sum is four or five not so user assistant " * 50]), 320, ["</s>", "<|im_start|>", "<|im_end|>"]
    )
    settings = {"objective": {"type": "preference", "template": "chatml", "rows": kind}}
    rows = build_row_tokenizer(PREFERENCES, DataSettings.model_validate(settings), tokenizer, 300)
    row = {"prompt": [USER, message(prefill)], "chosen": chosen, "rejected": rejected}
    texts = []
    for tokens in rows.tokenize(rows.parse(row), ReadCounts()):
        assert isinstance(tokens, TokenizedAnswers)
        prompt = tokenizer.decode(tokens.prompt_ids, keep_special_tokens=True)
        start, header, part = prompt.rpartition("<|im_start|>assistant\n")
        assert (start, header) == ("<|im_start|>user\nQ<|im_end|>\n", "<|im_start|>assistant\n")
        assert prefill.startswith(part) and len(prefill) - len(part) <= 2
        is_trained, is_rejected, _ = decode_parts(np.array(tokens.parts, np.int64))
        for side in (False, True):
            ids = np.array(tokens.ids)[is_trained & (is_rejected == side)].tolist()
            texts += [part + tokenizer.decode(ids, keep_special_tokens=True)] if ids else []
    assert texts == [f"{prefill}{answer}<|im_end|>" for answer in (chosen, rejected)]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"chosen": "Q A", "rejected": "Q A more"}, "one text is the beginning of the other"),
        ({"chosen": "Human: Q\n\nAssistant:", "rejected": "Human: Q\n\nAssistant: no"}, "one text is the beginning"),
        ({"chosen": "yes", "rejected": "no"}, "the texts have no common beginning"),
        ({"chosen": " yes", "rejected": " no"}, "the texts have no common beginning"),
        ({"chosen": "same", "rejected": "same"}, "chosen and rejected are the same"),
    ],
)
def test_whole_texts_without_a_border(row: dict[str, Any], words: str) -> None:
    with pytest.raises(ConversationError, match=words):
        parse_preference_row(row)


def test_a_prompt_is_either_trained_or_held_out(tiny_run: MakeRun, tmp_path: Path) -> None:
    rows = [
        {"prompt": [{"role": "user", "content": f"Q{n % 9}"}], "chosen": f"yes {n}", "rejected": "no"}
        for n in range(40)
    ]
    rows += [{"prompt": f"Text {n % 3}:", "ranking": [f" best {n}", " good", " bad"]} for n in range(12)]
    config = make(tiny_run, tmp_path, rows, **{"data.validation_fraction": 0.4})
    prepare(config)
    prompts = []
    splits: tuple[SplitName, ...] = ("train", "validation")
    for split in splits:
        dataset = open_supervised(Path(config.data.path), split, config.data.objective, config.batch, 0)
        assert isinstance(dataset, PreferenceDataset)
        prompts.append({tuple(dataset._read_prompt(number)) for number in range(len(dataset.row_ends))})
    assert all(prompts)
    assert not prompts[0] & prompts[1]
    assert len(prompts[0] | prompts[1]) == 12


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "Q: " * 80, "chosen": " yes", "rejected": " no"},
        {"prompt": [{"role": "user", "content": "Q" * 200}], "chosen": "yes", "rejected": "no"},
        {"prompt": "Q:", "chosen": " yes" * 100 + "!", "rejected": " yes" * 100 + "?"},
    ],
)
def test_rows_that_cannot_be_truncated_are_dropped(
    row: dict[str, Any], tiny_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    objective = {"type": "preference", "template": "chatml", "overflow": "truncate"}
    prepare(make(tiny_run, tmp_path, [GOOD, row], **{"batch.sequence_length": 160, "data.objective": objective}))
    assert re.search(
        r"dropped: 1 with (a prompt that leaves no room|answers that are equal) .*in 80 tokens", capsys.readouterr().out
    )
