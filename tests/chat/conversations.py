"""Conversations that chat templates are tried on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jingu.chat.messages import JsonObject, Message

CALL: JsonObject = {"name": "add", "arguments": {"a": 1, "b": "x y"}, "id": "call00001"}
LOOK: JsonObject = {"name": "look", "arguments": {"where": '日本 "q"'}, "id": "call00002"}
PING: JsonObject = {"name": "ping", "arguments": {}, "id": "call00001"}


def user(text: str) -> Message:
    return Message("user", text)


def answer(text: str, reasoning: str = "", *calls: JsonObject) -> Message:
    return Message("assistant", text, calls, reasoning_content=reasoning)


def result(text: str, call: JsonObject = CALL) -> Message:
    return Message("tool", text, name=call["name"], tool_call_id=call["id"])


def tool(name: str) -> JsonObject:
    parameters = {"type": "object", "properties": {"a": {"type": "integer", "description": "n"}}, "required": ["a"]}
    return {"type": "function", "function": {"name": name, "description": "Does it.", "parameters": parameters}}


SYSTEM = Message("system", "Be brief please.")
FOX = (user("Who?"), answer("The fox."))
REASONED = (user("Who?"), answer("The fox.", "It is brown."))
ADDED = (user("1+x?"), answer("", "", CALL), result("42"), answer("42!"))
LONG_REASONED = (*REASONED, user("How?"), answer("Quick.", "It jumps."))

PLAIN: dict[str, tuple[Message, ...]] = {
    "one round": FOX,
    "two rounds": (*FOX, user("How?"), answer("It was quick.")),
    "three rounds": (user("a"), answer("b"), user("c"), answer("d"), user("e"), answer("f")),
    "equal messages": (user("yes"), answer("yes"), user("yes"), answer("yes")),
    "names of roles": (user("user"), answer("assistant"), user("assistant"), answer("user")),
    "system": (SYSTEM, *FOX),
    "a short system message": (Message("system", "a"), user("a"), answer("a")),
    "system and two rounds": (SYSTEM, *FOX, user("How?"), answer("Quick.")),
    "an empty answer": (user("Who?"), answer("")),
    "an empty first answer": (user("Who?"), answer(""), user("Why?"), answer("So.")),
    "an empty last answer": (*FOX, user("Why?"), answer("")),
    "a question at the end": (*FOX, user("How?")),
    "white space": (user(" Who? "), answer("  The fox.\n")),
    "lines": (user("Who?\n\nWhat?"), answer("The\n\n  fox.\n\n- a\n- b")),
    "tags": (user("Who?"), answer("<table>\n</table>"), user("b"), answer("<t>")),
    "template syntax": (user("{{ x }} {% if %}"), answer("{'a': 1} {{ y }}")),
    "scripts": (user("谁？🙂"), answer("狐狸 🦊 é")),
    "quoted ends": (user("What is <|im_end|> and <|end|>?"), answer("It is <|im_end|> or </s> or <end_of_turn>.")),
    "quoted turns": (
        *(user("a<|im_start|>assistant\nb"), answer("<|im_start|>user\nx<|im_end|>"), user("c"), answer("d</s>")),
    ),
    "quoted roles": (user("<|user|> <|return|> <｜User｜>"), answer("<|call|><｜end▁of▁sentence｜>"), *FOX),
    "a quoted tag of reasoning": (user("What is <think>?"), answer("A tag, <think>.")),
    "numbers": (user("0"), answer("0"), user("null"), answer("None")),
}
WITH_REASONING: dict[str, tuple[Message, ...]] = {
    "reasoning": REASONED,
    "reasoning twice": LONG_REASONED,
    "reasoning first": (*REASONED, user("How?"), answer("Quick.")),
    "reasoning last": (*FOX, user("How?"), answer("Quick.", "It jumps.")),
    "reasoning after system": (SYSTEM, *LONG_REASONED),
    "lines of reasoning": (user("Who?"), answer("The fox.", "It\n\nis <b> brown.")),
    "reasoning in the content": (user("Who?"), answer("<think>\nIt is brown.\n</think>\n\nThe fox.")),
}
WITH_TOOLS: dict[str, tuple[Message, ...]] = {
    "a call": ADDED,
    "a call after system": (SYSTEM, *ADDED),
    "a call at the end": ADDED[:2],
    "a call with text": (ADDED[0], replace(ADDED[1], content="I add."), *ADDED[2:]),
    "two calls": (
        *(user("1+x?"), answer("", "", CALL, LOOK), result("42"), result("Tokyo", LOOK), answer("42 and Tokyo")),
    ),
    "calls one after the other": (*ADDED[:3], answer("", "", LOOK), result("Tokyo", LOOK), answer("done")),
    "a call and another round": (*ADDED, user("more"), answer("no")),
    "a result in JSON": (*ADDED[:2], result('{"v": [1, "é"]}'), answer("42!")),
    "a call with reasoning": (
        *(user("1+x?"), answer("", "I must add.", CALL), result("42"), answer("42!", "It came.")),
    ),
    "tools without a call": (*FOX, user("c"), answer("d")),
    "a call without arguments": (user("go"), answer("", "", PING), result("ok", PING), answer("done")),
}
CONVERSATIONS: dict[str, tuple[tuple[Message, ...], tuple[JsonObject, ...]]] = {
    **{name: (messages, ()) for name, messages in (PLAIN | WITH_REASONING).items()},
    "a call without definitions": (ADDED, ()),
    **{name: (messages, (tool("add"), tool("look"), tool("ping"))) for name, messages in WITH_TOOLS.items()},
}


def to_variables(messages: tuple[Message, ...], *, as_text: bool = False, as_parts: bool = False) -> list[Any]:
    """Return messages as transformers takes them.

    Args:
        as_text: write the arguments of calls as JSON text.
        as_parts: write contents as lists of parts.
    """
    import json

    entries: list[Any] = []
    for message in messages:
        content = [{"type": "text", "text": message.content}] if as_parts else message.content
        entry: JsonObject = {"role": message.role, "content": content}
        calls = []
        for call in message.tool_calls:
            arguments = json.dumps(call["arguments"], ensure_ascii=False) if as_text else call["arguments"]
            function = {"name": call["name"], "arguments": arguments}
            calls.append({"id": call["id"], "type": "function", "function": function})
        entry |= {"tool_calls": calls} if calls else {}
        if message.reasoning_content:
            entry |= dict.fromkeys(("reasoning_content", "thinking"), message.reasoning_content)
        for key in ("name", "tool_call_id"):
            entry |= {key: getattr(message, key)} if getattr(message, key) else {}
        entries.append(entry)
    return entries
