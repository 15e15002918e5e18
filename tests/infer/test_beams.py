"""Beam search: transformers' hypotheses and scores, whoever else is there and however few pages there are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from jingu.checkpoint.export import export_hf
from jingu.errors import JinguError
from jingu.infer.cache import page_bytes
from jingu.infer.engine import Engine, EngineSettings
from jingu.infer.load import Loaded
from jingu.infer.request import Constraint, Event, Request
from jingu.infer.sampling import Sampling

Found = list[tuple[list[int], float, str | None]]


def found(engine: Engine, *requests: Request) -> list[Found]:
    """Of each request its hypotheses: ids, score, why they end."""
    events: dict[int, list[Event]] = {engine.submit(request): [] for request in requests}
    while engine.busy:
        for event in engine.step():
            events[event.request].append(event)
    assert engine.stats().pages_used == 0
    made = []
    for request, each in zip(requests, events.values(), strict=True):
        choices = [[event for event in each if event.choice == number] for number in range(request.n)]
        ids = [[event.token.id for event in own if event.token] for own in choices]
        made.append([(of, own[-1].logprob, own[-1].finish) for of, own in zip(ids, choices, strict=True)])
    return made


def ending(model: Loaded, *ends: int) -> Loaded:
    return replace(model, end_ids=ends)


SEARCHES = [(2, 1.0, 1.0, 13), (5, 0.0, 1.3, 9), (4, 2.0, 1.0, 20), (3, -1.0, 1.0, 7)]
"""Beams, penalty of the length and of repetition, most tokens."""
PROMPT = (9, 4, 30, 2, 7, 7, 11, 5, 60, 3)


@pytest.mark.parametrize("kind", ["tiny", "answering"])
def test_hypotheses_and_scores_are_those_of_transformers(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    model: Loaded = request.getfixturevalue(kind)
    model.tokenizer.save(tmp_path / "tokenizer")
    export_hf(model.spec, model.model.state_dict().__getitem__, tmp_path / "tokenizer", tmp_path / "out")
    reader: Any = AutoModelForSeq2SeqLM if model.spec.encoder_layers else AutoModelForCausalLM
    theirs = reader.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    greedy = found(Engine(model), Request(PROMPT, Sampling(), 9, beams=3, ignore_end=True))[0][0][0]
    finishes = set()
    for ends in ((greedy[3],), (greedy[1], greedy[6]), tuple(range(20, 50)), (model.spec.vocabulary - 1,)):
        for beams, penalty, repetition, most in SEARCHES:
            asked = Request(
                PROMPT, Sampling(repetition_penalty=repetition), most, n=beams - 1, beams=beams, length_penalty=penalty
            )
            ours = found(Engine(ending(model, *ends)), asked)[0]
            source = [*PROMPT, model.tokenizer.end_id] if model.spec.encoder_layers else PROMPT
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
                decoder_start_token_id=model.start_id,
                return_dict_in_generate=True,
                output_scores=True,
            )
            begin = 1 if model.spec.encoder_layers else len(PROMPT)
            for (ids, score, finish), whole, wanted in zip(
                ours, expected.sequences.tolist(), expected.sequences_scores.tolist(), strict=True
            ):
                assert ids == whole[begin:][: len(ids)] and set(whole[begin:][len(ids) :]) <= {1}
                assert score == pytest.approx(wanted, rel=1e-5, abs=1e-5)
                finishes.add(finish)
    assert finishes == {"end", "length"}


@pytest.mark.parametrize("kind", ["tiny", "answering"])
def test_nobody_else_matters_nor_how_few_pages_there_are(kind: str, request: pytest.FixtureRequest) -> None:
    model: Loaded = request.getfixturevalue(kind)
    page = page_bytes(model.spec, 8, 4)
    asked = [
        Request(PROMPT, Sampling(), 30, n=3, beams=4, ignore_end=True),
        Request(PROMPT[:5], Sampling(), 23, n=2, beams=5, ignore_end=True),
        Request(PROMPT, Sampling(0.9, seed=3), 40, n=2, ignore_end=True),
    ]
    alone = [found(Engine(model), each)[0] for each in asked]
    for settings in (
        EngineSettings(prefill_chunk=3),
        EngineSettings(max_batch=6, guesses=3),
        EngineSettings(cache_bytes=24 * page),
        EngineSettings(page_tokens=16, max_batch=9, cache_bytes=30 * page),
    ):
        assert found(Engine(model, settings), *asked) == alone
        assert found(Engine(model, settings), *asked[::-1]) == alone[::-1]


def test_beams_share_the_pages_of_what_they_have_in_common(tiny: Loaded) -> None:
    engine = Engine(tiny)
    engine.submit(Request((1,) * 40, Sampling(), 9, beams=6))
    engine.step()
    assert engine.stats().pages_used == 5
    for step in range(1, 8):
        engine.step()
        stats = engine.stats()
        assert 6 <= stats.pages_used <= 5 + 6
        assert 40 + step <= stats.cached_tokens <= 40 + 6 * step


def test_a_cancelled_search_ends_and_its_pages_are_free(tiny: Loaded) -> None:
    engine = Engine(tiny)
    number = engine.submit(Request(PROMPT, Sampling(), 30, n=2, beams=3, ignore_end=True))
    for _ in range(4):
        assert engine.step() == []
    engine.cancel(number)
    assert [(event.choice, event.finish) for event in engine.step()] == [(0, "cancelled"), (1, "cancelled")]
    assert not engine.busy and engine.stats().pages_used == 0


def test_scores_that_are_no_numbers_end_a_search(tiny: Loaded) -> None:
    asked = Request(PROMPT, Sampling(), 6, n=2, beams=3, ignore_end=True)
    engine = Engine(tiny)
    before = found(engine, asked)
    assert tiny.model.embedding is not None  # type: ignore[union-attr]
    weight = tiny.model.embedding.weight  # type: ignore[union-attr]
    kept = weight[77].clone()  # type: ignore[index]
    with torch.no_grad():
        weight[77] = torch.nan  # type: ignore[index, operator]
        (broken,) = found(engine, replace(asked, prompt=(*PROMPT, 77)))
        weight[77] = kept  # type: ignore[index, operator]
    assert broken == [([], 0.0, "error")] * 2
    assert found(engine, asked) == before


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"beams": 65}, "beams: it is 65, and should be at most 64."),
        ({"beams": 2, "n": 3}, "beams: it is 2, and should be at least as many as n, 3."),
        *[
            (
                {"beams": 2, **each},
                "beams: a beam search tells whole hypotheses with a score of each, and has no stop strings, "
                "constraints or log-probabilities of tokens. Leave stop, constraint, logprobs and prompt_logprobs "
                "out, or beams.",
            )
            for each in ({"stop": ("a",)}, {"constraint": Constraint("json")}, {"logprobs": 0})
        ],
    ],
)
def test_what_a_search_cannot_do(tiny: Loaded, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(JinguError) as error:
        Engine(tiny).submit(Request((5,), Sampling(), 3, **settings))
    assert str(error.value) == words
