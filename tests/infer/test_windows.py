"""Layers with a window keep only its tokens in the KV cache, and answers do not change."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from jingu.config.sections.model import ModelSettings
from jingu.formats.huggingface import open_hf
from jingu.formats.stored_model import load_model
from jingu.infer.engine import Engine
from jingu.infer.engine_interface import EngineSettings
from jingu.infer.inference_model import InferenceModel
from jingu.infer.kv_cache import block_bytes, pool_bytes
from jingu.infer.request import Request
from jingu.infer.sampling import SamplingParams
from jingu.model.decoder import build_model
from jingu.model.parts import cached_tokens
from jingu.model.resolve import spec_from_settings
from jingu.model.spec import replace_fields
from jingu.model.weight_init import init_weights
from jingu.plan.serving import cache_bytes
from jingu.text.tokenizer import Tokenizer
from tests.parity import test_components as components
from tests.parity.fp64 import randomize

GREEDY = SamplingParams(temperature=0.0)
WINDOW = 32


def five_to_one(tokenizer: Tokenizer, context: int) -> InferenceModel:
    """Six layers, of which the last attends to all tokens and the others to a window."""
    settings = ModelSettings(hidden_size=16, num_heads=1, num_layers=6, intermediate_size=16, initializer_range=0.3)
    spec = spec_from_settings(settings, tokenizer.vocab_size, context)
    kinds = {"window": {"attention.sliding_window": WINDOW}, "full": {}}
    spec = replace_fields(spec, layer_kinds=kinds, layer_pattern=("window",) * 5 + ("full",))
    model = build_model(spec)
    init_weights(model, spec, 1)
    return InferenceModel(model.eval(), spec, tokenizer)


def check_memory(model: InferenceModel, lengths: list[int], num_tokens: int, settings: EngineSettings) -> None:
    """Check the blocks of running sequences after each step against the plan's formula, within a block for each."""
    engine = Engine(model, settings)
    source = random.Random(5)
    for length in lengths:
        prompt = tuple(source.randrange(1, 250) for _ in range(length))
        engine.submit(Request(prompt, GREEDY, num_tokens, ignore_eos=True))
    block = block_bytes(model.spec, engine.settings.tokens_per_block(model), 4)
    checked = 0
    while engine.busy:
        engine.step()
        sequences = engine._scheduler.running
        expected = sum(cache_bytes(model.spec, each.num_computed, number_bytes=4.0) for each in sequences)
        assert abs(engine.stats().used_bytes - expected) <= block * len(sequences)
        checked += sum(each.num_computed > max(lengths) - 1 for each in sequences)
    assert checked and engine.stats().used_bytes == 0


@pytest.mark.parametrize("block_size", [4, 16])
def test_memory_equals_the_formula(block_size: int, tokenizer: Tokenizer) -> None:
    model = five_to_one(tokenizer, 400)
    settings = EngineSettings(max_num_seqs=3, block_size=block_size, prefill_chunk_size=48)
    check_memory(model, [300, 7, 130], 60, settings)
    assert cached_tokens(model.spec.layer(0), 300) == WINDOW and cached_tokens(model.spec.layer(5), 300) == 300


@pytest.mark.slow
def test_memory_of_a_long_context_equals_the_formula(tokenizer: Tokenizer) -> None:
    check_memory(five_to_one(tokenizer, 1 << 15), [32_700, 1000], 60, EngineSettings(max_num_seqs=2))


def test_a_cache_of_few_windows_holds_long_sequences(tokenizer: Tokenizer) -> None:
    """The pools together take what the cache may take, and hold more tokens than equal pools would."""
    model = five_to_one(tokenizer, 2000)
    size = block_bytes(model.spec, 8, 4)
    engine = Engine(
        model, EngineSettings(max_num_seqs=4, block_size=8, prefill_chunk_size=32, kv_cache_bytes=40 * size)
    )
    full, window = engine._pools
    assert 40 * size - size < engine.stats().total_bytes <= 40 * size
    assert full.num_usable > 40 > window.num_usable
    assert engine.max_new_tokens(5) == full.num_usable * 8 - 5
    prompt = tuple(1 + place % 250 for place in range(full.num_usable * 8 - 9))
    alone = Engine(model).generate([Request(prompt, GREEDY, 9, ignore_eos=True)])
    assert engine.generate([Request(prompt, GREEDY, 9, ignore_eos=True)]) == alone
    tiny = Engine(model, EngineSettings(max_num_seqs=4, block_size=8, kv_cache_bytes=5 * size))
    assert [pool.num_usable for pool in tiny._pools] == [5, 5] and sum(pool_bytes(model.spec, 8, 4)) == size


