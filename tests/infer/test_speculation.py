"""Speculative decoding: the same answers in fewer steps, drawn from the same distribution; drafts that do not fit."""

from __future__ import annotations

import copy
import random
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from jingu.config.schema import ModelSettings
from jingu.errors import JinguError
from jingu.infer.engine import Engine
from jingu.infer.engine_interface import EngineSettings
from jingu.infer.inference_model import InferenceModel
from jingu.infer.kv_cache import block_bytes
from jingu.infer.request import Request
from jingu.infer.sampling import SamplingParams
from jingu.model.decoder import Decoder
from jingu.text.tokenizer import Tokenizer
from jingu.text.tokenizer_training import train_tokenizer
from tests.infer.conftest import filled
from tests.infer.test_batches import answers, model_of, random_request


def near(model: InferenceModel, noise: float) -> InferenceModel:
    """Return a model with almost the same weights."""
    other = copy.deepcopy(model.module)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in other.parameters():
            spread = noise * float(parameter.float().std(correction=0))
            parameter += torch.empty(parameter.shape).normal_(0, spread, generator=generator).to(parameter.dtype)
    return replace(model, module=other)


def steps(engine: Engine, request: Request) -> int:
    engine.submit(request)
    count = 0
    while engine.busy:
        engine.step()
        count += 1
    return count


@pytest.mark.parametrize("kind", ["llama-bf16", "gpt2", "mistral"])
def test_answers_are_the_same_with_any_draft(kind: str, tokenizer: Tokenizer) -> None:
    model, source = model_of(kind, tokenizer), random.Random(4)
    least = block_bytes(model.spec, 320, 4)
    small = filled(
        ModelSettings(hidden_size=24, num_heads=3, num_layers=1, initializer_range=0.4), tokenizer, context=150
    )
    right = 0
    for draft, settings in [
        (small, EngineSettings()),
        (near(model, 0.05), EngineSettings(max_num_seqs=3, prefill_chunk_size=9, num_speculative_tokens=3)),
        (near(model, 0.05), EngineSettings(kv_cache_bytes=least, num_speculative_tokens=2, block_size=16)),
        (model, EngineSettings(kv_cache_bytes=2 * least, num_speculative_tokens=5)),
    ]:
        requests = [random_request(source, model.spec.vocab_size, [tuple(range(1, 34))]) for _ in range(5)]
        alone = [answers(Engine(model), [request], source)[0] for request in requests]
        engine = Engine(model, settings, draft)
        assert answers(engine, requests, source) == alone
        stats = engine.stats()
        assert stats.draft_tokens >= stats.accepted_tokens
        right += stats.accepted_tokens
    assert right > 50


def test_better_drafts_need_fewer_steps(tokenizer: Tokenizer) -> None:
    model = model_of("gpt2", tokenizer)
    for sampling in (SamplingParams(), SamplingParams(1.0, seed=5, repetition_penalty=1.2)):
        request = Request((5, 6, 7), sampling, 31, ignore_eos=True)
        same, close, other = (
            steps(Engine(model, EngineSettings(num_speculative_tokens=4), draft), request)
            for draft in (
                model,
                near(model, 0.1),
                filled(ModelSettings(hidden_size=24, num_heads=3, num_layers=1), tokenizer, 400),
            )
        )
        assert same == 1 + 30 // 5  # the first token comes with the prompt
        assert same <= close < other <= 31


def test_sampled_tokens_follow_the_models_distribution(tiny: InferenceModel) -> None:
    prompt, top, count = (9, 4, 30), 3, 500
    engine = Engine(tiny, draft_model=near(tiny, 0.03))
    request = Request(prompt, SamplingParams(1.2, top_k=top, seed=11), 4, n=count, ignore_eos=True)
    engine.submit(request)
    result: dict[int, list[int]] = {}
    while engine.busy:
        for event in engine.step():
            assert event.token is not None
            result.setdefault(event.choice, []).append(event.token.id)
    assert 0.3 < engine.stats().accepted_tokens / engine.stats().draft_tokens < 1

    def likely(ids: tuple[int, ...]) -> dict[int, float]:
        assert isinstance(tiny.module, Decoder)
        with torch.no_grad():
            logits_V = tiny.module.logits(tiny.module(torch.tensor([ids])))[0, -1] / 1.2
        best = logits_V.topk(top)
        return dict(zip(best.indices.tolist(), best.values.softmax(0).tolist(), strict=True))

    expected: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        expected = {
            (*ids, id_): part * share
            for ids, part in expected.items()
            for id_, share in likely((*prompt, *ids)).items()
        }
    counts = Counter(tuple(ids[:3]) for ids in result.values())
    assert set(counts) <= set(expected)
    order = sorted(expected, key=lambda ids: expected[ids])
    bins: list[list[tuple[int, ...]]] = [[]]
    for ids in order:  # at least five are to be expected of each
        if sum(expected[each] for each in bins[-1]) * count >= 5:
            bins.append([])
        bins[-1].append(ids)
    observed = [sum(counts[ids] for ids in each) for each in bins]
    reference = [sum(expected[ids] for ids in each) * count for each in bins]
    freedom = len(bins) - 1
    assert freedom > 5
    quantile = freedom * (1 - 2 / (9 * freedom) + 2.326 * (2 / (9 * freedom)) ** 0.5) ** 3  # 99%; Wilson and Hilferty
    assert sum((seen - wish) ** 2 / wish for seen, wish in zip(observed, reference, strict=True)) < quantile


def test_incompatible_drafts_are_refused(tiny: InferenceModel, answering: InferenceModel, tokenizer: Tokenizer) -> None:
    other = train_tokenizer(iter(["other words entirely"]), 270, ["<|endoftext|>"])
    stranger = filled(ModelSettings(hidden_size=24, num_heads=3, num_layers=1), other)
    ours = tokenizer.vocab()
    larger = replace(tiny, tokenizer=cast(Tokenizer, SimpleNamespace(vocab=lambda: {**ours, "more": len(ours)})))
    cases: list[tuple[Any, Any, str]] = [
        (
            tiny,
            larger,
            f"--draft-model: the draft model has {len(ours) + 1} tokens and the model {len(ours)}. Use a smaller",
        ),
        (tiny, stranger, "--draft-model: the draft model has "),
        (answering, tiny, "--draft-model: speculative decoding does not support encoder-decoder models."),
        (tiny, answering, "--draft-model: speculative decoding does not support encoder-decoder models."),
        (replace(tiny, world_size=2), tiny, "--draft-model: speculative decoding supports only a single process."),
    ]
    for model, draft, words in cases:
        with pytest.raises(JinguError) as error:
            Engine(model, draft_model=draft)
        assert str(error.value).startswith(words)
