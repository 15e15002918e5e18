"""Faults: clients that disconnect, stall or send garbage, an engine that fails, a server that is full or shuts down."""

from __future__ import annotations

import contextlib
import gzip
import http.client
import json
import logging
import resource
import signal
import socket
import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from jingu.infer import distributed
from jingu.infer.engine import Engine
from jingu.infer.inference_model import InferenceModel
from jingu.infer.model_runner import ModelRunner
from jingu.serve import async_engine, responses
from jingu.serve.middleware import RepetitionFilter
from jingu.serve.server import raise_connection_limit
from jingu.text.tokenizer import Tokenizer
from tests.limits import PATIENCE
from tests.serve.conftest import Running, ScriptedEngine, Serve, eventually, send

LONG = {"inputs": "the weather is fine. " * 30, "parameters": {"max_new_tokens": 500}}


SHORT = {"inputs": "the weather", "parameters": {"max_new_tokens": 3}}


class StepGate:
    """Lets an engine run a limited number of steps."""

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
def gate() -> StepGate:
    return StepGate()


@pytest.fixture
def gated(serve: Serve, tiny_model: InferenceModel, gate: StepGate) -> Any:
    """Start servers whose engine is paused until the gate lets it run, at the latest when the test ends."""

    def start(**settings: Any) -> Running:
        return serve(ScriptedEngine(tiny_model, before=gate), **settings)

    yield start
    gate.open()


def raw(server: Running, data: bytes) -> tuple[int, dict[str, str], Any]:
    """Return status, headers and JSON of the response to raw bytes."""
    with socket.create_connection((server.host, server.port), timeout=PATIENCE) as connection:
        connection.sendall(data)
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        return answer.status, dict(answer.getheaders()), json.loads(answer.read())


def logged(server: Running, number: str) -> dict[str, Any]:
    """Return the log line of a request."""
    eventually(lambda: any(line.get("id") == number for line in server.lines))
    return next(line for line in server.lines if line.get("id") == number)


def protocol(server: Running) -> Any:
    """Return the connection class. Setting its `patience` affects all connections from their next wait on."""
    return server.server.config.http_protocol_class


def free(server: Running) -> bool:
    """Return whether no request is in progress."""
    async_engine = server.server.engine
    return (
        async_engine.num_requests == 0
        and not async_engine._handles
        and not async_engine._owners
        and not server.engine.busy
    )


# Clients


@pytest.mark.parametrize("path", ["/generate", "/generate_stream"])
def test_disconnecting_cancels_the_request(gated: Callable[..., Running], gate: StepGate, path: str) -> None:
    server = gated()
    before = len(server.lines)
    connection = send(server, path, LONG)
    gate.let(3)
    eventually(lambda: server.engine.live and server.engine.live[1][3] == 3)
    connection.close()
    eventually(lambda: server.server.engine.num_requests == 0)
    gate.let(1)
    eventually(lambda: server.engine.cancelled == [1])
    eventually(lambda: free(server))
    output = {(499, "cancelled"), (200, "cancelled")}
    eventually(lambda: any((line.get("status"), line.get("finish")) in output for line in server.lines[before:]))


def test_disconnecting_before_submission_costs_nothing(gated: Callable[..., Running], gate: StepGate) -> None:
    server = gated()
    first = send(server, "/generate", LONG)
    assert gate.waiting.wait(120)
    second = send(server, "/generate", LONG)
    eventually(lambda: server.server.engine.num_requests == 2)
    second.close()
    eventually(lambda: server.server.engine.num_requests == 1)
    gate.open()
    assert first.getresponse().status == 200
    eventually(lambda: free(server))
    assert server.engine.number == 1  # the engine never saw the other


