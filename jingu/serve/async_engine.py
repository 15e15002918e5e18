"""Run the engine on a thread of its own, for HTTP handlers on an event loop.

Handlers queue commands, which the engine's thread executes between two steps. It passes the events of each step to the
event loop. The engine itself uses no threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from jingu.errors import JinguError
from jingu.infer.engine_interface import StepEngine
from jingu.infer.request import Event, FinishReason, Request, Token
from jingu.runtime.futures import fulfill
from jingu.serve.http_errors import ApiError

LOGGER = logging.getLogger("jingu.serve")
# Makes the error of a request on which the engine failed.
_engine_failure = partial(ApiError, 500, "the engine failed on this request; see the server's log", kind="generation")
# The most tokens that wait in memory for a client that does not read its stream. Before these, some megabytes fit the
# buffers of the connection.
MAX_UNREAD_TOKENS = 20_000
_FAILED_REASONS = ("error", "cancelled", "refused")
T = TypeVar("T")


@dataclass
class RequestStats:
    """Times and token counts of a request so far.

    Attributes:
        arrival_time: when the server received the request. All times are values of `time.perf_counter`.
        accepted_time: when the handler passed the request to the engine.
        reasoning_tokens: how many of the generated tokens are reasoning before an answer; None where it is not parsed.
        start_time: when the engine began to compute the request; None before that.
    """

    arrival_time: float
    accepted_time: float = field(default_factory=time.perf_counter)
    start_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    end_time: float | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    reasoning_tokens: int | None = None
    finish_reason: str = "unfinished"

    def log_fields(self) -> dict[str, object]:
        """Return the fields of the request's log line."""
        latency = None
        if self.first_token_time is not None:
            latency = round(self.first_token_time - self.arrival_time, 4)
        return {
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "generated_tokens": self.generated_tokens,
            "first_token_seconds": latency,
            "finish": self.finish_reason,
        }


@dataclass
class Completion:
    """One generated answer, collected from its events."""

    tokens: list[Token] = field(default_factory=list)
    prompt_logprobs: tuple[Token, ...] = ()
    finish_reason: FinishReason = "length"
    cumulative_logprob: float = 0.0
    embedding: tuple[float, ...] | None = None

    def add(self, event: Event) -> None:
        """Add the next event."""
        self.prompt_logprobs = self.prompt_logprobs or event.prompt_logprobs
        if event.token is not None:
            self.tokens.append(event.token)
        self.finish_reason = event.finish_reason or self.finish_reason
        self.cumulative_logprob = event.cumulative_logprob
        self.embedding = event.embedding

    @property
    def text(self) -> str:
        """The answer's text."""
        return "".join(token.text for token in self.tokens)


def best_first(completions: list[Completion]) -> list[Completion]:
    """Return completions in the order of their log-probability per token, the highest first."""
    return sorted(completions, key=lambda each: each.cumulative_logprob / max(len(each.tokens), 1), reverse=True)


def count_sequences(requests: Sequence[Request]) -> int:
    """Return how much requests count towards the server's limit: as many as the sequences that they generate, but texts
    to embed count as one in total."""
    if requests[0].pooling is not None:
        return 1
    return sum(max(request.n, request.num_beams) for request in requests)


