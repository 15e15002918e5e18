"""Learn to sort digits: first briefly from examples, then only from rewards. Nothing is downloaded.

`python examples/grpo.py [KEY=VALUE ...]`: overrides are passed to the run that learns from rewards.
"""

from __future__ import annotations

import json
import random
import shlex
import subprocess
import sys
from pathlib import Path

PLACE = Path("build/sort")
DIGITS = 5
ROWS = 4000
QUESTIONS = 200


def write_rows(place: Path) -> list[tuple[str, str]]:
    """Write rows for supervised training and prompts for GRPO; return held-out questions with their answers."""
    numbers = random.Random(1).sample(range(10**DIGITS), ROWS + QUESTIONS)
    pairs = [(f"{number:0{DIGITS}}=", "".join(sorted(f"{number:0{DIGITS}}"))) for number in numbers]
    place.mkdir(parents=True, exist_ok=True)
    for name, key in (("rows", "completion"), ("prompts", "answer")):
        lines = (json.dumps({"prompt": question, key: answer}) for question, answer in pairs[QUESTIONS:])
        (place / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return pairs[:QUESTIONS]


def run_jingu(*arguments: str) -> None:
    """Print and run a jingu command."""
    print(f"\n$ jingu {shlex.join(arguments)}", flush=True)
    subprocess.run([sys.executable, "-m", "jingu", *arguments], check=True)


def accuracy(model: Path, questions: list[tuple[str, str]]) -> float:
    """Return the share of questions that the model answers correctly with greedy decoding."""
    import jingu

    texts = jingu.load(model).generate([question for question, _ in questions], max_tokens=2 * DIGITS)
    return sum(text == answer for text, (_, answer) in zip(texts, questions, strict=True)) / len(questions)


def main(overrides: list[str]) -> None:
    """Run all steps, and print the accuracy on held-out questions before and after learning from rewards."""
    questions = write_rows(PLACE)
    run_jingu("tokenizer", "train", "examples/sort.yaml", "data.text_field=prompt")
    run_jingu("tune", "prepare", "examples/sort.yaml")
    run_jingu("train", "examples/sort.yaml")
    run_jingu("train", "examples/grpo.yaml", *overrides)
    for name in ("sort", "grpo"):
        print(f"{name}: {accuracy(Path('runs') / name, questions):.0%} of {len(questions)} new questions are answered.")


if __name__ == "__main__":
    main(sys.argv[1:])
