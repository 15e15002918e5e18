"""Rewards: functions, verifiers, servers, and the sandbox."""

from __future__ import annotations

import gc
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, cast

import psutil
import pytest
from pydantic import TypeAdapter

from jingu.align import rollout_rewards
from jingu.align.code_reward import read_tests
from jingu.align.prompt_set import Prompt
from jingu.align.reward_list import Rewards, weak_fractions
from jingu.align.rollout_rewards import add_rewards
from jingu.align.rollouts import Sample
from jingu.config.sections.rewards import Reward
from jingu.errors import JinguError
from jingu.text.tokenizer import Tokenizer
from tests.limits import PATIENCE


def build(*settings: dict[str, Any], columns: tuple[str, ...] = ("answer",)) -> Rewards:
    tokenizer = cast(Tokenizer, None)  # only reward models have a use for it
    return Rewards([TypeAdapter(Reward).validate_python(each) for each in settings], columns, tokenizer)


def answer(completion: str, expected: Any = "", **more: Any) -> dict[str, Any]:
    return {
        "prompt": "question",
        "completion": completion,
        "completion_ids": [1, 2, 3],
        "completion_mask": [1, 1, 1],
        "answer": expected,
        **more,
    }


@pytest.mark.parametrize(
    ("settings", "completion", "expected", "score"),
    [
        ({"type": "exact"}, " yes\n", "yes", 1.0),
        ({"type": "exact"}, "yes.", "yes", 0.0),
        ({"type": "number"}, "So 3 + 4 = 7, thus 1,007.0.", 1007, 1.0),
        ({"type": "number"}, "none", "7", 0.0),
        ({"type": "regex", "pattern": r"<a>.*</a>"}, "<a>x\ny</a>", "", 1.0),
        ({"type": "regex"}, "abc", r"[ab]+", 0.0),
        ({"type": "math"}, r"It is $\frac{2}{4}$.", r"$0.5$", 1.0),
        ({"type": "math"}, r"It is $\frac{1}{4}$.", r"$0.5$", 0.0),
        ({"type": "json_schema", "column": "answer"}, '{"a": 1}', {"required": ["a"]}, 1.0),
        ({"type": "json_schema", "column": "answer"}, '{"b": 1}', '{"required": ["a"]}', 0.0),
        ({"type": "json_schema", "column": "answer"}, "{", {}, 0.0),
        ({"type": "length", "max_tokens": 3}, "", "", 1.0),
        ({"type": "length", "max_tokens": 2}, "", "", 0.5),
        ({"type": "length", "min_tokens": 4}, "", "", 0.75),
    ],
)
def test_verifiers(settings: dict[str, Any], completion: str, expected: Any, score: float) -> None:
    rewards = build(settings)
    assert rewards.score([answer(completion, expected)]) == [{settings["type"]: score}]
    rewards.close()


def test_a_worker_ends_with_the_last_reference() -> None:
    others = psutil.Process().children()
    rewards = build({"type": "regex", "pattern": "a+"})
    assert rewards.score([answer("a")]) == [{"regex": 1.0}]
    children = [child for child in psutil.Process().children() if child not in others]
    (process,) = (child for child in children if "reward_worker" in " ".join(child.cmdline()))
    del rewards
    gc.collect()
    assert not process.is_running()


def test_a_verifier_that_hangs_gives_0_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[str] = []
    monkeypatch.setattr("jingu.align.reward_list.log_warning", warnings.append)
    rewards = build({"type": "regex", "pattern": r"(T|(.)\2*)*#", "timeout": 0.3})
    hang = answer("a" * 40)
    assert rewards.score([answer("T#"), hang, answer("T#")]) == [{"regex": 1.0}, {"regex": 0.0}, {"regex": 1.0}]
    assert warnings == ["The reward regex: scoring 1 answer took longer than 0.3 seconds; the value is 0."]
    rewards.close()


FUNCTIONS = """
from __future__ import annotations
import os, time
from dataclasses import dataclass
@dataclass
class Score:  # Dataclasses look up the module that they are in.
    value: float
def length(completions, answer, **others):
    print("this must not get between the replies")
    assert sorted(others) == ["completion_ids", "completion_mask", "messages", "prompts"]
    return [len(text) + len(gold) for text, gold in zip(completions, answer)]
async def later(completion_ids): return [None, float(sum(completion_ids[1]))]
def nan(completions): return [0.0, float("nan")]
def short(completions): return [1.0]
def words(completions): return ["much", "little"]
def slow(completions): time.sleep(1000)
def dies(completions): os._exit(3)
def dies_once(completions):
    if not os.path.exists(__file__ + ".died"):
        open(__file__ + ".died", "w").close()
        os._exit(3)
    return [1.0] * len(completions)
def fails(completions): raise LookupError("no such thing")
"""


@pytest.fixture
def functions(tmp_path: Path) -> str:
    path = tmp_path / "functions.py"
    path.write_text(FUNCTIONS)
    return f"{path}:"