class RequestHandle:
    """Engine requests that one client submitted together, and their events as they arrive.

    Attributes:
        size: how much they count towards the server's limit; see `count_sequences`.
        unfinished: (index of the request, index of the choice) of all choices that have not ended.
        is_closed: whether all choices have ended, or the requests have failed or been cancelled.
    """

    def __init__(self, engine: AsyncEngine, requests: Sequence[Request], arrival_time: float) -> None:
        self.requests = tuple(requests)
        self.size = count_sequences(requests)
        self.stats = RequestStats(arrival_time)
        self.unfinished = {(index, choice) for index, request in enumerate(requests) for choice in range(request.n)}
        self.is_closed = False
        self._engine = engine
        # A None in the queue ends the iteration.
        self._batches: asyncio.Queue[list[tuple[int, Event]] | None] = asyncio.Queue()
        self._num_unread = 0
        self._running: set[int] = set()
        self._error: ApiError | None = None
        self._timer = asyncio.get_running_loop().call_later(engine.timeout, self._time_out, engine.timeout)

    async def batches(self) -> AsyncIterator[list[tuple[int, Event]]]:
        """Yield the events of each engine step, each with the index of its request in `requests`.

        Raises:
            ApiError: the request failed.
        """
        while (batch := await self._batches.get()) is not None:
            self._num_unread -= len(batch)
            yield batch
        if self._error is not None:
            raise self._error

    async def collect(self) -> list[list[Completion]]:
        """Wait until all choices have ended; return them by request and choice. Raise ApiError if a request fails."""
        completions = [[Completion() for _ in range(request.n)] for request in self.requests]
        async for batch in self.batches():
            for index, event in batch:
                completions[index][event.choice].add(event)
        return completions

    def cancel(self) -> None:
        """Cancel all unfinished choices."""
        if not self.is_closed:
            self.fail(ApiError(499, "the client has disconnected"), "cancelled")

    def _time_out(self, seconds: float) -> None:
        what = f"the request took more than {seconds:g} seconds"
        self.fail(ApiError(504, what, kind="incomplete_generation"), "timeout")

    def fail(self, error: ApiError, finish_reason: str = "error") -> None:
        """End the request with an error, unless it has ended. To be called on the event loop's thread."""
        if not self.is_closed:
            self._error = error
            # Nobody reads the tokens of a cancelled request.
            while finish_reason == "cancelled" and not self._batches.empty():
                self._batches.get_nowait()
            self._close(finish_reason)

    def receive(self, batch: list[tuple[int, Event]], now: float) -> None:
        """Add the events of a step, which ended at `now`. To be called on the event loop's thread."""
        if self.is_closed:
            return
        failure: Event | None = None
        for index, event in batch:
            self._record(index, event, now)
            if event.finish_reason in _FAILED_REASONS:
                failure = failure or event
        self._num_unread += len(batch)
        self._batches.put_nowait([entry for entry in batch if entry[1].finish_reason not in _FAILED_REASONS])
        if self._num_unread > MAX_UNREAD_TOKENS:
            self.fail(ApiError(408, f"the client left {MAX_UNREAD_TOKENS:,} tokens of its stream unread"), "cancelled")
        elif failure is not None:
            message = failure.error or "the engine cancelled the request"
            if failure.finish_reason == "refused":
                self.fail(ApiError(400, message))
            else:
                self.fail(ApiError(500, message, kind="generation"))
        elif not self.unfinished:
            self._close(self.stats.finish_reason)

    def _record(self, index: int, event: Event, now: float) -> None:
        """Update the statistics and the unfinished choices."""
        stats = self.stats
        if index not in self._running:
            self._running.add(index)
            stats.prompt_tokens += event.prompt_tokens
            stats.cached_tokens += event.cached_tokens
            stats.start_time = stats.start_time or event.start_time or None
        if event.token is not None:
            stats.generated_tokens += 1
            stats.first_token_time = stats.first_token_time or now
            stats.last_token_time = now
        if event.finish_reason is not None:
            self.unfinished.discard((index, event.choice))
            stats.finish_reason = event.finish_reason

    def _close(self, finish_reason: str) -> None:
        self.is_closed = True
        self.stats.finish_reason = finish_reason
        self.stats.end_time = time.perf_counter()
        self._timer.cancel()
        self._batches.put_nowait(None)
        self._engine.release(self)


