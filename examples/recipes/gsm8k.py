"""Write the questions of GSM8K as prompts for learning from rewards: `python examples/recipes/gsm8k.py FILE [ROWS]`.

ROWS is a file of rows with `question` and `answer`; without it, the training split is downloaded (`jingu[hub]`).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

INSTRUCTION = "Think step by step. End with the line: The answer is NUMBER."


def read_rows(path: str | None) -> Iterable[Mapping[str, str]]:
    """Return the rows of a file of JSON lines, or of the training split."""
    if path is not None:
        return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
    from datasets import load_dataset

    return load_dataset("openai/gsm8k", "main", split="train")


def main(target: Path, rows: str | None = None) -> None:
    """Write a prompt with its final number for each row."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("w", encoding="utf-8") as file:
        for row in read_rows(rows):
            messages = [{"role": "user", "content": f"{row['question']}\n\n{INSTRUCTION}"}]
            number = row["answer"].rpartition("####")[2].strip().replace(",", "")
            file.write(json.dumps({"prompt": messages, "answer": number}, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:3])
