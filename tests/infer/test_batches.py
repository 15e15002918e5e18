"""Many requests at once: no answer depends on the others, on chunks, on shared blocks or on preemption."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import nn

from jingu.compat.torch import has_byte_kernels
from jingu.config.sections.model import ModelSettings
from jingu.errors import JinguError
from jingu.infer.engine import Engine
from jingu.infer.engine_interface import EngineSettings
from jingu.infer.generate import print_stream
from jingu.infer.inference_model import InferenceModel
from jingu.infer.kv_cache import block_bytes
from jingu.infer.model_runner import ModelRunner
from jingu.infer.prepack import prepack_weights
from jingu.infer.request import Request
from jingu.infer.sampling import SamplingParams
from jingu.model.decoder import Decoder, build_model
from jingu.model.inputs import Inputs
from jingu.model.quantize import quantize_blocks, quantize_embedding_and_head
from jingu.model.quantized_weight import quantizing_reader
from jingu.model.resolve import spec_from_settings
from jingu.model.spec import QuantizationFormat, replace_fields
from jingu.model.weight_init import init_weights
from jingu.text.tokenizer import Tokenizer

KINDS: dict[str, dict[str, object]] = {
    "llama-bf16": {"hidden_size": 48, "num_heads": 3, "num_kv_heads": 1, "intermediate_size": 88},
    "mistral": {"family": "mistral", "hidden_size": 40, "num_heads": 4, "num_kv_heads": 2, "intermediate_size": 50},
    "mixed": {"hidden_size": 40, "num_heads": 4, "num_kv_heads": 2, "intermediate_size": 50, "num_layers": 3},
    "bloom": {"family": "bloom", "hidden_size": 48, "num_heads": 3},
    "gpt2": {"family": "gpt2", "hidden_size": 30, "num_heads": 3},
    "mixtral": {"family": "mixtral", "hidden_size": 24, "num_heads": 3, "num_kv_heads": 1, "intermediate_size": 20},
    "gpt_oss": {"family": "gpt_oss", "hidden_size": 24, "num_heads": 3, "num_kv_heads": 1, "intermediate_size": 20},
    "latent": {"family": "glm4_moe_lite", "hidden_size": 24, "num_heads": 3, "intermediate_size": 20},
    "gated_delta": {"hidden_size": 24, "num_heads": 3, "num_layers": 3, "intermediate_size": 20},
    "state_space": {"hidden_size": 24, "num_heads": 3, "num_layers": 3, "intermediate_size": 20},
    "short_conv": {"hidden_size": 24, "num_heads": 3, "num_layers": 3, "intermediate_size": 20},
    "t5": {"family": "t5", "hidden_size": 36, "num_heads": 3, "num_encoder_layers": 2},
}
MIXERS: dict[str, dict[str, object]] = {
    "gated_delta": {"num_heads": 4, "num_key_heads": 2, "key_head_dim": 6, "value_head_dim": 5},
    "state_space": {"num_heads": 4, "num_groups": 2, "head_dim": 5, "state_size": 6},
    "short_conv": {},
}
PREPACKED = {
    "llama-bf16": {**KINDS["llama-bf16"], "intermediate_size": 1100},  # long sums, which kernels may divide
    "llama-int8": {"hidden_size": 64, "num_heads": 4, "intermediate_size": 192},
    "llama-int4": {"hidden_size": 64, "num_heads": 4, "intermediate_size": 192},
    "llama-bytes": {"hidden_size": 64, "num_heads": 4, "intermediate_size": 192},
    "gpt2": KINDS["gpt2"],
    "mixtral": KINDS["mixtral"],
}
"""Model kinds that are loaded from folders."""


def model_of(kind: str, tokenizer: Tokenizer, prepacked: bool = False) -> InferenceModel:
    settings = ModelSettings.model_validate(
        {"num_layers": 2, "initializer_range": 0.3, **(PREPACKED if prepacked else KINDS)[kind]}
    )
    spec = spec_from_settings(settings, tokenizer.vocab_size, 400)
    if kind == "mistral":
        spec = spec.model_copy(update={"attention": spec.attention.model_copy(update={"sliding_window": 37})})
    if kind == "mixed":
        kinds = {"window": {"attention.sliding_window": 37}, "chunk": {"attention.chunk_size": 29}, "full": {}}
        spec = replace_fields(spec, layer_kinds=kinds, layer_pattern=("window", "full", "chunk"))
    if kind in MIXERS:
        kinds = {"state": {"mixer": {"type": kind, **MIXERS[kind]}}, "full": {}}
        spec = replace_fields(spec, layer_kinds=kinds, layer_pattern=("state", "full", "state"))
    model = build_model(spec)
    init_weights(model, spec, 1)
    model = model.to(torch.bfloat16 if kind.endswith("bf16") else torch.float32).eval()
    if kind.endswith(("int8", "int4", "bytes")):
        model = quantize_model(model, "int4" if kind.endswith("int4") else "int8")
    if prepacked:
        prepack_weights(model, as_bytes=kind.endswith("bytes") and has_byte_kernels())
    return InferenceModel(model, spec, tokenizer)


def quantize_model(whole: Decoder, kind: QuantizationFormat) -> Decoder:
    """Return a copy with quantized matrices."""
    weights, model = dict(whole.named_parameters()), build_model(whole.spec).eval()
    quantize_blocks(model, kind)
    quantize_embedding_and_head(model, torch.float32)
    read = quantizing_reader([model], lambda name: weights[name].detach())
    for name, _ in list(model.named_parameters()):
        module, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(module), leaf, nn.Parameter(read(name), requires_grad=False))
    return model


def random_request(source: random.Random, vocabulary: int, beginnings: list[tuple[int, ...]]) -> Request:
    begin = source.choice([(), (), *beginnings])
    prompt = (*begin, *(source.randrange(1, vocabulary) for _ in range(source.choice([1, 2, 7, 40, 150]))))
    sampling = SamplingParams(temperature=source.choice([0.0, 0.9]), seed=source.randrange(9))
    return Request(
        prompt, sampling, source.randrange(1, 20), logprobs=0, ignore_eos=True, n=source.choice([1, 1, 1, 3])
    )


def answers(
    engine: Engine, requests: list[Request], source: random.Random
) -> list[list[tuple[int, int, float | None]]]:
    """Return (choice, token, log-probability) of each request; requests arrive while others run, some are cancelled."""
    actual: dict[int, list[tuple[int, int, float | None]]] = {}
    numbers, waiting, cancelled = {}, list(enumerate(requests)), 0
    while waiting or engine.busy:
        while waiting and (not engine.busy or source.random() < 0.4):
            place, request = waiting.pop(0)
            numbers[engine.submit(request)] = place
            if source.random() < 0.1:
                cancelled = engine.submit(request)
        if cancelled and source.random() < 0.3:
            engine.cancel(cancelled)
            cancelled = 0
        for event in engine.step():
            if event.token is not None and event.request_id in numbers:
                tokens = (event.choice, event.token.id, event.token.logprob)
                actual.setdefault(numbers[event.request_id], []).append(tokens)
    assert engine.stats().used_blocks == 0
    return [sorted(actual[place], key=lambda token: token[0]) for place in range(len(requests))]


def check_mixes(model: InferenceModel, mixes: int, seed: int) -> None:
    source = random.Random(seed)
    beginnings = [tuple(source.randrange(1, model.spec.vocab_size) for _ in range(size)) for size in (33, 130)]
    preempted, least = 0, block_bytes(model.spec, 320, next(model.module.parameters()).itemsize)
    for _ in range(mixes):
        requests = [random_request(source, model.spec.vocab_size, beginnings) for _ in range(source.randrange(2, 6))]
        alone = [answers(Engine(model), [request], source)[0] for request in requests[:2]]
        settings = EngineSettings(
            max_num_seqs=source.choice([2, 5, 16]),
            block_size=source.choice([8, 16, 32]),
            kv_cache_bytes=source.choice([least, 20 * least]),
            prefill_chunk_size=source.choice([3, 50, 512]),
            num_speculative_tokens=source.choice([0, 3]),
        )
        together = answers(Engine(model, settings), requests, source)
        assert together[:2] == alone
        preempted += settings.kv_cache_bytes == least
    assert preempted or mixes < 9


@pytest.mark.parametrize("kind", KINDS)
def test_answers_do_not_depend_on_other_requests(kind: str, tokenizer: Tokenizer) -> None:
    check_mixes(model_of(kind, tokenizer), 2, 1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_answers_on_two_threads_do_not_depend_on_other_requests(kind: str, tokenizer: Tokenizer) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        check_mixes(model_of(kind, tokenizer), 5, 1)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("kind", PREPACKED)
def test_answers_of_loaded_models_do_not_depend_on_other_requests(kind: str, tokenizer: Tokenizer) -> None:
    check_mixes(model_of(kind, tokenizer, prepacked=True), 2, 3)


@pytest.mark.slow
@pytest.mark.parametrize("kind", PREPACKED)
def test_answers_of_loaded_models_in_many_mixes(kind: str, tokenizer: Tokenizer) -> None:
    check_mixes(model_of(kind, tokenizer, prepacked=True), 100, 4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_answers_in_many_mixes(kind: str, tokenizer: Tokenizer) -> None:
    check_mixes(model_of(kind, tokenizer), 167, 2)


@pytest.mark.parametrize("kind", ["mistral", "bloom", "gpt2", "mixtral"])
def test_prompts_with_bidirectional_attention(kind: str, tokenizer: Tokenizer) -> None:
    """The result equals the uncached forward of training, with any chunks and few blocks."""
    model = replace(model_of(kind, tokenizer), is_prefix_lm=True)
    source = random.Random(3)
    prompts = [tuple(source.randrange(1, model.spec.vocab_size) for _ in range(size)) for size in (150, 30, 129, 1, 30)]
    prompts[4] = (*prompts[1][:24], *prompts[4][:9])
    room = block_bytes(model.spec, 320, 4)
    engine = Engine(model, EngineSettings(max_num_seqs=4, prefill_chunk_size=16, kv_cache_bytes=room))
    requests = [Request(prompt, SamplingParams(), 20, logprobs=0, ignore_eos=True) for prompt in prompts]
    for prompt, tokens in zip(prompts, answers(engine, requests, source), strict=True):
        ids = [*prompt, *(id_ for _, id_, _ in tokens)]
        reach_T = torch.tensor([len(prompt)] * len(prompt) + [0] * len(tokens))
        with torch.no_grad():
            states = model.module(Inputs(torch.tensor([ids]), prefix_lengths=reach_T[None]))
            scores_TV = model.module.logits(states)[0].log_softmax(-1)[len(prompt) - 1 : -1]  # type: ignore[operator]
        assert scores_TV.argmax(-1).tolist() == ids[len(prompt) :]
        torch.testing.assert_close(
            scores_TV.amax(-1), torch.tensor([each for *_, each in tokens]), rtol=1e-4, atol=1e-4
        )
    assert engine.stats().prefix_cache_hits == 0
    with pytest.raises(JinguError, match="unavailable with prefix language models"):
        engine.submit(replace(requests[0], prompt_logprobs=True))


def test_steps_have_few_different_numbers_of_rows(tokenizer: Tokenizer) -> None:
    """oneDNN keeps its kernels for each of them."""
    model = model_of("llama-bf16", tokenizer, prepacked=True)
    cache = ModelRunner(model, num_blocks=[4], block_size=8).cache
    padded = [cache.pad(rows) for rows in range(1, 2049)]
    assert len(set(padded)) < 120 and all(count % cache.row_multiple == 0 for count in padded)
    assert all(rows <= count < rows + max(cache.row_multiple, rows / 16) for rows, count in enumerate(padded, 1))


@pytest.mark.parametrize("kind", ["llama-bf16", "gpt2"])
def test_answers_in_steps_of_many_rows(kind: str, tokenizer: Tokenizer) -> None:
    """With 37 and 69 sequences, steps are padded beyond the multiple of rows."""
    model = model_of(kind, tokenizer, prepacked=True)
    requests = [
        Request((5 + number, 9, 4), max_tokens=3, ignore_eos=True, sampling=SamplingParams(temperature=0.0))
        for number in range(69)
    ]

    def generate(requests: list[Request], max_num_seqs: int) -> list[list[int]]:
        engine = Engine(model, EngineSettings(max_num_seqs=max_num_seqs))
        ids: dict[int, list[int]] = {engine.submit(request): [] for request in requests}
        while engine.busy:
            for event in engine.step():
                if event.token is not None:
                    ids[event.request_id].append(event.token.id)
        return list(ids.values())

    few = generate(requests, 3)
    for count in (37, 69):
        assert generate(requests[:count], count) == few[:count]


def test_prefixes_are_shared_and_few_blocks_are_wasted(tokenizer: Tokenizer) -> None:
    model = model_of("gpt2", tokenizer)
    engine = Engine(model, EngineSettings(block_size=16))
    prompt = tuple(1 + place % 250 for place in range(200))
    requests = [Request((*prompt, 7 + number), SamplingParams(), 100, ignore_eos=True) for number in range(8)]
    for request in requests:
        engine.submit(request)
    events = engine.step()
    assert engine.stats().running == 1  # the others wait for what the first computes
    for _ in range(40):
        events += engine.step()
    stats = engine.stats()
    assert [event.cached_tokens for event in events if event.request_id == 5] == [192] * 40
    assert stats.prefix_cache_hits == 7 * 192
    assert stats.used_blocks == 16 + 7 * 3
    assert stats.cached_tokens == 241 + 7 * 48
    while engine.busy:
        engine.step()
    again = engine.submit(replace(requests[0], prompt=(*prompt, 7, 3), n=3))
    event, *_ = engine.step()
    assert event.request_id == again and event.cached_tokens == 192
    assert engine.stats().prefix_cache_hits == 8 * 192  # of the prompt, however many choices read it
    engine.cancel(again)
    assert engine.stats().used_blocks == 0


@pytest.mark.parametrize("kind", ["gpt2", "mistral"])
def test_the_cache_stays_within_its_limit(kind: str, tokenizer: Tokenizer) -> None:
    """Heads are padded to 16 elements; two blocks belong to no sequence."""
    model, allowed = model_of(kind, tokenizer), 1 << 20
    engine = Engine(model, EngineSettings(kv_cache_bytes=allowed))
    engine.generate([Request((5, 6), SamplingParams(), 9, ignore_eos=True)])
    allocated = sum(layer.store.nbytes for layer in engine._runner.cache.layers if layer.store is not None)
    page = block_bytes(model.spec, 8, 4)
    assert allowed - page < allocated - 2 * page <= allowed


def test_cached_prefixes_are_evicted(tokenizer: Tokenizer) -> None:
    """The least recently used one is evicted first."""
    model = model_of("gpt2", tokenizer)
    page = block_bytes(model.spec, 16, 4)
    engine = Engine(model, EngineSettings(kv_cache_bytes=8 * page, block_size=16))
    prompts = [tuple(number + place for place in range(1, 49)) for number in (0, 50, 100)]
    requests = [Request(prompt, SamplingParams(), 2, ignore_eos=True) for prompt in prompts]
    for number in (0, 1, 0, 2, 2, 0, 1):
        engine.generate([requests[number]])
    assert engine.stats().prefix_cache_hits == 32 + 32 + 32
    with pytest.raises(JinguError) as error:
        engine.submit(Request(tuple(range(1, 160)), SamplingParams(), 2))
    assert str(error.value) == (
        "prompt: prompt and output need up to 161 tokens, and the KV cache has room for 128. Ask for fewer tokens, or "
        "give the engine a larger KV cache (--kv-cache)."
    )


def test_non_finite_logits_end_one_request(tokenizer: Tokenizer) -> None:
    model = model_of("gpt2", tokenizer)
    engine = Engine(model)
    whole = engine.generate([Request((5, 6), SamplingParams(), 9, ignore_eos=True)])
    weight = model.module.embedding.weight
    original = weight[77].clone()
    with torch.no_grad():
        weight[77] = torch.nan
        engine.submit(Request((5, 77, 6), SamplingParams(), 9, logprobs=0))
        (event,) = engine.step()
        with pytest.raises(JinguError, match=r"logits are not finite. Try --precision fp32"):
            print_stream(engine, Request((5, 77, 6), SamplingParams(), 9))
        engine.submit(Request((5, 77, 6), SamplingParams(1.0), 9, n=2))
        assert [each.finish_reason for each in engine.step()] == ["error"] * 2 and not engine.busy
        weight[77] = original
    assert event.finish_reason == "error" and event.error == "the model's logits are not finite"
    assert engine.stats().used_blocks == 0
    assert engine.generate([Request((5, 6), SamplingParams(), 9, ignore_eos=True)]) == whole


def test_a_cancelled_prefill_is_not_reused(tokenizer: Tokenizer) -> None:
    """It is unknown whether the logits of a prompt that was cancelled half-way would have been finite."""
    model = model_of("gpt2", tokenizer)
    page = block_bytes(model.spec, 16, 4)
    settings = EngineSettings(prefill_chunk_size=32, kv_cache_bytes=5 * page, block_size=16)
    last = Request(tuple(range(1, 70)), SamplingParams(), 4, ignore_eos=True)
    engine, whole = Engine(model, settings), Engine(model, settings).generate([last])
    weight = model.module.embedding.weight
    original = weight[77].clone()
    with torch.no_grad():
        weight[77] = torch.nan
        number = engine.submit(Request((77,) * 60, SamplingParams(), 4))
        assert engine.step() == []
        engine.cancel(number)
        weight[77] = original
    assert engine.generate([last]) == whole and engine.stats().used_blocks == 0


def test_a_shared_prefix_survives_a_failed_request(tokenizer: Tokenizer) -> None:
    """Its shared blocks are still used by other requests."""
    model = model_of("gpt2", tokenizer)
    prompt = tuple(range(1, 30))
    alone = answers(Engine(model), [Request((*prompt, 40), SamplingParams(), 30, logprobs=0)], random.Random(0))
    engine, nothing = Engine(model), dict.fromkeys(range(model.spec.vocab_size), -torch.inf)
    survivor = engine.submit(Request((*prompt, 40), SamplingParams(), 30, logprobs=0))
    actual = engine.step()
    broken = engine.submit(Request((*prompt, 77), SamplingParams(logit_bias=nothing), 5))
    actual += engine.step()
    assert [event.finish_reason for event in actual if event.request_id == broken] == ["error"]
    while engine.busy:
        actual += engine.step()
    tokens = [event for event in actual if event.request_id == survivor and event.token]
    assert [(event.choice, event.token.id, event.token.logprob) for event in tokens if event.token] == alone[0]


def test_speculation_saves_steps_and_changes_no_answer(tokenizer: Tokenizer) -> None:
    model = model_of("llama-bf16", tokenizer)
    prompt = (5, 6, 7, 8, 9, 10, 11, 12) * 4
    few = dict.fromkeys(range(5, 9), 99.0)  # texts of a few tokens repeat themselves
    for sampling in (SamplingParams(logit_bias=few), SamplingParams(0.8, seed=3, repetition_penalty=1.1)):
        request = Request(prompt, sampling, 60, logprobs=1, ignore_eos=True)
        actual, steps = [], []
        for guesses in (0, 4):
            engine, events = Engine(model, EngineSettings(num_speculative_tokens=guesses)), []
            engine.submit(request)
            while engine.busy:
                events.append(engine.step())
            actual.append([event.token for each in events for event in each])
            steps.append(len(events))
        assert actual[0] == actual[1]
        assert steps[0] == 60 and (steps[1] < 60 or sampling.temperature)