def test_a_full_server_returns_retry_after(gated: Callable[..., Running], gate: StepGate) -> None:
    server = gated(max_concurrent_requests=2)
    listener = [send(server, "/generate", LONG) for _ in range(2)]
    eventually(lambda: server.server.engine.num_requests == 2)
    status, answer, headers = server.call("/generate", LONG)
    assert (status, answer["error_type"], headers["retry-after"]) == (429, "overloaded", "1")
    status, answer, headers = server.call("/v1/completions", {"model": "tiny", "prompt": "a"})
    assert (status, answer["error"]["type"], headers["retry-after"]) == (429, "rate_limit_error", "1")
    status, answer, _ = server.call("/v1/completions", {"model": "tiny", "prompt": ["a"] * 3})
    assert status == 400 and "several calls" in answer["error"]["message"]
    gate.open()
    assert [item.getresponse().status for item in listener] == [200, 200]
    assert server.call("/generate", LONG)[0] == 200


def test_a_request_times_out(gated: Callable[..., Running], gate: StepGate) -> None:
    server = gated(timeout=0.05)
    status, answer, _ = server.call("/generate", LONG)
    assert (status, answer["error_type"]) == (504, "incomplete_generation")
    assert "0.05 seconds" in answer["error"]
    stream = send(server, "/v1/completions", {"model": "tiny", "prompt": "a", "stream": True})
    gate.open()
    first = stream.getresponse()
    assert first.status in (200, 504)
    eventually(lambda: free(server))


def test_a_client_that_does_not_read_is_disconnected(gated: Callable[..., Running], gate: StepGate) -> None:
    server = gated()
    before = len(server.lines)  # which the module's servers share
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        connection.connect((server.host, server.port))
        message = {"model": "tiny", "prompt": "the weather " * 250, "max_tokens": 1000, "stream": True, "logprobs": 20}
        body = json.dumps(message).encode()
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


def test_a_client_that_does_not_send_is_disconnected(serve: Serve, tiny_model: InferenceModel) -> None:
    server = serve(ScriptedEngine(tiny_model), patience=0.2)
    for data in (b"", b"POST /generate HTTP/1.1\r\nHost:"):
        with (
            socket.create_connection((server.host, server.port), timeout=PATIENCE) as connection,
            contextlib.suppress(ConnectionError),  # where it was left before it had sent that
        ):
            connection.sendall(data)
            assert connection.recv(100) == b""
    protocol(server).patience = 120.0  # for the head; the body has the time that the server was made with
    head = b"POST /generate HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{"
    status, _, answer = raw(server, head)
    assert status == 408 and "0.2 seconds" in answer["error"]


@pytest.mark.parametrize(
    ("data", "status", "message"),
    [
        (b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"a" * 200_000 + b"\r\n\r\n", 431, "headers are too large"),
        (b"nonsense\r\n\r\n", 400, "not a valid HTTP/1.1 request"),
        (b"GET / HTTP/1.1\r\nContent-Length: x\r\nHost: a\r\n\r\n", 400, "not a valid HTTP/1.1 request"),
        (b"POST /generate HTTP/1.1\r\nHost: a\r\nContent-Length: 3000000\r\n\r\n" + b"a" * 3_000_000, 413, "2,000,000"),
    ],
)
def test_invalid_http_is_refused(serve: Serve, data: bytes, status: int, message: str) -> None:
    result, headers, answer = raw(_shared(serve), data)
    assert result == status and message in answer["error"]
    assert headers["content-type"] == "application/json"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "the body"),
        (b"{", "not valid JSON"),
        (b'{"inputs": ' + b"[" * 1_000, "recursion limit exceeded"),
        (b"\xff\xfe", ""),
        (b'{"inputs": 1e999}', "`inputs`"),
        (b'{"inputs": "\\ud800"}', ""),
        (b'{"inputs": "a", "parameters": {"temperature": NaN}}', "not valid JSON"),
        (b'{"inputs": "a", "parameters": {"seed": ' + b"9" * 5000 + b"}}", ""),
        (b'{"inputs": null}', "`inputs`"),
        (b"[]", ""),
        (b'"a"', ""),
    ],
)
def test_malformed_bodies_get_json_errors(serve: Serve, body: bytes, message: str) -> None:
    server = _shared(serve)
    status, answer, _ = server.call("/generate", body)
    assert status in (400, 422) and answer["error_type"] == "validation" and message in answer["error"], answer
    status, answer, _ = server.call("/v1/completions", body)
    assert status == 400 and answer["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("stop", ["x"] * 17, "`stop`: List should have at most 16 items"),
        ("stop", ["x", ""], "`stop.1`: String should have at least 1 character"),
        ("prompt", [5, -1], "`prompt.1`: Input should be greater than or equal to 0"),
        ("prompt", [5, "a"], "`prompt.1`: Input should be a valid integer"),
        ("prompt", None, "`prompt`: Input should be a valid string"),
    ],
)
def test_errors_of_fields_with_several_types(serve: Serve, field: str, value: object, message: str) -> None:
    status, answer, _ = _shared(serve).call("/v1/completions", {"model": "tiny", "prompt": "a", field: value})
    assert status == 400 and answer["error"]["message"].startswith(message) and answer["error"]["param"] == field


