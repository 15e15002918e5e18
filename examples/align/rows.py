"""Write rows for examples/align/preferences.yaml: `python examples/align/rows.py [FOLDER]`.

The task is to count. `sft.jsonl` has answers that count up and answers that count down, for the same questions;
`pairs.jsonl` prefers those that count up.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path


def write_rows(folder: Path) -> None:
    """Write both files."""
    folder.mkdir(parents=True, exist_ok=True)
    pick = random.Random(1)
    tuning = []
    pairs = []
    for _ in range(2000):
        start = pick.randrange(10, 80)
        numbers = [str(number) for number in range(start, start + pick.randrange(3, 6))]
        prompt = f"Count from {numbers[0]} to {numbers[-1]}."
        up = " ".join(numbers)
        down = " ".join(reversed(numbers))
        tuning.append({"instruction": prompt, "output": pick.choice([up, down])})
        pairs.append({"prompt": [{"role": "user", "content": prompt}], "chosen": up, "rejected": down})
    for name, rows in (("sft.jsonl", tuning), ("pairs.jsonl", pairs)):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    write_rows(Path(sys.argv[1] if len(sys.argv) > 1 else "build/align"))