def test_functions_and_weights(functions: str) -> None:
    rewards = build(
        {"type": "python", "function": functions + "length", "weight": 0.5},
        {"type": "python", "function": functions + "later", "weight": -1.0},
        {"type": "exact", "audit": True},
    )
    scores = rewards.score([answer("ab", "c"), answer("abc", "abc")])
    assert scores == [{"length": 3.0, "later": None, "exact": 0.0}, {"length": 6.0, "later": 6.0, "exact": 1.0}]
    assert [rewards.total(values) for values in scores] == [None, -3.0]
    assert rewards.total({"length": None, "later": None, "exact": 1.0}) is None
    rewards.close()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nan", "returned nan for an answer to the prompt 'question'"),
        ("short", "returned 1 value for 2 answers"),
        ("words", "reward words: it returned a list with str 'much', not a number"),
        ("slow", "did not return within 0.5 seconds"),
        ("dies", "its process ended with exit code 3"),
        ("fails", "LookupError: no such thing"),
    ],
)
def test_a_function_that_fails_is_an_error_in_words(functions: str, name: str, words: str) -> None:
    rewards = build({"type": "python", "function": functions + name, "timeout": 0.5 if name == "slow" else 60.0})
    with pytest.raises(JinguError, match=words):
        rewards.score([answer("a"), answer("b")])
    rewards.close()


def test_a_function_whose_process_dies_gets_another_one(functions: str) -> None:
    rewards = build({"type": "python", "function": functions + "dies_once", "on_error": "skip"})
    assert rewards.score([answer("a")]) == [{"dies_once": None}]
    assert rewards.score([answer("a")]) == [{"dies_once": 1.0}]
    rewards.close()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ([{"type": "exact"}, {"type": "exact"}], "two rewards have the name exact"),
        (
            [{"type": "exact", "name": "environment"}],
            "the name environment is reserved for the score of an environment",
        ),
        ([{"type": "exact", "column": "gold"}], r"no column gold.*Their columns are answer"),
        # The answer hides it: it would be compared with itself.
        ([{"type": "exact", "column": "completion"}], r"^task\.rewards\[0\]\.column: the name completion is that of"),
        ([{"type": "regex", "pattern": "("}], "is not a regular expression"),
        ([{"type": "judge", "template": "{question}"}], "a field that the rows lack"),
        ([{"type": "judge", "template": "{answer:{width}}"}], r"a field that the rows lack: \{width\}\. .*, answer\."),
        ([{"type": "judge", "template": "{}"}], "a field that the rows lack"),
        ([{"type": "judge", "template": "{answer"}], "a brace that does not belong to a field"),
        (
            [{"type": "http", "url": "http://my host/v1"}],
            r"^task\.rewards\[0\]\.url: 'http://my host/v1' is not a valid",
        ),
        ([{"type": "judge", "url": "http://localhost:80a/v1"}], "is not a valid URL"),
        ([{"type": "http", "url": "http://localhost:99999"}], "is not a valid URL"),
        ([{"type": "http", "url": "http://name:word@localhost"}], "is not a valid URL"),
        ([{"type": "http", "url": "http://:80"}], "is not a valid URL"),
        ([{"type": "http", "url": "http://[::1/"}], "is not a valid URL"),
    ],
)
def test_rewards_that_cannot_be_computed_are_refused(settings: list[dict[str, Any]], words: str) -> None:
    with pytest.raises(JinguError, match=words):
        build(*settings)


