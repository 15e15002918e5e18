"""Adapters that are loaded and unloaded while the server runs, as vLLM's clients do it."""

from __future__ import annotations

import gc
import json
import threading
from pathlib import Path
from typing import Any

import openai
import pytest

from jingu.errors import JinguError
from jingu.infer.engine import Engine
from jingu.infer.inference_model import load
from jingu.infer.multi_lora import MultiLoraLinear
from jingu.infer.request import Request
from jingu.infer.sampling import SamplingParams
from tests.infer.test_multi_lora import folder  # noqa: F401
from tests.serve.conftest import Running, Serve, send

# As long as two blocks of the KV cache, so that it is found in the prefix cache.
PROMPT = list(range(100, 120))


@pytest.fixture(scope="module")
def texts(folder: Path) -> dict[str | None, str]:  # noqa: F811
    """The answers of the base model and of adapters that are loaded with it."""
    model = load(folder / "base", "fp32", "cpu", {name: folder / name for name in ("small", "large")})
    requests = [Request(tuple(PROMPT), SamplingParams(), 20, adapter=name) for name in (None, "small", "large")]
    answers = dict(zip((None, "small", "large"), Engine(model).generate(requests), strict=True))
    assert len(set(answers.values())) == 3
    return answers


@pytest.fixture
def server(serve: Serve, folder: Path) -> Running:  # noqa: F811
    return serve(Engine(load(folder / "base", "fp32", "cpu", runtime_adapters=True)), template=None)


def load_adapter(server: Running, name: str, path: object) -> tuple[int, Any]:
    return server.call("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path)})[:2]


def complete(server: Running, name: str) -> Any:
    body = {"model": name, "prompt": PROMPT, "max_tokens": 20, "temperature": 0}
    status, answer, _ = server.call("/v1/completions", body)
    return answer["choices"][0]["text"] if status == 200 else (status, answer["error"]["code"])


def test_adapters_come_and_go(server: Running, folder: Path, texts: dict[str | None, str]) -> None:  # noqa: F811
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    assert complete(server, "tiny") == texts[None]
    added = client.post("/load_lora_adapter", cast_to=str, body={"lora_name": "a", "lora_path": str(folder / "small")})
    assert added == "Success: LoRA adapter 'a' added successfully."
    assert [model.id for model in client.models.list()] == ["tiny", "a"]
    assert [complete(server, name) for name in ("a", "tiny", "a")] == [texts["small"], texts[None], texts["small"]]
    removed = client.post("/unload_lora_adapter", cast_to=str, body={"lora_name": "a", "lora_int_id": None})
    assert removed == "Success: LoRA adapter 'a' removed successfully."
    assert complete(server, "a") == (404, "model_not_found")
    # Another adapter of this name does not see what the first has left in the prefix cache.
    assert load_adapter(server, "a", folder / "large")[0] == load_adapter(server, "b", folder / "small")[0] == 200
    assert [complete(server, name) for name in ("a", "b", "tiny")] == [texts["large"], texts["small"], texts[None]]


def test_a_request_in_progress_finishes_with_its_adapter(
    server: Running,
    folder: Path,  # noqa: F811
    texts: dict[str | None, str],
) -> None:
    assert load_adapter(server, "a", folder / "small")[0] == 200
    began, go_on, step = threading.Event(), threading.Event(), server.engine.step

    def pause() -> Any:
        events = step()
        began.set()
        assert go_on.wait(120)
        return events

    server.engine.step = pause
    body = {"model": "a", "prompt": PROMPT, "max_tokens": 20, "temperature": 0}
    connection = send(server, "/v1/completions", body)
    assert began.wait(120)
    command = threading.Thread(target=server.call, args=("/v1/unload_lora_adapter", {"lora_name": "a"}))
    command.start()
    go_on.set()
    command.join()
    answer = connection.getresponse().read()
    assert texts["small"] == json.loads(answer)["choices"][0]["text"]
    layers = [module for module in server.engine.model.module.modules() if isinstance(module, MultiLoraLinear)]
    gc.collect()
    assert layers and not any(layer.pairs for layer in layers)  # its memory is free


def test_errors_are_those_of_vllm(server: Running, folder: Path, tmp_path: Path) -> None:  # noqa: F811
    assert load_adapter(server, "a", folder / "small")[0] == 200
    for name, path, status, kind, words in (
        ("a", folder / "large", 400, "InvalidUserInput", "The lora adapter 'a' has already been loaded."),
        ("tiny", folder / "large", 400, "InvalidUserInput", "The lora adapter 'tiny' has already been loaded."),
        ("", folder / "large", 400, "InvalidUserInput", "Both 'lora_name' and 'lora_path' must be provided."),
        ("b", tmp_path / "none", 404, "NotFoundError", "No adapter found for"),
        ("b", "x" * 5000, 400, "InvalidUserInput", "cannot be read (File name too long)"),
        ("b", "\0", 404, "NotFoundError", "No adapter found for"),
        ("b", folder / "dora", 400, "InvalidUserInput", "only LoRA of plain matrices"),
        ("b", folder / "base", 400, "InvalidUserInput", "base"),
    ):
        actual, answer = load_adapter(server, name, path)
        error = answer["error"]
        assert (actual, error["type"], error["code"]) == (status, kind, status) and words in error["message"], error
    for name, status, words in (
        ("b", 404, "The lora adapter 'b' cannot be found."),
        ("tiny", 404, "cannot be found"),
        ("", 400, "'lora_name' needs to be provided to unload a LoRA adapter."),
    ):
        actual, answer, _ = server.call("/v1/unload_lora_adapter", {"lora_name": name})
        assert actual == status and words in answer["error"]["message"]
    assert server.call("/v1/load_lora_adapter", {"lora_name": "b"})[0] == 400
    assert server.engine.model.adapters.names == ("a",)


def test_adapters_are_fixed_unless_allowed(serve: Serve, folder: Path) -> None:  # noqa: F811
    server = serve()
    unloaded = server.call("/v1/unload_lora_adapter", {"lora_name": "a"})[:2]
    for status, answer in (load_adapter(server, "a", folder / "small"), unloaded):
        assert status == 403 and "start it with --runtime-adapters" in answer["error"]["message"]


def test_several_processes_cannot_load_adapters_later(folder: Path) -> None:  # noqa: F811
    ranks: Any = object()
    with pytest.raises(JinguError, match=r"--runtime-adapters: only a model of a single process"):
        load(folder / "base", "fp32", "cpu", ranks=ranks, runtime_adapters=True)
