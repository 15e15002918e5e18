"""Plan the recipes of examples/recipes: `python docs/recipes.py` writes their headers, and the page recipes.md.

A header has a title with a date, commands, and a line `# Machine: NAME, [N nodes of] M GPUs`. The lines after it are
those of the plan. Nothing is downloaded: a model on the hub is planned from the sizes that are known here.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from jingu.config.load import load_config
from jingu.config.schema import RunConfig
from jingu.formatting import format_bytes
from jingu.model.families import FAMILIES
from jingu.model.resolve import find_preset

ROOT = Path(__file__).resolve().parents[1]
RECIPES = ROOT / "examples" / "recipes"
PAGE = ROOT / "docs" / "recipes.md"
# What the models on the hub are: a preset, or a family and the keys of its config.
MODELS: dict[str, str | tuple[str, dict[str, Any]]] = {
    "Qwen/Qwen3-0.6B": "qwen3-0.6b",
    "Qwen/Qwen3-1.7B": "qwen3-1.7b",
    "Qwen/Qwen3-4B": "qwen3-4b",
    "Qwen/Qwen3.5-4B": (
        "qwen3_5_text",
        {"vocab_size": 248320, "hidden_size": 2560, "intermediate_size": 9216, "num_hidden_layers": 32}
        | {"num_attention_heads": 16, "num_key_value_heads": 4, "linear_num_value_heads": 32}
        | {"max_position_embeddings": 262144, "tie_word_embeddings": True, "mtp_num_hidden_layers": 0},
    ),
    "meta-llama/Llama-3.1-8B": "llama-3.1-8b",
    "meta-llama/Llama-3.2-1B-Instruct": "llama-3.2-1b",
    "google/gemma-3-1b-it": "gemma-3-1b",
    "openai/gpt-oss-20b": "gpt-oss-20b",
    "zai-org/GLM-4.5-Air": "glm-4.5-air",
}
REVISION = "0" * 40
HONEST = "Planned, not measured: no recipe has run on such hardware yet."
OPENING = f"""\
# Recipes

Runs of real models on real cards, to start from. Each file is complete; `jingu example recipes/NAME` writes it. Its
header has the commands, and what `jingu plan` says of memory and time.

**{HONEST}** A test runs each file with a tiny model of the same family, and another compares
the headers with the plan. If you have run one, tell us what it took.

`python docs/recipes.py` plans all of them again, and writes the headers and this page.

| recipe | date | machine | memory of a GPU | a step | tokens per second | the run |
|---|---|---|---|---|---|---|
"""


def recipe_files() -> list[Path]:
    """Return the recipes: the files beside which there is a machine to plan for."""
    return [file for file in sorted(RECIPES.glob("*.yaml")) if "\n# Machine: " in file.read_text(encoding="utf-8")]


def write_models(folder: Path) -> None:
    """Write the configs of all models on the hub into a folder, as the hub's library caches them."""
    for name, known in MODELS.items():
        if isinstance(known, str):
            spec = find_preset(known)
            family = FAMILIES[spec.family]
        else:
            family = FAMILIES[known[0]]
            spec = family.spec_from_hf(family.complete(known[1], is_part=True))
        repository = folder / f"models--{name.replace('/', '--')}"
        snapshot = repository / "snapshots" / REVISION
        snapshot.mkdir(parents=True)
        (snapshot / "config.json").write_text(json.dumps(family.hf_config(spec)), encoding="utf-8")
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text(REVISION, encoding="utf-8")


def plan_recipe(file: Path, cache: Path) -> dict[str, Any]:
    """Return the plan of a recipe, as `jingu plan --json` prints it.

    Args:
        cache: the hub's cache.
    """
    machine, nodes, gpus = read_machine(file.read_text(encoding="utf-8"))
    words = ["plan", str(file), "--on", machine, "--nodes", nodes, "--gpus", gpus, "--json"]
    environment = {**os.environ, "HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "jingu", *words]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if result.returncode:
        raise SystemExit(f"{file.name} does not fit: {result.stdout[-2000:]}{result.stderr}")
    plan: dict[str, Any] = json.loads(result.stdout)
    unknown = [words for words in plan["assumptions"] if "does not exist" in words]
    if unknown:
        raise SystemExit(f"{file.name}: {unknown}")
    return plan


def read_machine(text: str) -> tuple[str, str, str]:
    """Return the machine of a header, its nodes, and the GPUs of a node."""
    match = re.search(r"^# Machine: (\S+), (?:(\d+) nodes of )?(\d+) GPUs?$", text, re.MULTILINE)
    assert match is not None
    name = match[1] if not match[1].endswith(".yaml") else str(ROOT / match[1])
    return name, match[2] or "1", match[3]


def describe(config: RunConfig, plan: dict[str, Any]) -> tuple[str, str, str, str]:
    """Return memory, the time of a step, tokens per second, and the time of the run in words."""
    memory = f"{format_bytes(plan['memory_total'])} of {format_bytes(plan['memory_usable'])}"
    seconds = plan["step_seconds"]
    hours = seconds * config.train.steps / 3600
    length = (
        f"{hours * 60:.0f} minutes" if hours < 2 else f"{hours:.0f} hours" if hours < 72 else f"{hours / 24:.0f} days"
    )
    tokens = f"{float(format(plan['tokens_per_second'], '.2g')):,.0f}"
    return memory, f"{seconds:.2g} s", tokens, f"{config.train.steps:,} steps in {length}"


def write_header(text: str, words: tuple[str, str, str, str]) -> str:
    """Return the text of a recipe with the plan after its machine."""
    memory, step, tokens, run = words
    plan = f"# Memory: {memory} a GPU. Step: {step}, {tokens} tokens/s. Run: {run}.\n# {HONEST}\n"
    return re.sub(r"^(# Machine: .*\n)(?:# .*\n)*", lambda match: match[1] + plan, text, count=1, flags=re.MULTILINE)


def write_all() -> dict[Path, str]:
    """Return the contents of all recipes and of the page, by file."""
    rows = []
    contents = {}
    with tempfile.TemporaryDirectory() as folder:
        write_models(Path(folder))
        plans = {file: plan_recipe(file, Path(folder)) for file in recipe_files()}
    for file, plan in plans.items():
        text = file.read_text(encoding="utf-8")
        words = describe(load_config(file), plan)
        contents[file] = write_header(text, words)
        title, _, date = text.partition("\n")[0].removeprefix("# ").rpartition(" · ")
        machine = re.findall(r"^# Machine: (.*)$", text, re.MULTILINE)[0].replace(
            "examples/recipes/gpu-8gb.yaml", "8 GB"
        )
        link = f"[{title}](../examples/recipes/{file.name})"
        # A date that no line breaks.
        date = date.replace("-", "\N{NON-BREAKING HYPHEN}")
        rows.append(f"| {link} | {date} | {machine} | {' | '.join(words)} |")
    return {**contents, PAGE: OPENING + "\n".join(rows) + "\n"}


if __name__ == "__main__":
    for path, content in write_all().items():
        path.write_text(content, encoding="utf-8")