@pytest.fixture(scope="module", params=["gemma3", "gemma2", "chunks"])
def pair(request: pytest.FixtureRequest, tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> tuple:
    """Return transformers' model and jingu's; for chunks, jingu's without a cache is the reference."""
    torch.manual_seed(3)
    if request.param == "chunks":
        model = five_to_one(tokenizer, 400)
        chunks = {"window": {"attention.chunk_size": 13}, "full": {"attention.sliding_window": 40}}
        spec = replace_fields(model.spec, layer_kinds=chunks)
        module = build_model(spec)
        module.load_state_dict(model.module.state_dict())
        return None, InferenceModel(module.eval(), spec, tokenizer)
    folder: Path = tmp_path_factory.mktemp("model")
    config = getattr(components, request.param)()[0]
    config.max_position_embeddings = 400
    theirs = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    randomize(theirs, torch.float32, 0.1).save_pretrained(folder)
    stored = open_hf(folder)
    ours = load_model(stored, torch.float32).eval()
    return theirs.eval(), InferenceModel(ours, stored.spec, tokenizer)


def uncached(model: InferenceModel, prompt: tuple[int, ...], num_tokens: int) -> list[int]:
    ids = list(prompt)
    for _ in range(num_tokens):
        ids.append(int(model.module.logits(model.module(torch.tensor([ids])))[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize(
    "settings",
    [
        EngineSettings(),
        EngineSettings(max_num_seqs=3, block_size=4, prefill_chunk_size=5),
        EngineSettings(block_size=8, num_speculative_tokens=3),
        EngineSettings(block_size=4, prefill_chunk_size=16, kv_cache_bytes=-1, num_speculative_tokens=2),
    ],
    ids=["together", "chunks", "drafts", "preemption"],
)
def test_greedy_text_past_the_window(pair: tuple, settings: EngineSettings) -> None:
    """With batches, shared prefixes, drafts and preemption: equal to transformers and to the model without a cache."""
    theirs, model = pair
    source = random.Random(7)
    begin = tuple(source.randrange(1, 279) for _ in range(45))
    prompts = [
        begin + (5, 6, 7) * 4,
        begin + (9,) * 3,
        (3, 4) * 9,
        begin[:30] + (8,) * 30,
        begin + (5, 6, 7) * 4 + (2,),
    ]
    if settings.kv_cache_bytes is not None:
        settings = replace(settings, kv_cache_bytes=block_bytes(model.spec, 100, model.parameter.itemsize))
    engine = Engine(model, settings)
    with torch.no_grad():
        expected = [uncached(model, prompt, 17) for prompt in prompts]
    if theirs is not None:
        for prompt, ids in zip(prompts, expected, strict=True):
            text = theirs.generate(
                torch.tensor([prompt]), max_new_tokens=17, do_sample=False, eos_token_id=None, pad_token_id=0
            )
            assert text[0, len(prompt) :].tolist() == ids
    requests = [Request(prompt, GREEDY, 17, ignore_eos=True) for prompt in prompts]
    # The second round continues prefixes of which the first one has freed what lies behind the window.
    for _ in range(2):
        events = engine.run(requests)
        assert [[event.token.id for event in each if event.token] for each in events] == expected
    assert engine.stats().used_blocks == 0 and engine.stats().prefix_cache_hits > 0


def test_beams_and_continuations_past_the_window(pair: tuple) -> None:
    """Forks share blocks, copy what they write, and free what is behind their windows."""
    _, model = pair
    prompt = tuple(1 + place % 7 for place in range(50))
    beams = Request(prompt, GREEDY, 30, ignore_eos=True, num_beams=3)
    alone = Engine(model, EngineSettings(block_size=16)).generate([beams])
    engine = Engine(model, EngineSettings(block_size=4, prefill_chunk_size=7))
    assert engine.generate([beams, Request(prompt, GREEDY, 30, ignore_eos=True)])[0] == alone[0]
    continuations = [(4, 5, 6) * 15, (9,), (7, 8) * 3]
    (first, *_) = scores = engine.score(prompt, continuations)
    ids = torch.tensor([[*prompt, *continuations[0]]])
    with torch.no_grad():
        logprobs_TV = model.module.logits(model.module(ids))[0].log_softmax(-1)
    expected = logprobs_TV[len(prompt) - 1 : -1].gather(1, ids[0, len(prompt) :, None]).sum()
    assert first.logprob == pytest.approx(float(expected), rel=1e-4)
    small = EngineSettings(block_size=8, kv_cache_bytes=block_bytes(model.spec, 160, 4), prefill_chunk_size=16)
    assert Engine(model, small).score(prompt, continuations) == scores
    assert engine.stats().used_blocks == 0
