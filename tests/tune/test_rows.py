"""Rows in every supported form, and the errors of those that cannot be used."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jingu.chat.messages import ConversationError, Message
from jingu.errors import JinguError
from jingu.text.corpus_file import CorpusFile
from jingu.text.document_reader import Span
from jingu.tune.row_formats import parse_row
from jingu.tune.rows import BadRow, count_rows_before, raise_bad_row, read_rows, strip_comments

CALL = {"name": "weather", "arguments": {"city": "北京"}}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {}}}


def parts_of(file: Path, parts: int) -> list[Span]:
    """Divide a file into spans of about equal size."""
    size = file.stat().st_size if file.exists() else 0
    splits = CorpusFile(str(file), size, splits=not file.name.endswith(".gz"))
    return [Span(splits, size * part // parts, size * (part + 1) // parts) for part in range(parts)]


def user(text: str) -> Message:
    return Message("user", text)


def answer(text: str, weight: float = 1.0) -> Message:
    return Message("assistant", text, weight=weight)


CONVERSATIONS: list[tuple[str, dict[str, Any], list[Message]]] = [
    ("instruct", {"type": "instruct", "instruct": "翻译", "output": "好"}, [user("翻译"), answer("好")]),
    (
        "instruct",
        {"type": "instruct", "instruct": "Add", "input": "1, 2", "output": "3"},
        [user("Add\n1, 2"), answer("3")],
    ),
    (
        "conversation",
        {"type": "conversation", "rounds": [["ask", "a"], ["ask", "b"], ["ans", "c"], ["ans", "d"]]},
        [user("a\nb"), answer("c\nd")],
    ),
    (
        "conversation",
        {"type": "conversation", "rounds": [["ask", "a"], ["ans", "b", 0], ["ask", "c"], ["ans", "d"]]},
        [user("a"), answer("b", 0.0), user("c"), answer("d")],
    ),
    (
        "conver_has_api",
        {
            "type": "conver_has_api",
            "rounds": [["ask", "天气？"], ["api", CALL, {"温度": 3}], ["ans", "三度"]],
        },
        [user("天气？"), Message("assistant", "", (CALL,)), Message("tool", '{"温度": 3}'), answer("三度")],
    ),
    (
        "ref_qa",
        {"type": "ref_qa", "reference": "春眠不觉晓", "rounds": [["ask", "谁？"], ["ans", "孟浩然"]]},
        [user("春眠不觉晓\n\n谁？"), answer("孟浩然")],
    ),
    (
        "alpaca",
        {"instruction": "q", "input": "", "output": "a", "history": [["p", "r"]], "system": "s"},
        [Message("system", "s"), user("p"), answer("r"), user("q"), answer("a")],
    ),
    ("alpaca", {"instruction": "", "input": "q", "output": "a"}, [user("q"), answer("a")]),
    (
        "sharegpt",
        {
            "conversations": [
                {"from": "human", "value": "w"},
                {"from": "function_call", "value": json.dumps(CALL)},
                {"from": "observation", "value": "3"},
                {"from": "gpt", "value": "3°"},
            ],
            "tools": json.dumps([TOOL]),
        },
        [user("w"), Message("assistant", "", (CALL,)), Message("tool", "3"), answer("3°")],
    ),
    (
        "messages",
        {
            "messages": [
                {"role": "developer", "content": "s"},
                {"role": "user", "content": [{"type": "text", "text": "w"}]},
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [
                        {"type": "function", "function": {**CALL, "arguments": json.dumps(CALL["arguments"])}}
                    ],
                },
                {"role": "tool", "content": "3"},
                {"role": "assistant", "content": "3°", "weight": 0},
            ],
            "tools": [TOOL],
        },
        [
            Message("system", "s"),
            user("w"),
            Message("assistant", "", (CALL,)),
            Message("tool", "3"),
            answer("3°", 0.0),
        ],
    ),
]


CONVERSATIONS += [
    (
        "sharegpt",
        {"conversations": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]},
        [user("q"), answer("a")],
    ),
    (
        "query and response",
        {"query": "q", "response": "a", "history": [["p", "r"]]},
        [user("p"), answer("r"), user("q"), answer("a")],
    ),
    ("question and answer", {"question": "q", "answer": "a", "type": "algebra"}, [user("q"), answer("a")]),
    ("alpaca", {"instruction": "q", "output": "a", "type": 3}, [user("q"), answer("a")]),
]


@pytest.mark.parametrize(("kind", "value", "messages"), CONVERSATIONS)
def test_conversation_rows(kind: str, value: dict[str, Any], messages: list[Message]) -> None:
    row = parse_row(value)
    assert row.kind == kind
    assert list(row.messages) == messages
    assert row.tools == ((TOOL,) if "tools" in value else ())


def test_plain_text_rows() -> None:
    assert parse_row({"type": "pretrain", "text": "春"}).segments == (("春", True),)
    assert parse_row({"text": "春"}).segments == (("春", True),)
    assert parse_row({"prompt": "1+1=", "completion": "2"}).segments == (("1+1=", False), ("2", True))


BAD = [
    ([1], "expected an object with fields, not [1]"),
    ({}, "it has none"),
    ({"type": "poem"}, 'field type: expected pretrain, instruct, conversation, conver_has_api, ref_qa, not "poem"'),
    ({"type": "pretrain", "text": " "}, 'field text: expected text that is not empty, not " "'),
    ({"type": "instruct", "instruct": "a"}, "field output: expected text, but it is missing"),
    ({"instruction": "a", "output": 3}, "field output: expected text that is not empty, not 3"),
    ({"instruction": "a", "output": "b", "history": [["c"]]}, "field history[0]: expected [question, answer]"),
    ({"type": "conversation", "rounds": []}, "field rounds: expected a list that is not empty, not []"),
    ({"type": "conversation", "rounds": [["say", "a"]]}, 'field rounds[0]: expected ["ask", text]'),
    (
        {"type": "conversation", "rounds": [["ans", "a"]]},
        "roles out of order: assistant stands first, as turn 1; expected system or user",
    ),
    ({"type": "conversation", "rounds": [["ask", "a"]]}, "expected an answer at the end; the last turn is of user"),
    ({"type": "conver_has_api", "rounds": [["ask", "a"], ["api", "b"]]}, "field rounds[1][1]: expected a call"),
    ({"messages": [{"role": "poet", "content": "a"}]}, "field messages[0].role: expected system, developer"),
    ({"messages": [{"role": "user", "content": ""}]}, "field messages[0].content: expected text that is not empty"),
    (
        {"messages": [{"role": r, "content": "a"} for r in ("user", "assistant", "tool", "assistant")]},
        "roles out of order: tool stands after assistant",
    ),
    (
        {"messages": [{"role": "user", "content": "a", "weight": 3}]},
        "field messages[0].weight: expected a number from 0 to 2, not 3",
    ),
    (
        {"conversations": [{"from": "cat", "value": "a"}]},
        "field conversations[0].from: expected system, developer, user, human",
    ),
    ({"text": "a\ufdd0"}, "field text: U+FDD0 is not a character"),
    ({"prompt": "a", "chosen": "b", "rejected": "c"}, "fields chosen and rejected: this is a preference row"),
    ({"question": "a"}, "field answer: expected text, but it is missing"),
    ({"type": "algebra"}, "field type: expected pretrain, "),
    ({"text": "a\ud800"}, "field text: U+D800 is not a character"),
    (
        {"messages": [{"role": "user", "content": "a"}], "tools": [{"description": "\ud83d"}]},
        "field tools: U+D83D is not a character",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": {"x": "\ud83d"}}]}]},
        "field messages[0].tool_calls[0]: U+D83D is not a character",
    ),
    ({"prompt": "a"}, "field completion: expected text, but it is missing"),
    ({"messages": [{"role": "user", "content": "a"}], "tools": "x"}, "field tools: expected a list of objects"),
]


@pytest.mark.parametrize(("value", "reason"), BAD)
def test_errors_of_bad_rows(value: Any, reason: str) -> None:
    with pytest.raises(ConversationError) as caught:
        parse_row(value)
    assert reason in str(caught.value)


def test_json_with_comments(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    file.write_text(
        '[ // two rows\n {"text": "a // b, /* c */ ,]"}, /* and */ {"text": "\\"d",},\n]\n', encoding="utf-8"
    )
    (span,) = parts_of(file, 1)
    result = [(number, row.segments[0][0]) for number, row in read_rows(span, raise_bad_row)]
    assert result == [(1, "a // b, /* c */ ,]"), (2, '"d')]
    assert strip_comments('{"a": [1,\n// ,\n]}').count("\n") == 2


def test_bad_lines_are_reported(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    lines = ['\ufeff{"text": "好"}', "", "{oops", json.dumps({"text": "x" * 200}), '{"text": ""}']
    file.write_bytes("\n".join(lines).encode() + b"\n\xff")
    bad: list[BadRow] = []
    (span,) = parts_of(file, 1)
    assert [number for number, _ in read_rows(span, bad.append, max_bytes=100)] == [1]
    assert [item.number for item in bad] == [3, 4, 5, 6]
    assert "not UTF-8" in str(bad[3])
    assert "it is not JSON (Expecting property name enclosed in double quotes at column 2). It begins: {oops" in str(
        bad[0]
    )
    assert "longer than 100 bytes" in str(bad[1])
    with pytest.raises(JinguError, match=r'row 5: field text: .*not "". It begins: {"text": ""}') as caught:
        list(read_rows(span, lambda item: raise_bad_row(item) if item.number == 5 else None))
    assert str(caught.value.where) == str(file)


@pytest.mark.parametrize("name", ["rows.json", "rows.jsonl"])
def test_halves_of_characters_in_bad_rows_can_be_printed(name: str, tmp_path: Path) -> None:
    file = tmp_path / name
    rows = [{"instruction": "hi \ud83d", "output": "a"}, {"instruction": "a", "output": ["\ud83d"]}, {"\ud83d": "a"}]
    file.write_text(json.dumps(rows) if name == "rows.json" else "\n".join(map(json.dumps, rows)))
    bad: list[BadRow] = []
    assert not list(read_rows(*parts_of(file, 1), bad.append))
    for row, words in zip(bad, ("U+D83D is not a character", '"\\ud83d"', "it has \\ud83d"), strict=True):
        assert words in str(row)
        assert str(row).encode().count(rb"\ud83d") >= 1
    with pytest.raises(ConversationError) as caught:
        parse_row(rows[1])
    assert r'not ["\ud83d"]' in str(caught.value)


@pytest.mark.parametrize("name", ["rows.json.gz", "rows.jsonl.gz"])
def test_compressed_files(name: str, tmp_path: Path) -> None:
    """They are read sequentially, and truncated ones are reported."""
    file, rows = tmp_path / name, [{"text": f"{number} 春"} for number in range(2000)]
    packed = gzip.compress((json.dumps(rows) if "jsonl" not in name else "\n".join(map(json.dumps, rows))).encode())
    file.write_bytes(packed)
    assert [row.segments[0][0] for _, row in read_rows(*parts_of(file, 1), raise_bad_row)] == [
        row["text"] for row in rows
    ]
    file.write_bytes(packed[:-2000])
    with pytest.raises(JinguError, match="damaged, or was truncated"):
        list(read_rows(*parts_of(file, 1), raise_bad_row))


@pytest.mark.parametrize(
    ("content", "what"),
    [(b"\xff", "not UTF-8"), (b"{}", "not hold a list of rows"), (b"[{]", "not JSON"), (None, "cannot be read")],
)
def test_unreadable_files(content: bytes | None, what: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(JinguError, match=what):
        list(read_rows(*parts_of(file, 1), raise_bad_row))


@given(
    sizes=st.lists(st.integers(0, 60), max_size=30),
    parts=st.integers(1, 9),
    suffix=st.sampled_from([".json", ".jsonl"]),
)
def test_spans_of_a_file_have_each_row_once(
    sizes: list[int], parts: int, suffix: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.getbasetemp() / f"parts{suffix}"
    rows = [json.dumps({"text": f"{number}春" + "x" * size}, ensure_ascii=False) for number, size in enumerate(sizes)]
    rows[3:4] = ["{}"]
    file.write_text("\n".join(rows) if suffix == ".jsonl" else f"[{','.join(rows)}]", encoding="utf-8")
    result: list[tuple[int, str]] = []

    def bad(row: BadRow) -> None:
        result.append((row.number, "bad"))

    for span in parts_of(file, parts):
        result += [(count_rows_before(span) + number, row.segments[0][0]) for number, row in read_rows(span, bad)]
    texts = ["bad" if text == "{}" else json.loads(text)["text"] for text in rows]
    assert sorted(result) == list(enumerate(texts, start=1))


QUESTION = {"role": "user", "content": "q"}
ANSWER = {"role": "assistant", "content": "a"}


@pytest.mark.parametrize(
    ("row", "weights"),
    [
        ({"messages": [QUESTION, {**ANSWER, "train": False}, QUESTION, ANSWER]}, [0.0, 1.0]),
        ({"messages": [QUESTION, {**ANSWER, "label": False}, QUESTION, {**ANSWER, "weight": 0.5}]}, [0.0, 0.5]),
        ({"messages": [QUESTION, ANSWER], "weight": 0.5}, [0.5]),
        ({"instruction": "q", "output": "a", "weight": 2, "train": True, "label": True}, [2.0]),
        ({"messages": [{**QUESTION, "weight": 0}, {**ANSWER, "weight": 1.6}], "weight": 1.25}, [2.0]),
    ],
)
def test_weights_of_rows_and_turns(row: dict[str, Any], weights: list[float]) -> None:
    assert [message.weight for message in parse_row(row).messages if message.role == "assistant"] == weights


def test_what_turns_say_of_themselves_reaches_the_template() -> None:
    call = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    row = parse_row(
        {
            "messages": [
                {"role": "user", "name": "ann", "content": ["one ", {"type": "text", "text": "two"}]},
                {"role": "assistant", "thinking": "hm", "tool_calls": [call]},
                {"role": "tool", "content": "3", "tool_call_id": "call00001", "name": "f"},
                ANSWER,
            ]
        }
    )
    first, called, result, _ = row.messages
    assert (first.content, first.name) == ("one two", "ann")
    assert called.reasoning_content == "hm"
    assert called.tool_calls == ({"name": "f", "arguments": {}, "id": "call00001"},)
    assert (result.tool_call_id, result.name) == ("call00001", "f")


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "q", "completion": "a", "label": False}, "field label: false marks an answer not to be imitated"),
        ({"messages": [QUESTION, ANSWER], "train": False}, "nothing of the row is to be trained"),
        (
            {"messages": [{**QUESTION, "weight": 2}, ANSWER]},
            "only an assistant's turn can be trained, not that of user",
        ),
        (
            {"messages": [QUESTION, {**ANSWER, "weight": 1.5}], "weight": 1.8},
            "field weight: expected at most 2 when multiplied with the weight of a message, not 2.7",
        ),
        ({"messages": [QUESTION, ANSWER], "images": ["a.png"]}, "field images: only text can be trained on"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "a"}]}, ANSWER]},
            'field messages\\[0\\].content\\[0\\]: only text can be trained on, not "image_url"',
        ),
        ({"messages": [{**QUESTION, "thinking": "hm"}, ANSWER]}, "only an assistant's turn can have reasoning"),
        ({"messages": [QUESTION, {**ANSWER, "train": 2}]}, r"field messages\[1\].train: expected true or false"),
    ],
)
def test_fields_that_cannot_be_used_are_refused(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConversationError, match=reason):
        parse_row(row)


def test_columns_of_other_names() -> None:
    row = {"problem": "q", "solution": "a", "input": "unrelated"}
    columns = {"instruction": "problem", "output": "solution", "input": "context"}
    assert list(parse_row(row, columns).messages) == [user("q"), answer("a")]
    assert list(parse_row({**row, "context": "c"}, columns).messages) == [user("q\nc"), answer("a")]
    swapped = {"question": "a", "answer": "q"}
    assert list(parse_row(swapped, {"question": "answer", "answer": "question"}).messages) == [user("q"), answer("a")]
