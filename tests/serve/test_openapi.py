"""The OpenAPI description, and what a fuzzer makes of it: schemathesis finds no server error."""

from __future__ import annotations

import hypothesis
import pytest
import schemathesis
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.serve.conftest import Running, Serve

CHECKS = [
    schemathesis.checks.not_a_server_error,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
]


@pytest.fixture(scope="module")
def tiny(serve: Serve) -> Running:
    return serve()


def fuzz(server: Running, mode: schemathesis.GenerationMode, examples: int) -> int:
    """Call every operation with what the description allows, and with what it does not; how many there were."""
    described = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    operations = [each.ok() for each in described.get_all_operations()]
    if mode == schemathesis.GenerationMode.NEGATIVE:
        operations = [each for each in operations if each.body]
    for operation in operations:

        @hypothesis.settings(
            max_examples=examples,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
        def call(case: schemathesis.Case) -> None:
            answer = case.call(timeout=120)
            case.validate_response(answer, checks=CHECKS)

        call()
    return len(operations)


def test_the_description_names_everything(tiny: Running) -> None:
    described = tiny.call("/openapi.json")[1]
    there = {"/", "/generate", "/generate_stream", "/tokenize", "/info", "/health", "/metrics", "/v1/models"}
    there |= {"/v1/models/{model}", "/v1/completions", "/v1/chat/completions", "/v1/embeddings"}
    assert set(described["paths"]) == there


@pytest.mark.parametrize("mode", schemathesis.GenerationMode)
def test_a_fuzzer_finds_no_server_error(tiny: Running, mode: schemathesis.GenerationMode) -> None:
    assert fuzz(tiny, mode, 8) == (12 if mode == schemathesis.GenerationMode.POSITIVE else 7)


@pytest.mark.slow
@pytest.mark.parametrize("mode", schemathesis.GenerationMode)
def test_a_fuzzer_finds_no_server_error_in_many_tries(tiny: Running, mode: schemathesis.GenerationMode) -> None:
    fuzz(tiny, mode, 100)
