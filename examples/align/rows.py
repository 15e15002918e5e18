"""Write rows for examples/align/preferences.yaml and examples/rlhf.yaml: `python examples/align/rows.py [FOLDER]`.

The task is to count. In `sft.jsonl`, an answer counts up or down at random. In `pairs.jsonl`, one of two answers that
count up, down or in any order is chosen: the one with more numbers larger than the previous one. `prompts.jsonl` has
only the questions.
"""

from __future__ import annotations

import json
import random
import sys
from itertools import pairwise
from pathlib import Path


def write_rows(folder: Path) -> None:
    """Write the three files into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    pick = random.Random(1)
    tuning = []
    pairs = []
    prompts = []
    for _ in range(4000):
        start = pick.randrange(10, 80)
        numbers = [str(number) for number in range(start, start + pick.randrange(3, 6))]
        prompt = f"Count from {numbers[0]} to {numbers[-1]}."
        up = " ".join(numbers)
        down = " ".join(reversed(numbers))
        tuning.append({"instruction": prompt, "output": pick.choice([up, down])})
        messages = [{"role": "user", "content": prompt}]
        # Without answers in any order, a reward model learns to tell the first number from the last, and no more.
        mixed = " ".join(pick.sample(numbers, len(numbers)))
        first, second = pick.sample([up, down, mixed], 2)
        scores = counts_up([first, second])
        if scores[0] != scores[1]:
            chosen, rejected = (first, second) if scores[0] > scores[1] else (second, first)
            pairs.append({"prompt": messages, "chosen": chosen, "rejected": rejected})
        prompts.append({"prompt": messages})
    for name, rows in (("sft.jsonl", tuning), ("pairs.jsonl", pairs), ("prompts.jsonl", prompts)):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def counts_up(completions: list[str]) -> list[float]:
    """Return for each answer the share of numbers that are larger than the previous one, as the preferences reward."""
    scores = []
    for text in completions:
        numbers = [int(word) for word in text.split() if word.isdecimal()]
        grows = [low < high for low, high in pairwise(numbers)]
        scores.append(sum(grows) / max(len(grows), 1))
    return scores


if __name__ == "__main__":
    write_rows(Path(sys.argv[1] if len(sys.argv) > 1 else "build/align"))
