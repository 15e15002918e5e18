"""A model whose logits are not finite: no caller of the engine takes the empty texts that it gives for answers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import jingu
from jingu.align.prompt_set import Prompt, PromptSet
from jingu.align.rollouts import Generator
from jingu.config.sections.policies import GrpoSettings
from jingu.errors import JinguError
from jingu.evaluate.evaluation import evaluate_task, prepare_task
from jingu.evaluate.scoring import AnswerCache, Scorer
from jingu.infer.engine import Engine
from jingu.infer.engine_interface import EngineSettings
from jingu.infer.inference_model import InferenceModel
from jingu.infer.request import Request
from jingu.infer.sampling import SamplingParams
from jingu.parallel.layout import Precision
from jingu.training import evaluate
from tests.evaluate.conftest import WriteTask, load_task

FP32 = Precision("fp32", torch.float32, torch.float32, torch.float32)
# Settings of a task of each kind.
KINDS: dict[str, dict[str, Any]] = {
    "multiple_choice": {},
    "generate_until": {"doc_to_choice": None, "doc_to_target": "text", "generation_kwargs": {"max_gen_toks": 4}},
    "loglikelihood": {"doc_to_choice": None, "doc_to_target": "{{' ' ~ text}}"},
    "loglikelihood_rolling": {"doc_to_choice": None, "doc_to_target": "text"},
}


@pytest.fixture
def broken(tiny: InferenceModel) -> InferenceModel:
    module: Any = copy.deepcopy(tiny.module)
    with torch.no_grad():
        module.norm.weight.fill_(torch.nan)
    return replace(tiny, module=module)


def evaluate_with(model: InferenceModel, file: Path, cache: AnswerCache) -> None:
    evaluate_task(prepare_task(load_task(file)), Scorer(Engine(model), cache))


@pytest.mark.parametrize("kind", KINDS)
def test_evaluations_fail(broken: InferenceModel, write_task: WriteTask, tmp_path: Path, kind: str) -> None:
    """The cache of answers gets none, as the next evaluation would take it."""
    cache = AnswerCache(tmp_path / "answers.jsonl")
    with pytest.raises(JinguError, match=r"logits are not finite\. Try --precision fp32"):
        evaluate_with(broken, write_task(output_type=kind, **KINDS[kind]), cache)
    assert not cache.answers and not (tmp_path / "answers.jsonl").exists()


def samples_of_a_run(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate, "_inference_model", lambda run, module: module)
    monkeypatch.setattr(evaluate, "eval_mode", lambda module: torch.no_grad())
    settings = SimpleNamespace(sample_prompts=["one", "two"], max_new_tokens=3)
    run: Any = SimpleNamespace(config=SimpleNamespace(evaluation=settings, seed=1))
    evaluate.generate_samples(run, model)


def api(model: InferenceModel, _: pytest.MonkeyPatch) -> None:
    jingu.Model(model, None, EngineSettings()).generate(["one", "two"], max_tokens=3)


def api_scores(model: InferenceModel, _: pytest.MonkeyPatch) -> None:
    jingu.Model(model, None, EngineSettings()).score("one", [" two", " three"])


def rollouts(model: InferenceModel, _: pytest.MonkeyPatch) -> None:
    prompts = [Prompt(row, (row + 1,), "", {}) for row in range(2)]
    settings = GrpoSettings(type="grpo", prompts="prompts.jsonl", rewards=[{"type": "length"}], max_new_tokens=3)
    prompt_set = PromptSet(prompts, [], model.eos_token_ids, ())
    generator = Generator(
        prompt_set, settings, model.tokenizer, Precision("fp32", torch.float32, torch.float32, torch.float32), 1
    )
    generator.generate_share(model, prompts, (0, 1), 0)


@pytest.mark.parametrize("caller", [samples_of_a_run, api, api_scores, rollouts])
def test_other_callers_fail(
    tiny: InferenceModel,
    broken: InferenceModel,
    caller: Callable[[InferenceModel, pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caller(tiny, monkeypatch)
    with pytest.raises(JinguError, match="logits are not finite"):
        caller(broken, monkeypatch)


def test_an_engine_runs_again_after_an_error(tiny: InferenceModel) -> None:
    """Requests beside one that fails have ended, and those before one that does not fit are taken back."""
    module: Any = copy.deepcopy(tiny.module)
    with torch.no_grad():
        module.embedding.weight[77] = torch.nan
    engine = Engine(replace(tiny, module=module))
    fits, fails, does_not_fit = (Request(ids, SamplingParams(), 3) for ids in ((5, 6), (77,), (5,) * 90))
    for requests, error in (([fails, fits], "not finite"), ([fits, does_not_fit], "context of 64")):
        with pytest.raises(JinguError, match=error):
            engine.generate(requests)
        assert not engine.busy and engine.stats().used_blocks == 0
        assert engine.generate([fits]) == Engine(tiny).generate([fits])
