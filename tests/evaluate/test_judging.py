"""Judges that always prefer a position, that know the answer, that do not answer, and a server."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest
import scipy.stats

from jingu.cli import main
from jingu.config.sections.model import ModelSettings
from jingu.evaluate.judging import TEMPLATE, Verdict, judge_pairs, server_judge, summarize
from jingu.evaluate.scoring import AnswerCache, Scorer
from jingu.formats.export import export_hf
from jingu.infer.engine import Engine
from jingu.infer.inference_model import load
from jingu.model.decoder import build_model
from jingu.model.resolve import spec_from_settings
from jingu.model.weight_init import init_weights
from jingu.text.tokenizer import Tokenizer

# The second answer is better in the first three of four.
ITEMS = [("2 + 2?", "wrong", "right"), ("x", "wrong", "right"), ("y", "wrong", "right"), ("z", "right", "wrong")]


def know(prompts: Sequence[str]) -> list[Verdict]:
    return ["A" if "[Answer A]\nright" in prompt else "B" for prompt in prompts]


def test_a_judge_that_knows_is_believed() -> None:
    summary = summarize(judge_pairs(ITEMS, know))
    assert (summary["wins"], summary["ties"], summary["losses"], summary["win_rate"]) == (3, 0, 1, 0.75)
    assert summary["flip_rate"] == 0 and summary["first_position_rate"] == 0.5
    assert summary["p"] == pytest.approx(scipy.stats.binomtest(1, 4).pvalue)


@pytest.mark.parametrize(("letter", "share"), [("A", 1.0), ("B", 0.0)])
def test_a_judge_that_prefers_a_position_judges_ties(letter: Verdict, share: float) -> None:
    summary = summarize(judge_pairs(ITEMS, lambda prompts: [letter] * len(prompts)))
    assert (summary["ties"], summary["flip_rate"], summary["first_position_rate"]) == (4, 1.0, share)
    assert summary["win_rate"] == 0.5 and summary["p"] == 1


def test_a_pair_without_a_verdict_counts_in_no_rate() -> None:
    summary = summarize(judge_pairs(ITEMS, lambda prompts: [None] * len(prompts)))
    assert (summary["ties"], summary["without_verdict"]) == (0, 8)
    rates = ("win_rate", "stderr", "p", "flip_rate", "first_position_rate")
    assert all(math.isnan(summary[rate]) for rate in rates) and summary["interval_low"] == -math.inf
    summary = summarize([("B", "A"), ("B", None), (None, "A"), ("A", "A")])
    assert (summary["wins"], summary["ties"], summary["win_rate"], summary["without_verdict"]) == (1, 1, 0.75, 2)
    assert summary["flip_rate"] == 0.5


def test_answers_to_other_prompts_are_named(server: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_answers(tmp_path)
    (tmp_path / "two" / "qa.json").write_text(
        json.dumps({"task": "qa", "settings": {}, "num_fewshot": 3}), encoding="utf-8"
    )
    file = tmp_path / "two" / "qa.samples.jsonl"
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    lines[1]["pairs"][0][0] += " Think."
    file.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    command = ["evaluate", "judge", str(tmp_path / "one"), str(tmp_path / "two"), "--by", server, "--name", "big"]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "qa: not the same question: shots is unknown in one evaluation, 3 in the other" in out
    assert "qa: not the same question: the prompts of 1 document differ" in out


@pytest.fixture
def server() -> Iterator[str]:
    """A server that knows; it refuses requests that are not pinned."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            is_valid = self.path == "/v1/chat/completions" and body["temperature"] == 0 and body["model"] == "big"
            text = f"Answer {know([body['messages'][0]['content']])[0]} is better."
            reply = json.dumps({"choices": [{"message": {"content": text}}]} if is_valid else {}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(reply)))
            self.end_headers()
            self.wfile.write(reply)

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()


