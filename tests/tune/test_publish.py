"""From names on a hub to a repository there: tuning, a base that moves on, and uploads with a model card."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import transformers
import yaml

from jingu.text.tokenizer_training import train_tokenizer
from tests.hub_server import Files, Hub, serve_hub

BASE = "org/base"
CONFIG = """
name: mine
runs_dir: {folder}/runs
initialize: {{from: org/base}}
tokenizer: {{path: org/base}}
data:
  input: org/rows:train
  path: {folder}/data
  objective: {{type: supervised, template: plain}}
tune: {{type: lora, rank: 2, alpha: 4}}
batch: {{sequence_length: 64, global_batch_size: 2}}
train: {{steps: 2}}
"""


def read_files(folder: Path) -> Files:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def write_base(folder: Path, seed: int) -> Files:
    transformers.set_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=300, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=64, eos_token_id=0,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    train_tokenizer(iter(["red blue green it is " * 9]), 300, ["<|endoftext|>"]).save(folder)
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n\n# A base\n")
    return read_files(folder)


@dataclass
class Place:
    """A hub, its cache, and a run that was tuned from names on the hub."""

    hub: Hub
    folder: Path

    @property
    def run(self) -> Path:
        return self.folder / "runs" / "mine"

    def jingu(self, *words: str, **variables: str) -> CompletedProcess[str]:
        return self.hub.start([sys.executable, "-m", "jingu", *words], self.folder / "cache", **variables)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("place")
    rows = [{"prompt": f"red {number}", "completion": "blue"} for number in range(8)]
    with serve_hub() as hub:
        hub.add(BASE, write_base(folder / "base", 1))
        hub.add("org/rows", {"train.jsonl": "".join(f"{json.dumps(row)}\n" for row in rows).encode()}, "datasets")
        place = Place(hub, folder)
        (folder / "run.yaml").write_text(CONFIG.format(folder=folder))
        for command in (["tune", "prepare"], ["train"]):
            process = place.jingu(*command, str(folder / "run.yaml"))
            assert process.returncode == 0, process.stderr
        yield place


@pytest.mark.slow
def test_adapters_keep_the_commit_of_their_base(place: Place) -> None:
    commit = place.hub.repositories[f"models/{BASE}"].tags["main"]
    record = json.loads((place.run / "provenance.json").read_text())
    assert record["initial"]["model"] == f"{BASE}@{commit}"
    before = place.jingu("generate", str(place.run), "red", "--max-tokens", "4", "--temperature", "0")
    assert before.returncode == 0, before.stderr
    # The base moves on, and the cache is lost.
    place.hub.repositories[f"models/{BASE}"].commit(write_base(place.folder / "other", 2))
    shutil.rmtree(place.folder / "cache")
    after = place.jingu("generate", str(place.run), "red", "--max-tokens", "4", "--temperature", "0")
    assert after.returncode == 0, after.stderr
    assert after.stdout == before.stdout
    assert any(f"/resolve/{commit}/model.safetensors" in request for request in place.hub.requests)


@pytest.mark.slow
def test_an_upload_is_private_and_has_a_card(place: Place) -> None:
    metric = {"value": 0.5, "stderr": 0.1, "interval_low": 0.3, "interval_high": 0.7, "size": 25}
    results = {"task": "colors", "model": {"precision": "fp32"}, "results": {"acc,none": metric}}
    (place.run / "evaluations").mkdir(exist_ok=True)
    (place.run / "evaluations" / "colors.json").write_text(json.dumps(results))
    pushed = place.jingu("export", str(place.run), "--push", "me/mine", HF_TOKEN="secret")
    assert pushed.returncode == 0, pushed.stderr
    repository = place.hub.repositories["models/me/mine"]
    assert repository.is_private
    files = repository.commits[repository.tags["main"]]
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= files.keys()
    _, header, text = files["README.md"].decode().split("---\n", maxsplit=2)
    metadata = yaml.safe_load(header)
    assert metadata["base_model"] == BASE and metadata["license"] == "apache-2.0"
    assert metadata["datasets"] == ["org/rows"] and "jingu" in metadata["tags"]
    assert "| colors | acc | 0.5000 | 0.3000 to 0.7000 | fp32 |" in text
    assert "| steps | 2 |" in text and "jingu chat me/mine" in text
    # Again: not without a question.
    again = place.jingu("export", str(place.run), "--push", "me/mine", HF_TOKEN="secret")
    assert again.returncode == 2 and "add --yes" in again.stderr.lower()
    assert place.jingu("export", str(place.run), "--push", "me/mine", "--yes", HF_TOKEN="secret").returncode == 0
    # The adapters alone, which name their base on the hub.
    adapters = place.jingu("tune", "export", str(place.run), "--push", "me/adapters", "--public", HF_TOKEN="secret")
    assert adapters.returncode == 0, adapters.stderr
    uploaded = place.hub.repositories["models/me/adapters"]
    assert not uploaded.is_private
    config = json.loads(uploaded.commits[uploaded.tags["main"]]["adapter_config.json"])
    commit = next(iter(place.hub.repositories[f"models/{BASE}"].commits))
    assert (config["base_model_name_or_path"], config["revision"]) == (BASE, commit)
    assert "library_name: peft" in uploaded.commits[uploaded.tags["main"]]["README.md"].decode()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "an export needs a place. Set --to FOLDER, --push ORG/NAME, or both."),
        (["--push", "mine"], "this is not the name of a repository. Write ORG/NAME."),
        (["--push", "a/b/c"], "this is not the name of a repository."),
    ],
)
def test_wrong_places(words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from jingu.cli import main

    assert main(["export", str(tmp_path), *words]) == 2
    assert message in capsys.readouterr().err
