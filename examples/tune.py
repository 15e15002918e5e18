"""LoRA on instruction rows, from a model on disk to answers before and after, side by side.

`python examples/tune.py MODEL ROWS [KEY=VALUE ...]`: MODEL is a Hugging Face folder or a GGUF file, ROWS a file of rows
(.json or .jsonl); what follows is passed on to jingu's commands. Nothing is downloaded.
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
COLUMN = 56
"""Characters of a column of answers."""


def jingu(*arguments: str) -> None:
    """Run a jingu command, shown as one would type it."""
    print(f"\n$ jingu {shlex.join(arguments)}", flush=True)
    subprocess.run([sys.executable, "-m", "jingu", *arguments], check=True)


def answers(model: Path, tokens: int) -> list[str]:
    """What a model says to the questions, always the likeliest token."""
    from jingu.infer.engine import Engine
    from jingu.infer.load import load
    from jingu.infer.request import Request
    from jingu.infer.sampling import Sampling
    from jingu.tune.rows import Message
    from jingu.tune.supervise import encode
    from jingu.tune.templates import find_template

    engine = Engine(load(model))
    tokenizer = engine.loaded.tokenizer
    template = find_template("auto", tokenizer)
    prompts = [encode(template.prompt((Message("user", question),)), tokenizer)[0] for question in QUESTIONS]
    return engine.run([Request(tuple(prompt), Sampling(0.0), tokens) for prompt in prompts])


def side_by_side(left: str, right: str) -> str:
    """Two texts as columns."""
    columns = [
        [part for line in text.splitlines() for part in textwrap.wrap(line, COLUMN) or [""]] for text in (left, right)
    ]
    return "\n".join(f"{a:{COLUMN}} │ {b}".rstrip() for a, b in zip_longest(*columns, fillvalue=""))


def main(model: Path, rows: Path, overrides: list[str], tokens: int = 80) -> None:
    """All of it, with the time it took."""
    from jingu.config.load import load_config

    started = time.perf_counter()
    overrides = [f"data.input={rows}", *overrides]
    config = load_config(Path(CONFIG), overrides)
    base, run, tuned = PLACE / "base", Path(config.runs) / config.name, PLACE / "tuned"
    if not base.exists():
        jingu("import", str(model), "--to", str(base))
    jingu("tune", "preview", CONFIG, "--rows", "1", *overrides)
    jingu("tune", "prepare", CONFIG, *overrides)
    jingu("train", CONFIG, *overrides)
    shutil.rmtree(tuned, ignore_errors=True)
    jingu("tune", "merge", str(run), "--to", str(tuned))
    for question, before, after in zip(QUESTIONS, answers(base, tokens), answers(tuned, tokens), strict=True):
        print(f"\n{question}\n{'─' * (2 * COLUMN + 3)}")
        print(side_by_side(f"before\n\n{before}", f"after\n\n{after}"))
    print(f"\nDone in {(time.perf_counter() - started) / 60:.1f} minutes. {tuned} is a folder that transformers loads.")


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
