"""Answers of a model: the same bits in any batch, order and subset, and after a restart; each context once."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from jingu.errors import JinguError
from jingu.evaluate import scoring
from jingu.evaluate.evaluation import evaluate_task, prepare_task
from jingu.evaluate.scoring import AnswerCache, Scorer
from jingu.evaluate.task_metrics import Answer
from jingu.formats.export import export_hf
from jingu.infer.engine import Engine
from jingu.infer.engine_interface import EngineSettings
from jingu.infer.inference_model import InferenceModel, load
from jingu.infer.request import Request
from jingu.infer.sampling import SamplingParams
from jingu.model.decoder import Decoder
from tests.conftest import this_rank
from tests.evaluate.conftest import ROWS, WriteTask, load_task
from tests.rank_pool import RankPool

PAIRS = [(str(row["question"]), f" {choice}") for row in ROWS for choice in row["choices"]]  # type: ignore[attr-defined]


def scorer(model: InferenceModel, path: Path | None = None, **settings: Any) -> Scorer:
    return Scorer(Engine(model, EngineSettings(**settings)), AnswerCache(path))


def test_batch_order_and_subset_do_not_matter(tiny: InferenceModel, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = scorer(tiny).score(PAIRS)
    assert scorer(tiny, max_num_seqs=1).score(PAIRS) == expected
    assert scorer(tiny).score(PAIRS[::-1]) == expected[::-1]
    assert scorer(tiny).score(PAIRS[4:9]) == expected[4:9]
    monkeypatch.setattr(scoring, "CHUNK_SIZE", 2)
    assert scorer(tiny).score(PAIRS) == expected


def score_on_rank(rank: int, world: int, model: Path, path: Path) -> list[Answer]:
    """The answers of one of several ranks, which divide the requests in chunks of two."""
    scoring.CHUNK_SIZE = 2
    own = Scorer(Engine(load(model, "fp32", "cpu")), AnswerCache(path), this_rank(rank, world))
    generated = own.generate([context for context, _ in PAIRS[::3]], Request((), SamplingParams(), 3))
    return own.score(PAIRS) + [answer for group in generated for answer in group]


def test_ranks_divide_the_work(tiny: InferenceModel, ranks: RankPool, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    tiny.tokenizer.save(tmp_path / "tokenizer")
    assert isinstance(tiny.module, Decoder)
    export_hf(tiny.spec, tiny.module.state_dict().__getitem__, tmp_path / "tokenizer", folder)
    alone = Scorer(Engine(load(folder, "fp32", "cpu")), AnswerCache(None))
    expected = alone.score(PAIRS)
    generated = alone.generate([context for context, _ in PAIRS[::3]], Request((), SamplingParams(), 3))
    expected += [answer for group in generated for answer in group]
    for world in (2, 4):
        path = tmp_path / f"{world}.jsonl"
        assert ranks.run(score_on_rank, world, folder, path) == [expected] * world
        # The first rank has stored all answers, so that one process goes on from there.
        engine = Engine(load(folder, "fp32", "cpu"))
        assert Scorer(engine, AnswerCache(path)).score(PAIRS) == expected[: len(PAIRS)] and engine.stats().steps == 0


def test_choices_share_one_context(tiny: InferenceModel) -> None:
    engine = Engine(tiny)
    own = Scorer(engine, AnswerCache(None))
    own.score(PAIRS)
    contexts = {own.encode_pair(*pair)[0] for pair in PAIRS}
    assert len(contexts) == len(ROWS)
    assert engine.stats().prompt_tokens == sum(map(len, contexts))


def test_a_killed_evaluation_goes_on(tiny: InferenceModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out" / "cache.jsonl"
    monkeypatch.setattr(scoring, "CHUNK_SIZE", 3)
    expected = scorer(tiny, path).score(PAIRS)
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    # The process was killed while it wrote.
    path.write_text("".join(lines[:9]) + lines[9][:20], encoding="utf-8")
    engine = Engine(tiny)
    assert Scorer(engine, AnswerCache(path)).score(PAIRS) == expected
    assert 0 < engine.stats().prompt_tokens < sum(len(json.dumps(pair)) for pair in PAIRS)
    # Now that all is known, nothing is computed.
    engine = Engine(tiny)
    assert Scorer(engine, AnswerCache(path)).score(PAIRS) == expected
    assert engine.stats().steps == 0


def test_windows_predict_every_token_once_with_the_full_context(tiny: InferenceModel) -> None:
    own = scorer(tiny)
    text = "What is one and two? " * 40
    ids = tuple(tiny.tokenizer.encode(text))
    windows = own.windows(text)
    assert sum((predicted for _, predicted in windows), ()) == ids and len(ids) % 64
    assert [len(read) + len(predicted) for read, predicted in windows] == [65] * len(windows)
    (answer,) = own.score_texts([text])
    assert answer.num_tokens == len(ids)
    assert own.windows("") == [((0,), ())] and own.score_texts([""]) == [Answer(is_greedy=True)]


def test_what_does_not_fit_is_cut_and_counted(tiny: InferenceModel, write_task: WriteTask) -> None:
    own = scorer(tiny)
    long = "many things, " * 30
    (answer, same) = own.score([(long, " one"), (long[13:], " one")])
    assert answer == same and own.counts == {"truncated": 2, "empty": 0}
    own.score([("a", "")])
    assert own.counts["empty"] == 1
    with pytest.raises(JinguError, match=r"a continuation has \d+ tokens, and the model's context is 64"):
        own.score([("a", long)])
    file = write_task([{**row, "question": long} for row in ROWS])
    counts = evaluate_task(prepare_task(load_task(file), limit=2), own).counts
    assert counts == {"truncated": 6, "empty": 0, "left_out": len(ROWS) - 2}


def test_bits_of_a_text_by_its_units(tiny: InferenceModel, write_task: WriteTask) -> None:
    texts = ["一 two\n三四", "ä"]
    names = ("bits_per_byte", "bits_per_character", "bits_per_word", "byte_perplexity", "word_perplexity")
    file = write_task(
        [{"text": text} for text in texts],
        output_type="loglikelihood_rolling",
        doc_to_text="",
        doc_to_target="text",
        doc_to_choice=None,
        metric_list=[{"metric": name} for name in names],
    )
    metrics = evaluate_task(prepare_task(load_task(file)), scorer(tiny)).metrics
    bits = -sum(answer.logprob for answer in scorer(tiny).score_texts(texts)) / math.log(2)
    # Bytes, characters and words of both texts.
    expected = [bits / 16, bits / 9, bits / 4, 2 ** (bits / 16), 2 ** (bits / 4)]
    assert [metrics[f"{name},none"].value for name in names] == pytest.approx(expected)
    assert not any(metrics[f"{name},none"].higher_is_better for name in names)


def test_repeated_answers_are_voted_on(tiny: InferenceModel, write_task: WriteTask) -> None:
    steps = [{"function": "majority_vote"}, {"function": "take_first"}]
    file = write_task(
        output_type="generate_until",
        doc_to_choice=None,
        doc_to_target="text",
        repeats=5,
        filter_list=[{"name": "vote", "filter": steps}, {"name": "first", "filter": [{"function": "take_first"}]}],
        generation_kwargs={"do_sample": True, "temperature": 0.9, "max_gen_toks": 2, "until": ["\n"]},
    )
    result = evaluate_task(prepare_task(load_task(file)), scorer(tiny))
    texts = [[answer["text"] for answer in record["answers"]] for record in result.records]
    assert all(len(group) == 5 for group in texts) and any(len(set(group)) > 1 for group in texts)
    assert set(result.metrics) == {"exact_match,vote", "exact_match,first"}
    again = evaluate_task(prepare_task(load_task(file), limit=2), scorer(tiny, max_num_seqs=1))
    assert again.records == result.records[:2]


def test_errors_account_for_clusters(tiny: InferenceModel, write_task: WriteTask) -> None:
    rows = [{**row, "passage": index // 2} for index, row in enumerate(ROWS)]
    plain = evaluate_task(prepare_task(load_task(write_task(rows))), scorer(tiny))
    file = write_task(rows, metadata={"cluster": "passage"})
    clustered = evaluate_task(prepare_task(load_task(file)), scorer(tiny))
    assert clustered.metrics["acc,none"].value == plain.metrics["acc,none"].value
    assert plain.metrics["acc,none"].method == "mean" and clustered.metrics["acc,none"].method == "clustered"
    assert [record["cluster"] for record in clustered.records] == ["0", "0", "1", "1", "2", "2", "3"]
