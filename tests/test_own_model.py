"""The guide to a part of your own: its spec and its module, applied as they stand to a copy of jingu, and no more.

The family that uses the part is a table, as in the guide.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from jingu.config.load import dump_yaml
from jingu.model.sharding_table import ShardingStyle
from tests.conftest import MakeRun

ROOT = Path(__file__).parents[1]
GUIDE = (ROOT / "docs" / "guides" / "own-model.md").read_text(encoding="utf-8")
LAYOUTS = ("parallel.zero_stage=3 parallel.shard=2", "parallel.tensor=2", "parallel.pipeline=2 parallel.zero_stage=0")
# Trains and plans a run, and compares its parameters with the table, and generated logits with those of the whole text.
CHECK = """
import sys
from pathlib import Path
import torch
from jingu.cli import main
from jingu.infer.engine import Engine
from jingu.infer.inference_model import load
from jingu.infer.request import Request
from jingu.infer.sampling import SamplingParams
from jingu.model.decoder import parameter_shapes
from jingu.model.parameter_table import parameter_table

assert main(["train", "run.yaml"]) == 0
assert main(["plan", "run.yaml", "--json"]) == 0
loaded = load(Path(sys.argv[1]), "fp32", "cpu")
built = {name: tuple(shape) for name, shape in parameter_shapes(loaded.spec).items()}
assert list(built.items()) == [(name, entry.shape) for name, entry in parameter_table(loaded.spec).items()]
engine = Engine(loaded)
prompt = [5, 17, 80, 3]
engine.submit(Request(tuple(prompt), SamplingParams(), 12))
tokens = []
while engine.busy:
    tokens += [event.token.id for event in engine.step() if event.token is not None]
ids = torch.tensor([prompt + tokens])
with torch.no_grad():
    greedy = loaded.module.logits(loaded.module(ids)).argmax(-1)[0]
assert tokens == greedy[len(prompt) - 1 : -1].tolist()
"""


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of jingu with the two files and the table of the guide."""
    package = tmp_path / "copy" / "jingu"
    shutil.copytree(ROOT / "jingu", package)  # with its bytecode, or each process would compile it again
    spec, module = re.findall(r"^```python\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL)
    (table,) = re.findall(r"^```toml\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL)
    specs = package / "model" / "mixer_specs.py"
    text = specs.read_text(encoding="utf-8")
    union = "StateMixer = GatedDelta | "
    assert text.count(union) == 1
    (name,) = re.findall(r"^class (\w+)", spec, re.MULTILINE)
    specs.write_text(text.replace(union, f"{spec}\n\nStateMixer = {name} | GatedDelta | "), encoding="utf-8")
    (path,) = re.findall(r'module = "jingu\.(.*):', spec)
    file = package / f"{path.replace('.', '/')}.py"
    assert not file.exists()
    file.write_text(module, encoding="utf-8")
    with (package / "model" / "families" / "families.toml").open("a", encoding="utf-8") as families:
        families.write(f"\n{table}")
    return package.parent


def jingu(copy: Path, folder: Path, *words: str) -> str:
    result = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(copy)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture
def folder(tmp_path: Path, tiny_run: MakeRun) -> Path:
    run = tiny_run({"model.family": None, "name": "tiny", "train.steps": 2, "model.num_layers": 4})
    # The copy knows the family; this process does not.
    text = dump_yaml(run).replace("  family: null", "  family: averaging")
    assert "family: averaging" in text
    (tmp_path / "run.yaml").write_text(text, encoding="utf-8")
    return tmp_path


def test_a_part_is_its_spec_and_its_file(copy: Path, folder: Path) -> None:
    jingu(copy, folder, "-c", CHECK, "runs/tiny")


@pytest.mark.slow
def test_the_part_runs_in_every_layout(copy: Path, folder: Path) -> None:
    for layout in LAYOUTS:
        out = jingu(copy, folder, "-m", "jingu", "verify", "run.yaml", "--steps", "2", "--against", *layout.split())
        assert "equal in fp64" in out


def test_every_style_is_documented() -> None:
    cells = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", GUIDE, re.MULTILINE)
    assert {word.strip("` ") for line in cells for word in line.split(",")} == set(get_args(ShardingStyle))