def test_the_content_type_must_be_json(serve: Serve) -> None:
    server = _shared(serve)
    body = b'{"inputs": "a"}'
    for kind in ("text/plain", "application/x-www-form-urlencoded"):
        status, answer, _ = server.call("/generate", body, headers={"Content-Type": kind})
        assert status == 422 and "application/json" in answer["error"]


# Who may call


def test_api_keys_are_required(serve: Serve, tiny_model: InferenceModel) -> None:
    server = serve(ScriptedEngine(tiny_model), keys=("one", "钥匙"))
    for key in (None, "Bearer two", "one", "Bearer ", "Basic one", "Bearer one two"):
        status, answer, headers = server.call("/v1/models", headers={} if key is None else {"Authorization": key})
        assert (status, headers["www-authenticate"]) == (401, "Bearer") and answer["error"]["code"] == "invalid_api_key"
        assert ("is required" in answer["error"]["message"]) is (key in (None, "one", "Bearer "))
    assert server.call("/generate", LONG)[0] == server.call("/metrics")[0] == server.call("/openapi.json")[0] == 401
    for key in ("one", "钥匙".encode().decode("latin-1")):
        assert server.call("/v1/models", headers={"Authorization": f"Bearer {key}"})[0] == 200
    assert server.call("/health")[0] == server.call("/chat")[0] == 200


def test_other_host_names_are_refused(serve: Serve, tiny_model: InferenceModel) -> None:
    server = serve(ScriptedEngine(tiny_model), hosts=("localhost", "127.0.0.1", "[::1]"))
    for host, status in (("localhost:1", 200), ("[::1]:80", 200), ("127.0.0.1", 200), ("evil.example", 403), ("", 403)):
        assert server.call("/v1/models", headers={"Host": host})[0] == status, host


def test_other_origins_are_refused(serve: Serve, tiny_model: InferenceModel) -> None:
    asks = {"Origin": "https://page.example", "Access-Control-Request-Method": "POST"}
    _, _, headers = serve(ScriptedEngine(tiny_model)).call("/generate", method="OPTIONS", headers=asks)
    assert "access-control-allow-origin" not in headers
    model = serve(ScriptedEngine(tiny_model), origins=("https://page.example",), keys=("one",))
    status, _, headers = model.call("/generate", method="OPTIONS", headers=asks)
    assert (status, headers["access-control-allow-origin"]) == (200, "https://page.example")
    preflight = {"Origin": "https://page.example", "Access-Control-Request-Method": "POST"}
    # As OpenAI's client sends in a browser.
    preflight["Access-Control-Request-Headers"] = "authorization,content-type,x-stainless-lang,x-stainless-os"
    status, _, allowed = model.call("/v1/chat/completions", method="OPTIONS", headers=preflight)
    assert status == 200 and "x-stainless-os" in allowed["access-control-allow-headers"]
    other = model.call("/generate", method="OPTIONS", headers={**asks, "Origin": "https://evil.example"})[2]
    assert "access-control-allow-origin" not in other


def test_prompts_are_logged_only_on_request(serve: Serve, tiny_model: InferenceModel) -> None:
    body = {"inputs": "the weather", "parameters": {"max_new_tokens": 3}}
    for expected in (False, True):
        server = serve(ScriptedEngine(tiny_model), log_prompts=expected)
        number = server.call("/generate", body)[2]["x-request-id"]
        server.call("/generate", {"inputs": "the weather", "wish": "the weather"})
        server.call("/generate", b'{"inputs": "the weather"')
        line = logged(server, number)
        assert line["prompt_tokens"] == 2 and line["generated_tokens"] == 3 and line["finish"] in ("length", "end")
        assert line.get("prompts") == (["the weather"] if expected else None)
        assert expected or "weather" not in json.dumps(server.lines)


