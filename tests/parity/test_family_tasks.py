"""What is done with every family: preferences, rewards, scores of an evaluation, and answers over HTTP.

The models are those of `test_family_proofs.py`, as transformers writes them, beside a tokenizer.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import jingu
from jingu.align.commands import prepare
from jingu.config.schema import RunConfig
from jingu.infer.engine import Engine
from jingu.infer.engine_interface import EngineSettings
from jingu.infer.inference_model import load
from jingu.text.tokenizer import Tokenizer
from tests.align.preferences import train_here, write_pairs
from tests.conftest import Done
from tests.parity import test_family_proofs as proofs
from tests.serve.conftest import Serve, serve, tiny_model, tokenizer

pytestmark = pytest.mark.slow
__all__ = ["serve", "tiny_model", "tokenizer"]  # fixtures

PROMPT = "the end is"


@pytest.fixture(scope="module", params=proofs.CASES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A folder of transformers with a tokenizer, and transformers' model."""
    torch.manual_seed(len(request.param))
    theirs = proofs.randomize(proofs.build(request.param), torch.float32, 0.1)
    folder = tmp_path_factory.mktemp("model") / request.param
    theirs.save_pretrained(folder)
    proofs.train_tokenizer(iter(["the end is far, it is a heap. " * 3]), 290, ["<|endoftext|>"]).save(folder)
    return folder, theirs.eval()


def run_of(model: Path, folder: Path, name: str, **sections: Any) -> RunConfig:
    """Return a tiny run that starts from a model."""
    return RunConfig.model_validate(
        {
            "name": name,
            "runs_dir": str(folder / "runs"),
            "tokenizer": {"path": str(model)},
            "initialize": {"from": str(model)},
            "batch": {"sequence_length": 48, "global_batch_size": 4, "micro_batch_size": 4},
            "optimizer": {"type": "adamw", "lr": 1e-3},
            "schedule": {"type": "constant", "warmup": 0},
            "train": {"steps": 4, "log_every": 1, "compile": False, "hang_timeout": None},
            "evaluation": {"every": 0},
            "checkpoint": {"every": 0},
            "device": {"type": "cpu", "threads": 1},
            **sections,
        }
    )


def test_preferences_are_learned(model: tuple[Path, Any], tmp_path: Path, done: Callable[[RunConfig], Done]) -> None:
    """DPO in fp64: the first loss is ln 2, because policy and reference are equal; then it falls."""
    data = {
        "input": str(write_pairs(tmp_path / "pairs.jsonl")),
        "path": str(tmp_path / "data"),
        "suffixes": [".jsonl"],
        "num_workers": 1,
        "objective": {"type": "preference", "template": "plain"},
    }
    config = run_of(model[0], tmp_path, "dpo", data=data, task={"type": "dpo"}, precision={"type": "fp64"})
    prepare(config)
    train_here(config)
    losses = done(config).column("loss")
    assert losses[0] == pytest.approx(math.log(2), rel=1e-9) and min(losses[1:]) < losses[0]


def test_rewards_are_learned_from_what_was_sampled(
    model: tuple[Path, Any], tmp_path: Path, done: Callable[[RunConfig], Done]
) -> None:
    """GRPO in fp64: training computes the log-probabilities of generation, and rewards give gradients."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": PROMPT[:length]}) + "\n" for length in range(3, 9)))
    task = {
        "type": "grpo",
        "prompts": str(prompts),
        "prompts_per_step": 4,
        "answers_per_prompt": 4,
        "max_new_tokens": 6,
        "rewards": [{"type": "regex", "pattern": ".*[aeiou].*", "timeout": 60.0}],
    }
    batch = {"sequence_length": 24, "micro_batch_size": 4}
    train = {"steps": 2, "log_every": 1, "compile": False, "hang_timeout": None}
    config = run_of(model[0], tmp_path, "grpo", task=task, batch=batch, train=train, precision={"type": "fp64"})
    train_here(config)
    assert max(done(config).column("mismatch_max")) < 1e-9
    assert max(done(config).column("grad_norm")) > 0.0


def test_scores_are_those_of_transformers(model: tuple[Path, Any]) -> None:
    """Log-probabilities of continuations, on which evaluations rest."""
    folder, theirs = model
    words = Tokenizer.load(folder)
    continuations = [" far", " a heap", " the end, it"]
    scores = jingu.load(folder, precision="fp32", device="cpu").score(PROMPT, continuations)
    start = words.encode(PROMPT)
    for text, score in zip(continuations, scores, strict=True):
        ids = words.encode(PROMPT + text)
        assert ids[: len(start)] == start
        with torch.no_grad():
            logprobs = theirs(torch.tensor([ids])).logits[0].float().log_softmax(-1)
        expected = [float(logprobs[place - 1, ids[place]]) for place in range(len(start), len(ids))]
        assert score.token_logprobs == pytest.approx(expected, abs=2e-4)


def test_greedy_text_over_http_is_that_of_transformers(model: tuple[Path, Any], serve: Serve) -> None:
    folder, theirs = model
    server = serve(Engine(load(folder, "fp32", "cpu"), EngineSettings(max_num_seqs=2)), template=None)
    words = Tokenizer.load(folder)
    ids = words.encode(PROMPT)
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    status, answer, _ = server.call("/v1/completions", body)
    assert status == 200, answer
    for _ in range(8):
        with torch.no_grad():
            ids = [*ids, int(theirs(torch.tensor([ids])).logits[0, -1].argmax())]
    assert answer["choices"][0]["text"] == words.decode(ids)[len(PROMPT) :]
