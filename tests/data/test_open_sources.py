"""A run's sources: short form, several sources, errors, and how much of each is used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jingu.config.schema import RunConfig
from jingu.data.build import build
from jingu.data.open_sources import count_epochs, open_sources
from jingu.errors import JinguError
from jingu.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, tokenizer_folder: Path, corpus_folder: Path) -> Path:
    """Two data sets, built as two sources: `en` of the text files, `zh` of the lines."""
    place = tmp_path_factory.mktemp("sources")
    sources = [
        {"path": str(place / "en"), "input": str(corpus_folder / "*.txt")},
        {"path": str(place / "zh"), "input": [str(corpus_folder / "lines.jsonl")]},
    ]
    data = {"sources": sources, "num_workers": 1, "validation_fraction": 0.2}
    build(RunConfig.model_validate({"tokenizer": {"path": str(tokenizer_folder)}, "data": data}))
    return place


@pytest.fixture
def opened(folders: Path, tokenizer_folder: Path, data_tokenizer: Tokenizer) -> Any:
    def make(
        steps: int = 10, weights: tuple[float, float] = (1.0, 1.0), epochs: Any = (None, None), **data: Any
    ) -> Any:
        sources = [
            {"path": str(folders / name), "weight": weight, "max_epochs": cap}
            for name, weight, cap in zip(("en", "zh"), weights, epochs, strict=True)
        ]
        config = RunConfig.model_validate(
            {
                "data": {"sources": sources, **data},
                "batch": {"sequence_length": 16, "global_batch_size": 4},
                "train": {"steps": steps},
            }
        )
        return config, open_sources(config, data_tokenizer)

    return make


def test_shares_and_epochs(opened: Any) -> None:
    config, source = opened(steps=100, weights=(3.0, 1.0))
    (first, share, epochs), (second, *_) = count_epochs(config, source)
    assert (first, second) == ("en", "zh")
    assert share == 0.75 and epochs == 300 / len(source.sources[0])
    assert source.sources[0].seed != source.sources[1].seed


def test_temperature_is_over_sizes(opened: Any) -> None:
    for temperature, power in ((1.0, 1.0), (2.0, 0.5), (1e9, 0.0)):
        _, source = opened(temperature=temperature)
        sizes = [len(windows) ** power for windows in source.sources]
        shares = source.mixture.segments[0].shares
        assert shares[0] / sum(shares) == pytest.approx(sizes[0] / sum(sizes), abs=1e-4)


def test_stages_start_at_their_steps(opened: Any) -> None:
    _, source = opened(
        steps=9, stages=[{"start_step": 0, "weights": [0.0, 1.0]}, {"start_step": 5, "weights": [1.0, 1.0]}]
    )
    assert [set(source.locate(step)[0].tolist()) for step in (0, 4, 5, 8)] == [{1}, {1}, {0, 1}, {0, 1}]
    _, source = opened(steps=9, weights=(1.0, 0.0), stages=[{"start_step": 5, "weights": [0.0, 1.0]}])
    assert [set(source.locate(step)[0].tolist()) for step in (0, 4, 5)] == [{0}, {0}, {1}]


def test_a_source_that_reaches_its_cap_leaves_the_rest_to_the_others(opened: Any) -> None:
    _, source = opened(steps=1000, epochs=(1.5, None))
    assert source.mixture.counts(4000)[0] == -(-3 * len(source.sources[0]) // 2)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"epochs": (1, 0.5), "steps": 10**6}, "data.sources: every source reaches its maximum of epochs at step "),
        ({"weights": (0.0, 0.0)}, "data: every weight of the stage from step 0 is 0."),
        (
            {"stages": [{"start_step": 3, "weights": [1.0]}]},
            "data.stages: the stage from step 3 has 1 weight for 2 sources. Give one weight for each of data.sources, "
            "in their order; 0 leaves a source out.",
        ),
        (
            {"stages": [{"start_step": 3, "weights": [1.0, 1.0]}, {"start_step": 3, "weights": [1.0, 1.0]}]},
            "data.stages: each stage must start at a later step than the one before.",
        ),
        (
            {"path": "elsewhere"},
            "data: data.sources is set, and so is data.input or data.path. Make the one corpus another of data.s",
        ),
    ],
)
def test_incompatible_settings_are_explained(opened: Any, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(JinguError) as caught:
        opened(**changes)
    assert str(caught.value).startswith(words)


def test_two_sources_in_one_folder_are_refused() -> None:
    config = RunConfig.model_validate({"data": {"sources": [{"path": "x"}, {"path": "x"}]}})
    with pytest.raises(JinguError, match=r"data\.sources: two sources have the same path, x\."):
        build(config)