class Handler(BaseHTTPRequestHandler):
    failures = 0

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if Handler.failures:
            Handler.failures -= 1
            self.send_error(503)
            return
        if self.path == "/incomplete":
            self.send_response(200)
            self.send_header("Content-Length", "100")
            self.end_headers()
            self.wfile.write(b'{"scores": [')
            return
        if self.path == "/v1/chat/completions":
            assert self.headers["Authorization"] == "Bearer secret"
            grade = body["messages"][0]["content"].count("x")
            reply: Any = {"choices": [{"message": {"content": f"Grade: {grade}" if grade else "?"}}]}
        else:
            reply = {"scores": [len(text) for text in body["completions"]]}
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(reply).encode())

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_servers(server: str, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("secret\n")
    judge = {"type": "judge", "url": f"{server}/v1", "api_key_file": str(tmp_path / "key")}
    rewards = build({"type": "http", "url": server}, {**judge, "template": "Grade {completion}."})
    Handler.failures = 1
    assert rewards.score([answer("xx"), answer("a")]) == [{"http": 2.0, "judge": 2.0}, {"http": 1.0, "judge": None}]
    Handler.failures = 1
    rewards = build({"type": "http", "url": server, "retries": 0})
    with pytest.raises(JinguError, match=r"gave no scores in 1 attempt .*503"):
        rewards.score([answer("a")])
    rewards = build({"type": "http", "url": f"{server}/incomplete", "retries": 0})
    with pytest.raises(JinguError, match=r"gave no scores in 1 attempt .*IncompleteRead"):
        rewards.score([answer("a")])


def test_a_template_has_parts_and_formats_of_columns(server: str, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("secret\n")
    judge = {"type": "judge", "url": f"{server}/v1", "api_key_file": str(tmp_path / "key")}
    rewards = build({**judge, "template": "{meta[answer]} {answer:.2f} {completion}"}, columns=("meta", "answer"))
    assert rewards.score([answer("x", 0.5, meta={"answer": "xx"})]) == [{"judge": 3.0}]
    for row, words in (
        (answer("x", 0.5, meta={}), r"with the prompt 'question' \(KeyError: 'answer'\)"),
        (answer("x", 0.5, meta=None), r"\(TypeError: "),
        (answer("x", "half", meta={"answer": ""}), r"\(ValueError: Unknown format code"),
    ):
        with pytest.raises(JinguError, match=r"^task\.rewards\[0\]\.template: it does not fit the row .*" + words):
            rewards.score([row])


def test_the_other_ranks_poll_while_the_first_one_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """A single collective would end after its timeout, however long a judge may take."""
    may_end = threading.Event()

    class SlowRewards:
        def score(self, answers: list[dict[str, Any]]) -> list[dict[str, float]]:
            assert may_end.wait(PATIENCE)
            return [{"length": float(len(item["completion"]))} for item in answers]

        def total(self, parts: dict[str, float]) -> float:
            return 2.0 * parts["length"]

        def late(self, count: int) -> list[list[str]]:
            return [[]] * count

        trained_names = ("length",)

    def poll(done: Callable[[float], bool]) -> None:
        assert not done(0.0)
        may_end.set()
        assert done(PATIENCE)

    monkeypatch.setattr(rollout_rewards.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(rollout_rewards, "wait_until_all_done", poll)
    monkeypatch.setattr(rollout_rewards, "gather_from_all", lambda value: [value, {}])
    sample = Sample("question", 0, 0, (1,), (2,), (0.0,), "abc", "end")
    prompt = Prompt(0, (1,), "question", {})
    (scored,) = add_rewards([sample], [prompt], cast(Rewards, SlowRewards()))
    assert (scored.rewards, scored.reward) == ({"length": 3.0}, 6.0)


def test_code_passes_tests() -> None:
    rewards = build({"type": "python_tests", "column": "answer"})
    tests = "assert f(1) == 2"
    answers = [
        answer("So:\n```python\ndef f(x):\n    return x + 1\n```\nDone.", tests),
        answer("def f(x): return x", tests),
        answer("import sys\nsys.exit(97)", tests),
        answer("", tests),
        answer("```Python\r\ndef f(x):\r\n    return x + 1\r\n```", [tests, "assert f(2) == 3"]),
        answer(
            "```py\nprint(int(input()) + 1)\n```", [{"input": "1\n", "output": "2"}, {"input": "5", "output": "6\n"}]
        ),
        answer("```py\nprint(2)\n```", {"inputs": ["1", "5"], "outputs": ["2", "6"]}),
        answer("print(2)", '{"inputs": ["1"], "outputs": ["2\\n"]}'),
    ]
    scores = [1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0]
    assert [score["python_tests"] for score in rewards.score(answers)] == scores
    assert [score["python_tests"] for score in rewards.score(answers[::-1] * 2)] == scores[::-1] * 2
    rewards.close()


@pytest.mark.parametrize(
    ("tests", "words"),
    [
        (None, "expected statements"),
        ("", "use nothing"),
        ("assert f(1) ==", "not Python"),
        ("assert True", "use nothing"),
        ("def check(candidate):\n    assert candidate(1) == 2", "call none"),
        ([], "expected statements"),
        ([1], "expected statements"),
        ([{"input": "1"}], "expected statements"),
        ([{"input": 1, "output": "1"}], "is not a text"),
        ({"inputs": ["1"], "outputs": []}, "same length"),
        ({"inputs": "1", "outputs": "1"}, "same length"),
        ({"inputs": [], "outputs": []}, "expected statements"),
    ],
)
def test_columns_without_tests_are_refused(tests: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_tests(tests)
    rewards = build({"type": "python_tests", "column": "answer"})
    with pytest.raises(JinguError, match=words):
        rewards.score([answer("def f(x): return x", tests)])
    rewards.close()


def test_tests_that_an_answer_can_deceive_are_counted() -> None:
    settings = [TypeAdapter(Reward).validate_python({"type": "python_tests", "name": "code"})]
    rows = [
        {"tests": "assert f(1) == 2"},
        {"tests": "import os\nassert f(1) == 2"},
        {"tests": ["assert eval(f(1)) == 2"]},
    ]
    rows.append({"tests": [{"input": "", "output": ""}]})
    assert weak_fractions(settings, rows) == {"weak_tests/code": 0.5}
    assert weak_fractions([TypeAdapter(Reward).validate_python({"type": "exact"})], rows) == {}
