"""What judges, servers and functions of the user return: one form is read, everything else is refused in words."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from jingu.align.asynchronous import check_answer
from jingu.align.json_client import JsonClient, parse_reply
from jingu.align.reward_list import Rewards, read_grade
from jingu.config.sections.rewards import JudgeReward
from jingu.errors import JinguError
from jingu.evaluate.judging import server_judge
from tests.align.test_verifiers import build


@pytest.mark.parametrize(
    ("reply", "grade"),
    [
        ("7", 7.0),
        (" 7.5\n", 7.5),
        ("7.", 7.0),
        ("**7**", 7.0),
        ("7/10", 7.0),
        ("7 / 10", 7.0),
        ("7 out of 10", 7.0),
        ("Score: 7", 7.0),
        ("Grade: 7/10", 7.0),
        ("**Score:** 7", 7.0),
        ("It fails step 3.\nScore: 7", 7.0),
        ("Grade: 7\nReason: it fails step 3", 7.0),
        ("<think>perhaps 3</think>7", 7.0),
        ("10", 10.0),
        ("0", 0.0),
        ("7/5", None),
        ("3/5", None),
        ("70/100", None),
        ("11", None),
        ("-1", None),
        ("1e300", None),
        ("nan", None),
        ("7 8", None),
        ("7 or 8", None),
        ("Score: 7\nScore: 8", None),
        ("I give it 7.", None),
        ("Step 3 is wrong", None),
        ("seven", None),
        ("", None),
    ],
)
def test_grades(reply: str, grade: float | None) -> None:
    assert read_grade(reply, JudgeReward()) == grade


def test_grades_within_other_limits() -> None:
    settings = JudgeReward(min_grade=-1, max_grade=1)
    assert [read_grade(text, settings) for text in ("-1", "0.5", "0.5/1", "2", "5/10")] == [-1, 0.5, 0.5, None, None]


Reply = Callable[[BaseHTTPRequestHandler, dict[str, Any]], None]


@pytest.fixture
def serve_reply() -> Iterator[Callable[[Reply], str]]:
    """Starts servers that reply to a POST as a function does, and returns their addresses."""
    servers = []

    def start(reply: Reply) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                reply(self, json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

            def do_GET(self) -> None:
                reply(self, {})

            def log_message(self, *_: Any) -> None:
                pass

        server = HTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def send(handler: BaseHTTPRequestHandler, value: Any) -> None:
    content = value if isinstance(value, bytes) else json.dumps(value).encode()
    handler.send_response(200)
    handler.send_header("Content-Length", str(len(content)))
    handler.end_headers()
    handler.wfile.write(content)


def answers(count: int = 2) -> list[dict[str, Any]]:
    messages = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "text", "own": True}]
    values = {"prompt": "question", "completion": "text", "completion_ids": [1], "completion_mask": [1]}
    return [{**values, "messages": messages, "answer": "5"} for _ in range(count)]


@pytest.mark.parametrize(
    "value",
    [
        {"scores": {"0": 0.9, "1": 0.8}},
        {"scores": [0.9]},
        {"scores": [0.9, "0.8"]},
        {"scores": [0.9, True]},
        {"scores": [[0.9], [0.8]]},
        {"scores": [0.9, 10**400]},
        {"scores": "12"},
        {"scores": None},
        {"score": [1, 2]},
        [1, 2],
        b"[" * 100_000,
        b"no JSON",
        b"",
    ],
)
def test_scores_of_a_server_are_a_list_of_numbers(value: Any, serve_reply: Callable[[Reply], str]) -> None:
    url = serve_reply(lambda handler, _: send(handler, value))
    rewards = build({"type": "http", "url": url, "retries": 0, "name": "mine"})
    with pytest.raises(JinguError, match="gave no scores in 1 attempt"):
        rewards.score(answers())


def test_a_server_receives_answers_columns_and_conversations(serve_reply: Callable[[Reply], str]) -> None:
    bodies: list[Any] = []

    def reply(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        bodies.append(body)
        send(handler, {"scores": [1, None]})

    rewards = build({"type": "http", "url": serve_reply(reply)})
    assert rewards.score(answers()) == [{"http": 1.0}, {"http": None}]
    (body,) = bodies
    assert body["completions"] == ["text", "text"] and body["answer"] == ["5", "5"]
    assert [message["content"] for message in body["messages"][0]] == ["question", "text"]


@pytest.mark.parametrize("message", [{"content": None}, {}, {"content": [{"type": "text"}]}, {"content": "?"}])
def test_a_judge_without_a_grade_leaves_an_answer_unscored(
    message: dict[str, Any], serve_reply: Callable[[Reply], str]
) -> None:
    url = serve_reply(lambda handler, _: send(handler, {"choices": [{"message": message}]}))
    rewards = build({"type": "judge", "url": url, "retries": 0})
    assert rewards.score(answers(1)) == [{"judge": None}]
    assert rewards.total({"judge": None}) is None


def test_a_judge_reads_the_conversation(serve_reply: Callable[[Reply], str]) -> None:
    questions: list[str] = []

    def reply(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        questions.append(body["messages"][0]["content"])
        send(handler, {"choices": [{"message": {"content": "7"}}]})

    rewards = build({"type": "judge", "url": serve_reply(reply), "template": "{messages} {answer}"})
    assert rewards.score(answers(1)) == [{"judge": 7.0}]
    assert questions == ["user: question\n\nassistant: text 5"]


def drip(handler: BaseHTTPRequestHandler, in_headers: bool) -> None:
    """Send a byte from time to time, for ever."""
    stop = threading.Event()
    handler.wfile.write(b"HTTP/1.0 200 OK\r\n" + (b"X: " if in_headers else b"\r\n"))
    while not stop.wait(0.02):
        try:
            handler.wfile.write(b"x")
        except OSError:
            return


@pytest.mark.parametrize("in_headers", [False, True])
def test_the_timeout_is_that_of_the_whole_request(in_headers: bool, serve_reply: Callable[[Reply], str]) -> None:
    client = JsonClient("task.rewards[0]", 0.3, 0)
    with pytest.raises(JinguError, match=r"gave no scores in 1 attempt \(TimeoutError: timed out after 0\.3 seconds"):
        client.post(serve_reply(lambda handler, _: drip(handler, in_headers)), {}, parse_reply, "scores")


def test_a_key_does_not_travel_to_another_server(serve_reply: Callable[[Reply], str], tmp_path: Path) -> None:
    requests: list[str] = []

    def spy(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        requests.append(str(handler.headers))
        send(handler, {"scores": [9, 9], "choices": [{"message": {"content": "A"}}]})

    other = serve_reply(spy)
    (tmp_path / "key").write_text("SECRET")
    for status in (301, 302, 303, 307, 308):

        def redirect(handler: BaseHTTPRequestHandler, body: dict[str, Any], status: int = status) -> None:
            handler.send_response(status)
            handler.send_header("Location", f"{other}/else")
            handler.end_headers()

        url = serve_reply(redirect)
        rewards = build({"type": "http", "url": url, "retries": 0, "api_key_file": str(tmp_path / "key")})
        with pytest.raises(JinguError, match=f"HTTP Error {status}: .*a redirect, which is not followed"):
            rewards.score(answers())
        with pytest.raises(JinguError, match="the judge does not answer"):
            server_judge(url, "judge")(["?"])
    assert requests == []


def test_a_server_that_refuses_a_connection_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(JinguError, match="refused"):
        JsonClient("task.rewards[0]", 5.0, 0).post(f"http://127.0.0.1:{port}/", {}, parse_reply, "scores")


GOOD = {
    "token_ids": [5, 6, 1],
    "logprobs": {"token_logprobs": [-0.5, -1, 0.0]},
    "finish_reason": "stop",
    "text": "ab",
}


def check(**changes: Any) -> tuple[tuple[int, ...], tuple[float, ...], str]:
    answer = {**GOOD, **changes}
    if isinstance(logprobs := answer["logprobs"], list):
        answer["logprobs"] = {"token_logprobs": logprobs}
    return check_answer(answer, 10, 4, [1], has_stop=False)


def test_answers_of_a_generation_server() -> None:
    assert check() == ((5, 6, 1), (-0.5, -1.0, 0.0), "end")
    assert check(token_ids=[5] * 4, logprobs=[-1.0] * 4, finish_reason="length")[2] == "length"
    # Some servers look at the length before the end token.
    assert check(token_ids=[5, 5, 5, 1], logprobs=[-1.0] * 4, finish_reason="length")[2] == "end"
    stopped = {**GOOD, "token_ids": [5, 6, 7]}
    assert check_answer(stopped, 10, 4, [1], has_stop=True)[2] == "stop"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"token_ids": [5, 99, 1]}, "99 is not in the vocabulary of 10"),
        ({"token_ids": [5, -1, 1]}, "-1 is not in"),
        ({"token_ids": [5, 6.0, 1]}, r"6\.0 is not in"),
        ({"token_ids": [5, True, 1]}, "True is not in"),
        ({"token_ids": [5, "6", 1]}, "'6' is not in"),
        ({"token_ids": [5, 1]}, "not one for each"),
        ({"token_ids": []}, "not one for each"),
        ({"token_ids": "561"}, "not one for each"),
        ({"token_ids": None}, "not one for each"),
        ({"token_ids": [5, 1, 6]}, "goes on after its end token"),
        ({"token_ids": [5] * 5, "logprobs": [-1.0] * 5}, "5 tokens, more than max_tokens 4"),
        ({"logprobs": [-0.5, float("nan"), 0.0]}, "nan is not the log-probability"),
        ({"logprobs": [-0.5, float("-inf"), 0.0]}, "-inf is not the log-probability"),
        ({"logprobs": [-0.5, 0.7, 0.0]}, r"0\.7 is not the log-probability"),
        ({"logprobs": [-0.5, None, 0.0]}, "None is not the log-probability"),
        ({"logprobs": [-0.5, "-1", 0.0]}, "'-1' is not the log-probability"),
        ({"logprobs": [-0.5, False, 0.0]}, "False is not the log-probability"),
        ({"finish_reason": "abort"}, "'abort', neither stop nor length"),
        ({"finish_reason": None}, "None, neither stop nor length"),
        ({"finish_reason": "length", "token_ids": [5, 6, 7]}, "cut off after 3 of 4 tokens"),
        ({"token_ids": [5, 6, 7]}, "it stopped without an end token"),
        ({"text": None}, "the text is None"),
    ],
)
def test_answers_of_a_generation_server_that_cannot_be_right(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check(**changes)


FUNCTIONS = """
import itertools
from fractions import Fraction

