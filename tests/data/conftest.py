"""A corpus, its tokenizer, and built data sets."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jingu.data.build as build_module
from jingu.config.schema import RunConfig
from jingu.config.sections.data import DataSettings, TokenizerSettings
from jingu.data.build import build
from jingu.text.corpus import plan_units
from jingu.text.tokenizer import Tokenizer
from jingu.text.tokenizer_training import train_tokenizer

MakeConfig = Callable[..., RunConfig]


def corpus_texts(count: int = 60) -> list[str]:
    """Documents of many lengths, some of them duplicates, in English, code and Chinese."""
    random = np.random.default_rng(7)
    words = ["def", "return", " seed", " grow", "\n    ", "春眠", "不觉晓", "🙂", "<|endoftext|>", "x = 1\n"]
    texts = ["".join(random.choice(words, random.integers(1, 80))) for _ in range(count)]
    return texts + texts[:5]


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(iter(corpus_texts()), 300, ["<|endoftext|>"]).save(folder)
    return folder


@pytest.fixture(scope="session")
def corpus_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    texts = corpus_texts()
    for index, text in enumerate(texts[:20]):
        (folder / f"{index:02}.txt").write_text(text, encoding="utf-8")
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in ["", *texts[20:]]]
    (folder / "lines.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return folder


@pytest.fixture
def make_config(tmp_path: Path, tokenizer_folder: Path, corpus_folder: Path) -> MakeConfig:
    """Make the configuration of a run over the corpus; keyword arguments replace settings of `data`."""

    def make(tokenizer: Path = tokenizer_folder, **data: Any) -> RunConfig:
        settings = {
            "input": str(corpus_folder),
            "path": str(tmp_path / "data"),
            "num_workers": 1,
            "validation_fraction": 0.2,
        }
        return RunConfig(tokenizer=TokenizerSettings(path=str(tokenizer)), data=DataSettings(**{**settings, **data}))

    return make


@pytest.fixture
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many units of work from a small corpus."""
    monkeypatch.setattr(build_module, "plan_units", partial(plan_units, unit_bytes=700))
    # However slow the machine is: a build that fails leaves nothing, as if it had only just begun.
    monkeypatch.setattr(build_module, "RESUMABLE_AFTER_SECONDS", math.inf)


@pytest.fixture(scope="session")
def built_folder(tmp_path_factory: pytest.TempPathFactory, tokenizer_folder: Path, corpus_folder: Path) -> Path:
    """A data set of several shards a split."""
    path = tmp_path_factory.mktemp("built") / "data"
    data = DataSettings(
        input=str(corpus_folder), path=str(path), num_workers=1, validation_fraction=0.2, shard_tokens=400
    )
    build(RunConfig(tokenizer=TokenizerSettings(path=str(tokenizer_folder)), data=data))
    return path


@pytest.fixture(scope="session")
def data_tokenizer(tokenizer_folder: Path) -> Tokenizer:
    return Tokenizer.load(tokenizer_folder)