# The engine


class Failing(ScriptedEngine):
    """An engine that fails in given steps, and if `hopeless` also when requests are cancelled."""

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


def test_a_failed_step_fails_its_requests_and_no_others(serve: Serve, tiny_model: InferenceModel) -> None:
    engine = Failing(tiny_model)
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
def test_an_aborted_answer_is_reported(
    serve: Serve, tiny_model: InferenceModel, path: str, finish: Any, failed: int, kind: str
) -> None:
    class Breaking(ScriptedEngine):
        def step(self) -> Any:
            events = super().step()
            return [replace(item, finish_reason=finish, error="scores are not finite") for item in events]

    server = serve(Breaking(tiny_model))
    status, answer, _ = server.call(path, LONG)
    if path == "/generate_stream":
        assert status == 200
        answer = json.loads(answer.removeprefix("data: "))
    else:
        assert status == failed
    assert answer == {"error": "scores are not finite", "error_type": kind}
    eventually(lambda: free(server))


def test_a_failed_step_of_the_engine_itself(
    serve: Serve, tiny_model: InferenceModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve()
    remaining, computed = [3], ModelRunner.compute

    def fails(*value: Any) -> Any:
        remaining[0] -= 1
        if not remaining[0]:
            raise MemoryError("no room")
        return computed(*value)

    response = server.call("/generate", LONG)[1]
    with monkeypatch.context() as patch:
        patch.setattr(ModelRunner, "compute", fails)
        assert server.call("/generate", LONG)[0] == 500
    assert server.call("/health")[0] == 200 and server.engine.stats().used_blocks == 0
    assert server.call("/generate", LONG)[1] == response
    eventually(lambda: free(server))


def test_ranks_out_of_sync_end_the_server(
    serve: Serve, tiny_model: InferenceModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Channel:
        def __init__(self, _: Any) -> None:
            pass

        def broadcast(self, _: Any) -> None:
            pass

    def fails(*_: Any) -> Any:
        raise ConnectionError("a rank has left")

    with monkeypatch.context() as patch:
        patch.setattr(distributed, "_CommandChannel", Channel)
        server = serve(distributed.DistributedEngine(Engine(tiny_model)))
    assert server.engine.max_new_tokens(8) == tiny_model.spec.max_position_embeddings - 8
    assert server.call("/generate", SHORT)[0] == 200
    with monkeypatch.context() as patch:
        patch.setattr(ModelRunner, "compute", fails)
        assert server.call("/generate", SHORT)[0] == 500
    eventually(lambda: not server.server.engine._thread.is_alive())
    assert isinstance(server.server.engine.failure, ConnectionError)


def test_an_engine_that_cannot_continue_ends_the_server(serve: Serve, tiny_model: InferenceModel) -> None:
    engine = Failing(tiny_model)
    engine.fail_at, engine.hopeless = frozenset({2}), True
    server = serve(engine)
    late = http.client.HTTPConnection(server.host, server.port, timeout=PATIENCE)
    late.connect()
    assert server.call("/generate", LONG)[0] == 500
    with contextlib.suppress(OSError, http.client.HTTPException):  # it has been closed, or
        late.request("GET", "/health")
        assert late.getresponse().status == 503
    eventually(lambda: not server.server.engine._thread.is_alive())
    assert isinstance(server.server.engine.failure, RuntimeError)
    engine.hopeless = False


def test_a_request_waiting_for_a_broken_engine_fails(serve: Serve, tiny_model: InferenceModel) -> None:
    """A request that arrives during the last step."""
    started, fail = threading.Event(), threading.Event()

    class Last(ScriptedEngine):
        def step(self) -> Any:
            started.set()
            fail.wait()
            raise RuntimeError("a bug")

        def cancel(self, number: int) -> None:
            raise RuntimeError("another")

    server = serve(Last(tiny_model), grace=1.0)
    first = send(server, "/generate", LONG)
    assert started.wait(120)
    second = send(server, "/generate", LONG)
    eventually(lambda: server.server.engine.num_requests == 2)
    fail.set()
    assert first.getresponse().status == 500
    answer = second.getresponse()
    assert (answer.status, "engine has failed" in json.loads(answer.read())["error"]) == (503, True)
    eventually(lambda: server.server.engine.num_requests == 0)


def test_a_bug_in_submission_is_a_server_error(serve: Serve, tiny_model: InferenceModel) -> None:
    def fail(_: str) -> str:
        raise ZeroDivisionError("secrets")

    engine = ScriptedEngine(tiny_model, fail)
    server = serve(engine)
    status, answer, _ = server.call("/generate", LONG)
    assert (status, answer["error_type"]) == (500, "generation") and "secrets" not in answer["error"]
    engine.says = lambda prompt: prompt
    assert server.call("/generate", LONG)[0] == 200


# The end


def test_shutdown_finishes_requests_in_progress(gated: Callable[..., Running], gate: StepGate) -> None:
    server = gated(grace=600.0)
    response = send(server, "/generate", LONG)
    stream = send(server, "/generate_stream", LONG)
    eventually(lambda: server.server.engine.num_requests == 2)
    gate.let(5)
    late = http.client.HTTPConnection(server.host, server.port, timeout=PATIENCE)
    late.connect()
    server.server.should_exit = True
    eventually(lambda: server.server.engine.is_stopping)
    with contextlib.suppress(OSError):  # it has been closed, or
        late.request("POST", "/generate", json.dumps(LONG), {"Content-Type": "application/json"})
        assert late.getresponse().status == 503
    gate.open()
    assert json.loads(response.getresponse().read())["generated_text"].startswith("the weather is fine.")
    assert b'"finish_reason":"eos_token"' in stream.getresponse().read()


@pytest.mark.parametrize(("grace", "signals"), [(0.2, 1), (100.0, 2)])
def test_shutdown_aborts_requests_after_the_grace_period(
    gated: Callable[..., Running], gate: StepGate, grace: float, signals: int
) -> None:
    server = gated(grace=grace)
    response = send(server, "/generate", LONG)
    body = {"model": "tiny", "prompt": LONG["inputs"], "max_tokens": 500, "stream": True}
    stream = send(server, "/v1/completions", body)
    eventually(lambda: server.server.engine.num_requests == 2)
    gate.let(5)
    started = stream.getresponse()
    for _ in range(signals):
        server.server.handle_exit(signal.SIGTERM, None)
    answer = response.getresponse()
    assert answer.status == 503 and "shutting down" in json.loads(answer.read())["error"]
    last = started.read().decode().split("data: ")[-1]
    assert "shutting down" in json.loads(last)["error"]["message"]


EMBED = {"model": "tiny", "input": ["a", "b"]}


def test_texts_to_embed_count_as_one_request(gated: Callable[..., Running], gate: StepGate) -> None:
    server = gated(max_concurrent_requests=1)
    first = send(server, "/v1/embeddings", EMBED)
    assert gate.waiting.wait(120) and server.server.engine.num_requests == 1
    assert [server.call(path, body)[0] for path, body in (("/v1/embeddings", EMBED), ("/generate", SHORT))] == [429] * 2
    server.server.should_exit = True
    eventually(lambda: server.server.engine.is_stopping)
    gate.open()
    answer = first.getresponse()
    assert answer.status == 200 and len(json.loads(answer.read())["data"]) == 2
    eventually(lambda: free(server))


def test_embeddings_time_out(gated: Callable[..., Running]) -> None:
    status, answer, _ = gated(timeout=0.05).call("/v1/embeddings", EMBED)
    assert status == 504 and "0.05 seconds" in answer["error"]["message"]


def _shared(serve: Serve, servers: dict[int, Running] = {}) -> Running:  # noqa: B006
    """Return a server that many small tests share."""
    if id(serve) not in servers:
        servers[id(serve)] = serve()
    return servers[id(serve)]


# One client does not stop the others


def longest_pause(server: Running, until: threading.Event) -> float:
    """Return the longest time that `/health` took until an event."""
    longest = 0.0
    while not until.is_set():
        start = time.perf_counter()
        assert server.call("/health")[0] == 200
        longest = max(longest, time.perf_counter() - start)
    return longest


@pytest.mark.parametrize(
    "text",
    ["weather is fine. " * 100_000, "a" * 1_900_000, "的数据" * 100_000],
    ids=["words", "one letter", "Chinese"],
)
def test_a_prompt_that_cannot_fit_is_refused_without_being_tokenized(
    text: str, serve: Serve, tiny_model: InferenceModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = _shared(serve)
    monkeypatch.setattr(Tokenizer, "encode", lambda *_, **__: pytest.fail("the prompt was tokenized"))
    for path, body in (
        ("/generate", {"inputs": text}),
        ("/v1/completions", {"model": "tiny", "prompt": text}),
        ("/v1/chat/completions", {"model": "tiny", "messages": [{"role": "user", "content": text}]}),
        ("/v1/messages", {"model": "tiny", "max_tokens": 5, "messages": [{"role": "user", "content": text}]}),
    ):
        status, answer, _ = server.call(path, body)
        assert status in (400, 422) and "or more tokens exceed the model's context of 2048" in json.dumps(answer)


def test_other_clients_are_answered_while_a_long_text_is_tokenized(serve: Serve) -> None:
    server = _shared(serve)
    done = threading.Event()
    pauses: list[float] = []
    thread = threading.Thread(target=lambda: pauses.append(longest_pause(server, done)))
    thread.start()
    # Truncation makes a prompt of any length acceptable, so all of it is tokenized.
    body = {"inputs": "the weather is fine. " * 90_000, "parameters": {"truncate": 5, "max_new_tokens": 2}}
    start = time.perf_counter()
    assert server.call("/generate", body)[0] == 200
    seconds = time.perf_counter() - start
    done.set()
    thread.join(PATIENCE)
    assert pauses[0] < seconds


def test_a_backlog_is_bounded(serve: Serve, tiny_model: InferenceModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_engine, "MAX_UNREAD_TOKENS", 100)
    server = serve(ScriptedEngine(tiny_model))
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        connection.connect((server.host, server.port))
        message = {"model": "tiny", "prompt": "the weather " * 250, "max_tokens": 1000, "stream": True, "logprobs": 20}
        body = json.dumps({**message, "n": 16}).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        )
        connection.sendall(head.encode() + b"\r\n\r\n" + body)
        eventually(lambda: server.engine.cancelled == [1])
        assert server.call("/generate", SHORT)[0] == 200


def test_answers_to_one_prompt_count_towards_the_limit(gated: Callable[..., Running], gate: StepGate) -> None:
    server = gated(max_concurrent_requests=8)
    body = {"model": "tiny", "prompt": "the weather", "max_tokens": 2}
    status, answer, _ = server.call("/v1/completions", {**body, "n": 9})
    assert status == 400 and "at most 8 answers at once, not 9" in answer["error"]["message"]
    first = send(server, "/v1/completions", {**body, "n": 6})
    eventually(lambda: server.server.engine.num_requests == 6)
    for more in ({"n": 3}, {"prompt": ["a", "b", "c"]}, {"best_of": 3}):
        assert server.call("/v1/completions", {**body, **more})[0] == 429, more
    gate.open()
    assert first.getresponse().status == 200
    eventually(lambda: free(server))


@pytest.mark.parametrize(
    ("path", "body", "sign"),
    [
        ("/v1/completions", {"prompt": "the weather"}, b": keep-alive\n\n"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, b": keep-alive\n\n"),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3}, b"event: ping\n"),
        ("/generate_stream", {"inputs": "the weather"}, b": keep-alive\n\n"),
        ("/v1/responses", {"input": "the weather"}, b": keep-alive\n\n"),
        ("/api/chat", {"messages": [{"role": "user", "content": "a"}]}, b'"content":""},"done":false}\n'),
        ("/api/generate", {"prompt": "a"}, b'"response":"","done":false}\n'),
    ],
)
def test_silent_streams_send_keep_alives(
    path: str,
    body: dict[str, Any],
    sign: bytes,
    gated: Callable[..., Running],
    gate: StepGate,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(responses, "KEEP_ALIVE_SECONDS", 0.02)
    server = gated()
    fields = {} if path == "/generate_stream" else {"model": "tiny", "stream": True}
    response = send(server, path, {**fields, **body}).getresponse()
    text = b""
    while sign not in text:
        text += response.readline()
    gate.open()
    assert response.read()
    eventually(lambda: free(server))


def test_idle_connections_make_room(serve: Serve, tiny_model: InferenceModel) -> None:
    server = serve(ScriptedEngine(tiny_model), max_connections=4)
    idle = [socket.create_connection((server.host, server.port), timeout=PATIENCE) for _ in range(12)]
    try:
        eventually(lambda: len(server.server.server_state.connections) <= 4)
        assert server.call("/health")[0] == 200
        assert idle[0].recv(10) == b""  # the oldest was closed
    finally:
        for connection in idle:
            connection.close()


def test_the_limit_of_files_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 4096))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limit: limits.append(limit))
    assert raise_connection_limit() == 4096 - 64 and limits == [(4096, 4096)]


