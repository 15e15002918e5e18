"""Run jingu and modules of this package in child processes, and prepare their data."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
# Beginning of the configuration of a run on little text.
LITTLE_DATA = """
tokenizer: {path: tokenizer, vocab_size: 512}
data: {input: text, path: data}
evaluation: {every: 0}
"""


def run_jingu(folder: Path, *words: str) -> None:
    """Run `jingu WORDS...` in a folder."""
    subprocess.run([sys.executable, "-m", "jingu", *words], cwd=folder, check=True, capture_output=True)


def prepare_data(folder: Path, config: str) -> None:
    """Write run.yaml to `folder`, train the tokenizer and build the data set.

    If the folder has no text yet, the source of a Python module becomes the text.
    """
    if not (folder / "text").exists():
        (folder / "text").mkdir()
        for number in range(20):
            text = Path(json.__file__).read_text(encoding="utf-8") + str(number)
            (folder / "text" / f"{number}.txt").write_text(text, encoding="utf-8")
    (folder / "run.yaml").write_text(config, encoding="utf-8")
    run_jingu(folder, "tokenizer", "train", "run.yaml")
    run_jingu(folder, "data", "build", "run.yaml")


def measure_in_child(module: str, *arguments: object) -> Any:
    """Run a module of this package with arguments; return the JSON value of the last line that it prints."""
    command = [sys.executable, "-m", f"bench.{module}", *map(str, arguments)]
    process = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{process.stderr[-3000:]}")
    return json.loads(process.stdout.splitlines()[-1])
