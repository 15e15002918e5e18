"""The OpenAPI description, fuzzed by schemathesis without server errors."""

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

from tests.limits import PATIENCE
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
    """Call every operation with valid or invalid input; return the number of operations."""
    described = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    operations = [item.ok() for item in described.get_all_operations()]
    if mode == schemathesis.GenerationMode.NEGATIVE:
        operations = [item for item in operations if item.body]
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
            answer = case.call(timeout=PATIENCE)
            case.validate_response(answer, checks=CHECKS)

        call()
    return len(operations)


def test_openapi_describes_every_path(tiny: Running) -> None:
    described = tiny.call("/openapi.json")[1]
    mask = {"/", "/generate", "/generate_stream", "/tokenize", "/info", "/health", "/metrics", "/v1/models"}
    mask |= {"/v1/responses", "/v1/messages", "/v1/messages/count_tokens", "/detokenize"}
    mask |= {"/api/chat", "/api/generate", "/api/tags", "/api/version"}
    mask |= {"/v1/models/{model}", "/v1/completions", "/v1/chat/completions", "/v1/embeddings"}
    mask |= {"/v1/score", "/v1/rerank"}
    mask |= {"/v1/load_lora_adapter", "/v1/unload_lora_adapter"}
    mask |= {"/api/show", "/api/ps", "/api/embed", "/api/embeddings", "/rerank", "/v2/rerank"}
    assert set(described["paths"]) == mask


def test_what_may_stream_is_described_as_a_stream(tiny: Running) -> None:
    described = tiny.call("/openapi.json")[1]
    streaming = set()
    # The body of `/tokenize` is that of `/generate`, whose other fields have no effect.
    for path in described["paths"].keys() - {"/tokenize"}:
        operations = described["paths"][path]
        body = operations.get("post", {}).get("requestBody", {}).get("content", {}).get("application/json", {})
        name = body.get("schema", {}).get("$ref", "").rpartition("/")[2]
        if "stream" in described["components"]["schemas"].get(name, {}).get("properties", {}):
            streaming.add(path)
            content = operations["post"]["responses"]["200"]["content"]
            assert {"text/event-stream", "application/x-ndjson"} & set(content), path
    assert {"/", "/generate", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat"} <= streaming


@pytest.mark.parametrize("mode", schemathesis.GenerationMode)
def test_fuzzing_finds_no_server_error(tiny: Running, mode: schemathesis.GenerationMode) -> None:
    assert fuzz(tiny, mode, 3) == (30 if mode == schemathesis.GenerationMode.POSITIVE else 22)


@pytest.mark.slow
@pytest.mark.parametrize("mode", schemathesis.GenerationMode)
def test_long_fuzzing_finds_no_server_error(tiny: Running, mode: schemathesis.GenerationMode) -> None:
    fuzz(tiny, mode, 100)
