"""Tune a model with LoRA on instruction data, and compare its answers before and after.

`python examples/tune.py MODEL ROWS [KEY=VALUE ...]`: MODEL is a Hugging Face folder or a GGUF file, and ROWS is a file
of rows (.json or .jsonl). Overrides are passed to jingu's commands. Nothing is downloaded.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
import textwrap
import time
from itertools import zip_longest
from pathlib import Path

CONFIG = "examples/tune.yaml"
PLACE = Path("build/tune")
QUESTIONS = (
    "Give three tips for staying healthy.",
    "Explain why the sky is blue.",
    "Describe a process of making tea.",
)
COLUMN = 56  # characters per column of answers


def run_jingu(*arguments: str) -> None:
    """Print and run a jingu command."""
    print(f"\n$ jingu {shlex.join(arguments)}", flush=True)
    subprocess.run([sys.executable, "-m", "jingu", *arguments], check=True)


def answers(model: Path, tokens: int) -> list[str]:
    """Return a model's answers to the questions, of at most `tokens` tokens each."""
    import jingu

    chat_model = jingu.load(model)
    return [chat_model.chat(question, max_tokens=tokens) for question in QUESTIONS]


def wrap(text: str) -> list[str]:
    """Wrap a text to lines of at most `COLUMN` characters."""
    return [part for line in text.splitlines() for part in textwrap.wrap(line, COLUMN) or [""]]


def side_by_side(left: str, right: str) -> str:
    """Return two texts as two columns."""
    lines = zip_longest(wrap(left), wrap(right), fillvalue="")
    return "\n".join(f"{a:{COLUMN}} │ {b}".rstrip() for a, b in lines)


def main(model: Path, rows: Path, overrides: list[str], tokens: int = 80) -> None:
    """Run all steps and print the answers before and after."""
    from jingu.config.load import load_config

    started = time.perf_counter()
    overrides = [f"data.input={rows}", *overrides]
    config = load_config(Path(CONFIG), overrides)
    base = PLACE / "base"
    run = Path(config.runs_dir) / config.name
    tuned = PLACE / "tuned"
    if not base.exists():
        run_jingu("import", str(model), "--to", str(base))
    run_jingu("tune", "preview", CONFIG, "--rows", "1", *overrides)
    run_jingu("tune", "prepare", CONFIG, *overrides)
    run_jingu("train", CONFIG, *overrides)
    shutil.rmtree(tuned, ignore_errors=True)
    run_jingu("tune", "merge", str(run), "--to", str(tuned))
    for question, before, after in zip(QUESTIONS, answers(base, tokens), answers(tuned, tokens), strict=True):
        print(f"\n{question}\n{'─' * (2 * COLUMN + 3)}")
        print(side_by_side(f"before\n\n{before}", f"after\n\n{after}"))
    print(f"\nDone in {(time.perf_counter() - started) / 60:.1f} minutes. {tuned} is a folder that transformers loads.")


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
