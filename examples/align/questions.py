"""Write questions to answer with yes or no, one per line: python examples/align/questions.py build/questions.jsonl"""

from __future__ import annotations

import json
import sys
from pathlib import Path

SUBJECTS = {
    "the sky": ("blue", "green", "wet"),
    "ice": ("cold", "hot", "hard"),
    "fire": ("hot", "cold", "blue"),
    "a car": ("fast", "alive", "round"),
    "a cat": ("alive", "green", "big"),
    "milk": ("white", "black", "sweet"),
    "the sun": ("hot", "small", "yellow"),
    "a stone": ("hard", "soft", "alive"),
}


def write_questions(path: Path) -> None:
    """Write each question as a prompt that the model continues, in JSON Lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = ({"prompt": f"Is {subject} {word}? Yes or no:"} for subject, words in SUBJECTS.items() for word in words)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    write_questions(Path(sys.argv[1]))