def write_answers(folder: Path) -> None:
    """Write the answers of two models to `one` and `two`, as an evaluation does."""
    for number, name in ((1, "one"), (2, "two")):
        results = folder / name
        results.mkdir()
        lines = [
            {"index": index, "hash": str(index), "pairs": [[item[0], ""]], "answers": [{"text": item[number]}]}
            for index, item in enumerate(ITEMS)
        ]
        (results / "qa.samples.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
        (results / "qa.json").write_text(json.dumps({"task": "qa", "settings": {}}), encoding="utf-8")


def test_a_model_judges_by_the_more_probable_letter(tokenizer: Tokenizer, tmp_path: Path) -> None:
    write_answers(tmp_path)
    settings = ModelSettings(hidden_size=24, num_heads=3, num_layers=2, initializer_range=0.4)
    spec = spec_from_settings(settings, tokenizer.vocab_size, 512)
    model = build_model(spec)
    init_weights(model, spec, 1)
    tokenizer.save(tmp_path / "tokenizer")
    judge = tmp_path / "judge"
    export_hf(spec, model.state_dict().__getitem__, tmp_path / "tokenizer", judge)
    command = ["evaluate", "judge", str(tmp_path / "one"), str(tmp_path / "two"), "--by", str(judge)]
    assert main([*command, "--precision", "fp32", "--device", "cpu"]) == 0
    scorer = Scorer(Engine(load(judge, "fp32", "cpu")), AnswerCache(None))
    judged = json.loads((tmp_path / "two" / "judged.json").read_text(encoding="utf-8"))
    for (prompt, *answers), record in zip(ITEMS, judged["records"], strict=True):
        for (first, second), verdict in zip((answers, answers[::-1]), record["verdicts"], strict=True):
            text = TEMPLATE.format(prompt=prompt, first=first, second=second)
            a, b = (score.logprob for score in scorer.score([(text, " A"), (text, " B")]))
            assert verdict == ("A" if a > b else "B")
    assert len(judged["judge"]) == 32 and scorer.counts["truncated"] == 0


def test_a_server_judges_the_results_of_two_models(
    server: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_answers(tmp_path)
    command = ["evaluate", "judge", str(tmp_path / "one"), str(tmp_path / "two"), "--by", server]
    assert main([*command, "--name", "big"]) == 0
    assert "win rate" in capsys.readouterr().out
    judged = json.loads((tmp_path / "two" / "judged.json").read_text(encoding="utf-8"))
    assert judged["summary"] == summarize(judge_pairs(ITEMS, server_judge(server, "big")))
    assert judged["summary"]["win_rate"] == 0.75 and judged["records"][3]["verdicts"] == ["A", "B"]
    assert main([*command, "--name", "small"]) == 2
    assert "the judge does not answer ('choices')" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert main([*command[:3], str(tmp_path / "empty"), "--by", server]) == 2
    assert "no generated answers in common" in capsys.readouterr().err


def test_empty_answers_are_judged(server: str, tmp_path: Path) -> None:
    """Otherwise a model that often answers nothing would be judged by its other answers alone."""
    write_answers(tmp_path)
    samples = tmp_path / "one" / "qa.samples.jsonl"
    samples.write_text(samples.read_text(encoding="utf-8").replace('"right"', '""'), encoding="utf-8")
    command = ["evaluate", "judge", str(tmp_path / "one"), str(tmp_path / "two"), "--by", server, "--name", "big"]
    assert main(command) == 0
    judged = json.loads((tmp_path / "two" / "judged.json").read_text(encoding="utf-8"))
    assert [record["index"] for record in judged["records"]] == [0, 1, 2, 3]


def test_choices_are_not_judged(server: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_answers(tmp_path)
    content = json.dumps({"task": "qa", "settings": {"output_type": "multiple_choice"}})
    (tmp_path / "two" / "qa.json").write_text(content, encoding="utf-8")
    command = ["evaluate", "judge", str(tmp_path / "one"), str(tmp_path / "two"), "--by", server, "--name", "big"]
    assert main(command) == 2
    assert "no generated answers in common" in capsys.readouterr().err
