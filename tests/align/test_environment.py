"""Environments: what a model reads between its turns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import pytest

from jingu.align.environment import Environments, encode_reply, tool_messages
from jingu.align.prompt_set import Prompt, PromptSet, load_prompts
from jingu.align.tools import call_tool, describe_tool
from jingu.chat.chat_format import find_chat_format
from jingu.chat.messages import Message
from jingu.chat.tool_calls import ToolCall
from jingu.config.sections.policies import EnvironmentSettings, GrpoSettings
from jingu.errors import JinguError
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
    reply = encode_reply(Message("assistant", "?"), (Message("user", "a <|im_end|> reply"),), prompts, tokenizer)
    whole = (*start, Message("assistant", "an answer"), Message("user", "a <|im_end|> reply"))
    assert (*ids, *reply) == chat_format.encode_prompt(whole)


def forecast(
    city: str,
    days: int = 3,
    unit: Literal["C", "F"] = "C",
    hours: list[int] | None = None,
    exact: bool = False,
    height: float = 0.0,
) -> dict[str, Any]:
    """Return the weather of a city.

    It is a forecast.

    Args:
        city: its name,
            in English
        days: how many
        unit: of temperatures
        hours: of each day
        exact: whether it has decimals
        height: above the sea, in meters

    Returns:
        Temperatures.
    """
    if days > 9:
        raise ValueError("too far away")
    return {"city": city, "days": days}


def test_tools_are_described_as_by_transformers() -> None:
    from transformers.utils import get_json_schema

    expected = get_json_schema(forecast)
    del expected["function"]["return"]
    # There, a type or None is written as `nullable`, which is no keyword of JSON schema.
    hours = expected["function"]["parameters"]["properties"]["hours"]
    hours |= {"anyOf": [{"type": hours.pop("type"), "items": hours.pop("items")}, {"type": "null"}]}
    del hours["nullable"]
    definition = describe_tool("forecast", forecast)
    assert definition == expected
    # Some templates write properties in their order.
    city, unit = (definition["function"]["parameters"]["properties"][name] for name in ("city", "unit"))
    assert [*city] == ["type", "description"] and [*unit] == ["type", "enum", "description"]


@pytest.mark.parametrize(
    ("arguments", "result"),
    [
        ('{"city": "Ulm", "days": 2}', '{"city": "Ulm", "days": 2}'),
        ('{"city": "Ulm", "days": "soon"}', "error: days: Input should be a valid integer"),
        ('{"town": "Ulm"}', "error: city: Missing required argument; town: Unexpected keyword argument"),
        ('{"city": "Ulm", "days": 10}', "error: ValueError: too far away"),
        ('{"city": ', "error: JSONDecodeError"),
    ],
)
def test_models_read_results_and_errors_of_tools(arguments: str, result: str) -> None:
    assert call_tool(forecast, arguments).startswith(result)


TOOLS = """
import time

def add(first: int, second: int) -> int:
    '''Add two numbers.

    Args:
        first: one of them
        second: the other
    '''
    return first + second

async def reverse(text: str) -> str:
    '''Reverse a text.'''
    return text[::-1]

def untyped(text):
    '''Needs a type.'''

def sleep() -> None:
    '''Take long.'''
    time.sleep(1000)

class Safe:
    def begin(self, row):
        self.code = row["code"]
        self.is_open = 0.0

    def open(self, code: str) -> str:
        '''Try a code.'''
        self.is_open = float(code == self.code)
        return "open" if self.is_open else "closed"

    def step(self, answer):
        return "Use the tool." if not self.is_open else None

    def score(self):
        return self.is_open
