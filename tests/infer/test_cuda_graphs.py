"""Steps recorded and launched whole: the same answers; on CUDA by CUDA, elsewhere by a stand-in that runs a step again
from the tensors that it was recorded with, as a graph does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from jingu.config.sections.model import ModelSettings
from jingu.errors import JinguError
from jingu.infer.cuda_graphs import CudaGraphRunner
from jingu.infer.engine import Engine
from jingu.infer.engine_interface import EngineSettings
from jingu.infer.generate import InferenceOptions
from jingu.infer.inference_model import InferenceModel
from jingu.infer.model_runner import compile_blocks
from jingu.infer.prepack import prepack_weights
from jingu.infer.request import Event, Request
from jingu.infer.sampling import SamplingParams
from jingu.model.decoder import Decoder
from jingu.text.tokenizer import Tokenizer
from tests.infer.conftest import filled

REQUESTS = [
    Request((5, 6, 7), SamplingParams(), 40, logprobs=1, ignore_eos=True),
    Request(
        tuple(range(3, 90)), SamplingParams(0.9, seed=3), 70, logprobs=1, ignore_eos=True
    ),  # over a border of spans
    Request((5, 6, 7, 8, 9, 10, 11, 12), SamplingParams(1.2, seed=5), 30, n=2, logprobs=1, ignore_eos=True),
]


class Again:
    """Records a step and replays it; its outputs keep their addresses."""

    def __init__(self) -> None:
        self.recorded, self.launched = 0, 0

    def __call__(self, step: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
        result = step().clone()
        self.recorded += 1

        def replay() -> None:
            self.launched += 1
            result.copy_(step())

        return replay, result


def generate_events(engine: Engine) -> list[list[Event]]:
    numbers = [engine.submit(request) for request in REQUESTS]
    events = []
    while engine.busy:
        events += engine.step()
    return [[event for event in events if event.request_id == number] for number in numbers]


@pytest.mark.parametrize("position", ["rope", "learned"])
def test_recorded_steps_give_the_same_answers(position: str, tokenizer: Tokenizer) -> None:
    family = {"rope": "llama", "learned": "gpt2"}[position]
    settings = ModelSettings.model_validate({"family": family, "hidden_size": 24, "num_heads": 3, "num_layers": 2})
    model = filled(settings, tokenizer, context=200)
    few = EngineSettings(max_num_seqs=4, prefill_chunk_size=16)
    plain, again = generate_events(Engine(model, few)), Again()
    assert generate_events(Engine(model, few, graphs=CudaGraphRunner(again))) == plain
    assert 2 <= again.recorded < again.launched / 5
    assert generate_events(Engine(model, few, graphs=CudaGraphRunner(again, most=1))) == plain


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_recorded_on_cuda(tokenizer: Tokenizer) -> None:
    model = filled(ModelSettings(hidden_size=64, num_heads=4, num_layers=2), tokenizer, context=200)
    model.module.to("cuda")
    assert generate_events(Engine(model, graphs=CudaGraphRunner())) == generate_events(Engine(model))


@pytest.mark.parametrize("family", ["llama", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_compiled_steps_give_the_same_answers_and_compile_once(family: str, tokenizer: Tokenizer) -> None:
    settings = ModelSettings.model_validate({"family": family, "hidden_size": 24, "num_heads": 3, "num_layers": 2})
    plain, twin = (filled(settings, tokenizer, context=200) for _ in range(2))
    for each in (plain, twin):
        each.module.double()
    prepack_weights(cast(Decoder, twin.module))  # as a model is loaded; in fp64 its matrices stay as they are
    expected, model = generate_events(Engine(plain)), compile_blocks(twin)
    graphs, again = counters["stats"]["unique_graphs"], Again()
    assert graphs
    for engine in (
        Engine(model, EngineSettings(max_num_seqs=4, prefill_chunk_size=16)),
        Engine(model, graphs=CudaGraphRunner(again)),
    ):
        for events, others in zip(generate_events(engine), expected, strict=True):
            tokens, their_tokens = ([event.token for event in each if event.token] for each in (events, others))
            assert [token.id for token in tokens] == [token.id for token in their_tokens]
            for token, their in zip(tokens, their_tokens, strict=True):
                assert token.logprob == pytest.approx(their.logprob, abs=1e-9)
    assert counters["stats"]["unique_graphs"] == graphs
    assert again.recorded


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_compiled_on_cuda(tokenizer: Tokenizer) -> None:
    plain, twin = (
        filled(ModelSettings(hidden_size=64, num_heads=4, num_layers=2), tokenizer, context=200) for _ in range(2)
    )
    for each in (plain, twin):
        each.module.to("cuda")
    actual, expected = (
        generate_events(Engine(compile_blocks(twin), graphs=CudaGraphRunner())),
        generate_events(Engine(plain)),
    )
    assert [[event.token and event.token.id for event in each] for each in actual] == [
        [event.token and event.token.id for event in each] for each in expected
    ]


def test_models_that_cannot_be_recorded_or_compiled(answering: InferenceModel) -> None:
    with pytest.raises(JinguError, match="single-process dense decoders"):
        Engine(answering, graphs=CudaGraphRunner(Again()))
    with pytest.raises(JinguError, match="single-process dense decoders"):
        compile_blocks(answering)
    for how in (InferenceOptions(device="cpu", cuda_graphs=True), InferenceOptions(device="cpu", compile=True)):
        with pytest.raises(JinguError, match=r"needs a model on (CUDA|a GPU)"):
            how.load(Path("not-looked-for"))
