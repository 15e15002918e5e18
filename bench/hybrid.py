"""A hybrid stack compared with a plain one of as many parameters: bits per byte of real runs, with several seeds.

The hybrid is `examples/hybrid.yaml`. The plain stack has attention in all layers, and a feed-forward that makes up for
the parameters of the mixers.
"""

from __future__ import annotations

import json
import tempfile
from math import prod
from pathlib import Path
from statistics import mean, stdev

from bench.children import prepare_data, run_jingu
from jingu.config.load import load_config
from jingu.model.parameter_table import parameter_table
from jingu.model.resolve import spec_from_settings

EXAMPLE = Path(__file__).parents[1] / "examples" / "hybrid.yaml"
SEEDS = (1, 2, 3)
# Overrides of the example for the plain stack; the intermediate size is found.
PLAIN = (
    "model.family=qwen3",
    "model.layer_pattern=null",
    *(f"model.mixer.{name}=null" for name in ("num_heads", "num_key_heads", "key_head_dim", "value_head_dim")),
)


def count_parameters(*overrides: str) -> int:
    """Return the number of parameters of the example's model with these overrides."""
    config = load_config(EXAMPLE, overrides)
    spec = spec_from_settings(config.model, config.tokenizer.vocab_size, config.batch.sequence_length)
    return sum(prod(row.shape) for row in parameter_table(spec).values())


def plain_overrides() -> tuple[str, ...]:
    """Return the overrides of the plain stack whose number of parameters is nearest to the hybrid's."""
    target = count_parameters()
    sizes = [f"model.intermediate_size={size}" for size in range(128, 1024, 8)]
    best = min(sizes, key=lambda size: abs(count_parameters(*PLAIN, size) - target))
    return (*PLAIN, best)


def train(folder: Path, name: str, seed: int, steps: int, *overrides: str) -> tuple[float, float]:
    """Train; return the bits per byte on the validation text, and tokens per second."""
    settings = (f"name={name}-{seed}", f"seed={seed}", f"train.steps={steps}", f"evaluation.every={steps}")
    run_jingu(folder, "train", "run.yaml", *settings, "checkpoint.every=0", *overrides)
    lines = (folder / f"runs/{name}-{seed}/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    rates = [record["tokens_per_second"] for record in records if record["type"] == "train"]
    bits = [record["bits_per_byte"] for record in records if record["type"] == "evaluation"]
    return bits[-1], mean(rates[len(rates) // 2 :])


def run(size: str = "") -> str:
    """Return the table as Markdown; `tiny` trains for a few steps with one seed."""
    from examples.quickstart import collect

    steps, seeds = (4, SEEDS[:1]) if size == "tiny" else (600, SEEDS)
    stacks: dict[str, tuple[str, ...]] = {"hybrid": (), "plain": plain_overrides()}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        collect(folder / "build/quickstart/text")
        prepare_data(folder, EXAMPLE.read_text(encoding="utf-8"))
        results: dict[str, list[tuple[float, float]]] = {name: [] for name in stacks}
        for seed in seeds:
            for stack, overrides in stacks.items():
                results[stack].append(train(folder, stack, seed, steps, *overrides))
    lines = ["| stack | parameters | bits per byte (each seed) | mean ± standard deviation | tokens/s |"]
    lines.append("|---|---|---|---|---|")
    for stack, overrides in stacks.items():
        bits, rates = zip(*results[stack], strict=True)
        spread = f" ± {stdev(bits):.4f}" if len(bits) > 1 else ""
        each = ", ".join(f"{value:.4f}" for value in bits)
        parameters = f"{count_parameters(*overrides):,}"
        lines.append(f"| {stack} | {parameters} | {each} | {mean(bits):.4f}{spread} | {mean(rates):,.0f} |")
    return "\n".join(lines)
