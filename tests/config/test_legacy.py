"""Files of older versions still open: a run, its checkpoint, its tokenizer and its data set, stored with old keys."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch

import jingu
from jingu.checkpoint.commands import verify
from jingu.config.introspect import all_keys
from jingu.config.legacy import migrate_config, migrate_spec, renamed_key
from jingu.config.load import load_config, load_stored_config
from jingu.config.schema import RunConfig
from jingu.data.build import build
from jingu.errors import JinguError
from jingu.infer.inference_model import load as load_model
from jingu.infer.sampling import SamplingParams, token_probs
from jingu.model.decoder import Decoder
from jingu.model.inputs import Inputs
from jingu.model.spec import ModelSpec
from jingu.text.tokenizer_commands import train as train_tokenizer
from jingu.training.commands import train
from jingu.training.run import ResumeOptions

ARCHIVE = Path(__file__).parents[1] / "stored" / "old_keys.tar.xz"
"""Made by commit 1f8dfc8 of jingu: `jingu tokenizer train`, `jingu data build` and `jingu train` on its run.yaml."""


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def rows_of(kind: str) -> list[dict[str, Any]]:
    lines = Path("runs/tiny/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [row for row in map(json.loads, lines) if row["type"] == kind]


def test_a_stored_run_generates_what_it_did(stored: Path) -> None:
    sample = rows_of("sample")[-1]
    model = load_model(Path("runs/tiny"), "fp32", "cpu")
    assert isinstance(model.module, Decoder)
    # As samples were drawn during training: by an exponential time for each token.
    params = SamplingParams(temperature=0.7, top_p=0.9)
    generator = torch.Generator().manual_seed(3)
    prompt = model.tokenizer.encode(sample["prompt"])
    ids = list(prompt)
    for _ in range(4):
        with torch.no_grad():
            logits_BTV = model.module.logits(model.module(Inputs(torch.tensor([ids]))))
        (probs_V,) = token_probs(logits_BTV[:, -1], [params])
        times_V = torch.rand(len(probs_V), dtype=torch.float64, generator=generator).log().neg()
        ids.append(int((probs_V / times_V).argmax()))
    assert model.tokenizer.decode(ids[len(prompt) :]) == sample["text"]
    verify(Path("runs/tiny"))


def test_a_stored_run_resumes(stored: Path) -> None:
    config = load_stored_config(Path("runs/tiny/config.yaml"))
    assert (config.model.hidden_size, config.data.validation_fraction, config.checkpoint.keep_last) == (16, 0.2, 1)
    longer = load_config_of(config, "schedule.type=constant", "train.steps=6")
    assert train(longer, resume_options=ResumeOptions(["schedule", "train.steps"])) == 0
    assert [row["step"] for row in rows_of("train")] == [1, 2, 3, 4, 5, 6]


def load_config_of(config: RunConfig, *overrides: str) -> RunConfig:
    from jingu.config.load import config_from_tree

    return config_from_tree(config.model_dump(), overrides)


def test_stored_tokenizer_and_data_set_are_used_again(stored: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = load_stored_config(Path("runs/tiny/config.yaml"))
    train_tokenizer(config)
    build(config)
    out = capsys.readouterr().out
    assert "tokenizer: already trained in tokenizer" in out
    assert "data: already built in data" in out
    splits = [jingu.Dataset("data", split) for split in ("train", "validation")]
    assert min(len(split) for split in splits) > 0


def test_a_user_s_file_with_old_keys_is_an_error(stored: Path) -> None:
    with pytest.raises(JinguError) as error:
        load_config(Path("run.yaml"))
    assert "- run.yaml:3: runs was renamed. Write runs_dir." in str(error.value)
    assert "- run.yaml:15: model.width was renamed. Write model.hidden_size." in str(error.value)


def test_migrating_a_new_file_changes_nothing() -> None:
    tree = RunConfig().model_dump()
    assert migrate_config(tree) == tree
    spec = json.loads(ModelSpec.from_json(Path(ARCHIVE).parent.joinpath("model.json").read_bytes()).to_json())
    assert migrate_spec(spec) == spec


def test_no_old_key_is_in_use() -> None:
    for key in all_keys():
        assert renamed_key(tuple(key.split("."))) is None, key


def test_the_type_of_a_section_decides() -> None:
    def rates(kind: str) -> dict[str, Any]:
        return migrate_config({"data": {"objective": {"type": kind, "rate": 0.3}}})["data"]["objective"]

    assert rates("span_corruption") == {"type": "span_corruption", "noise_density": 0.3}
    assert rates("fill_in_the_middle") == {"type": "fill_in_the_middle", "rate": 0.3}
    old = {"optimizer": {"groups": [{"match": "*", "rate": 2.0}]}, "schedule": {"type": "noam"}}
    new = {"optimizer": {"param_groups": [{"match": "*", "lr_multiplier": 2.0}]}, "schedule": {"type": "inverse_sqrt"}}
    assert migrate_config(old) == new
