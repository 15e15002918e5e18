"""A tool for examples/tool.yaml, and rows for it: `python examples/align/calculator.py`.

A question is a product of two numbers; the tool computes it. In the rows for tuning four of ten answers are wrong, so
the tuned model calls the tool, but states its result only now and then.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any


def multiply(first: int, second: int) -> int:
    """Multiply two numbers.

    Args:
        first: one of them
        second: the other
    """
    return first * second


def write_rows(folder: Path) -> None:
    """Write the rows for tuning, and the prompts with their answers."""
    folder.mkdir(parents=True, exist_ok=True)
    pick = random.Random(1)
    parameters = {
        "type": "object",
        "properties": {name: {"type": "integer", "description": name} for name in ("first", "second")},
        "required": ["first", "second"],
    }
    function = {"name": "multiply", "description": "Multiply two numbers.", "parameters": parameters}
    tools = [{"type": "function", "function": function}]
    rows, prompts = [], []
    for _ in range(2000):
        first, second = pick.randrange(2, 10), pick.randrange(2, 10)
        question = {"role": "user", "content": f"{first}*{second}"}
        call = {"name": "multiply", "arguments": {"first": first, "second": second}}
        product = str(first * second)
        answer = product if pick.random() < 0.6 else str(pick.randrange(4, 82))
        messages: list[dict[str, Any]] = [
            question,
            {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]},
            {"role": "tool", "content": product},
            {"role": "assistant", "content": answer},
        ]
        text = json.dumps(call) + f" {answer}"
        rows.append({"messages": messages, "tools": tools, "text": text})
        prompts.append({"prompt": [question], "answer": product})
    for name, lines in (("rows", rows), ("prompts", prompts)):
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write_rows(Path("build/tool"))
