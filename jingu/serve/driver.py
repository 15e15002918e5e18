"""One thread drives the engine; the handlers of HTTP requests, on the event loop, talk to it through queues.

The engine is not told of threads, nor the handlers of the engine. All words between them are orders (taken between two
steps of the engine) and events (handed over once a step).
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
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from jingu.errors import JinguError
from jingu.infer.lockstep import Driven
from jingu.infer.request import Event, Request
from jingu.serve.errors import ServeError

LOGGER = logging.getLogger("jingu.serve")
FAILED = "the engine failed on this; the server's log tells more"
_BROKEN = ("error", "cancelled", "refused")
T = TypeVar("T")


@dataclass
class Account:
    """What a ticket has cost so far. Times are of `time.perf_counter`: `begun` is when the engine began with it."""

    arrived: float
    accepted: float = field(default_factory=time.perf_counter)
    begun: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    ended: float | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    finish: str = "unfinished"

    def shown(self) -> dict[str, object]:
        """For a line of the log."""
        waited = None if self.first_token is None else round(self.first_token - self.arrived, 4)
        return {
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "generated_tokens": self.generated_tokens,
            "first_token_seconds": waited,
            "finish": self.finish,
        }


class Ticket:
    """Requests of one client that were accepted together, and their events as they come.

    Attributes:
        awaited: choices that have not ended, each with the place of its request.
    """

    def __init__(self, driver: Driver, requests: Sequence[Request], arrived: float) -> None:
        self.requests = tuple(requests)
        self.account = Account(arrived)
        self._driver = driver
        self._lots: asyncio.Queue[list[tuple[int, Event]] | None] = asyncio.Queue()
        self.awaited = {(number, choice) for number, each in enumerate(requests) for choice in range(each.n)}
        self._met: set[int] = set()
        self._failure: ServeError | None = None
        self.closed = False
        self._timer = asyncio.get_running_loop().call_later(driver.seconds, self.fail, driver.late(), "timeout")

    async def batches(self) -> AsyncIterator[list[tuple[int, Event]]]:
        """Events, each with the place of its request in `requests`, in the lots in which they came.

        Raises:
            ServeError: the request was broken off.
        """
        while (lot := await self._lots.get()) is not None:
            yield lot
        if self._failure is not None:
            raise self._failure

    def cancel(self) -> None:
        """Give up what is not finished. Nothing happens where all is."""
        self.fail(ServeError(499, "the client has left"), "cancelled")

    def fail(self, error: ServeError, finish: str = "error") -> None:
        """End the request with an error, unless it has ended. On the event loop's thread."""
        if not self.closed:
            self._failure = error
            self._close(finish)

    def receive(self, events: list[tuple[int, Event]], now: float) -> None:
        """Take what a step has brought. On the event loop's thread."""
        if self.closed:
            return
        account = self.account
        for number, event in events:
            if number not in self._met:
                self._met.add(number)
                account.prompt_tokens += event.prompt_tokens
                account.cached_tokens += event.cached_tokens
                account.begun = account.begun or event.begun or None
            if event.token is not None:
                account.generated_tokens += 1
                account.first_token = account.first_token or now
                account.last_token = now
            if event.finish is not None:
                self.awaited.discard((number, event.choice))
                account.finish = event.finish
        broken = next((event for _, event in events if event.finish in _BROKEN), None)
        self._lots.put_nowait([each for each in events if each[1].finish not in _BROKEN])
        if broken is not None:
            words, refused = broken.error or "the engine gave the request up", broken.finish == "refused"
            self.fail(ServeError(400, words) if refused else ServeError(500, words, kind="generation"))
        elif not self.awaited:
            self._close(account.finish)

    def _close(self, finish: str) -> None:
        self.closed = True
        self.account.finish = finish
        self.account.ended = time.perf_counter()
        self._timer.cancel()
        self._lots.put_nowait(None)
        self._driver.closed(self)


