"""The quickstart: collect text that every machine has, then run jingu's commands on it.

The text is the source code of the Python standard library. Arguments are passed to `jingu train` as overrides, for
example `make quickstart ARGUMENTS="name=short train.steps=50"`.
"""

from __future__ import annotations

import gzip
import json
import lzma
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

CONFIG = "examples/quickstart.yaml"
PLACE = Path("build/quickstart")


def collect(folder: Path) -> None:
    """Copy the modules of the standard library to `folder`, without its tests, which many systems lack."""
    if folder.exists():
        return
    library = Path(sysconfig.get_paths()["stdlib"])
    partial = folder.with_name(".text.partial")
    shutil.rmtree(partial, ignore_errors=True)
    count = 0
    size = 0
    for file in sorted(library.rglob("*.py")):
        parts = file.relative_to(library).parts
        if {"site-packages", "dist-packages", "test", "tests", "idle_test"} & set(parts):
            continue
        target = partial.joinpath(*parts)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)
        count += 1
        size += file.stat().st_size
    partial.replace(folder)
    print(f"{count} files of the Python standard library, {size / 1e6:.1f} MB")


def run_jingu(*arguments: str) -> None:
    """Print and run a jingu command."""
    print(f"\n$ jingu {shlex.join(arguments)}", flush=True)
    child = subprocess.Popen([sys.executable, "-m", "jingu", *arguments])
    while child.poll() is None:
        try:
            child.wait()
        except KeyboardInterrupt:
            continue  # the child also receives Ctrl-C: it saves a checkpoint and exits
    if child.returncode:
        raise SystemExit(child.returncode)


def compressors() -> dict[str, float]:
    """Return the bits per byte of gzip -9 and xz -9 on the validation text, on which the model was evaluated."""
    import numpy as np

    from jingu.data.dataset import open_dataset
    from jingu.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(PLACE / "tokenizer")
    validation = open_dataset(PLACE / "data", "validation")
    text = tokenizer.decode(validation.gather(np.array([0]), validation.tokens)[0].tolist()).encode()
    compressed = {"gzip -9": gzip.compress(text, 9), "xz -9": lzma.compress(text, preset=9)}
    return {name: 8 * len(data) / len(text) for name, data in compressed.items()}


def compare(run: Path) -> tuple[dict[str, float], int]:
    """Return the bits per byte of the model and of the compressors, and the number of evaluated bytes.

    Also add the results of the compressors to the metrics of the run, so that its report shows them.
    """
    metrics = run / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").split("\n") if line]
    final = [line for line in lines if line["type"] == "evaluation"][-1]
    baselines = compressors()
    if not any(line["type"] == "baseline" for line in lines):
        with metrics.open("a", encoding="utf-8") as file:
            for name, bits in baselines.items():
                file.write(json.dumps({"type": "baseline", "step": 0, "name": name, "bits_per_byte": bits}) + "\n")
    return {"your model": final["bits_per_byte"], **baselines}, final["bytes"]


def main() -> None:
    """Run all steps and print the results."""
    from jingu.config.load import load_config

    started = time.perf_counter()
    overrides = sys.argv[1:]
    config = load_config(Path(CONFIG), overrides)
    run = Path(config.runs_dir) / config.name
    PLACE.mkdir(parents=True, exist_ok=True)
    collect(PLACE / "text")
    run_jingu("tokenizer", "train", CONFIG)
    run_jingu("data", "build", CONFIG)
    run_jingu("train", CONFIG, *overrides)
    bits, size = compare(run)
    for prompt in ("import os\n\ndef ", "class Stack:\n    def ", "def read_file(path):\n"):
        run_jingu("generate", str(run), prompt, "--max-tokens", "60", "--temperature", "0.6", "--seed", "1")
    exported = PLACE / "exported"
    shutil.rmtree(exported, ignore_errors=True)
    run_jingu("export", str(run), "--to", str(exported))
    run_jingu("report", str(run))
    print(f"\nBits per byte of the {size:,} validation bytes:")
    for name, value in sorted(bits.items(), key=lambda item: item[1]):
        print(f"  {name:12} {value:.3f}")
    print(f"Done in {(time.perf_counter() - started) / 60:.1f} minutes. {run}/report.html shows the details.")


if __name__ == "__main__":
    main()