def test_repeated_errors_are_logged_once() -> None:
    logger, handler = logging.Logger("asyncio-like"), _Records()
    logger.addHandler(handler)
    logger.addFilter(RepetitionFilter(seconds=60.0))
    for _ in range(1000):
        logger.error("socket.accept() out of system resource")
    logger.error("another one")
    assert handler.texts == ["socket.accept() out of system resource", "another one"]


class _Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


# Forms of HTTP


@pytest.mark.parametrize("target", [b"http://a/health", b"http://a:8000/health?x=1", b"HTTP://a/health"])
def test_a_request_for_a_whole_url_is_answered(serve: Serve, target: bytes) -> None:
    data = b"GET " + target + b" HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
    server = _shared(serve)
    with socket.create_connection((server.host, server.port), timeout=PATIENCE) as connection:
        connection.sendall(data)
        assert connection.recv(100).startswith(b"HTTP/1.1 200")


def test_the_host_of_a_whole_url_is_checked(serve: Serve, tiny_model: InferenceModel) -> None:
    server = serve(ScriptedEngine(tiny_model), hosts=("localhost",))
    for host, status in (("localhost", b"200"), ("evil.example", b"403")):
        with socket.create_connection((server.host, server.port), timeout=PATIENCE) as connection:
            request = f"GET http://{host}/v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
            connection.sendall(request.encode())
            assert connection.recv(100).startswith(b"HTTP/1.1 " + status)


