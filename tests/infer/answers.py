"""Answers of an engine to several requests at once."""

from __future__ import annotations

from jingu.infer.engine import Engine
from jingu.infer.request import Request


def answer_together(engine: Engine, requests: list[Request]) -> list[tuple[list[int], list[float]]]:
    """Return ids and log-probabilities of requests that run together."""
    result: dict[int, tuple[list[int], list[float]]] = {engine.submit(request): ([], []) for request in requests}
    while engine.busy:
        for event in engine.step():
            assert event.token is not None and event.token.logprob is not None
            result[event.request_id][0].append(event.token.id)
            result[event.request_id][1].append(event.token.logprob)
    return list(result.values())
