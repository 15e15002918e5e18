"""Reward models: what they learn, and that transformers computes the same from an exported folder."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter

from jingu.align.reference import References
from jingu.align.reward_list import Rewards
from jingu.config.sections.model import ModelSettings
from jingu.config.sections.rewards import Reward
from jingu.data.open_sources import open_sources
from jingu.data.preference_data import PreferenceDataset
from jingu.errors import JinguError
from jingu.formats.export import convert, export_hf
from jingu.formats.models import open_model
from jingu.infer.engine import Engine
from jingu.infer.inference_model import load
from jingu.model.decoder import build_model
from jingu.model.resolve import spec_from_settings
from jingu.model.weight_init import init_weights
from jingu.text.tokenizer import Tokenizer
from jingu.training.batch_transforms import model_inputs
from jingu.training.commands import train
from tests.align.preferences import preference_run, train_here
from tests.conftest import Library, MakeRun


def reward_run(tiny_run: MakeRun, folder: Path, **changes: Any) -> Any:
    settings = {"task": {"type": "reward", "centering": 0.01}, "train.steps": 20, "optimizer.lr": 3e-3}
    return preference_run(tiny_run, folder, {**settings, "evaluation.every": 20, **changes}, name="reward")


def test_a_reward_model_learns_and_transformers_agrees(tiny_run: MakeRun, tmp_path: Path, done: Any) -> None:
    from transformers import AutoModelForSequenceClassification

    config = reward_run(tiny_run, tmp_path)
    train_here(config)
    losses = done(config).column("loss")
    assert losses[0] == pytest.approx(math.log(2), abs=0.05)
    assert losses[-1] < 0.3
    # Export, load with transformers, and import again.
    folder = tmp_path / "exported"
    convert(done(config).folder, folder, "fp32")
    theirs = AutoModelForSequenceClassification.from_pretrained(folder)
    assert type(theirs).__name__ == "LlamaForSequenceClassification" and theirs.num_labels == 1
    again = open_model(folder)
    assert again.spec.score_head
    ids = torch.arange(5, 25).view(1, -1)
    with torch.no_grad():
        expected = theirs.double()(ids).logits[0, 0]
    model = load_decoder(folder)
    hidden = model(ids)
    torch.testing.assert_close((hidden @ model.head_weight().t())[0, -1, 0], expected, rtol=1e-6, atol=1e-6)


CLASSIFIERS = ("bloom", "gpt2", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")


@pytest.mark.slow
@pytest.mark.parametrize("family", CLASSIFIERS)
def test_classifiers_of_every_family_are_exchanged_with_transformers(
    family: str, library: Library, tmp_path: Path
) -> None:
    from transformers import AutoModelForSequenceClassification

    num_kv_heads = None if family in ("bloom", "gpt2") else 2
    sizes = ModelSettings(family=family, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=num_kv_heads)
    spec = spec_from_settings(sizes, 389, 64).model_copy(update={"score_head": True})
    model = build_model(spec)
    init_weights(model, spec, 3)
    model.double()
    export_hf(spec, model.state_dict().__getitem__, library.tokenizer, tmp_path / "exported")
    # Its other products of experts have no fp64.
    options = {"experts_implementation": "eager"} if "mix" in family or "moe" in family else {}
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path / "exported", **options)
    assert type(theirs).__name__.endswith("ForSequenceClassification") and theirs.num_labels == 1
    ids = torch.arange(5, 25).view(1, -1)
    with torch.no_grad():
        expected = theirs.double()(ids).logits[0, 0]
        for own in (model, load_decoder(tmp_path / "exported")):
            score = (own(ids) @ own.head_weight().t())[0, -1, 0]
            torch.testing.assert_close(score, expected, rtol=1e-6, atol=1e-6)


def load_decoder(folder: Path) -> Any:
    from jingu.formats.stored_model import load_model

    return load_model(open_model(folder), torch.float64, torch.device("cpu"))


def test_a_reward_model_scores_answers_of_a_rollout(tiny_run: MakeRun, tmp_path: Path, done: Any) -> None:
    config = reward_run(tiny_run, tmp_path, **{"train.steps": 2, "evaluation.every": 0})
    train_here(config)
    folder = done(config).folder
    tokenizer = Tokenizer.load(folder / "tokenizer")
    settings = TypeAdapter(Reward).validate_python({"type": "model", "model": str(folder)})
    rewards = Rewards([settings], (), tokenizer)
    answers = [{"prompt": "x", "completion": "y", "prompt_ids": [5, 6, 7], "completion_ids": [8, 9]}]
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    model = load_decoder(folder)
    expected = float((model(ids) @ model.head_weight().t())[0, -1, 0])
    assert rewards.score(answers)[0]["model"] == pytest.approx(expected, abs=1e-5)
    # The engine, with which the server scores, opens the run as well.
    ((score,),) = Engine(load(folder, "fp32", "cpu")).embed(ids.tolist(), "score")
    assert score == pytest.approx(expected, abs=1e-5)
    plain = tiny_run(name="plain", **{"train.steps": 1})
    assert train(plain) == 0
    with pytest.raises(JinguError, match="has no score head"):
        Rewards([settings.model_copy(update={"model": str(done(plain).folder)})], (), tokenizer)


@pytest.mark.parametrize("template", ["chatml", "llama3", "plain"])
def test_rewards_of_training_are_those_of_generated_answers(
    template: str, tiny_run: MakeRun, tmp_path: Path, done: Any
) -> None:
    """A template may write something after the end of an answer, such as a line break, which no generated one has."""
    changes = {
        "data.objective.template": template,
        "train.steps": 2,
        "evaluation.every": 0,
        "batch.sequence_length": 96,
    }
    config = reward_run(tiny_run, tmp_path, **changes)
    train_here(config)
    folder = done(config).folder
    tokenizer = Tokenizer.load(folder / "tokenizer")
    settings = TypeAdapter(Reward).validate_python({"type": "model", "model": str(folder)})
    rewards = Rewards([settings], (), tokenizer)
    (dataset,) = open_sources(config, tokenizer).sources
    assert isinstance(dataset, PreferenceDataset)
    batch = References({}).attach(dataset.read(np.array([0, 1])).to_batch(), [dataset] * 2, np.array([0, 1]))
    assert batch.documents is not None
    model = load_decoder(folder)
    with torch.no_grad():
        scores_BT = (model(model_inputs(batch)) @ model.head_weight().t())[..., 0]
    trained_BK = batch.sum_by_answer(scores_BT * batch.is_last)
    for row, number in [(0, 0), (0, 1), (1, 0), (1, 1)]:
        is_own_T = batch.documents[row] == number
        ids, labels = batch.tokens[row, is_own_T].tolist(), batch.labels[row, is_own_T]
        start = int((labels >= 0).nonzero()[0]) + 1
        answer = {
            "prompt_ids": ids[:start],
            "completion_ids": labels[labels >= 0].tolist(),
            "prompt": "",
            "completion": "",
        }
        value = rewards.score([answer])[0]["model"]
        assert trained_BK[row, number].item() == pytest.approx(value, abs=1e-5)
