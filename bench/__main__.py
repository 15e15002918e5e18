"""`python -m bench [NAME[=ARGUMENT] ...]`: run the benchmarks and bring docs/benchmarks.md up to date.

NAME=tiny shows that one runs, where it has such a size, and leaves the page alone. The benchmarks are:
"""

from __future__ import annotations

import importlib
import platform
import re
import sys
from datetime import UTC, datetime
from pathlib import Path

NAMES = {
    "infer": "Generation with SmolLM2-135M in bf16, prompts of 100 tokens, 2 threads",
    "startup": "Waiting for the first sign of life",
    "train_step": "A training step of a 17M Llama (6 × 384, vocabulary 16,384), sequence 512, batch 4, 2 threads",
    "loop": "The loop beside a bare one around the same model (17M Llama, fp32, not compiled)",
    "convert": "Import and export beside cp: a Hugging Face folder of half a gigabyte (must be 0.5 or more)",
    "pipeline_idle": "Waiting in a pipeline (must: 1f1b 1.05 or less, the two with split backward passes half of it)",
    "offload": "Master weights and optimizer state on disk beside in memory (a Llama of 12 × 1024, 512 tokens a step)",
    "moe": "A mixture of experts (8 of 512, 2 a token, width 384) beside a dense layer of 1024, 8 × 512 tokens",
    "experts": "Experts larger than memory: a quarter of SmolLM2 grown to 8 experts (1.3 GB, 2 a token) resident, bf16",
    "quantised": "Matrices of 8 and 4 bits beside bf16: SmolLM2-135M, one stream on one thread, processor time",
    "precision": "Losses in bf16 and fp16 beside fp32: 200 steps of a real run (4 × 192, 8 × 256 tokens a step)",
    "data": "Data: opening at any size, batches from a warm page cache, building beside `datasets.map`",
    "serve": "The server (SmolLM2-135M): first tokens beside 16 streams, time outside the model, 2 threads",
    "tune": "Fine-tuning a Llama of SmolLM2-135M's shape on instruction rows, 2 threads",
    "checkpoint": "Checkpoints of a model with 300 MB of state (26M Llama with AdamW, fp32), 2 threads",
}
PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"
HEAD = """# Benchmarks

Every table is made by `make bench` (one of them: `python -m bench NAME`), which also writes this page. Ratios come
from one run on one machine, the two sides in turn; absolute figures depend on the machine named under each table.
"""


def machine() -> str:
    """The machine, in a line."""
    import torch

    from jingu.runtime.devices import usable_cores

    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    return (
        f"{usable_cores()} cores of {model} ({torch.backends.cpu.get_cpu_capability()}), "
        f"Python {platform.python_version()}, torch {torch.__version__}, {datetime.now(UTC):%Y-%m-%d}"
    )


def section(name: str, argument: str = "") -> str:
    """Run one benchmark; its part of the page."""
    table = importlib.import_module(f"bench.{name}").run(*[argument] * bool(argument))
    return f"\n## {NAMES[name]}\n\n`python -m bench {name}` · {machine()}\n\n{table}\n"


def main() -> None:
    """Run the benchmarks named on the command line, or all, and replace their sections in the page."""
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(__doc__, *(f"  {name:13}  {what}" for name, what in NAMES.items()), sep="\n")
        return
    wanted = dict(word.partition("=")[::2] for word in sys.argv[1:]) or dict.fromkeys(NAMES, "")
    if unknown := [name for name in wanted if name not in NAMES]:
        sys.exit(f"There is no benchmark {unknown[0]}. There are {', '.join(NAMES)}.")
    text = PAGE.read_text(encoding="utf-8") if PAGE.exists() else HEAD
    for name, argument in wanted.items():
        made = section(name, argument)
        print(made, flush=True)
        if argument == "tiny":
            continue
        pattern = re.compile(rf"\n## {re.escape(NAMES[name])}\n.*?(?=\n## |\Z)", re.DOTALL)
        text = pattern.sub(lambda _match, made=made: made, text) if pattern.search(text) else text + made
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