class Lazy:  # a name that imports its module when it is used
    def __init__(self, name): self.name = name
    def __getattr__(self, key): return getattr(__import__(self.name), key)
np, torch = Lazy("numpy"), Lazy("torch")

def a_list(completions): return [1, 0.5]
def a_tuple(completions): return (1, 0.5)
def comparison(completions): return [True, 0.5]
def array(completions): return np.array([1, 0.5])
def numpy_numbers(completions): return [np.float32(1), np.float64(0.5)]
def tensor(completions): return torch.tensor([1, 0.5])
def tensors(completions): return [torch.tensor(1.0), Fraction(1, 2)]
def generator(completions): return (value for value in (1, 0.5))
async def later(completions): return [1, 0.5]

def dictionary(completions): return {0: 1.0, 1: 1.0}
def values(completions): return {0: 1.0, 1: 1.0}.values()
def a_set(completions): return {1.0, 0.5}
def text(completions): return "12"
def data(completions): return b"12"
def number(completions): return 1.0
def nothing(completions): return None
def texts(completions): return ["1", "0.5"]
def lists(completions): return [[1], [0.5]]
def matrix(completions): return np.ones((2, 1))
def scalar(completions): return torch.tensor(1.0)
def complex_numbers(completions): return [1j, 0]
def endless(completions): return itertools.count()
def huge(completions): return [10**400, 0]
def large(completions): return [1.7e308, 1.7e308]
"""
ACCEPTED = ("a_list", "a_tuple", "comparison", "array", "numpy_numbers", "tensor", "tensors", "generator", "later")


@pytest.fixture(scope="module")
def functions(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("functions") / "functions.py"
    path.write_text(FUNCTIONS)
    return str(path)


def function(path: str, function_name: str, **settings: Any) -> dict[str, Any]:
    return {"type": "python", "function": f"{path}:{function_name}", **settings}


def test_functions_return_numbers(functions: str) -> None:
    rewards = build(*(function(functions, name) for name in ACCEPTED))
    first, second = rewards.score(answers())
    assert first == dict.fromkeys(ACCEPTED, 1.0) and second == dict.fromkeys(ACCEPTED, 0.5)
    rewards.close()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("dictionary", r"it returned dict \{0: 1\.0, 1: 1\.0\}, not a list of numbers"),
        ("values", "it returned dict_values"),
        ("a_set", "it returned set"),
        ("text", "it returned str '12', not"),
        ("data", "it returned bytes"),
        ("number", "it returned float"),
        ("nothing", "it returned NoneType"),
        ("texts", "it returned a list with str '1', not a number"),
        ("lists", "it returned a list with list"),
        ("matrix", "it returned a list with list"),
        ("scalar", "it returned Tensor|it returned tensor|not a list of numbers"),
        ("complex_numbers", "it returned a list with complex"),
        ("endless", "it returned 3 values for 2 answers"),
        ("huge", "it returned inf for an answer"),
        ("large", r"it returned 1\.7e\+308 for an answer"),
    ],
)
def test_functions_that_return_something_else_are_named(name: str, words: str, functions: str) -> None:
    rewards = build(function(functions, name, name="first"), {"type": "exact", "name": "second"})
    with pytest.raises(JinguError, match=words) as caught:
        rewards.score(answers())
    assert caught.value.where == "the reward first"
    rewards.close()


def test_sums_that_are_too_large_are_an_error(functions: str) -> None:
    rewards = build({"type": "exact", "weight": 1e200}, {"type": "number", "weight": -1e308})
    for parts in ({"exact": 1.0, "number": 0.0}, {"exact": 1e99, "number": 1e99}):
        with pytest.raises(JinguError, match=r"^task\.rewards: the weighted sum of the rewards of an answer, .* large"):
            rewards.total(parts)


def test_an_answer_that_one_reward_does_not_score_is_not_scored() -> None:
    def total(parts: dict[str, float | None], *settings: dict[str, Any]) -> float | None:
        rewards: Rewards = build(*settings)
        return rewards.total(parts)

    judge, exact = {"type": "judge"}, {"type": "exact"}
    assert total({"judge": None, "exact": 1.0}, judge, exact) is None
    assert total({"judge": 8.0, "exact": 0.5}, judge, exact) == 8.5
    assert total({"judge": None, "exact": 1.0}, {**judge, "required": False}, exact) == 1.0
    assert total({"judge": None, "exact": 1.0}, {**judge, "audit": True}, exact) == 1.0
    assert total({"judge": None, "exact": None}, {**judge, "required": False}, {**exact, "required": False}) is None
