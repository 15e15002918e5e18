"""What goes wrong: clients that leave, wait, or send nonsense; an engine that fails; a server that is full or stops."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from jingu.infer import engine as engine_module
from jingu.infer import lockstep
from jingu.infer.engine import Engine
from jingu.infer.load import Loaded
from jingu.serve import openai
from tests.serve.conftest import Running, Serve, Spoken, eventually

LONG = {"inputs": "the weather is fine. " * 30, "parameters": {"max_new_tokens": 500}}


SHORT = {"inputs": "the weather", "parameters": {"max_new_tokens": 3}}


class Gated:
    """Lets an engine go on as many steps as it is told."""

    def __init__(self) -> None:
        self._steps = threading.Semaphore(0)
        self._open = threading.Event()
        self.waiting = threading.Event()

    def __call__(self) -> None:
        self.waiting.set()
        if not self._open.is_set():
            self._steps.acquire()

    def let(self, steps: int) -> None:
        self._steps.release(steps)

    def open(self) -> None:
        self._open.set()
        self._steps.release()


@pytest.fixture
def gate() -> Gated:
    return Gated()


@pytest.fixture
def gated(serve: Serve, loaded: Loaded, gate: Gated) -> Any:
    """A server whose engine stands still until it is let go on; it is when the test ends."""

    def start(**settings: Any) -> Running:
        return serve(Spoken(loaded, before=gate), **settings)

    yield start
    gate.open()


def send(server: Running, path: str, body: object) -> http.client.HTTPConnection:
    """Ask, and do not wait for the answer."""
    connection = http.client.HTTPConnection(server.host, server.port, timeout=120)
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    return connection


def raw(server: Running, sent: bytes) -> tuple[int, dict[str, str], Any]:
    """What the server answers to bytes."""
    with socket.create_connection((server.host, server.port), timeout=120) as connection:
        connection.sendall(sent)
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        return answer.status, dict(answer.getheaders()), json.loads(answer.read())


def logged(server: Running, number: str) -> dict[str, Any]:
    """The line of the log about a request."""
    eventually(lambda: any(line.get("id") == number for line in server.lines))
    return next(line for line in server.lines if line.get("id") == number)


def protocol(server: Running) -> Any:
    """What connections are made of: those to come have its `patience`, and those there are, from their next wait on."""
    return server.server.config.http_protocol_class


def free(server: Running) -> bool:
    """Whether nothing is under way any more."""
    driver = server.server.driver
    return driver.open == 0 and not driver._tickets and not driver._known and not server.engine.busy


# Clients


@pytest.mark.parametrize("path", ["/generate", "/generate_stream"])
def test_who_leaves_cancels(gated: Callable[..., Running], gate: Gated, path: str) -> None:
    server = gated()
    before = len(server.lines)
    connection = send(server, path, LONG)
    gate.let(3)
    eventually(lambda: server.engine.live and server.engine.live[1][3] == 3)
    connection.close()
    eventually(lambda: server.server.driver.open == 0)
    gate.let(1)
    eventually(lambda: server.engine.cancelled == [1])
    eventually(lambda: free(server))
    told = {(499, "cancelled"), (200, "cancelled")}
    eventually(lambda: any((line.get("status"), line.get("finish")) in told for line in server.lines[before:]))


def test_who_leaves_before_the_engine_has_the_request_costs_nothing(gated: Callable[..., Running], gate: Gated) -> None:
    server = gated()
    first = send(server, "/generate", LONG)
    assert gate.waiting.wait(120)
    second = send(server, "/generate", LONG)
    eventually(lambda: server.server.driver.open == 2)
    second.close()
    eventually(lambda: server.server.driver.open == 1)
    gate.open()
    assert first.getresponse().status == 200
    eventually(lambda: free(server))
    assert server.engine.number == 1  # the engine never saw the other


def test_a_full_server_says_when_to_come_again(gated: Callable[..., Running], gate: Gated) -> None:
    server = gated(queue=2)
    taken = [send(server, "/generate", LONG) for _ in range(2)]
    eventually(lambda: server.server.driver.open == 2)
    status, answer, headers = server.call("/generate", LONG)
    assert (status, answer["error_type"], headers["retry-after"]) == (429, "overloaded", "1")
    status, answer, headers = server.call("/v1/completions", {"model": "tiny", "prompt": "a"})
    assert (status, answer["error"]["type"], headers["retry-after"]) == (429, "rate_limit_error", "1")
    status, answer, _ = server.call("/v1/completions", {"model": "tiny", "prompt": ["a"] * 3})
    assert status == 400 and "several calls" in answer["error"]["message"]
    gate.open()
    assert [each.getresponse().status for each in taken] == [200, 200]
    assert server.call("/generate", LONG)[0] == 200


def test_a_request_that_takes_too_long_is_ended(gated: Callable[..., Running], gate: Gated) -> None:
    server = gated(timeout=0.05)
    status, answer, _ = server.call("/generate", LONG)
    assert (status, answer["error_type"]) == (504, "incomplete_generation")
    assert "0.05 seconds" in answer["error"]
    stream = send(server, "/v1/completions", {"model": "tiny", "prompt": "a", "stream": True})
    gate.open()
    first = stream.getresponse()
    assert first.status in (200, 504)
    eventually(lambda: free(server))


def test_who_does_not_read_is_left(gated: Callable[..., Running], gate: Gated) -> None:
    server = gated()
    before = len(server.lines)  # which the module's servers share
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        connection.connect((server.host, server.port))
        words = {"model": "tiny", "prompt": "the weather " * 250, "max_tokens": 1000, "stream": True, "logprobs": 20}
        body = json.dumps(words).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        )
        connection.sendall(head.encode() + b"\r\n\r\n" + body)
        assert gate.waiting.wait(120)
        protocol(server).patience = 0.2  # only now: the client may take its time to send
        gate.open()
        eventually(
            lambda: ("/v1/completions", 200) in {(e.get("path"), e.get("status")) for e in server.lines[before:]}
        )
    eventually(lambda: free(server) and not server.server.server_state.connections)


def test_who_does_not_send_is_left(serve: Serve, loaded: Loaded) -> None:
    server = serve(Spoken(loaded), patience=0.2)
    for sent in (b"", b"POST /generate HTTP/1.1\r\nHost:"):
        with (
            socket.create_connection((server.host, server.port), timeout=120) as connection,
            contextlib.suppress(ConnectionError),  # where it was left before it had sent that
        ):
            connection.sendall(sent)
            assert connection.recv(100) == b""
    protocol(server).patience = 120.0  # for the head; the body has the time that the server was made with
    head = b"POST /generate HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{"
    status, _, answer = raw(server, head)
    assert status == 408 and "0.2 seconds" in answer["error"]


@pytest.mark.parametrize(
    ("sent", "status", "words"),
    [
        (b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"a" * 200_000 + b"\r\n\r\n", 431, "headers are too large"),
        (b"nonsense\r\n\r\n", 400, "not a request of HTTP/1.1"),
        (b"GET / HTTP/1.1\r\nContent-Length: x\r\nHost: a\r\n\r\n", 400, "not a request of HTTP/1.1"),
        (b"POST /generate HTTP/1.1\r\nHost: a\r\nContent-Length: 3000000\r\n\r\n" + b"a" * 3_000_000, 413, "2,000,000"),
    ],
)
def test_what_is_no_request(serve: Serve, sent: bytes, status: int, words: str) -> None:
    found, headers, answer = raw(_shared(serve), sent)
    assert found == status and words in answer["error"]
    assert headers["content-type"] == "application/json"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "the body"),
        (b"{", "not JSON"),
        (b'{"inputs": ' + b"[" * 1_000, "recursion limit exceeded"),
        (b"\xff\xfe", ""),
        (b'{"inputs": 1e999}', "`inputs`"),
        (b'{"inputs": "\\ud800"}', ""),
        (b'{"inputs": "a", "parameters": {"temperature": NaN}}', "not JSON"),
        (b'{"inputs": "a", "parameters": {"seed": ' + b"9" * 5000 + b"}}", ""),
        (b'{"inputs": null}', "`inputs`"),
        (b"[]", ""),
        (b'"a"', ""),
    ],
)
def test_nonsense_is_refused_as_json(serve: Serve, body: bytes, words: str) -> None:
    server = _shared(serve)
    status, answer, _ = server.call("/generate", body)
    assert status in (400, 422) and answer["error_type"] == "validation" and words in answer["error"], answer
    status, answer, _ = server.call("/v1/completions", body)
    assert status == 400 and answer["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("stop", ["x"] * 17, "`stop`: List should have at most 16 items"),
        ("stop", ["x", ""], "`stop.1`: String should have at least 1 character"),
        ("prompt", [5, -1], "`prompt.1`: Input should be greater than or equal to 0"),
        ("prompt", [5, "a"], "`prompt.1`: Input should be a valid integer"),
        ("prompt", None, "`prompt`: Input should be a valid string"),
    ],
)
def test_a_field_of_several_types_is_told_what_it_lacks(serve: Serve, field: str, value: object, words: str) -> None:
    status, answer, _ = _shared(serve).call("/v1/completions", {"model": "tiny", "prompt": "a", field: value})
    assert status == 400 and answer["error"]["message"].startswith(words) and answer["error"]["param"] == field


def test_the_body_must_say_that_it_is_json(serve: Serve) -> None:
    server = _shared(serve)
    body = b'{"inputs": "a"}'
    for kind in ("text/plain", "application/x-www-form-urlencoded"):
        status, answer, _ = server.call("/generate", body, headers={"Content-Type": kind})
        assert status == 422 and "application/json" in answer["error"]


# Who may call


def test_keys_are_asked_for(serve: Serve, loaded: Loaded) -> None:
    server = serve(Spoken(loaded), keys=("one", "钥匙"))
    for key in (None, "Bearer two", "one", "Bearer ", "Basic one", "Bearer one two"):
        status, answer, headers = server.call("/v1/models", headers={} if key is None else {"Authorization": key})
        assert (status, headers["www-authenticate"]) == (401, "Bearer") and answer["error"]["code"] == "invalid_api_key"
        assert ("is needed" in answer["error"]["message"]) is (key in (None, "one", "Bearer "))
    assert server.call("/generate", LONG)[0] == server.call("/metrics")[0] == server.call("/openapi.json")[0] == 401
    for key in ("one", "钥匙".encode().decode("latin-1")):
        assert server.call("/v1/models", headers={"Authorization": f"Bearer {key}"})[0] == 200
    assert server.call("/health")[0] == server.call("/chat")[0] == 200


def test_other_names_of_the_host_are_refused(serve: Serve, loaded: Loaded) -> None:
    server = serve(Spoken(loaded), hosts=("localhost", "127.0.0.1", "[::1]"))
    for host, status in (("localhost:1", 200), ("[::1]:80", 200), ("127.0.0.1", 200), ("evil.example", 403), ("", 403)):
        assert server.call("/v1/models", headers={"Host": host})[0] == status, host


def test_pages_of_others_may_not_call(serve: Serve, loaded: Loaded) -> None:
    asks = {"Origin": "https://page.example", "Access-Control-Request-Method": "POST"}
    _, _, headers = serve(Spoken(loaded)).call("/generate", method="OPTIONS", headers=asks)
    assert "access-control-allow-origin" not in headers
    opened = serve(Spoken(loaded), origins=("https://page.example",), keys=("one",))
    status, _, headers = opened.call("/generate", method="OPTIONS", headers=asks)
    assert (status, headers["access-control-allow-origin"]) == (200, "https://page.example")
    other = opened.call("/generate", method="OPTIONS", headers={**asks, "Origin": "https://evil.example"})[2]
    assert "access-control-allow-origin" not in other


def test_the_log_has_no_prompts_unless_it_should(serve: Serve, loaded: Loaded) -> None:
    asked = {"inputs": "the weather", "parameters": {"max_new_tokens": 3}}
    for wanted in (False, True):
        server = serve(Spoken(loaded), log_prompts=wanted)
        number = server.call("/generate", asked)[2]["x-request-id"]
        server.call("/generate", {"inputs": "the weather", "wish": "the weather"})
        server.call("/generate", b'{"inputs": "the weather"')
        line = logged(server, number)
        assert line["prompt_tokens"] == 2 and line["generated_tokens"] == 3 and line["finish"] in ("length", "end")
        assert line.get("prompts") == (["the weather"] if wanted else None)
        assert wanted or "weather" not in json.dumps(server.lines)


# The engine


class Failing(Spoken):
    """Fails in the steps that it is told to, and perhaps in forgetting."""

    fail_at: frozenset[int] = frozenset()
    hopeless = False
    steps = 0

    def step(self) -> Any:
        self.steps += 1
        if self.steps in self.fail_at:
            raise RuntimeError("a bug with secrets")
        return super().step()

    def cancel(self, number: int) -> None:
        if self.hopeless:
            raise RuntimeError("another")
        super().cancel(number)


def test_a_failed_step_fails_its_requests_and_no_others(serve: Serve, loaded: Loaded) -> None:
    engine = Failing(loaded)
    engine.fail_at = frozenset({3})
    server = serve(engine)
    status, answer, _ = server.call("/generate", LONG)
    assert (status, answer["error_type"]) == (500, "generation") and "secrets" not in answer["error"]
    assert server.call("/generate", LONG)[0] == 200
    engine.fail_at = frozenset({engine.steps + 3})
    events = server.events("/v1/completions", {"model": "tiny", "prompt": "the weather is fine", "stream": True})
    assert events[-1]["error"]["type"] == "server_error"
    assert server.call("/health")[0] == 200
    eventually(lambda: free(server))


@pytest.mark.parametrize(("finish", "failed", "kind"), [("error", 500, "generation"), ("refused", 422, "validation")])
@pytest.mark.parametrize("path", ["/generate", "/generate_stream"])
def test_an_answer_that_the_engine_breaks_off_is_told(
    serve: Serve, loaded: Loaded, path: str, finish: Any, failed: int, kind: str
) -> None:
    class Breaking(Spoken):
        def step(self) -> Any:
            events = super().step()
            return [replace(each, finish=finish, error="scores are not finite") for each in events]

    server = serve(Breaking(loaded))
    status, answer, _ = server.call(path, LONG)
    if path == "/generate_stream":
        assert status == 200
        answer = json.loads(answer.removeprefix("data: "))
    else:
        assert status == failed
    assert answer == {"error": "scores are not finite", "error_type": kind}
    eventually(lambda: free(server))


def test_a_failed_step_of_the_engine_itself(serve: Serve, loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    server = serve()
    left, computed = [3], engine_module.scores

    def fails(*given: Any) -> Any:
        left[0] -= 1
        if not left[0]:
            raise MemoryError("no room")
        return computed(*given)

    whole = server.call("/generate", LONG)[1]
    with monkeypatch.context() as patch:
        patch.setattr(engine_module, "scores", fails)
        assert server.call("/generate", LONG)[0] == 500
    assert server.call("/health")[0] == 200 and server.engine.stats().pages_used == 0
    assert server.call("/generate", LONG)[1] == whole
    eventually(lambda: free(server))


def test_ranks_that_are_no_longer_in_step_end_the_server(
    serve: Serve, loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Orders:
        def __init__(self, _: Any) -> None:
            pass

        def hand_out(self, _: Any) -> None:
            pass

    def fails(*_: Any) -> Any:
        raise ConnectionError("a rank has left")

    with monkeypatch.context() as patch:
        patch.setattr(lockstep, "_Orders", Orders)
        server = serve(lockstep.Lockstep(Engine(loaded)))
    assert server.call("/generate", SHORT)[0] == 200
    with monkeypatch.context() as patch:
        patch.setattr(engine_module, "scores", fails)
        assert server.call("/generate", SHORT)[0] == 500
    eventually(lambda: not server.server.driver._thread.is_alive())
    assert isinstance(server.server.driver.broken, ConnectionError)


def test_an_engine_that_cannot_go_on_ends_the_server(serve: Serve, loaded: Loaded) -> None:
    engine = Failing(loaded)
    engine.fail_at, engine.hopeless = frozenset({2}), True
    server = serve(engine)
    late = http.client.HTTPConnection(server.host, server.port, timeout=120)
    late.connect()
    assert server.call("/generate", LONG)[0] == 500
    with contextlib.suppress(OSError, http.client.HTTPException):  # it has been closed, or
        late.request("GET", "/health")
        assert late.getresponse().status == 503
    eventually(lambda: not server.server.driver._thread.is_alive())
    assert isinstance(server.server.driver.broken, RuntimeError)
    engine.hopeless = False


def test_who_waits_for_an_engine_that_cannot_go_on_is_told(serve: Serve, loaded: Loaded) -> None:
    """A request that came during its last step: nothing is left to answer it."""
    begun, fail = threading.Event(), threading.Event()

    class Last(Spoken):
        def step(self) -> Any:
            begun.set()
            fail.wait()
            raise RuntimeError("a bug")

        def cancel(self, number: int) -> None:
            raise RuntimeError("another")

    server = serve(Last(loaded), grace=1.0)
    first = send(server, "/generate", LONG)
    assert begun.wait(120)
    second = send(server, "/generate", LONG)
    eventually(lambda: server.server.driver.open == 2)
    fail.set()
    assert first.getresponse().status == 500
    answer = second.getresponse()
    assert (answer.status, "engine has failed" in json.loads(answer.read())["error"]) == (503, True)
    eventually(lambda: server.server.driver.open == 0)


def test_a_bug_in_taking_a_request_is_an_error_of_the_server(serve: Serve, loaded: Loaded) -> None:
    def fail(_: str) -> str:
        raise ZeroDivisionError("secrets")

    engine = Spoken(loaded, fail)
    server = serve(engine)
    status, answer, _ = server.call("/generate", LONG)
    assert (status, answer["error_type"]) == (500, "generation") and "secrets" not in answer["error"]
    engine.says = lambda prompt: prompt
    assert server.call("/generate", LONG)[0] == 200


# The end


def test_asked_to_stop_it_finishes_what_it_has(gated: Callable[..., Running], gate: Gated) -> None:
    server = gated(grace=600.0)
    whole = send(server, "/generate", LONG)
    stream = send(server, "/generate_stream", LONG)
    eventually(lambda: server.server.driver.open == 2)
    gate.let(5)
    late = http.client.HTTPConnection(server.host, server.port, timeout=120)
    late.connect()
    server.server.should_exit = True
    eventually(lambda: server.server.driver.stopping)
    with contextlib.suppress(OSError):  # it has been closed, or
        late.request("POST", "/generate", json.dumps(LONG), {"Content-Type": "application/json"})
        assert late.getresponse().status == 503
    gate.open()
    assert json.loads(whole.getresponse().read())["generated_text"].startswith("the weather is fine.")
    assert b'"finish_reason":"eos_token"' in stream.getresponse().read()


@pytest.mark.parametrize(("grace", "signals"), [(0.2, 1), (100.0, 2)])
def test_what_does_not_finish_in_time_is_told(
    gated: Callable[..., Running], gate: Gated, grace: float, signals: int
) -> None:
    server = gated(grace=grace)
    whole = send(server, "/generate", LONG)
    asked = {"model": "tiny", "prompt": LONG["inputs"], "max_tokens": 500, "stream": True}
    stream = send(server, "/v1/completions", asked)
    eventually(lambda: server.server.driver.open == 2)
    gate.let(5)
    begun = stream.getresponse()
    for _ in range(signals):
        server.server.handle_exit(signal.SIGTERM, None)
    answer = whole.getresponse()
    assert answer.status == 503 and "stops" in json.loads(answer.read())["error"]
    last = begun.read().decode().split("data: ")[-1]
    assert "stops" in json.loads(last)["error"]["message"]


@pytest.fixture
def embedding(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gated]:
    """Embeddings are not made, one after another, until the engine is let."""
    gate = Gated()

    def embedded(*_: Any) -> list[float]:
        gate()
        return [1.0]

    monkeypatch.setattr(openai, "_embedded", embedded)
    yield gate
    gate.open()


EMBED = {"model": "tiny", "input": ["a", "b"]}


def test_embeddings_are_under_way_like_others(serve: Serve, loaded: Loaded, embedding: Gated) -> None:
    server = serve(Spoken(loaded), queue=1)
    first = send(server, "/v1/embeddings", EMBED)
    assert embedding.waiting.wait(120) and server.server.driver.open == 1
    assert [server.call(path, body)[0] for path, body in (("/v1/embeddings", EMBED), ("/generate", SHORT))] == [429] * 2
    server.server.should_exit = True
    eventually(lambda: server.server.driver.stopping)
    embedding.open()
    answer = first.getresponse()
    assert answer.status == 200 and len(json.loads(answer.read())["data"]) == 2
    eventually(lambda: free(server))


def test_embeddings_that_take_too_long_are_ended(serve: Serve, loaded: Loaded, embedding: Gated) -> None:
    status, answer, _ = serve(Spoken(loaded), timeout=0.05).call("/v1/embeddings", EMBED)
    assert status == 504 and "0.05 seconds" in answer["error"]["message"]


def test_embeddings_that_do_not_finish_in_time_are_told(
    serve: Serve, loaded: Loaded, embedding: Gated, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve(Spoken(loaded), grace=0.05)
    abandon = server.server.driver.abandon

    def abandoned(error: Any) -> None:
        abandon(error)
        embedding.let(1)

    monkeypatch.setattr(server.server.driver, "abandon", abandoned)
    asked = send(server, "/v1/embeddings", EMBED)
    assert embedding.waiting.wait(120)
    server.server.should_exit = True
    answer = asked.getresponse()
    assert answer.status == 503 and "stops" in json.loads(answer.read())["error"]["message"]


def _shared(serve: Serve, held: dict[int, Running] = {}) -> Running:  # noqa: B006
    """One server for many small tests."""
    if id(serve) not in held:
        held[id(serve)] = serve()
    return held[id(serve)]
