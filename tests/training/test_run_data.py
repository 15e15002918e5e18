"""Runs over mixed, packed, filled and shortened data train, stop, resume, and end as one that was never stopped."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from jingu.errors import JinguError
from jingu.training.commands import train

FORMS: dict[str, dict[str, Any]] = {
    "packed": {"data.packing": "best_fit", "data.document_mask": True},
    "apart": {"data.document_mask": True, "data.order": {"type": "blocks", "block_tokens": 700, "open_blocks": 2}},
    "lazy": {"data.reader": "lazy"},
}


@pytest.fixture(autouse=True)
def quick(peak: None) -> None:
    """No run here measures the machine."""


@pytest.mark.parametrize("form", FORMS)
def test_it_trains_and_resumes(form: str, tiny_run: Any, done: Any) -> None:
    changes = {
        **FORMS[form],
        "train.steps": 6,
        "checkpoint.every": 3,
        "evaluation.every": 6,
        "evaluation.num_sequences": 2,
    }
    whole, parts = tiny_run(changes, name="whole"), tiny_run(changes, name="parts")
    assert train(whole) == 0
    assert train(parts) == 0
    shutil.rmtree(done(parts).folder / "checkpoints" / "step-00000006")
    assert train(parts) == 0
    assert done(parts).column("resumed_from", "start") == [None, 3]
    found = done(parts).tensors()
    for name, tensor in done(whole).tensors().items():
        assert torch.equal(found[name], tensor), name
    losses = done(whole).column("loss")
    assert losses[-1] < losses[0]


def test_a_mixture_copied_to_a_local_disk(tiny_run: Any, done: Any, library: Any, tmp_path: Path) -> None:
    (tmp_path / "again").symlink_to(library.data, target_is_directory=True)
    sources = [{"path": str(library.data), "weight": 2.0}, {"path": str(tmp_path / "again"), "max_epochs": 1.0}]
    changes = {
        "data": {"sources": sources, "local_cache": str(tmp_path / "fast"), "validation_fraction": 0.2},
        "train.steps": 4,
    }
    config = tiny_run({**changes, "evaluation.every": 4, "evaluation.num_sequences": 2})
    assert train(config) == 0
    assert len(done(config).column("bits_per_byte", "evaluation")) == 1
    assert list((tmp_path / "fast").iterdir())


def test_resuming_without_a_document(tiny_run: Any, done: Any, library: Any, tmp_path: Path) -> None:
    """From a checkpoint before the step it resumes; from a later one, the hash of the samples refuses."""
    file = tmp_path / "drop.txt"
    file.write_text("".join(f"data/train-00000:{number}\n" for number in range(2)))
    plain = {"train.steps": 6, "checkpoint.every": 3}
    drop = {**plain, "data.drop": {"file": str(file), "start_step": 3}}
    undisturbed, spiked = tiny_run(drop, name="undisturbed"), tiny_run(plain, name="run")
    assert train(undisturbed) == 0
    assert train(spiked) == 0
    without = tiny_run({**drop, "train.steps": 6}, name="run")
    with pytest.raises(JinguError, match="are not those that the run was trained on"):
        train(without)
    shutil.rmtree(done(spiked).folder / "checkpoints" / "step-00000006")
    assert train(without) == 0
    found = done(without).tensors()
    for name, tensor in done(undisturbed).tensors().items():
        assert torch.equal(found[name], tensor), name
