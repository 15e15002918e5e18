"""Many requests at once: nobody's answer depends on the others, on chunks, on pages shared, or on pages taken away."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import nn

from jingu.config.sections.model import ModelSettings
from jingu.errors import JinguError
from jingu.infer.arrange import arrange
from jingu.infer.cache import page_bytes
from jingu.infer.engine import Engine, EngineSettings
from jingu.infer.load import Loaded, loaded
from jingu.infer.request import Request
from jingu.infer.sampling import Sampling
from jingu.infer.verbs import write
from jingu.model.build import spec_from_settings
from jingu.model.decoder import Decoder, make_model
from jingu.model.initialise import initialise
from jingu.model.packed import packed_reader
from jingu.model.quantised import round_blocks, round_ends
from jingu.model.spec import Kind
from jingu.text.tokenizer import Tokenizer

KINDS: dict[str, dict[str, object]] = {
    "llama-bf16": {"width": 48, "heads": 3, "kv_heads": 1, "feed_forward": 88},
    "mistral": {"family": "mistral", "width": 40, "heads": 4, "kv_heads": 2, "feed_forward": 50},
    "bloom": {"family": "bloom", "width": 48, "heads": 3},
    "gpt2": {"family": "gpt2", "width": 30, "heads": 3},
    "mixtral": {"family": "mixtral", "width": 24, "heads": 3, "kv_heads": 1, "feed_forward": 20},
    "t5": {"family": "t5", "width": 36, "heads": 3, "encoder_layers": 2},
}
ARRANGED = {
    "llama-bf16": {**KINDS["llama-bf16"], "feed_forward": 1100},  # long sums, which kernels may divide
    "llama-int8": {"width": 64, "heads": 4, "feed_forward": 192},
    "llama-int4": {"width": 64, "heads": 4, "feed_forward": 192},
    "gpt2": KINDS["gpt2"],
    "mixtral": KINDS["mixtral"],
}
"""As they are loaded."""


def model_of(kind: str, tokenizer: Tokenizer, arranged: bool = False) -> Loaded:
    settings = ModelSettings.model_validate(
        {"layers": 2, "initial_std": 0.3, **(ARRANGED if arranged else KINDS)[kind]}
    )
    spec = spec_from_settings(settings, tokenizer.vocabulary, 400)
    if kind == "mistral":
        spec = spec.model_copy(update={"attention": spec.attention.model_copy(update={"window": 37})})
    model = make_model(spec)
    initialise(model, spec, 1)
    model = model.to(torch.bfloat16 if kind.endswith("bf16") else torch.float32).eval()
    if kind.endswith(("int8", "int4")):
        model = packed(model, "int8" if kind.endswith("int8") else "int4")
    if arranged:
        arrange(model)
    return loaded(model, spec, tokenizer)


def packed(whole: Decoder, kind: Kind) -> Decoder:
    """The same with matrices of few bits."""
    weights, model = dict(whole.named_parameters()), make_model(whole.spec).eval()
    round_blocks(model, kind)
    round_ends(model, torch.float32)
    read = packed_reader([model], lambda name: weights[name].detach())
    for name, _ in list(model.named_parameters()):
        module, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(module), leaf, nn.Parameter(read(name), requires_grad=False))
    return model


def drawn(source: random.Random, vocabulary: int, beginnings: list[tuple[int, ...]]) -> Request:
    begin = source.choice([(), (), *beginnings])
    prompt = (*begin, *(source.randrange(1, vocabulary) for _ in range(source.choice([1, 2, 7, 40, 150]))))
    sampling = Sampling(temperature=source.choice([0.0, 0.9]), seed=source.randrange(9))
    return Request(
        prompt, sampling, source.randrange(1, 20), logprobs=0, ignore_end=True, n=source.choice([1, 1, 1, 3])
    )


def answers(
    engine: Engine, requests: list[Request], source: random.Random
) -> list[list[tuple[int, int, float | None]]]:
    """(choice, token, log-probability) of each request; requests arrive while others are answered, some leave."""
    found: dict[int, list[tuple[int, int, float | None]]] = {}
    numbers, waiting, gone = {}, list(enumerate(requests)), 0
    while waiting or engine.busy:
        while waiting and (not engine.busy or source.random() < 0.4):
            place, request = waiting.pop(0)
            numbers[engine.submit(request)] = place
            if source.random() < 0.1:
                gone = engine.submit(request)
        if gone and source.random() < 0.3:
            engine.cancel(gone)
            gone = 0
        for event in engine.step():
            if event.token is not None and event.request in numbers:
                told = (event.choice, event.token.id, event.token.logprob)
                found.setdefault(numbers[event.request], []).append(told)
    assert engine.stats().pages_used == 0
    return [sorted(found[place], key=lambda each: each[0]) for place in range(len(requests))]


def check_mixes(model: Loaded, mixes: int, seed: int) -> None:
    source = random.Random(seed)
    beginnings = [tuple(source.randrange(1, model.spec.vocabulary) for _ in range(size)) for size in (33, 130)]
    preempted, least = 0, page_bytes(model.spec, 320, next(model.model.parameters()).itemsize)
    for _ in range(mixes):
        requests = [drawn(source, model.spec.vocabulary, beginnings) for _ in range(source.randrange(2, 6))]
        alone = [answers(Engine(model), [request], source)[0] for request in requests[:2]]
        settings = EngineSettings(
            max_batch=source.choice([2, 5, 16]),
            page_tokens=source.choice([8, 16, 32]),
            cache_bytes=source.choice([least, 20 * least]),
            prefill_chunk=source.choice([3, 50, 512]),
            guesses=source.choice([0, 3]),
        )
        together = answers(Engine(model, settings), requests, source)
        assert together[:2] == alone
        preempted += settings.cache_bytes == least
    assert preempted or mixes < 9


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_nobody_else_matters(kind: str, threads: int, tokenizer: Tokenizer) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        check_mixes(model_of(kind, tokenizer), 5, 1)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("kind", ARRANGED)
def test_nobody_else_matters_to_a_model_as_it_is_loaded(kind: str, tokenizer: Tokenizer) -> None:
    check_mixes(model_of(kind, tokenizer, arranged=True), 5, 3)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ARRANGED)
def test_nobody_else_matters_to_loaded_models_in_many_mixes(kind: str, tokenizer: Tokenizer) -> None:
    check_mixes(model_of(kind, tokenizer, arranged=True), 100, 4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_nobody_else_matters_in_many_mixes(kind: str, tokenizer: Tokenizer) -> None:
    check_mixes(model_of(kind, tokenizer), 167, 2)


@pytest.mark.parametrize("kind", ["mistral", "bloom", "gpt2", "mixtral"])
def test_prompts_that_are_seen_whole(kind: str, tokenizer: Tokenizer) -> None:
    """As the uncached forward of training sees them, whatever the chunks, and though pages run short."""
    model = replace(model_of(kind, tokenizer), reads_whole=True)
    source = random.Random(3)
    prompts = [tuple(source.randrange(1, model.spec.vocabulary) for _ in range(size)) for size in (150, 30, 129, 1, 30)]
    prompts[4] = (*prompts[1][:24], *prompts[4][:9])
    room = page_bytes(model.spec, 320, 4)
    engine = Engine(model, EngineSettings(max_batch=4, prefill_chunk=16, cache_bytes=room))
    requests = [Request(prompt, Sampling(), 20, logprobs=0, ignore_end=True) for prompt in prompts]
    for prompt, told in zip(prompts, answers(engine, requests, source), strict=True):
        ids = [*prompt, *(id_ for _, id_, _ in told)]
        reach_T = torch.tensor([len(prompt)] * len(prompt) + [0] * len(told))
        with torch.no_grad():
            states = model.model(torch.tensor([ids]), reach_BT=reach_T[None])
            scores_TV = model.model.logits(states)[0].log_softmax(-1)[len(prompt) - 1 : -1]  # type: ignore[operator]
        assert scores_TV.argmax(-1).tolist() == ids[len(prompt) :]
        torch.testing.assert_close(scores_TV.amax(-1), torch.tensor([each for *_, each in told]), rtol=1e-4, atol=1e-4)
    assert engine.stats().prefix_hits == 0
    with pytest.raises(JinguError, match="sees a prompt whole"):
        engine.submit(replace(requests[0], prompt_logprobs=True))


def test_prefixes_are_shared_and_waste_is_little(tokenizer: Tokenizer) -> None:
    model = model_of("gpt2", tokenizer)
    engine = Engine(model, EngineSettings(page_tokens=16))
    prompt = tuple(1 + place % 250 for place in range(200))
    requests = [Request((*prompt, 7 + number), Sampling(), 100, ignore_end=True) for number in range(8)]
    for request in requests:
        engine.submit(request)
    events = engine.step()
    assert engine.stats().running == 1  # the others wait for what the first computes
    for _ in range(40):
        events += engine.step()
    stats = engine.stats()
    assert [event.cached_tokens for event in events if event.request == 5] == [192] * 40
    assert stats.prefix_hits == 7 * 192
    assert stats.pages_used == 16 + 7 * 3
    assert stats.cached_tokens == 241 + 7 * 48
    while engine.busy:
        engine.step()
    again = engine.submit(replace(requests[0], prompt=(*prompt, 7, 3), n=3))
    event, *_ = engine.step()
    assert event.request == again and event.cached_tokens == 192
    assert engine.stats().prefix_hits == 8 * 192  # of the prompt, however many choices read it
    engine.cancel(again)
    assert engine.stats().pages_used == 0


@pytest.mark.parametrize("kind", ["gpt2", "mistral"])
def test_the_cache_is_no_larger_than_allowed(kind: str, tokenizer: Tokenizer) -> None:
    """Heads are filled up to 16 elements; two pages belong to no sequence."""
    model, allowed = model_of(kind, tokenizer), 1 << 20
    engine = Engine(model, EngineSettings(cache_bytes=allowed))
    engine.run([Request((5, 6), Sampling(), 9, ignore_end=True)])
    taken = sum(layer._store.nbytes for layer in engine._cache._layers if layer._store is not None)
    page = page_bytes(model.spec, 8, 4)
    assert allowed - page < taken - 2 * page <= allowed


def test_kept_prefixes_make_room(tokenizer: Tokenizer) -> None:
    """The one not used for the longest goes first."""
    model = model_of("gpt2", tokenizer)
    page = page_bytes(model.spec, 16, 4)
    engine = Engine(model, EngineSettings(cache_bytes=8 * page, page_tokens=16))
    prompts = [tuple(number + place for place in range(1, 49)) for number in (0, 50, 100)]
    requests = [Request(prompt, Sampling(), 2, ignore_end=True) for prompt in prompts]
    for number in (0, 1, 0, 2, 2, 0, 1):
        engine.run([requests[number]])
    assert engine.stats().prefix_hits == 32 + 32 + 32
    with pytest.raises(JinguError) as error:
        engine.submit(Request(tuple(range(1, 160)), Sampling(), 2))
    assert str(error.value) == (
        "prompt: prompt and answer have up to 161 tokens, and the key-value cache has room for 128. Ask for fewer "
        "tokens, or give the engine a larger cache."
    )


def test_scores_that_are_no_numbers_end_one_request(tokenizer: Tokenizer) -> None:
    model = model_of("gpt2", tokenizer)
    engine = Engine(model)
    whole = engine.run([Request((5, 6), Sampling(), 9, ignore_end=True)])
    weight = model.model.embedding.weight
    kept = weight[77].clone()
    with torch.no_grad():
        weight[77] = torch.nan
        engine.submit(Request((5, 77, 6), Sampling(), 9, logprobs=0))
        (event,) = engine.step()
        with pytest.raises(JinguError, match=r"scores are not finite numbers. Try --precision fp32"):
            write(engine, Request((5, 77, 6), Sampling(), 9))
        engine.submit(Request((5, 77, 6), Sampling(1.0), 9, n=2, best_of=3))
        assert [each.finish for each in engine.step()] == ["error"] * 2 and not engine.busy
        weight[77] = kept
    assert event.finish == "error" and event.error == "the model's scores are not finite numbers"
    assert engine.stats().pages_used == 0
    assert engine.run([Request((5, 6), Sampling(), 9, ignore_end=True)]) == whole


def test_what_was_cut_short_spoils_nothing(tokenizer: Tokenizer) -> None:
    """Of a prompt that is given up half read nobody knows whether its scores would have been finite numbers."""
    model = model_of("gpt2", tokenizer)
    page = page_bytes(model.spec, 16, 4)
    settings = EngineSettings(prefill_chunk=32, cache_bytes=5 * page, page_tokens=16)
    last = Request(tuple(range(1, 70)), Sampling(), 4, ignore_end=True)
    engine, whole = Engine(model, settings), Engine(model, settings).run([last])
    weight = model.model.embedding.weight
    kept = weight[77].clone()
    with torch.no_grad():
        weight[77] = torch.nan
        number = engine.submit(Request((77,) * 60, Sampling(), 4))
        assert engine.step() == []
        engine.cancel(number)
        weight[77] = kept
    assert engine.run([last]) == whole and engine.stats().pages_used == 0


def test_a_prefix_outlives_those_whose_answers_fail(tokenizer: Tokenizer) -> None:
    """Pages that others share are theirs, too."""
    model = model_of("gpt2", tokenizer)
    prompt = tuple(range(1, 30))
    alone = answers(Engine(model), [Request((*prompt, 40), Sampling(), 30, logprobs=0)], random.Random(0))
    engine, nothing = Engine(model), dict.fromkeys(range(model.spec.vocabulary), -torch.inf)
    kept = engine.submit(Request((*prompt, 40), Sampling(), 30, logprobs=0))
    found = engine.step()
    broken = engine.submit(Request((*prompt, 77), Sampling(logit_bias=nothing), 5))
    found += engine.step()
    assert [event.finish for event in found if event.request == broken] == ["error"]
    while engine.busy:
        found += engine.step()
    told = [event for event in found if event.request == kept and event.token]
    assert [(event.choice, event.token.id, event.token.logprob) for event in told if event.token] == alone[0]


def test_guesses_come_sooner_and_change_nothing(tokenizer: Tokenizer) -> None:
    model = model_of("llama-bf16", tokenizer)
    prompt = (5, 6, 7, 8, 9, 10, 11, 12) * 4
    few = dict.fromkeys(range(5, 9), 99.0)  # texts of a few tokens repeat themselves
    for sampling in (Sampling(logit_bias=few), Sampling(0.8, seed=3, repetition_penalty=1.1)):
        request = Request(prompt, sampling, 60, logprobs=1, ignore_end=True)
        found, steps = [], []
        for guesses in (0, 4):
            engine, events = Engine(model, EngineSettings(guesses=guesses)), []
            engine.submit(request)
            while engine.busy:
                events.append(engine.step())
            found.append([event.token for each in events for event in each])
            steps.append(len(events))
        assert found[0] == found[1]
        assert steps[0] == 60 and (steps[1] < 60 or sampling.temperature)
