"""The engine: choices, end tokens, stop strings, seeds, limits, cancellation, log-probabilities; and the command."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from jingu.errors import JinguError
from jingu.formats.export import export_hf
from jingu.infer import generate
from jingu.infer.engine import Engine
from jingu.infer.engine_interface import EngineSettings
from jingu.infer.generate import InferenceOptions
from jingu.infer.inference_model import InferenceModel, load
from jingu.infer.kv_cache import block_bytes
from jingu.infer.request import Constraint, Event, Request, Token
from jingu.infer.sampling import SamplingParams, sampling_params
from jingu.infer.structured_output import GrammarCompiler
from jingu.model.inputs import Inputs

WARM = SamplingParams(temperature=1.0, seed=4)


def events_of(engine: Engine, *requests: Request) -> dict[int, list[Event]]:
    events: dict[int, list[Event]] = {engine.submit(request): [] for request in requests}
    while engine.busy:
        for event in engine.step():
            events[event.request_id].append(event)
    return events


def tokens_of(
    model: InferenceModel, *prompt: int, max_tokens: int = 12, sampling: SamplingParams | None = None, **more: object
) -> list[Token]:
    request = Request(prompt, sampling or SamplingParams(), max_tokens, **more)  # type: ignore[arg-type]
    ((*events,),) = events_of(Engine(model), request).values()
    return [event.token for event in events if event.token]


def text_of(tokens: list[Token]) -> str:
    return "".join(token.text for token in tokens)


def test_threads_of_a_command(tmp_path: Path, tiny: InferenceModel, capsys: pytest.CaptureFixture[str]) -> None:
    weights = dict(tiny.module.named_parameters())
    tiny.tokenizer.save(tmp_path / "tokenizer")
    export_hf(tiny.spec, lambda name: weights[name].detach(), tmp_path / "tokenizer", tmp_path / "model")
    num_threads = torch.get_num_threads()
    try:
        assert (
            generate.generate(tmp_path / "model", "the", {}, InferenceOptions(threads=num_threads + 2), max_tokens=2)
            == 0
        )
        assert torch.get_num_threads() == num_threads + 2
    finally:
        torch.set_num_threads(num_threads)


def test_end_token_finishes_and_is_not_shown(tiny: InferenceModel) -> None:
    free = tokens_of(tiny, 5, 6, ignore_eos=True)
    assert len(free) == 12
    end = free[3].id
    first = next(n for n, token in enumerate(free) if token.id == end)
    ending = InferenceModel(tiny.module, tiny.spec, tiny.tokenizer, eos_token_ids=(end,))
    (events,) = events_of(Engine(ending), Request((5, 6), SamplingParams(), 12)).values()
    ended = [event.token for event in events if event.token]
    assert [token.id for token in ended] == [token.id for token in free[: first + 1]]
    assert [event.finish_reason for event in events] == [None] * first + ["end"]
    assert text_of(ended) == tiny.tokenizer.decode([token.id for token in free[:first]])


def test_stop_string_finishes(tiny: InferenceModel) -> None:
    text = text_of(tokens_of(tiny, 9, max_tokens=30, sampling=WARM, ignore_eos=True))
    stop = text[5:8]
    request = Request((9,), WARM, 30, stop=(stop,), ignore_eos=True)
    (events,) = events_of(Engine(tiny), request).values()
    assert text_of([event.token for event in events if event.token]) == text[: text.index(stop)]
    assert [event.finish_reason for event in events if event.finish_reason] == ["stop"]


def test_same_seed_same_text_and_choices_differ(tiny: InferenceModel) -> None:
    def run(seed: int) -> list[list[int]]:
        torch.manual_seed(seed + 100)  # of no consequence
        (events,) = events_of(Engine(tiny), Request((), SamplingParams(1.3, 50, seed=seed), 20, n=3)).values()
        return [[event.token.id for event in events if event.choice == number and event.token] for number in range(3)]

    first = run(1)
    assert first == run(1)
    assert all(one != other for one in first for other in run(2))
    assert first[0] != first[1] != first[2] != first[0]
    assert first[0] == [token.id for token in tokens_of(tiny, max_tokens=20, sampling=SamplingParams(1.3, 50, seed=1))]


def test_empty_prompt_starts_a_document(tiny: InferenceModel) -> None:
    assert tokens_of(tiny) == tokens_of(tiny, tiny.tokenizer.eos_token_id)


@pytest.mark.parametrize("model", ["tiny", "answering"])
def test_log_probabilities_equal_the_models(model: str, request: pytest.FixtureRequest) -> None:
    of: InferenceModel = request.getfixturevalue(model)
    sampling = SamplingParams(temperature=0.7, repetition_penalty=1.5, logit_bias={3: 2.0})
    tokens = tokens_of(of, 9, 4, 30, sampling=sampling, logprobs=3, ignore_eos=True)
    ids = [token.id for token in tokens]
    with torch.no_grad():
        if of.spec.num_encoder_layers:
            source, prompt = torch.tensor([[9, 4, 30, of.tokenizer.eos_token_id]]), [of.decoder_start_token_id]
            states = of.module(Inputs(torch.tensor([[*prompt, *ids]]), source=Inputs(source)))
        else:
            prompt = [9, 4, 30]
            states = of.module(torch.tensor([[*prompt, *ids]]))
        expected = of.module.logits(states)[0].log_softmax(-1)[len(prompt) - 1 : -1]  # type: ignore[union-attr, operator]
    for token, row in zip(tokens, expected, strict=True):
        assert token.logprob == pytest.approx(float(row[token.id]), abs=1e-4)
        best = row.topk(3)
        assert [id_ for id_, _ in token.top] == best.indices.tolist()
        assert [logprob for _, logprob in token.top] == pytest.approx(best.values.tolist(), abs=1e-4)


def test_log_probabilities_of_the_prompt(tiny: InferenceModel) -> None:
    prompt = (9, 4, 30, 2, 2, 7)
    request = Request(prompt, SamplingParams(), 3, logprobs=2, prompt_logprobs=True, n=2)
    (events,) = events_of(Engine(tiny), request).values()
    with torch.no_grad():
        expected = tiny.module.logits(tiny.module(torch.tensor([prompt])))[0].log_softmax(-1)  # type: ignore[union-attr, operator]
    ((messages,),) = [[event.prompt_logprobs for event in events if event.prompt_logprobs]]
    assert [token.id for token in messages] == list(prompt)
    assert messages[0].logprob is None
    for place, token in enumerate(messages[1:]):
        assert token.logprob == pytest.approx(float(expected[place, token.id]), abs=1e-4)
        assert [id_ for id_, _ in token.top] == expected[place].topk(2).indices.tolist()


def test_cancelled_requests_end_and_others_continue(tiny: InferenceModel) -> None:
    engine = Engine(tiny, EngineSettings(max_num_seqs=2))
    remaining, gone = (
        engine.submit(Request((5,), SamplingParams(), 8, ignore_eos=True)),
        engine.submit(Request((6,), WARM, 8, n=3)),
    )
    events = engine.step()
    engine.cancel(gone)
    engine.cancel(gone)
    engine.cancel(77)
    while engine.busy:
        events += engine.step()
    assert [event.finish_reason for event in events if event.request_id == remaining] == [None] * 7 + ["length"]
    ends = [(event.choice, event.token) for event in events if event.finish_reason == "cancelled"]
    assert ends == [(0, None), (1, None), (2, None)]
    assert engine.stats().running == engine.stats().waiting == 0


@pytest.mark.parametrize(
    ("prompt", "settings", "words"),
    [
        (
            [1] * 60,
            {"max_tokens": 5},
            "prompt: the prompt's 60 tokens and 5 new tokens exceed the model's context of 64. Ask for at most 4 "
            "tokens or shorten the prompt.",
        ),
        (
            [1] * 64,
            {},
            "prompt: the prompt's 64 tokens and 1 new token exceed the model's context of 64. Shorten the prompt.",
        ),
        ([1], {"max_tokens": 0}, "max_tokens: it is 0, and should be 1 or more."),
        (
            [9999],
            {},
            "prompt: token 9999 is outside the model's vocabulary of 280. Use the tokenizer that the model was trained "
            "with.",
        ),
        ([1], {"stop": ("",)}, "stop: a stop string is empty. Leave it out."),
        ([1], {"n": 0}, "n: it is 0, and should be 1 or more."),
        ([1], {"logprobs": 281}, "logprobs: it is 281, and should be at most 280."),
        (
            [1],
            {"sampling": SamplingParams(logit_bias={280: 1.0})},
            "logit_bias: token 280 is outside the model's vocabulary of 280. Use the tokenizer that the model was "
            "trained with.",
        ),
    ],
)
def test_requests_that_can_never_be_served(
    tiny: InferenceModel, prompt: list[int], settings: dict[str, object], words: str
) -> None:
    with pytest.raises(JinguError) as error:
        Engine(tiny).submit(Request(tuple(prompt), **{"sampling": SamplingParams(), "max_tokens": 1, **settings}))  # type: ignore[arg-type]
    assert str(error.value) == words


def test_context_can_be_filled(tiny: InferenceModel) -> None:
    assert len(tokens_of(tiny, *[1] * 60, max_tokens=4, ignore_eos=True)) == 4


def test_generate_prints_prompt_and_continuation(
    tiny: InferenceModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny.tokenizer.save(tmp_path / "tokenizer")
    weights = tiny.module.state_dict()
    export_hf(tiny.spec, weights.__getitem__, tmp_path / "tokenizer", tmp_path / "out")
    fp32 = InferenceOptions("fp32")
    generate.generate(tmp_path / "out", "the end", {}, fp32, max_tokens=9)
    printed = capsys.readouterr()
    (text,) = Engine(tiny).generate([Request(tiny.encode("the end"), SamplingParams(), 9)])
    assert printed.out == f"the end{text}\n"
    assert "tokens" in printed.err and "draft" not in printed.err
    generate.generate(tmp_path / "out", "the end", {}, replace(fp32, draft_model=tmp_path / "out"), max_tokens=9)
    again = capsys.readouterr()
    assert again.out == printed.out and "6 of 6 draft tokens were accepted" in again.err
    generate.generate(tmp_path / "out", "the end", {}, fp32, max_tokens=9, num_beams=3)
    searched = Request(tiny.encode("the end"), SamplingParams(), 9, num_beams=3)
    assert capsys.readouterr().out == f"the end{Engine(tiny).generate([searched])[0]}\n"
    generate.generate(tmp_path / "out", "the end", {}, fp32)  # as much as the context has room for
    assert len(capsys.readouterr().out) > len(printed.out)


def test_the_size_of_the_kv_cache_is_an_option(tiny: InferenceModel, tmp_path: Path) -> None:
    sizes = {
        text: InferenceOptions("fp32", kv_cache=text).make_engine(tiny).stats().total_blocks
        for text in ("40kB", "80kB")
    }
    assert 0 < 2 * sizes["40kB"] <= sizes["80kB"] <= 2 * sizes["40kB"] + 1
    # What is wrong is said before a model is opened.
    for text, problem in (("much", "is not a size"), ("900TB", "more than the memory"), ("101%", "more than all")):
        with pytest.raises(JinguError, match=problem):
            InferenceOptions(kv_cache=text).load(tmp_path / "missing")


@pytest.mark.parametrize("prompt", [(), (7,), (7,) * 20])
@pytest.mark.parametrize("cache_tokens", [48, 640])
@pytest.mark.parametrize("kind", ["decoder", "encoder-decoder"])
def test_the_room_for_new_tokens_is_limited_by_context_and_cache(
    kind: str, cache_tokens: int, prompt: tuple[int, ...], tiny: InferenceModel, answering: InferenceModel
) -> None:
    model = tiny if kind == "decoder" else answering
    size = block_bytes(model.spec, 8, 4) * cache_tokens // 8
    engine = Engine(model, EngineSettings(block_size=8, kv_cache_bytes=size))
    room = engine.max_new_tokens(len(prompt))
    engine.submit(Request(prompt, SamplingParams(), room))
    with pytest.raises(JinguError, match="context of 64" if cache_tokens > 64 else "KV cache has room"):
        engine.submit(Request(prompt, SamplingParams(), room + 1))


def test_sampling_defaults_come_from_generation_config(tiny: InferenceModel, tmp_path: Path) -> None:
    tiny.tokenizer.save(tmp_path / "tokenizer")
    export_hf(tiny.spec, tiny.module.state_dict().__getitem__, tmp_path / "tokenizer", tmp_path / "out")
    assert load(tmp_path / "out", "fp32").default_sampling == {}
    recommended = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "eos_token_id": 0, "do_sample": True, "min_p": None}
    (tmp_path / "out" / "generation_config.json").write_text(json.dumps(recommended), encoding="utf-8")
    model = load(tmp_path / "out", "fp32")
    assert model.default_sampling == {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
    options = {"top_k": None, "seed": 3}
    assert sampling_params(options, model.default_sampling) == SamplingParams(0.6, None, 0.95, seed=3)
    # As Gemma 3: transformers then samples with a temperature of 1.
    (tmp_path / "out" / "generation_config.json").write_text('{"do_sample": true, "top_k": 64}', encoding="utf-8")
    assert sampling_params({}, load(tmp_path / "out", "fp32").default_sampling) == SamplingParams(1.0, 64)


def test_answers_follow_a_schema_or_regular_expression(tiny: InferenceModel) -> None:
    """The text of the model would otherwise be noise."""
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 3, "maximum": 9}, "ok": {"type": "boolean"}},
        "required": ["n", "ok"],
        "additionalProperties": False,
    }
    engine = Engine(tiny)
    reference = {
        "json_schema": Constraint("json_schema", json.dumps(schema)),
        "regex": Constraint("regex", "(le|la) [的数]{2} [0-9]{3}"),
        "json": Constraint("json"),
    }
    requests = [
        Request((7,), SamplingParams(1.0, seed=seed, logit_bias={}), 55, constraint=constraint, ignore_eos=seed == 1)
        for constraint in reference.values()
        for seed in range(3)
    ]
    events = events_of(engine, *requests)
    texts = ["".join(event.token.text for event in each if event.token) for each in events.values()]
    ends = [each[-1].finish_reason for each in events.values()]
    assert ends[:6] == ["end"] * 6
    for text in texts[:3]:
        result = json.loads(text)
        assert set(result) == {"n", "ok"} and 3 <= result["n"] <= 9 and isinstance(result["ok"], bool)
    assert all(re.fullmatch(reference["regex"].value, text) for text in texts[3:6])
    for text, end in zip(texts[6:], ends[6:], strict=True):
        assert text.startswith("{") and (end == "length" or isinstance(json.loads(text), dict))
    assert len(set(texts)) > 6


def test_a_grammar_is_read_once_for_all_choices(tiny: InferenceModel, monkeypatch: pytest.MonkeyPatch) -> None:
    read, opened = [], GrammarCompiler.compile
    monkeypatch.setattr(
        GrammarCompiler, "compile", lambda self, reference: read.append(reference) or opened(self, reference)
    )
    reference = Constraint("regex", "(le|la) [的数]{2} [0-9]{3}")
    (events,) = events_of(Engine(tiny), Request((7,), SamplingParams(1.0), 55, n=4, constraint=reference)).values()
    texts = ["".join(each.token.text for each in events if each.token and each.choice == n) for n in range(4)]
    assert all(re.fullmatch(reference.value, text) for text in texts) and len(set(texts)) > 1
    assert read == [reference]


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("json_schema", '{"type": "nothing"}'),
        ("json_schema", "{"),
        ("json_schema", '{"$ref": "#"}'),
        ("json_schema", "[" * 100_000),
        ("regex", "("),
        ("grammar", "start: missing"),
        ("grammar", "root ::= ("),
        ("grammar", ""),
        ("regex", r"[^\s\S]"),
    ],
)
def test_invalid_constraints_are_refused(tiny: InferenceModel, kind: Any, value: str) -> None:
    engine = Engine(tiny)
    with pytest.raises(JinguError, match="constraint: the output cannot be constrained like this"):
        engine.submit(Request((7,), SamplingParams(), 5, constraint=Constraint(kind, value)))
    assert not engine.busy


def test_a_schema_without_a_finite_text_is_refused(tiny: InferenceModel, capfd: Any) -> None:
    node = {"type": "object", "properties": {"c": {"$ref": "#/$defs/n"}}, "required": ["c"]}
    endless = Constraint("json_schema", json.dumps({"$defs": {"n": node}, "$ref": "#/$defs/n"}))
    (events,) = events_of(Engine(tiny), Request((7,), SamplingParams(), 50, constraint=endless)).values()
    assert events[-1].finish_reason == "refused" and "Too many items" in str(events[-1].error)
    assert "non-verbose" not in str(events[-1].error) and capfd.readouterr().err == ""
