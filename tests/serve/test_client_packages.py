"""Clients with dependencies of their own, from the environment that `make .venv-clients` installs them into."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

import jingu
from jingu.infer.inference_model import InferenceModel
from tests.serve.conftest import Running, ScriptedEngine, Serve
from tests.serve.test_agents import ARGUMENTS, FUNCTION, says

CLIENTS = Path(jingu.__file__).parents[1] / ".venv-clients" / "bin"
PROGRAMS = Path(__file__).parent / "clients"
HELLO = "Hello, 世界!"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CLIENTS.exists(), reason="`make .venv-clients` installs the clients"),
]


@pytest.fixture(scope="module")
def server(serve: Serve, tiny_model: InferenceModel) -> Running:
    return serve(ScriptedEngine(tiny_model, says))


def run_client(*command: str | Path) -> str:
    """Run a program of the clients' environment, without a network; return its output."""
    # Without the first, LiteLLM looks for prices on the web.
    offline = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
    run = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **offline}, timeout=600)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]
    return run.stdout


def test_litellm(server: Running) -> None:
    output = run_client(CLIENTS / "python", PROGRAMS / "litellm_calls.py", server.url, json.dumps(FUNCTION))
    results: dict[str, Any] = json.loads(output.splitlines()[-1])
    assert len(results) == 5
    for provider, result in results.items():
        assert (result["answer"], result["stream"]) == (HELLO, HELLO), provider
        if provider == "ollama":
            assert result["embeddings"] == [[0.6, 0.8]] * 2
        else:
            assert result["arguments"] == json.loads(ARGUMENTS), provider


def test_langchain(server: Running) -> None:
    output = run_client(CLIENTS / "python", PROGRAMS / "langchain_calls.py", server.url, json.dumps(FUNCTION))
    results: dict[str, Any] = json.loads(output.splitlines()[-1])
    assert results["answer"] == HELLO and results["arguments"] == json.loads(ARGUMENTS)
    assert results["group"] == {"place": "北京", "people": 3}
    assert len(results["embeddings"]) == 1000 and results["embeddings"][-1] == pytest.approx([0.6, 0.8])


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/embeddings"])
@pytest.mark.parametrize("stream", ["true", "false"])
def test_guidellm(path: str, stream: str, server: Running, tmp_path: Path) -> None:
    rows = [{"prompt": text, "output_tokens_count": 8} for text in ("Hi", "北京 naïve", "More")]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    report = tmp_path / "report.json"
    run_client(
        *(CLIENTS / "guidellm", "run", "--disable-console"),
        *("--backend", f"kind=openai_http,target={server.url},request_format={path},stream={stream}"),
        *("--profile", "kind=synchronous", "--constraint", "kind=max_requests,count=3"),
        *("--data", f"kind=json_file,path={tmp_path / 'prompts.jsonl'}", "--output", f"kind=json,path={report}"),
    )
    requests = json.loads(report.read_text(encoding="utf-8"))["benchmarks"][0]["requests"]
    assert not requests["errored"] and len(requests["successful"]) == 3, str(requests["errored"])[:2000]
    for request in requests["successful"]:
        assert path == "/v1/embeddings" or (request["output"] and request["output_metrics"]["text_tokens"])
