"""Speculation with a model's own layer of multi-token prediction: the same answers, and the drafts that it predicts."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from jingu.errors import JinguError
from jingu.formats.huggingface import open_hf
from jingu.formats.stored_model import load_model
from jingu.infer.engine import Engine
from jingu.infer.engine_interface import EngineSettings
from jingu.infer.inference_model import InferenceModel, load
from jingu.infer.kv_cache import block_bytes
from jingu.infer.prediction_speculator import PredictionSpeculator
from jingu.infer.request import Request
from jingu.infer.sampling import SamplingParams
from jingu.model.decoder import Decoder
from jingu.model.inputs import Inputs
from jingu.text.tokenizer_training import train_tokenizer
from tests.infer.test_batches import answers, random_request
from tests.parity.test_multi_token_prediction import change, written


@pytest.fixture(scope="module", params=["glm4_moe", "deepseek_v3", "mimo_v2_flash", "exaone_moe"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp(request.param)
    written(request.param, folder)
    change(folder, max_position_embeddings=400)
    train_tokenizer(iter(["some text"]), 290, ["<|endoftext|>"]).save(folder / "tokenizer")
    for file in (folder / "tokenizer").iterdir():
        if file.name != "config.json":
            shutil.copy(file, folder)
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> InferenceModel:
    return load(folder, "fp32", "cpu")


def settings(**changes: Any) -> EngineSettings:
    return EngineSettings(use_predictions=True, **changes)


def test_answers_are_the_same(model: InferenceModel) -> None:
    source = random.Random(4)
    least = block_bytes(model.spec, 320, 4)
    for each in (
        settings(),
        settings(max_num_seqs=3, prefill_chunk_size=9, num_speculative_tokens=3),
        settings(kv_cache_bytes=least, block_size=16, num_speculative_tokens=2),
    ):
        requests = [random_request(source, model.spec.vocab_size, [tuple(range(1, 34))]) for _ in range(5)]
        alone = [answers(Engine(model), [request], source)[0] for request in requests]
        engine = Engine(model, each)
        assert answers(engine, requests, source) == alone
        assert engine.stats().draft_tokens > 0


@pytest.mark.slow
def test_a_thousand_greedy_tokens_are_the_same(model: InferenceModel) -> None:
    requests = [Request((5 + n, 6, 7 + n), SamplingParams(), 88, ignore_eos=True) for n in range(12)]
    expected = [[event.token for event in events] for events in Engine(model).run(requests)]
    engine = Engine(model, settings(num_speculative_tokens=2))
    assert [[event.token for event in events] for events in engine.run(requests)] == expected
    assert sum(map(len, expected)) > 1000


def test_drafts_are_the_predictions_of_the_layer(
    model: InferenceModel, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole texts without a cache give the same drafts; the second one comes from the layer's own hidden states."""
    decoder = load_model(open_hf(folder), torch.float32).eval()
    drafts: list[tuple[list[int], list[int]]] = []
    original = PredictionSpeculator.propose

    def record(self: PredictionSpeculator, max_tokens: Any) -> Any:
        proposals = original(self, max_tokens)
        drafts.extend((list(sequence.token_ids), list(tokens)) for sequence, tokens in proposals.items())
        return proposals

    monkeypatch.setattr(PredictionSpeculator, "propose", record)
    engine = Engine(model, settings(prefill_chunk_size=7, num_speculative_tokens=2))
    engine.run([Request(tuple(range(3, 20)), SamplingParams(), 12, ignore_eos=True)])
    assert len(drafts) > 5
    layer, embedding = decoder.mtp[0], decoder.embedding
    assert embedding is not None
    for ids, tokens in drafts:
        with torch.no_grad():
            text = torch.tensor([ids])
            states = decoder(text)[:, :-1]
            nexts = text[:, 1:]
            for number in range(len(tokens)):
                context = decoder.prediction_context(Inputs(nexts), states)
                further = layer(states, embedding(nexts), context)
                assert int(decoder.logits(further)[0, -1].argmax()) == tokens[number]
                states = torch.cat((states, further[:, -1:]), 1)
                nexts = torch.cat((nexts, torch.tensor([[tokens[number]]])), 1)


@pytest.mark.slow
def test_a_trained_layer_is_right_often(tiny_run: Any, train_on: Any, done: Any) -> None:
    config = tiny_run(
        {"model.mtp_layers": 1, "model.mtp_loss_weight": 0.3, "train.steps": 200, "precision.type": "fp32"}
    )
    train_on(1, config)
    model = load(done(config).folder, "fp32", "cpu")
    requests = [Request((9 + n, 4, 30), SamplingParams(), 28, ignore_eos=True) for n in range(8)]
    expected = [[event.token for event in events] for events in Engine(model).run(requests)]
    engine = Engine(model, settings())
    assert [[event.token for event in events] for events in engine.run(requests)] == expected
    stats = engine.stats()
    assert stats.accepted_tokens / stats.draft_tokens > 0.3
    # 20,000 samples of pairs of tokens follow the model's distribution.
    prompt, count = (9, 4, 30), 20_000
    engine.submit(Request(prompt, SamplingParams(1.2, top_k=3, seed=11), 2, n=count, ignore_eos=True))
    pairs: dict[int, list[int]] = {}
    while engine.busy:
        for event in engine.step():
            assert event.token is not None
            pairs.setdefault(event.choice, []).append(event.token.id)

    def likely(*ids: int) -> dict[int, float]:
        assert isinstance(model.module, Decoder)
        with torch.inference_mode():
            logits_V = model.module.logits(model.module(torch.tensor([[*prompt, *ids]])))[0, -1] / 1.2
        best = logits_V.topk(3)
        return dict(zip(best.indices.tolist(), best.values.softmax(0).tolist(), strict=True))

    counts = Counter(tuple(pair) for pair in pairs.values())
    expected_counts = {
        (one, two): count * share * part for one, share in likely().items() for two, part in likely(one).items()
    }
    assert set(counts) <= set(expected_counts) and len(expected_counts) == 9
    chi_square = sum((counts[pair] - wish) ** 2 / wish for pair, wish in expected_counts.items())
    assert chi_square < 20.09  # 99% of 8 degrees of freedom


def test_models_without_the_layer_are_refused(tiny: InferenceModel) -> None:
    with pytest.raises(JinguError, match="has no layers of multi-token prediction"):
        Engine(tiny, settings())
