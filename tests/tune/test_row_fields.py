"""Every field of a row is used, refused by name or listed, in rows of every kind."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jingu.align.commands import prepare as prepare_preferences
from jingu.align.preference_rows import parse_preference_row
from jingu.chat.messages import ConversationError
from jingu.data.open_sources import open_sources
from jingu.errors import JinguError
from jingu.text.tokenizer import Tokenizer
from jingu.tune.prepare import prepare
from jingu.tune.preview import preview
from jingu.tune.row_fields import TABLES, describe_fields
from jingu.tune.row_formats import parse_messages, parse_prompt, parse_row
from tests.conftest import MakeRun

GUIDES = Path(__file__).parents[2] / "docs" / "guides"
USER = {"role": "user", "content": "Q"}
ANSWER = {"role": "assistant", "content": "A"}
TOOLS = [{"name": "f", "parameters": {}}]
# A row of each format of messages, and of each format of texts.
CHATS: list[dict[str, Any]] = [
    {"messages": [USER, ANSWER]},
    {"conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]},
    {"instruction": "Q", "output": "A"},
    {"query": "Q", "response": "A"},
    {"question": "Q", "answer": "A"},
    {"prompt": [USER], "completion": [ANSWER]},
    {"type": "instruct", "instruct": "Q", "output": "A"},
    {"type": "conversation", "rounds": [["ask", "Q"], ["ans", "A"]]},
]
TEXTS: list[dict[str, Any]] = [{"text": "Q A"}, {"type": "pretrain", "text": "Q A"}, {"prompt": "Q", "completion": "A"}]
PAIRS: list[dict[str, Any]] = [
    {"prompt": [USER], "chosen": [ANSWER], "rejected": "B"},
    {"prompt": "Q", "chosen": [ANSWER], "rejected": [{"role": "assistant", "content": "B"}]},
    {"question": "Q", "chosen": "A", "rejected": "B"},
    {"messages": [USER], "chosen": ANSWER, "rejected": "B"},
    {"prompt": [USER], "ranking": ["A", "B"]},
    {"messages": [USER, ANSWER], "label": 0},
]


@pytest.mark.parametrize("scope", ["row", "message"])
def test_the_guide_has_the_table_of_fields(scope: Any) -> None:
    assert describe_fields(scope) in (GUIDES / "tuning.md").read_text(encoding="utf-8")


def test_the_guide_of_alignment_names_the_fields_of_prompts() -> None:
    (names,) = re.findall(r"(`system`.*) shape the prompt of messages", (GUIDES / "alignment.md").read_text("utf-8"))
    used = [field.name for field in TABLES["row"] if field.shapes_prompt and not field.refusal]
    assert re.findall(r"`(\w+)`", names) == used


@pytest.mark.parametrize("row", CHATS + PAIRS)
@pytest.mark.parametrize("tools", ["tools", "functions", "apis"])
@pytest.mark.parametrize("system", ["system", "system_prompt", "sys_prompt"])
def test_context_is_used_in_every_format(row: dict[str, Any], tools: str, system: str) -> None:
    variables = {"enable_thinking": False, "absent": None}
    history = [["old question", "old answer"]]
    full = {**row, system: "S", tools: json.dumps(TOOLS), "history": history, "chat_template_kwargs": variables}
    parsed: Any = (parse_preference_row if row in PAIRS else parse_row)(full)
    answer = parsed.answers[0] if row in PAIRS else parsed
    assert [message.content for message in answer.messages] == ["S", "old question", "old answer", "Q", "A"]
    assert answer.tools == tuple(TOOLS)
    assert answer.variables == {"enable_thinking": False}
    assert not answer.carried


@pytest.mark.parametrize("row", [*TEXTS, {"prompt": "Q", "chosen": "A", "rejected": "B"}])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("system", "BE BRIEF"),
        ("system_message", "BE BRIEF"),
        ("history", [["a", "b"]]),
        ("functions", TOOLS),
        ("chat_template_kwargs", '{"enable_thinking": true}'),
        ("thinking", "because"),
        ("input", "another passage"),
        ("context", "another passage"),
    ],
)
def test_texts_refuse_what_needs_a_template(row: dict[str, Any], name: str, value: Any) -> None:
    parse: Any = parse_preference_row if "chosen" in row else parse_row
    with pytest.raises(ConversationError, match=f"field {name}: a row of the format (text|pretrain|completion)"):
        parse({**row, name: value})
    # Null and NaN, which tables write for an absent value, and empty values are none.
    for absent in (None, float("nan"), "", [], {}):
        parse({**row, name: absent})


@pytest.mark.parametrize("row", CHATS + TEXTS)
@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("mask", True, "does not say whether true means"),
        ("images", ["a.png"], "only text can be trained on"),
        ("labels", [1, -100], "rows are text"),
        ("enable_thinking", False, "stands in chat_template_kwargs"),
        ("System", "S", "it is spelled system"),
        ("chatTemplateKwargs", {"a": 1}, "it is spelled chat_template_kwargs"),
        ("kto_tag", False, "not to be imitated"),
        ("label", "false", "not to be imitated"),
        ("label", 0, "not to be imitated"),
        ("loss", "no", "expected true or false"),
        ("chosen", "another text", "has no place for it"),
    ],
)
def test_fields_that_no_format_of_tuning_uses(row: dict[str, Any], name: str, value: Any, reason: str) -> None:
    with pytest.raises(ConversationError, match=reason):
        parse_row({**row, name: value})


def test_fields_that_carry_nothing_are_listed() -> None:
    turns = [{**USER, "id": 7}, {**ANSWER, "name": None, "tool_calls": None}]
    row = parse_row({"messages": turns, "id": 1, "source": "web", "type": "math", "label": "greeting"})
    assert set(row.carried) == {"messages[].id", "id", "source", "type", "label"}


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [USER, ANSWER], "prompt": "Q", "text": "user: Q\nassistant: A"},
        {"messages": [USER, {"role": "assistant", "content": "so it is 42"}], "answer": "42"},
        {
            "prompt": "Q",
            "messages": [USER, ANSWER],
            "chosen": [USER, ANSWER],
            "rejected": [USER, {**ANSWER, "content": "B"}],
        },
    ],
)
def test_fields_may_repeat_text_of_the_row(row: dict[str, Any]) -> None:
    (parse_preference_row if "chosen" in row else parse_row)(row)


@pytest.mark.parametrize("row", CHATS)
@pytest.mark.parametrize("absent", [None, float("nan"), [], ""])
def test_a_field_without_a_value_does_not_decide_the_format(row: dict[str, Any], absent: Any) -> None:
    others = {name: absent for name in ("messages", "conversations", "instruction", "query", "text") if name not in row}
    assert parse_row({**others, **row}) == parse_row(row)
    pair = {"prompt": "Q", "completion": "A", "label": True}
    assert parse_preference_row({**pair, "chosen": None, "rejected": None}) == parse_preference_row(pair)


MASKS = [
    ({"loss": False}, 0.0),
    ({"train_on_turn": "0"}, 0.0),
    ({"train": 0}, 0.0),
    ({"trainable": "False"}, 0.0),
    ({"loss_mask": 1}, 1.0),
    ({"label": 0.0}, 0.0),
    ({"weight": 0.5, "training": True}, 0.5),
    ({"loss_scale": 2}, 2.0),
]


@pytest.mark.parametrize(("mask", "weight"), MASKS)
def test_masks_of_answers(mask: dict[str, Any], weight: float) -> None:
    row = parse_row({"messages": [USER, {**ANSWER, **mask}, {**USER, "train": False}, ANSWER]})
    assert [message.weight for message in row.messages if message.role == "assistant"] == [weight, 1.0]


@pytest.mark.parametrize(
    ("turn", "reason"),
    [
        ({**ANSWER, "mask": 0}, r"(messages|prompt)\[.\].mask: it does not say"),
        ({**ANSWER, "loss": 3}, r"\[.\].loss: expected true or false"),
        ({**ANSWER, "loss_factor": 0}, "it may be about the loss; write train or weight"),
        ({**ANSWER, "isTrained": False}, "it may be about the loss; write train or weight"),
        ({**ANSWER, "tools": TOOLS}, "stand beside the messages"),
        ({**ANSWER, "value": "B"}, r"(messages|prompt)\[.\].value: a message has no place"),
        ({**ANSWER, "videos": ["a"]}, "only text can be trained on"),
        ({**ANSWER, "prefix": True}, "a message is trained whole"),
        ({**ANSWER, "toolCalls": [{}]}, "it is spelled tool_calls"),
        ({**ANSWER, "train": True, "loss": False}, "fields train and loss: they mean the same, but differ"),
    ],
)
def test_fields_of_messages_that_cannot_be_used(turn: dict[str, Any], reason: str) -> None:
    for parse in (parse_row, lambda row: parse_prompt({"prompt": [*row["messages"], USER]})):
        with pytest.raises(ConversationError, match=reason):
            parse({"messages": [USER, turn]})


def test_other_contradictions() -> None:
    for row, reason in [
        ({"messages": [{"role": "system", "content": "T"}, USER, ANSWER], "system": "S"}, "another system message"),
        ({"messages": [USER, ANSWER], "tools": TOOLS, "functions": [{"name": "g"}]}, "tools and functions: they mean"),
        ({"messages": [USER, ANSWER], "chat_template_kwargs": {"messages": []}}, "messages is not a variable"),
        (
            {"prompt": [USER, {**ANSWER, "tool_calls": [{"name": "f"}]}], "completion": [ANSWER]},
            "that message cannot have tool calls",
        ),
        ({"prompt": [USER, {**ANSWER, "reasoning": "r"}], "completion": "b"}, "that message cannot have reasoning"),
        ({"prompt": [USER, ANSWER], "completion": {**ANSWER, "thinking": "r"}}, "reasoning cannot follow the text"),
        ({"prompt": [USER, {**ANSWER, "content": [{"type": "image"}]}], "completion": "b"}, "only text can be"),
        ({"messages": [{**USER, "tool_calls": [{"name": "f", "arguments": {}}]}, ANSWER]}, "can have tool calls"),
    ]:
        with pytest.raises(ConversationError, match=reason):
            parse_row(row)
    for row, reason in [
        ({"prompt": "other", "chosen": [USER, ANSWER], "rejected": [USER, ANSWER]}, "begin with another prompt"),
        ({"prompt": [USER], "chosen": "A", "rejected": "B", "weight": 0.5}, "has no loss weight"),
        ({"prompt": "Q", "messages": [{**USER, "content": "else"}], "chosen": "A", "rejected": "B"}, "has no place"),
        ({"messages": [USER, {**ANSWER, "loss": 0.0}], "label": True}, "has no loss weight"),
        ({"messages": [USER, ANSWER], "label": True, "kto_tag": False}, "label and kto_tag: they mean the same"),
    ]:
        with pytest.raises(ConversationError, match=reason):
            parse_preference_row(row)
    with pytest.raises(ConversationError, match="a message has no such field"):
        parse_messages([{**USER, "colour": 3}])


def write(tmp_path: Path, rows: list[dict[str, Any]]) -> str:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(file)


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"system": "syss"}, "no row has a value in the field syss; rows have the fields instruction, output, sys."),
        ({"system": "sys", "tools": "functions_list"}, "no row has a value in the field functions_list"),
        ({"sytem": "sys"}, "sytem is not a name that jingu gives to a field"),
    ],
)
def test_columns_that_match_nothing(columns: dict[str, str], reason: str, tiny_run: MakeRun, tmp_path: Path) -> None:
    rows = [{"instruction": "q", "output": "a", "sys": None}, {"instruction": "q", "output": "b", "sys": "S"}]
    for kind, run in (("supervised", prepare), ("supervised", preview), ("preference", prepare_preferences)):
        objective = {"type": kind, "template": "chatml", "columns": columns}
        config = tiny_run({"data.input": write(tmp_path, rows), "data.objective": objective})
        with pytest.raises(JinguError) as error:
            run(config)
        assert reason in str(error.value)


def test_the_preview_lists_fields_without_effect(
    tiny_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"instruction": "q", "output": "a", "sys": "S", "id": n, "System": "unused"} for n in range(3)]
    objective = {"type": "supervised", "template": "chatml", "columns": {"system": "sys", "System": ""}}
    preview(tiny_run({"data.input": write(tmp_path, rows), "data.objective": objective, "batch.sequence_length": 256}))
    output = capsys.readouterr().out
    assert "fields without effect: 3 id\n" in output
    assert "│\n│S│<" in output.replace("│\nS", "│\n│S")


def test_masks_are_part_of_what_makes_a_duplicate(tiny_run: MakeRun, tmp_path: Path) -> None:
    turns = [USER, ANSWER, USER, {**ANSWER, "content": "B"}]
    masked = [[{**turn, "weight": 0} if at == place else turn for at, turn in enumerate(turns)] for place in (1, 3, 3)]
    changes = {
        "data.input": write(tmp_path, [{"messages": messages} for messages in masked]),
        "data.path": str(tmp_path / "data"),
        "data.duplicates": "drop",
        "data.validation_fraction": 0,
        "data.objective": {"type": "supervised", "template": "chatml"},
        "batch.sequence_length": 256,
    }
    config = tiny_run(changes)
    prepare(config)
    tokenizer = Tokenizer.load(Path(config.tokenizer.path))
    (dataset,) = open_sources(config, tokenizer).sources
    batch = dataset.read(np.arange(len(dataset)))
    trained = tokenizer.decode(batch.labels[batch.labels >= 0].tolist())
    assert (trained.count("A"), trained.count("B")) == (1, 1)