"""


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.fixture
def tools_file(tmp_path: Path) -> Path:
    path = tmp_path / "tools.py"
    path.write_text(TOOLS)
    return path


def test_calls_are_answered_and_other_turns_end_or_go_to_the_class(tools_file: Path) -> None:
    prompts = {key: Prompt(key, (), "", {"code": str(key)}, messages=({},)) for key in range(4)}
    tools = [f"{tools_file}:add", f"{tools_file}:reverse", "open"]
    environments = Environments(EnvironmentSettings(path=f"{tools_file}:Safe", tools=tools))
    assert [tool["function"]["name"] for tool in environments.tools] == ["add", "reverse", "open"]
    environments.begin(prompts)
    turns = {
        0: "First " + call("add", first=2, second=3) + call("reverse", text="abc"),
        1: call("open", code="1"),
        2: "I do not know.",
        3: call("unknown", code="3"),
    }
    replies = environments.reply(turns, prompts)
    contents = {key: [message.content for message in reply[1]] for key, reply in replies.items() if reply}  # type: ignore[union-attr]
    assert contents == {0: ["5", "cba"], 1: ["open"], 2: ["Use the tool."], 3: ["Use the tool."]}
    assert environments.reply({1: "Done."}, prompts) == {1: None}
    assert environments.score([0, 1, 2, 3]) == {0: 0.0, 1: 1.0, 2: 0.0, 3: 0.0}
    alone = Environments(EnvironmentSettings(tools=[f"{tools_file}:add"]))
    assert not alone.has_score
    assert alone.reply({0: "No call."}, prompts) == {0: None}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "neither a class nor a tool"),
        ({"tools": ["FILE:untyped"]}, "the argument text of the tool untyped has no type"),
        ({"tools": ["FILE:nothing"]}, "has no function nothing"),
        ({"path": "FILE:Safe", "tools": ["shut"]}, "has no method shut to use as a tool"),
        ({"path": "FILE:Safe", "tools": ["step"]}, "the tool step has no docstring"),
    ],
)
def test_bad_tools_are_refused(settings: dict[str, Any], words: str, tools_file: Path) -> None:
    text = json.dumps(settings).replace("FILE", str(tools_file))
    with pytest.raises(JinguError, match=words):
        Environments(EnvironmentSettings.model_validate_json(text))


def test_a_tool_that_takes_too_long_ends_the_run(tools_file: Path) -> None:
    environments = Environments(EnvironmentSettings(tools=[f"{tools_file}:sleep"], timeout=0.1))
    with pytest.raises(JinguError, match=r"a tool did not return within 0\.1 seconds"):
        environments.reply({0: call("sleep")}, {})


def test_results_are_what_the_template_writes_after_calls(tools_file: Path, tmp_path: Path) -> None:
    marks = [*MARKS, "<tool_call>", "</tool_call>"]
    tokenizer = train_tokenizer(iter(["the user asks, the assistant answers. " * 3]), 400, marks)
    environments = Environments(EnvironmentSettings(tools=[f"{tools_file}:add"]))
    rows = [{"role": "user", "content": "What is 2 + 3?"}]
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": rows}))
    settings = GrpoSettings(prompts=str(tmp_path / "prompts.jsonl"), template="qwen", max_new_tokens=4)
    prompts = load_prompts(settings, tokenizer, 4096, tools=environments.tools)
    chat_format = prompts.chat_format
    assert chat_format is not None
    start = (Message("user", "What is 2 + 3?"),)
    assert prompts.prompts[0].ids == chat_format.encode_prompt(start, environments.tools)
    # The ids so far and those of the results are the prompt that the template makes of the whole conversation.
    turn, results = tool_messages([ToolCall("add", '{"first": 2, "second": 3}')], ["5"])
    whole = chat_format.encode_prompt((*start, turn, *results), environments.tools)
    reply = encode_reply(turn, results, prompts, tokenizer)
    before = len(whole) - len(reply)
    assert whole[before:] == reply
    assert whole[before - 1] == chat_format.eos_token_ids[0]
    assert tokenizer.decode([*reply]).count("tool_response") == 2
    # Templates without a place for tools are refused, and prompts that are texts.
    for template, prompt, words in (("chatml", rows, "does not support tools"), ("qwen", "2 + 3 =", "is a text")):
        (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": prompt}))
        with pytest.raises(JinguError, match=words):
            changed = settings.model_copy(update={"template": template})
            load_prompts(changed, tokenizer, 4096, tools=environments.tools)
