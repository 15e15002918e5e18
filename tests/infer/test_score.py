"""Scores of continuations and embeddings equal the model's uncached forward, whatever the other requests."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch

from jingu.config.sections.model import ModelSettings
from jingu.errors import JinguError
from jingu.infer.engine import Engine
from jingu.infer.engine_interface import EngineSettings
from jingu.infer.inference_model import InferenceModel
from jingu.infer.kv_cache import block_bytes
from jingu.infer.request import Request, Score
from jingu.infer.sampling import SamplingParams
from jingu.model.adapter_specs import SoftPrompt
from jingu.model.decoder import build_model
from jingu.model.inputs import Inputs
from jingu.model.resolve import spec_from_settings
from jingu.model.weight_init import init_weights
from jingu.text.tokenizer import Tokenizer

CONTEXT = (9, 4, 30, 2, 7, 7, 11, 5, 60, 3, 8)
CONTINUATIONS = [(5,), (40, 41, 42, 43), (5, 9, 4), tuple(range(50, 75)), (5, 9, 4, 1, 2, 3, 17, 18, 19)]
KINDS = ["decoder", "encoder-decoder", "prefix-lm", "prompt-tuning"]


@pytest.fixture
def models(tiny: InferenceModel, answering: InferenceModel, tokenizer: Tokenizer) -> dict[str, InferenceModel]:
    settings = ModelSettings(hidden_size=24, num_heads=3, num_layers=2, initializer_range=0.4)
    spec = spec_from_settings(settings, tokenizer.vocab_size, 64)
    spec = spec.model_copy(update={"adapter": SoftPrompt(num_virtual_tokens=5)})
    tuned = build_model(spec)
    init_weights(tuned, spec, 1)
    return {
        "decoder": tiny,
        "encoder-decoder": answering,
        "prefix-lm": replace(tiny, is_prefix_lm=True),
        "prompt-tuning": InferenceModel(tuned.eval(), spec, tokenizer),
    }


def expected_scores(model: InferenceModel) -> list[Score]:
    """Score each continuation by one forward pass without a cache."""
    scores = []
    module: Any = model.module
    encoder_decoder = model.spec.num_encoder_layers is not None
    prompt = model.spec.prompted([model.decoder_start_token_id] if encoder_decoder else CONTEXT)
    for continuation in CONTINUATIONS:
        more: dict[str, Any] = {}
        ids = [*prompt, *continuation]
        if encoder_decoder:
            more["source"] = Inputs(torch.tensor([[*CONTEXT, model.tokenizer.eos_token_id]]))
        if model.is_prefix_lm:
            more["prefix_lengths"] = torch.tensor([[len(prompt)] * len(prompt) + [0] * len(continuation)])
        with torch.no_grad():
            logprobs_TV = module.logits(module(Inputs(torch.tensor([ids]), **more)))[0].log_softmax(-1)
        rows_TV = logprobs_TV[len(prompt) - 1 : -1]
        token_logprobs = tuple(float(row_V[id_]) for row_V, id_ in zip(rows_TV, continuation, strict=True))
        is_greedy = rows_TV.argmax(-1).tolist() == list(continuation)
        scores.append(Score(sum(token_logprobs), token_logprobs, is_greedy))
    return scores


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float64, 1e-9)])
@pytest.mark.parametrize("kind", KINDS)
def test_scores_equal_the_uncached_forward(
    kind: str, dtype: torch.dtype, tolerance: float, models: dict[str, InferenceModel]
) -> None:
    model = models[kind]
    model = replace(model, module=copy.deepcopy(model.module).to(dtype))
    scores = Engine(model).score(CONTEXT, CONTINUATIONS)
    for score, expected in zip(scores, expected_scores(model), strict=True):
        assert score.token_logprobs == pytest.approx(expected.token_logprobs, abs=tolerance)
        assert score.logprob == pytest.approx(expected.logprob, abs=tolerance * len(score.token_logprobs))
        assert score.is_greedy == expected.is_greedy


@pytest.mark.parametrize("kind", KINDS)
def test_scores_do_not_depend_on_other_requests(kind: str, models: dict[str, InferenceModel]) -> None:
    """Bit for bit: alone, together, in chunks, in waves, beside other requests, and with few KV blocks."""
    model = models[kind]
    expected = [Engine(model).score(CONTEXT, [continuation])[0] for continuation in CONTINUATIONS]
    few_blocks = 14 * block_bytes(model.spec, 8, 4)
    for settings in (
        EngineSettings(),
        EngineSettings(prefill_chunk_size=3),
        EngineSettings(max_num_seqs=2),
        EngineSettings(kv_cache_bytes=few_blocks, max_num_seqs=5, num_speculative_tokens=2),
    ):
        engine = Engine(model, settings)
        other = engine.submit(Request(CONTEXT, SamplingParams(), 30, ignore_eos=True))
        events = engine.step()
        assert engine.score(CONTEXT, CONTINUATIONS) == expected
        while engine.busy:
            events += engine.step()
        assert [event.token is not None for event in events if event.request_id == other] == [True] * 30
        assert engine.stats().used_blocks == 0


@pytest.mark.parametrize("kind", KINDS)
def test_scores_of_generated_text_equal_its_log_probabilities(kind: str, models: dict[str, InferenceModel]) -> None:
    model = models[kind]
    for sampling in (SamplingParams(), SamplingParams(1.0, seed=3)):
        engine = Engine(model)
        engine.submit(Request(CONTEXT, sampling, 20, logprobs=0, ignore_eos=True))
        tokens = []
        while engine.busy:
            tokens += [event.token for event in engine.step() if event.token is not None]
        ids = [token.id for token in tokens]
        (score,) = engine.score(CONTEXT, [ids])
        assert list(score.token_logprobs) == [token.logprob for token in tokens]
        assert score.is_greedy == (sampling.temperature == 0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_context_is_computed_once(
    kind: str, models: dict[str, InferenceModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, computed = Engine(models[kind]), []
    plan = engine._runner.cache.plan
    monkeypatch.setattr(
        engine._runner.cache, "plan", lambda chunks, encoding: computed.extend(chunks) or plan(chunks, encoding)
    )
    engine.score(CONTEXT, CONTINUATIONS)
    prompt = engine.model.spec.prompted([0] if kind == "encoder-decoder" else CONTEXT)
    following = sum(len(continuation) - 1 for continuation in CONTINUATIONS)
    assert sum(len(chunk.ids) for chunk in computed) == len(prompt) + following


def test_cancelled_scores_end(tiny: InferenceModel) -> None:
    engine = Engine(tiny)
    request_id = engine.submit(Request(CONTEXT, SamplingParams(), 25, continuations=tuple(CONTINUATIONS)))
    (first,) = engine.step()
    assert first.choice == 0 and first.score is not None and first.finish_reason == "length"
    engine.cancel(request_id)
    assert [(event.choice, event.finish_reason) for event in engine.step()] == [(n, "cancelled") for n in range(1, 5)]
    assert not engine.busy and engine.stats().used_blocks == 0


def test_inputs_that_cannot_be_scored(tiny: InferenceModel) -> None:
    engine = Engine(tiny)
    for context, continuations, words in (
        (CONTEXT, [(1,), ()], r"continuations: a continuation is empty"),
        (CONTEXT, [], r"max_tokens: it is 0"),
        (CONTEXT, [(1, 280)], r"continuations: token 280 is outside the model's vocabulary of 280"),
        (CONTEXT, [tuple(range(60))], r"prompt: the prompt's 11 tokens and 60 new tokens exceed the model's context"),
    ):
        if continuations:
            with pytest.raises(JinguError, match=words):
                engine.score(context, continuations)
        else:
            assert engine.score(context, continuations) == []
    weight: Any = copy.deepcopy(tiny.module)
    broken = replace(tiny, module=weight)
    with torch.no_grad():
        weight.embedding.weight[77] = torch.nan
    with pytest.raises(JinguError, match=r"logits are not finite\. Try --precision fp32"):
        Engine(broken).score((77,), [(5, 6), (7,)])
    assert not engine.busy


def test_embeddings_are_pooled_states(tiny: InferenceModel, answering: InferenceModel) -> None:
    engine = Engine(tiny)
    with torch.no_grad():
        hidden_TD = tiny.module(torch.tensor([CONTEXT]))[0]
    for pooling, pooled_D in (("mean", hidden_TD.mean(0)), ("last", hidden_TD[-1])):
        expected = torch.nn.functional.normalize(pooled_D, dim=0).tolist()
        assert engine.embed([CONTEXT], pooling) == [pytest.approx(expected, abs=1e-6)]  # type: ignore[arg-type]
    with pytest.raises(JinguError, match="embeddings support only single-process decoders"):
        Engine(answering).embed([CONTEXT])
    with pytest.raises(JinguError, match="exceed the model's context of 64"):
        engine.embed([(1,) * 65])
    with pytest.raises(JinguError, match="prompt: it is empty"):
        engine.embed([()])


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_embeddings_do_not_depend_on_the_batch(tiny: InferenceModel, pooling: Any) -> None:
    """To the last bit: neither on chunks, nor on preemption, nor on cached prefixes, nor on requests beside them."""
    texts = [tuple(range(1, 64)), *(tuple(range(n, n + 9)) for n in range(20)), tuple(range(1, 40)), (5,) * 64]
    expected = [Engine(tiny).embed([text], pooling)[0] for text in texts]
    small = EngineSettings(4, block_size=8, kv_cache_bytes=20 * block_bytes(tiny.spec, 8, 4), prefill_chunk_size=5)
    for settings in (EngineSettings(), small):
        engine = Engine(tiny, settings)
        for seed in range(3):
            engine.submit(Request((7,), SamplingParams(1.0, seed=seed), 30, ignore_eos=True))
        assert engine.embed(texts, pooling) == expected
        assert engine.embed(texts[:2], pooling) == expected[:2]
        while engine.busy:
            engine.step()
        assert engine.stats().used_blocks == 0


def test_prompts_take_turns_with_texts_to_embed(tiny: InferenceModel) -> None:
    engine = Engine(tiny, EngineSettings(prefill_chunk_size=16))
    running = engine.submit(Request((7,), SamplingParams(), 60, ignore_eos=True))
    engine.step()
    texts = [engine.submit(Request(tuple(range(n, n + 48)), SamplingParams(), 1, pooling="mean")) for n in range(9)]
    engine.step()
    later = engine.submit(Request((8,) * 16, SamplingParams(), 3, ignore_eos=True))
    order = []
    while len(order) < 10:
        events = engine.step()
        assert running in {event.request_id for event in events}  # a token in every step
        order += [event.request_id for event in events if event.request_id != running and event.finish_reason]
    # The prompt that came last waits for one text, not for nine.
    assert order == [texts[0], later, *texts[1:]]


def test_an_embedding_that_is_not_finite_is_reported(tiny: InferenceModel) -> None:
    weight: Any = copy.deepcopy(tiny.module)
    with torch.no_grad():
        weight.embedding.weight[77] = torch.nan
    engine = Engine(replace(tiny, module=weight))
    with pytest.raises(JinguError, match=r"hidden states are not finite\. Try --precision fp32"):
        engine.embed([(5, 77)])
    assert engine.embed([(5, 6)]) == Engine(tiny).embed([(5, 6)])
    assert not engine.busy and engine.stats().used_blocks == 0