class Driver:
    """Owns the engine's thread.

    Args:
        engine: what is driven.
        capacity: requests accepted and not finished, at most; the next is refused with 429.
        seconds: that one may take; then it ends with an error.
        on_end: told of each ticket that ends.
    """

    def __init__(
        self, engine: Driven, capacity: int, seconds: float, on_end: Callable[[Ticket], None] = lambda _: None
    ) -> None:
        self.engine = engine
        self.capacity, self.seconds = capacity, seconds
        self.open = 0
        self.broken: Exception | None = None
        """Why the engine cannot go on."""
        self.stopping = False
        self._over: ServeError | None = None
        """What everyone is told from when on nothing more is waited for."""
        self._on_end = on_end
        self._orders: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._tickets: set[Ticket] = set()
        self._known: dict[int, tuple[Ticket, int]] = {}
        """Of the engine's thread: by the engine's number, whose request it has, and its place among that one's."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Begin, on the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def submit(self, requests: Sequence[Request], arrived: float) -> Ticket:
        """Hand requests that came at a time to the engine; returns when it has taken them.

        Raises:
            ServeError: there is no room now, or the server is stopping or broken.
            JinguError: one of them can never be served.
        """
        self.check_open(len(requests))
        ticket = Ticket(self, requests, arrived)
        self._tickets.add(ticket)
        self.open += len(requests)
        failure = ServeError(500, FAILED, kind="generation")
        try:
            await self.call(lambda: self._submit(ticket))
        except JinguError:
            ticket.fail(failure, "refused")
            raise
        except ServeError as error:
            ticket.fail(error)
            raise
        except Exception as error:
            LOGGER.exception("the engine failed in taking a request")
            ticket.fail(failure)
            raise failure from error
        except BaseException:  # the client has left
            ticket.cancel()
            raise
        return ticket

    def check_open(self, requests: int) -> None:
        """Raise ServeError unless so many more requests can be taken now."""
        self._check_whole()
        if self.stopping:
            raise ServeError(503, "the server is stopping", headers={"retry-after": "5"})
        if requests > self.capacity:
            raise JinguError(
                f"{requests} requests at once are more than the {self.capacity} that the server takes.",
                fix="Send them in several calls.",
            )
        if self.open + requests > self.capacity:
            raise ServeError(
                429,
                f"the server is busy: {self.open} of at most {self.capacity} requests are under way",
                kind="overloaded",
                headers={"retry-after": "1"},
            )

    async def call(self, function: Callable[[], T]) -> T:
        """The value of a function that is called on the engine's thread, between two steps. What is under way may go on
        so while the server stops, until nothing more is waited for."""
        self._check_whole()
        if self._over is not None:
            raise self._over
        answer: Future[T] = Future()

        def order() -> None:
            if answer.set_running_or_notify_cancel():
                try:
                    answer.set_result(function())
                except Exception as error:
                    answer.set_exception(error)

        self._orders.put(order)
        return await asyncio.wrap_future(answer)

    @asynccontextmanager
    async def counted(self) -> AsyncIterator[None]:
        """Count what is done inside as a request that is under way, although it has no ticket.

        Raises:
            ServeError: there is no room now, the server is stopping or broken, or it takes too long.
        """
        self.check_open(1)
        self.open += 1
        try:
            async with asyncio.timeout(self.seconds):
                yield
        except TimeoutError:
            raise self.late() from None
        finally:
            self.open -= 1

    def late(self) -> ServeError:
        """What a request that takes too long ends with."""
        return ServeError(504, f"the request took more than {self.seconds:g} seconds", kind="incomplete_generation")

    def closed(self, ticket: Ticket) -> None:
        """Told by a ticket that has ended; the engine, unless it is beyond that, forgets what it has of it."""
        self._tickets.remove(ticket)
        self.open -= len(ticket.requests)
        self._on_end(ticket)
        if self.broken is None:
            self._orders.put(lambda: self._forget(ticket))

    def abandon(self, error: ServeError) -> None:
        """End every ticket with an error, and what has none when it next asks for something."""
        self._over = error
        for ticket in list(self._tickets):
            ticket.fail(error)

    async def stop(self) -> None:
        """End the thread, after the step that it is in."""
        self.stopping = True
        self.abandon(ServeError(503, "the server is stopping"))
        self._orders.put(None)
        await asyncio.to_thread(self._thread.join)

    def _check_whole(self) -> None:
        if self.broken is not None:
            raise ServeError(503, "the engine has failed, and the server ends")

    # On the engine's thread.

    def _run(self) -> None:
        while True:
            if self.broken is None and self.engine.busy and self._orders.empty():
                self._step()
            elif (order := self._orders.get()) is not None:
                order()
            else:
                return

    def _step(self) -> None:
        try:
            events = self.engine.step()
        except Exception as error:
            LOGGER.exception("the engine failed in a step")
            self._recover(error)
            return
        lots: dict[Ticket, list[tuple[int, Event]]] = {}
        for event in events:
            if event.request in self._known:
                ticket, place = self._known[event.request]
                lots.setdefault(ticket, []).append((place, event))
        now = time.perf_counter()
        for ticket, told in lots.items():
            self._later(partial(ticket.receive, told, now))

    def _submit(self, ticket: Ticket) -> None:
        if ticket.closed:
            return
        self._check_whole()  # the step before this order may have been the last
        try:
            for place, request in enumerate(ticket.requests):
                self._known[self.engine.submit(request)] = ticket, place
        except Exception:
            self._forget(ticket)
            raise

    def _forget(self, ticket: Ticket) -> None:
        for number in [number for number, (known, _) in self._known.items() if known is ticket]:
            del self._known[number]
            if ticket.awaited:
                self.engine.cancel(number)

    def _recover(self, error: Exception) -> None:
        """After a failed step: every request that took part may have lost something, so all end with an error. An
        engine that cannot forget them cannot go on."""
        lost = list({ticket: None for ticket, _ in self._known.values()})
        try:
            for ticket in lost:
                self._forget(ticket)
            self.engine.step()  # it only tells that they are cancelled
            if self.engine.busy:
                raise RuntimeError("it still has requests that were cancelled")
        except Exception:
            LOGGER.exception("the engine cannot go on, and the server ends")
            self.broken = error
        for ticket in lost:
            self._later(partial(ticket.fail, ServeError(500, FAILED, kind="generation")))

    def _later(self, function: Callable[[], object]) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed, and with it everyone who could be told
            self._loop.call_soon_threadsafe(function)
