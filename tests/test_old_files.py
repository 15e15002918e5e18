"""A tokenizer, a data set and a run that commit 1f8dfc8 wrote, with the names of that time, still open.

tests/fixtures/v0_1f8dfc8 holds them as they were written: a llama of 9,488 parameters after 4 steps, and its
checkpoint. The expected numbers are what 1f8dfc8 itself gave when it continued from there.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file

from jingu.cli import main
from jingu.config.load import load_stored_config
from jingu.data.build import build
from jingu.data.dataset import open_dataset
from jingu.errors import JinguError
from jingu.text.tokenizer import Tokenizer

FIXTURE = Path(__file__).parent / "fixtures" / "v0_1f8dfc8"
RUN = Path("runs/tiny")


@pytest.fixture
def old_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the fixture, which is also the working directory: all paths in it are relative."""
    shutil.copytree(FIXTURE, tmp_path / "old")
    monkeypatch.chdir(tmp_path / "old")
    return tmp_path / "old"


@pytest.fixture
def run_file(old_files: Path) -> str:
    """The configuration of the old run as a file with today's keys."""
    config = load_stored_config(RUN / "config.yaml")
    (old_files / "new.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")), encoding="utf-8")
    return "new.yaml"


def metrics(kind: str) -> list[dict[str, Any]]:
    lines = (RUN / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [line for line in map(json.loads, lines) if line["type"] == kind]


def test_the_data_set_opens(old_files: Path) -> None:
    tokenizer = Tokenizer.load(old_files / "tokenizer")
    splits = {"train": (52, 5746), "validation": (12, 1401)}
    for split, (documents, tokens) in splits.items():
        dataset = open_dataset(old_files / "data", split)  # type: ignore[arg-type]
        assert (len(dataset.document_lengths()), dataset.tokens) == (documents, tokens)
        assert dataset.manifest.tokenizer == tokenizer.fingerprint()
        assert dataset.document_origin(0, 0).startswith("corpus/")
        length = int(dataset.document_lengths()[0])
        text = tokenizer.decode(dataset.gather(np.array([0]), length)[0].tolist())
        corpus = [path.read_text(encoding="utf-8") for path in sorted((old_files / "corpus").glob("*.txt"))]
        lines = (old_files / "corpus" / "lines.jsonl").read_text(encoding="utf-8").splitlines()
        assert text in corpus + [json.loads(line)["text"] for line in lines]


def test_building_again_finds_the_old_data_set_and_makes_the_same_bytes(
    run_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tokenizer", "train", run_file]) == main(["data", "build", run_file]) == 0
    out = capsys.readouterr().out
    assert "tokenizer: already trained" in out and "data: already built in data." in out
    assert main(["data", "build", run_file, "data.path=again"]) == 0
    names = {
        "held_out-0": "validation-0",
        "held_out-places-0": "validation-origins-0",
        "train-places-0": "train-origins-0",
    }
    for path in Path("data").glob("*-0*"):
        name = path.name
        for old, new in names.items():
            name = name.replace(old, new)
        assert (Path("again") / name).read_bytes() == path.read_bytes()
    config = load_stored_config(RUN / "config.yaml")
    changed = config.data.model_copy(update={"validation_fraction": 0.3})
    with pytest.raises(JinguError, match=r"validation_fraction was 0\.2 and is now 0\.3"):
        build(config.model_copy(update={"data": changed}))


def test_the_run_resumes_to_more_steps(run_file: str, peak: None) -> None:
    # A constant rate: the decays of 1f8dfc8 end one step earlier.
    overrides = ["train.steps=6", "schedule={type: constant, warmup: 2}"]
    assert main(["train", run_file, *overrides, "--allow", "train.steps", "--allow", "schedule.type"]) == 0
    assert metrics("start")[-1]["resumed_from"] == 4
    losses = [line["loss"] for line in metrics("train")]
    assert losses[4:] == pytest.approx([5.539184331893921, 5.4190404415130615], rel=1e-5)
    assert metrics("evaluation")[-1]["loss"] == pytest.approx(5.194708813947069, rel=1e-5)
    assert [path.name for path in (RUN / "checkpoints").iterdir()] == ["step-00000006"]


def test_verbs_read_the_run(old_files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "list", str(RUN)]) == 0
    assert re.search(r"step-00000004 .* complete", capsys.readouterr().out)
    assert main(["checkpoint", "verify", str(RUN)]) == 0
    assert "step-00000004: good" in capsys.readouterr().out
    # In fp64 no CPU rounds differently enough to choose another token.
    assert main(["generate", str(RUN), "The model", "--max-tokens", "12", "--precision", "fp64"]) == 0
    assert capsys.readouterr().out == "The model" + "\ufffd" * 7 + "99999\n"
    assert main(["report", str(RUN)]) == 0
    assert (RUN / "report.html").stat().st_size > 10_000
    assert main(["data", "inspect", "data"]) == 0
    assert "every file matches its checksum" in capsys.readouterr().out


def test_the_model_is_exported(old_files: Path) -> None:
    assert main(["export", str(RUN), "--to", "exported"]) == 0
    config = json.loads(Path("exported/config.json").read_text(encoding="utf-8"))
    assert (config["model_type"], config["hidden_size"], config["num_key_value_heads"]) == ("llama", 16, 1)
    exported = load_file("exported/model.safetensors")
    [shard] = (RUN / "checkpoints").glob("step-00000004/*.safetensors")
    stored = {name: array for name, array in load_file(shard).items() if name.startswith("model/")}
    assert sum(array.size for array in exported.values()) == sum(array.size for array in stored.values()) == 9488
    assert sorted(array.tobytes() for array in exported.values()) == sorted(a.tobytes() for a in stored.values())
