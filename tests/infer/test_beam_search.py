"""Beam search equals transformers, whatever the other requests and however few blocks there are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from jingu.errors import JinguError
from jingu.formats.export import export_hf
from jingu.infer.engine import Engine
from jingu.infer.engine_interface import EngineSettings
from jingu.infer.inference_model import InferenceModel
from jingu.infer.kv_cache import block_bytes
from jingu.infer.request import Constraint, Event, Request
from jingu.infer.sampling import SamplingParams

Hypothesis = list[tuple[list[int], float, str | None]]


def find_hypotheses(engine: Engine, *requests: Request) -> list[Hypothesis]:
    """Return the hypotheses of each request: ids, score, finish reason."""
    events: dict[int, list[Event]] = {engine.submit(request): [] for request in requests}
    while engine.busy:
        for event in engine.step():
            events[event.request_id].append(event)
    assert engine.stats().used_blocks == 0
    built = []
    for request, each in zip(requests, events.values(), strict=True):
        choices = [[event for event in each if event.choice == number] for number in range(request.n)]
        ids = [[event.token.id for event in own if event.token] for own in choices]
        built.append(
            [(of, own[-1].cumulative_logprob, own[-1].finish_reason) for of, own in zip(ids, choices, strict=True)]
        )
    return built


def ending(model: InferenceModel, *ends: int) -> InferenceModel:
    return replace(model, eos_token_ids=ends)


SEARCHES = [(2, 1.0, 1.0, 13), (5, 0.0, 1.3, 9), (4, 2.0, 1.0, 20), (3, -1.0, 1.0, 7)]
"""Beams, length penalty, repetition penalty, maximum number of tokens."""
PROMPT = (9, 4, 30, 2, 7, 7, 11, 5, 60, 3)


@pytest.mark.parametrize("kind", ["tiny", "answering"])
def test_hypotheses_and_scores_equal_transformers(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    model: InferenceModel = request.getfixturevalue(kind)
    model.tokenizer.save(tmp_path / "tokenizer")
    export_hf(model.spec, model.module.state_dict().__getitem__, tmp_path / "tokenizer", tmp_path / "out")
    reader: Any = AutoModelForSeq2SeqLM if model.spec.num_encoder_layers else AutoModelForCausalLM
    theirs = reader.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    greedy = find_hypotheses(Engine(model), Request(PROMPT, SamplingParams(), 9, num_beams=3, ignore_eos=True))[0][0][0]
    finishes = set()
    for ends in ((greedy[3],), (greedy[1], greedy[6]), tuple(range(20, 50)), (model.spec.vocab_size - 1,)):
        for beams, penalty, repetition, most in SEARCHES:
            query = Request(
                PROMPT,
                SamplingParams(repetition_penalty=repetition),
                most,
                n=beams - 1,
                num_beams=beams,
                length_penalty=penalty,
            )
            ours = find_hypotheses(Engine(ending(model, *ends)), query)[0]
            source = [*PROMPT, model.tokenizer.eos_token_id] if model.spec.num_encoder_layers else PROMPT
            expected = theirs.generate(
                torch.tensor([source]),
                max_new_tokens=most,
                num_beams=beams,
                num_return_sequences=beams - 1,
                length_penalty=penalty,
                repetition_penalty=repetition,
                do_sample=False,
                eos_token_id=list(ends),
                pad_token_id=1,
                decoder_start_token_id=model.decoder_start_token_id,
                return_dict_in_generate=True,
                output_scores=True,
            )
            begin = 1 if model.spec.num_encoder_layers else len(PROMPT)
            for (ids, score, finish), whole, reference in zip(
                ours, expected.sequences.tolist(), expected.sequences_scores.tolist(), strict=True
            ):
                assert ids == whole[begin:][: len(ids)] and set(whole[begin:][len(ids) :]) <= {1}
                assert score == pytest.approx(reference, rel=1e-5, abs=1e-5)
                finishes.add(finish)
    assert finishes == {"end", "length"}


@pytest.mark.parametrize("kind", ["tiny", "answering"])
def test_hypotheses_do_not_depend_on_other_requests_or_memory(kind: str, request: pytest.FixtureRequest) -> None:
    model: InferenceModel = request.getfixturevalue(kind)
    page = block_bytes(model.spec, 8, 4)
    query = [
        Request(PROMPT, SamplingParams(), 30, n=3, num_beams=4, ignore_eos=True),
        Request(PROMPT[:5], SamplingParams(), 23, n=2, num_beams=5, ignore_eos=True),
        Request(PROMPT, SamplingParams(0.9, seed=3), 40, n=2, ignore_eos=True),
    ]
    alone = [find_hypotheses(Engine(model), each)[0] for each in query]
    for settings in (
        EngineSettings(prefill_chunk_size=3),
        EngineSettings(max_num_seqs=6, num_speculative_tokens=3),
        EngineSettings(kv_cache_bytes=24 * page),
        EngineSettings(block_size=16, max_num_seqs=9, kv_cache_bytes=30 * page),
    ):
        assert find_hypotheses(Engine(model, settings), *query) == alone
        assert find_hypotheses(Engine(model, settings), *query[::-1]) == alone[::-1]


def test_beams_share_blocks_of_their_common_prefix(tiny: InferenceModel) -> None:
    engine = Engine(tiny)
    engine.submit(Request((1,) * 40, SamplingParams(), 9, num_beams=6))
    engine.step()
    assert engine.stats().used_blocks == 5
    for step in range(1, 8):
        engine.step()
        stats = engine.stats()
        assert 6 <= stats.used_blocks <= 5 + 6
        assert 40 + step <= stats.cached_tokens <= 40 + 6 * step


def test_a_cancelled_search_frees_its_blocks(tiny: InferenceModel) -> None:
    engine = Engine(tiny)
    number = engine.submit(Request(PROMPT, SamplingParams(), 30, n=2, num_beams=3, ignore_eos=True))
    for _ in range(4):
        assert engine.step() == []
    engine.cancel(number)
    assert [(event.choice, event.finish_reason) for event in engine.step()] == [(0, "cancelled"), (1, "cancelled")]
    assert not engine.busy and engine.stats().used_blocks == 0


def test_non_finite_logits_end_a_search(tiny: InferenceModel) -> None:
    query = Request(PROMPT, SamplingParams(), 6, n=2, num_beams=3, ignore_eos=True)
    engine = Engine(tiny)
    before = find_hypotheses(engine, query)
    assert tiny.module.embedding is not None  # type: ignore[union-attr]
    weight = tiny.module.embedding.weight  # type: ignore[union-attr]
    remaining = weight[77].clone()  # type: ignore[index]
    with torch.no_grad():
        weight[77] = torch.nan  # type: ignore[index, operator]
        (broken,) = find_hypotheses(engine, replace(query, prompt=(*PROMPT, 77)))
        weight[77] = remaining  # type: ignore[index, operator]
    assert broken == [([], 0.0, "error")] * 2
    assert find_hypotheses(engine, query) == before


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"num_beams": 65}, "num_beams: it is 65, and should be at most 64."),
        ({"num_beams": 2, "n": 3}, "num_beams: it is 2, and should be at least n, 3."),
        *[
            (
                {"num_beams": 2, **each},
                "num_beams: beam search does not support stop strings, constraints and log-probabilities of tokens. "
                "Leave out stop, constraint, logprobs and prompt_logprobs, or num_beams.",
            )
            for each in ({"stop": ("a",)}, {"constraint": Constraint("json")}, {"logprobs": 0})
        ],
    ],
)
def test_unsupported_settings_of_beam_search(tiny: InferenceModel, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(JinguError) as error:
        Engine(tiny).submit(Request((5,), SamplingParams(), 3, **settings))
    assert str(error.value) == words