def test_compressed_bodies_are_read(serve: Serve) -> None:
    server = _shared(serve)
    plain = json.dumps(SHORT).encode()
    for encoding, body in (("gzip", gzip.compress(plain)), ("deflate", zlib.compress(plain)), ("identity", plain)):
        assert server.call("/generate", body, headers={"Content-Encoding": encoding})[0] == 200, encoding
    for encoding, body, status, words in (
        ("gzip", plain, 422, "not in the format"),
        ("gzip", gzip.compress(plain)[:-9], 422, "incomplete"),
        ("br", plain, 415, "gzip, deflate or no encoding"),
        ("gzip", gzip.compress(b" " * 3_000_000), 413, "2,000,000"),
    ):
        result, answer, _ = server.call("/generate", body, headers={"Content-Encoding": encoding})
        assert result == status and words in answer["error"], (encoding, answer)


def test_private_networks_are_reached_from_allowed_origins(serve: Serve, tiny_model: InferenceModel) -> None:
    server = serve(ScriptedEngine(tiny_model), origins=("https://page.example",))
    asks = {
        "Origin": "https://page.example",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Private-Network": "true",
    }
    status, _, headers = server.call("/generate", method="OPTIONS", headers=asks)
    assert status == 200 and headers["access-control-allow-private-network"] == "true"
    other = server.call("/generate", method="OPTIONS", headers={**asks, "Origin": "https://evil.example"})
    assert other[0] == 400


def test_the_id_of_a_request_has_the_name_of_each_protocol(serve: Serve) -> None:
    headers = _shared(serve).call("/v1/models")[2]
    assert headers["request-id"] == headers["x-request-id"]