class AsyncEngine:
    """Runs the engine on a thread, and gives coroutines access to it.

    Args:
        engine: the engine that the thread runs.
        max_requests: maximum number of unfinished sequences; requests for more fail with status 429.
        timeout: seconds after which a request fails.
        on_end: called with each handle whose requests have ended.

    Attributes:
        num_requests: number of unfinished sequences; see `count_sequences`.
        failure: the error after which the engine cannot continue; None: there was none.
        is_stopping: whether the server refuses new requests because it is shutting down.
    """

    def __init__(
        self, engine: StepEngine, max_requests: int, timeout: float, on_end: Callable[[RequestHandle], None]
    ) -> None:
        self.engine = engine
        self.max_requests = max_requests
        self.timeout = timeout
        self.num_requests = 0
        self.failure: Exception | None = None
        self.is_stopping = False
        # The error of calls after `abort_all`.
        self._abort_error: ApiError | None = None
        self._on_end = on_end
        # A None in the queue ends the thread.
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._handles: set[RequestHandle] = set()
        # By the engine's request id, (handle, index of the request in it). Only the engine's thread uses this.
        self._owners: dict[int, tuple[RequestHandle, int]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Start the thread. It delivers events to the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def submit(self, requests: Sequence[Request], arrival_time: float) -> RequestHandle:
        """Submit requests to the engine, and return once it has accepted them.

        Raises:
            ApiError: the server is full, stopping or broken.
            JinguError: one of the requests can never be served.
        """
        self.check_available(count_sequences(requests))
        handle = RequestHandle(self, requests, arrival_time)
        self._handles.add(handle)
        self.num_requests += handle.size
        # After any error the handle must be closed, or its requests would count towards the limit forever.
        try:
            await self.call(lambda: self._submit(handle))
        except JinguError:
            handle.fail(_engine_failure(), "refused")
            raise
        except ApiError as error:
            handle.fail(error)
            raise
        except Exception as error:
            LOGGER.exception("the engine failed to accept a request")
            failure = _engine_failure()
            handle.fail(failure)
            raise failure from error
        except BaseException:
            # The task was cancelled, because the client has disconnected.
            handle.cancel()
            raise
        return handle

    def check_available(self, requests: int) -> None:
        """Raise ApiError unless requests for this many more sequences can be accepted now.

        Raises:
            JinguError: they are more than the server accepts at any time.
        """
        self._check_failure()
        if self.is_stopping:
            raise ApiError(503, "the server is shutting down", headers={"retry-after": "5"})
        if requests > self.max_requests:
            raise JinguError(
                f"the server generates at most {self.max_requests} answers at once, not {requests}.",
                fix="Send several calls with fewer prompts, or ask for fewer answers to each.",
            )
        if self.num_requests + requests > self.max_requests:
            raise ApiError(
                429,
                f"the server is busy: {self.num_requests} of at most {self.max_requests} requests are in progress",
                kind="overloaded",
                headers={"retry-after": "1"},
            )

    def max_new_tokens(self, prompt_tokens: int) -> int:
        """Return how many tokens can be generated after a prompt of this length; see `Engine.max_new_tokens`."""
        # It depends on constants only, so it needs no turn on the engine's thread.
        return self.engine.max_new_tokens(prompt_tokens)

    async def call(self, function: Callable[[], T]) -> T:
        """Call a function on the engine's thread between two steps, and return its value.

        During a shutdown this still works for requests in progress, until they are aborted.
        """
        self._check_failure()
        if self._abort_error is not None:
            raise self._abort_error
        # The result crosses threads through a Future, which the event loop awaits.
        result: Future[T] = Future()
        self._commands.put(partial(fulfill, result, function))
        return await asyncio.wrap_future(result)

    def release(self, handle: RequestHandle) -> None:
        """Remove a closed handle; the engine cancels its unfinished requests."""
        if self.failure is None:
            # Queue the command before the count decreases: who sees the lower count may rely on the command.
            self._commands.put(lambda: self._forget(handle))
        self._handles.remove(handle)
        self.num_requests -= handle.size
        self._on_end(handle)

    def abort_all(self, error: ApiError) -> None:
        """Fail every request in progress, and every later call, with an error."""
        self._abort_error = error
        for handle in list(self._handles):
            handle.fail(error)

    async def stop(self) -> None:
        """End the thread after its current step."""
        self.is_stopping = True
        self.abort_all(ApiError(503, "the server is shutting down"))
        self._commands.put(None)
        await asyncio.to_thread(self._thread.join)

    def _check_failure(self) -> None:
        if self.failure is not None:
            raise ApiError(503, "the engine has failed and the server is shutting down")

    # The methods below run on the engine's thread.

    def _run(self) -> None:
        while True:
            # Run all commands first, so that submissions and cancellations take effect before the next step.
            if self.failure is None and self.engine.busy and self._commands.empty():
                self._step()
                continue
            command = self._commands.get()
            if command is None:
                return
            command()

    def _step(self) -> None:
        try:
            events = self.engine.step()
        except Exception as error:
            LOGGER.exception("a step of the engine failed")
            self._recover(error)
            return
        batches: dict[RequestHandle, list[tuple[int, Event]]] = {}
        for event in events:
            if event.request_id in self._owners:
                handle, index = self._owners[event.request_id]
                batches.setdefault(handle, []).append((index, event))
        now = time.perf_counter()
        for handle, batch in batches.items():
            self._call_on_loop(partial(handle.receive, batch, now))

    def _submit(self, handle: RequestHandle) -> None:
        if handle.is_closed:
            return
        # A step between the call and this command may have failed.
        self._check_failure()
        try:
            for index, request in enumerate(handle.requests):
                self._owners[self.engine.submit(request)] = handle, index
        except Exception:
            self._forget(handle)
            raise

    def _forget(self, handle: RequestHandle) -> None:
        for request_id in [request_id for request_id, (owner, _) in self._owners.items() if owner is handle]:
            del self._owners[request_id]
            if handle.unfinished:
                self.engine.cancel(request_id)

    def _recover(self, error: Exception) -> None:
        """Fail all requests after a failed step, since any of them may have lost state. If the engine cannot remove
        them, set `failure`, which shuts down the server."""
        handles = list({handle: None for handle, _ in self._owners.values()})
        try:
            for handle in handles:
                self._forget(handle)
            # This step only yields the events of the cancellations.
            self.engine.step()
            if self.engine.busy:
                raise RuntimeError("the engine still has requests that were cancelled")
        except Exception:
            LOGGER.exception("the engine cannot continue; the server shuts down")
            self.failure = error
        for handle in handles:
            self._call_on_loop(partial(handle.fail, _engine_failure()))

    def _call_on_loop(self, function: Callable[[], object]) -> None:
        assert self._loop is not None
        # A closed loop raises RuntimeError; then no handler is left to be informed.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function)
