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
from jingu.infer.arrange import arrange
from jingu.infer.engine import Engine, EngineSettings
from jingu.infer.forward import compiled
from jingu.infer.graphs import Graphs
from jingu.infer.load import Loaded
from jingu.infer.request import Event, Request
from jingu.infer.sampling import Sampling
from jingu.infer.verbs import Compute
from jingu.model.decoder import Decoder
from jingu.text.tokenizer import Tokenizer
from tests.infer.conftest import filled

REQUESTS = [
    Request((5, 6, 7), Sampling(), 40, logprobs=1, ignore_end=True),
    Request(tuple(range(3, 90)), Sampling(0.9, seed=3), 70, logprobs=1, ignore_end=True),  # over a border of spans
    Request((5, 6, 7, 8, 9, 10, 11, 12), Sampling(1.2, seed=5), 30, n=2, logprobs=1, ignore_end=True),
]


class Again:
    """Records a step as something to run again; what it gives lies where it lay before."""

    def __init__(self) -> None:
        self.recorded, self.launched = 0, 0

    def __call__(self, step: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
        result = step().clone()
        self.recorded += 1

        def replay() -> None:
            self.launched += 1
            result.copy_(step())

        return replay, result


def told(engine: Engine) -> list[list[Event]]:
    numbers = [engine.submit(request) for request in REQUESTS]
    events = []
    while engine.busy:
        events += engine.step()
    return [[event for event in events if event.request == number] for number in numbers]


@pytest.mark.parametrize("position", ["rope", "learned"])
def test_recorded_steps_give_the_same(position: str, tokenizer: Tokenizer) -> None:
    family = {"rope": "llama", "learned": "gpt2"}[position]
    settings = ModelSettings.model_validate({"family": family, "width": 24, "heads": 3, "layers": 2})
    model = filled(settings, tokenizer, context=200)
    few = EngineSettings(max_batch=4, prefill_chunk=16)
    plain, again = told(Engine(model, few)), Again()
    assert told(Engine(model, few, graphs=Graphs(again))) == plain
    assert 2 <= again.recorded < again.launched / 5
    assert told(Engine(model, few, graphs=Graphs(again, most=1))) == plain


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_recorded_on_cuda(tokenizer: Tokenizer) -> None:
    model = filled(ModelSettings(width=64, heads=4, layers=2), tokenizer, context=200)
    model.model.to("cuda")
    assert told(Engine(model, graphs=Graphs())) == told(Engine(model))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_compiled_steps_answer_alike_and_are_compiled_once(family: str, tokenizer: Tokenizer) -> None:
    settings = ModelSettings.model_validate({"family": family, "width": 24, "heads": 3, "layers": 2})
    plain, twin = (filled(settings, tokenizer, context=200) for _ in range(2))
    for each in (plain, twin):
        each.model.double()
    arrange(cast(Decoder, twin.model))  # as a model is loaded; in fp64 its matrices stay as they are
    expected, model = told(Engine(plain)), compiled(twin)
    graphs, again = counters["stats"]["unique_graphs"], Again()
    assert graphs
    for engine in (Engine(model, EngineSettings(max_batch=4, prefill_chunk=16)), Engine(model, graphs=Graphs(again))):
        for events, others in zip(told(engine), expected, strict=True):
            tokens, their_tokens = ([event.token for event in each if event.token] for each in (events, others))
            assert [token.id for token in tokens] == [token.id for token in their_tokens]
            for token, their in zip(tokens, their_tokens, strict=True):
                assert token.logprob == pytest.approx(their.logprob, abs=1e-9)
    assert counters["stats"]["unique_graphs"] == graphs
    assert again.recorded


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_compiled_on_cuda(tokenizer: Tokenizer) -> None:
    plain, twin = (filled(ModelSettings(width=64, heads=4, layers=2), tokenizer, context=200) for _ in range(2))
    for each in (plain, twin):
        each.model.to("cuda")
    found, expected = told(Engine(compiled(twin), graphs=Graphs())), told(Engine(plain))
    assert [[event.token and event.token.id for event in each] for each in found] == [
        [event.token and event.token.id for event in each] for each in expected
    ]


def test_what_cannot_be_recorded_or_compiled(answering: Loaded) -> None:
    with pytest.raises(JinguError, match="decoders alone"):
        Engine(answering, graphs=Graphs(Again()))
    with pytest.raises(JinguError, match="decoders alone"):
        compiled(answering)
    for how in (Compute(device="cpu", cuda_graphs=True), Compute(device="cpu", compile=True)):
        with pytest.raises(JinguError, match="for models on CUDA"):
            how.load(Path("not-looked-for"))
