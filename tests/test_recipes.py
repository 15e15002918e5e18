"""The recipes: their headers are the plan's, and their commands run, with a tiny model of the same family."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from jingu.cli import main
from jingu.config.load import load_config
from jingu.config.schema import RunConfig
from jingu.data.build import build
from jingu.text.tokenizer_training import train_tokenizer
from jingu.training.commands import train
from tests.conftest import Done, Library, tiny

ROOT = Path(__file__).parents[1]
RECIPES = sorted(file for file in ROOT.glob("examples/recipes/*.yaml") if "# Machine: " in file.read_text("utf-8"))
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
each_recipe = pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)


@pytest.fixture(scope="module")
def recipes() -> ModuleType:
    spec = importlib.util.spec_from_file_location("recipes_page", ROOT / "docs" / "recipes.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_there_are_twelve() -> None:
    assert len(RECIPES) == 12
    page = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    assert re.findall(r"\(\.\./examples/recipes/(\S+)\)", page) == [file.name for file in RECIPES]


@each_recipe
def test_a_header_says_date_commands_machine_and_plan(file: Path, recipes: ModuleType) -> None:
    header = file.read_text(encoding="utf-8").partition("\nname: ")[0]
    assert re.match(r"# .+ · \d{4}-\d\d-\d\d\n#\n# ", header)
    assert len(commands(file)) >= 2 and all(
        str(file.relative_to(ROOT)) in line or ".py" in line for line in commands(file)
    )
    assert re.search(
        r"\n# Machine: .*\n# Memory: .* a GPU\. Step: .* tokens/s\. Run: .*\n" + f"# {recipes.HONEST}$", header
    )
    config = load_config(file)
    assert config.name == file.stem
    assert config.initialize.from_ in recipes.MODELS or config.initialize.from_ is None


@pytest.mark.slow
def test_headers_are_those_of_the_plan(recipes: ModuleType) -> None:
    for path, content in recipes.write_all().items():
        assert path.read_text(encoding="utf-8") == content, "run: python docs/recipes.py"


def commands(file: Path) -> list[str]:
    """The commands of a header."""
    return re.findall(r"^#     (\S.*)$", file.read_text(encoding="utf-8").partition("\nname: ")[0], re.MULTILINE)


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def message(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Small files in the forms of the recipes' data."""
    folder = tmp_path_factory.mktemp("rows")
    numbers = range(40)
    talks = [[message("user", f"What is {n} + 1?"), message("assistant", f"It is {n + 1}.")] for n in numbers]
    right, wrong = ([*talk[:1], message("assistant", text)] for talk in talks[:1] for text in ("Yes.", "No."))
    return {
        "supervised": write_rows(folder / "talks.jsonl", ({"messages": talk} for talk in talks)),
        "preference": write_rows(
            folder / "pairs.jsonl",
            ({"prompt": talk[:1], "chosen": right[1:], "rejected": wrong[1:]} for talk in talks),
        ),
        "questions": write_rows(
            folder / "questions.jsonl",
            ({"question": f"What is {n} + 1?", "answer": f"Add.\n#### {n + 1}"} for n in numbers),
        ),
    }


@pytest.fixture(scope="module")
def talker(library: Library, tmp_path_factory: pytest.TempPathFactory) -> Library:
    """The text of the tests with a tokenizer that has the special tokens of chats, and its data set."""
    folder = tmp_path_factory.mktemp("talker")
    result = Library(library.text, folder / "tokenizer", folder / "data")
    train_tokenizer(iter(["What is 1 + 1? It is 2. " * 5]), 300, SPECIAL).save(result.tokenizer)
    build(tiny(result, folder / "runs", {}))
    return result


def tiny_model(family: str) -> dict[str, Any]:
    """Settings of a tiny model of a family."""
    sizes = {"num_layers": 4, "hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "intermediate_size": 48}
    return {"family": family, "max_position_embeddings": 256, **sizes}


@pytest.mark.slow
@each_recipe
def test_the_commands_run_with_a_tiny_model(
    file: Path,
    recipes: ModuleType,
    data: dict[str, str],
    talker: Library,
    done: Callable[[RunConfig], Done],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    config = load_config(file)
    tokenizer = tmp_path / "tokenizer"
    overrides = [
        f"runs_dir={tmp_path}/runs",
        f"tokenizer.path={tokenizer}",
        f"data.path={tmp_path}/data",
        "data.validation_fraction=0.2",
        "batch.sequence_length=64",
        "train.steps=2",
        "train.log_every=1",
        "train.compile=false",
        "schedule.warmup=0",
        "precision.type=fp32",
        "device.type=cpu",
        "device.threads=1",
        "parallel.expert=1",
    ]
    kind = config.data.objective.type
    if config.initialize.from_ is None:
        # From scratch: the same family, on the text of the tests.
        overrides += [
            f"data.input={talker.text}",
            "data.suffixes=[.py]",
            "data.num_workers=1",
            "tokenizer.vocab_size=420",
        ]
        if kind != "pretraining" or config.tokenizer.path.startswith("build/"):
            family = "t5" if kind == "span_corruption" else "llama"
            assert main(["tokenizer", "train", str(file), *overrides]) == 0
        else:
            family = recipes.find_preset(config.model.preset).family
            overrides.append(f"tokenizer.path={talker.tokenizer}")
        model = {**dict.fromkeys(config.model.model_fields_set - {"family"}), **tiny_model(family)}
        overrides += [f"model.{key}={'null' if value is None else value}" for key, value in model.items()]
        overrides += ["batch.global_batch_size=4", "batch.micro_batch_size=2", "evaluation.num_sequences=2"]
    else:
        known = recipes.MODELS[config.initialize.from_]
        family = recipes.find_preset(known).family if isinstance(known, str) else known[0]
        changes = {"name": "start", "train.steps": 1, "precision": {"type": "fp32"}, "model": tiny_model(family)}
        start = tiny(talker, tmp_path / "runs", changes)
        assert train(start) == 0
        overrides += [f"initialize.from={done(start).folder}", "data.num_workers=1"]
        overrides.append(f"tokenizer.path={talker.tokenizer}")
        if config.task.type == "grpo":
            prompts = tmp_path / "prompts.jsonl"
            script = [sys.executable, "examples/recipes/gsm8k.py", str(prompts), data["questions"]]
            subprocess.run(script, check=True)
            overrides += [f"task.prompts={prompts}", "task.template=chatml", "task.prompts_per_step=2"]
            overrides += ["task.answers_per_prompt=2", "task.max_new_tokens=8", "batch.sequence_length=128"]
            overrides.append("batch.micro_batch_size=2")
        else:
            overrides += [f"data.input={data[kind]}", "data.suffixes=[.jsonl]", "data.objective.template=chatml"]
            overrides += ["batch.global_batch_size=4", "batch.micro_batch_size=2", "evaluation.num_sequences=2"]
            overrides += ["batch.sequence_length=256"] * (kind == "preference")
    for line in commands(file):
        words = shlex.split(line)
        if words[0] == "jingu" and words[1:3] != ["tokenizer", "train"]:
            assert main([*words[1:], *overrides]) == 0, line
    result = Done(tmp_path / "runs" / config.name)
    assert result.column("step") == [1, 2]
