"""Models and data sets by name: the real clients of the hub, against a server on this machine."""

from __future__ import annotations

import errno
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from jingu.errors import JinguError
from jingu.runtime.hub import HubName, explain_hub_errors, hub_name_of, parse_name
from tests.hub_server import Hub, serve_hub

# Prints where each name leads, or the error.
SCRIPT = """
import json, sys
from jingu.errors import JinguError
from jingu.runtime.hub import hub_name_of, local_path, local_rows
results = []
for kind, name in {names!r}:
    try:
        path = (local_rows if kind == "rows" else local_path)(name)
        content = sorted(file.name for file in path.iterdir()) if path.is_dir() else path.read_text()
        name = hub_name_of(path)
        results.append([content, name and name.revision])
    except JinguError as error:
        results.append([str(error), None])
print(json.dumps(results))
"""
MODEL = {
    "config.json": b"{}",
    "model.safetensors": bytes(5000),
    "pytorch_model.bin": b"pickle",
    "tokenizer.json": b"{}",
    "onnx/model.onnx": b"graph",
}
ROWS = {
    "data/train-00000.jsonl": '{"prompt": "a", "completion": "ä"}\n{"prompt": "b", "completion": null}\n'.encode(),
    "data/test-00000.jsonl": b'{"prompt": "c", "completion": "d"}\n',
}


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    with serve_hub() as server:
        server.add("org/tiny", MODEL)
        server.add("org/pickles", {"config.json": b"{}", "pytorch_model.bin": b"pickle"})
        server.add("org/quantized", {"a-q4.gguf": b"a", "b-q8.gguf": b"b"})
        server.add("org/empty", {"README.md": b"nothing"})
        server.add("org/gated", MODEL, is_gated=True)
        server.add("org/private", MODEL, token="secret")
        server.add("org/rows", ROWS, "datasets")
        yield server


def resolve(hub: Hub, cache: Path, *names: tuple[str, str], **variables: str) -> list[tuple[object, str | None]]:
    process = hub.run(SCRIPT.format(names=names), cache, **variables)
    assert process.returncode == 0, process.stderr
    return [tuple(result) for result in json.loads(process.stdout.splitlines()[-1])]


def test_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert parse_name("Qwen/Qwen3-0.6B") == HubName("hf", "Qwen/Qwen3-0.6B")
    assert parse_name("Qwen/Qwen3-0.6B@v1.0") == HubName("hf", "Qwen/Qwen3-0.6B", revision="v1.0")
    assert parse_name("a/b@refs/pr/3") == HubName("hf", "a/b", revision="refs/pr/3")
    assert parse_name("a/b/c/d-q4.gguf@main") == HubName("hf", "a/b", "c/d-q4.gguf", revision="main")
    assert parse_name("openai/gsm8k:main:test") == HubName("hf", "openai/gsm8k", parts=("main", "test"))
    assert parse_name("modelscope:Qwen/Qwen3") == HubName("modelscope", "Qwen/Qwen3")
    for text in ("a/b@v1", "modelscope:a/b", "a/b/c.gguf", "a/b:main:test@abc"):
        assert str(parse_name(text)) == text
    # Paths, URLs and patterns are no names.
    (tmp_path / "folder").mkdir()
    for text in ("runs/mine", "folder/model", "data/rows.jsonl", "corpus/rows.jsonl", "s3://bucket/a", "/a/b", "./a/b",
                 "a", "a/*.txt", "a/../b", "~/a", "a b/c"):  # fmt: skip
        assert parse_name(text) is None, text
    assert parse_name("hf:folder/model") == HubName("hf", "folder/model")


def test_models_and_rows_are_downloaded_once(hub: Hub, tmp_path: Path) -> None:
    commit = hub.repositories["models/org/tiny"].tags["main"]
    names = [("model", "org/tiny"), ("model", f"hf:org/tiny@{commit}"), ("model", "org/quantized/b-q8.gguf"),
             ("rows", "org/rows"), ("rows", "org/rows:test"), ("rows", "org/rows:default:train")]  # fmt: skip
    results = resolve(hub, tmp_path, *names)
    assert results[0] == (["config.json", "model.safetensors", "tokenizer.json"], commit)
    assert results[1] == results[0]
    assert results[2][0] == "b"
    train = [{"prompt": "a", "completion": "ä"}, {"prompt": "b", "completion": None}]
    assert [json.loads(line) for line in str(results[3][0]).splitlines()] == train
    assert json.loads(str(results[4][0])) == {"prompt": "c", "completion": "d"}
    assert results[5][0] == results[3][0]
    # Without the network, the cache has all of it.
    hub.requests.clear()
    assert resolve(hub, tmp_path, *names, HF_HUB_OFFLINE="1") == results
    assert hub.requests == []


def test_a_new_version_is_another_folder(hub: Hub, tmp_path: Path) -> None:
    repository = hub.add("org/moving", MODEL)
    first = repository.tags["main"]
    assert resolve(hub, tmp_path, ("model", "org/moving"))[0][1] == first
    second = repository.commit({**MODEL, "config.json": b'{"changed": true}'})
    results = resolve(hub, tmp_path, ("model", "org/moving"), ("model", f"org/moving@{first}"))
    assert [commit for _, commit in results] == [second, first]


def test_errors_say_what_to_do(hub: Hub, tmp_path: Path) -> None:
    expected = {
        "org/none": "neither such a path here nor such a repository",
        "org/tiny@v9": "the repository has no revision v9.",
        "org/gated": "access to this repository has to be granted first. Accept its terms",
        "org/private": "For a private repository, log in",
        "org/pickles": "this repository has its weights only as pickles (pytorch_model.bin)",
        "org/quantized": "one of them has to be named. Write org/quantized/a-q4.gguf",
        "org/quantized/c.gguf": "the repository has no file c.gguf. It has a-q4.gguf and b-q8.gguf.",
        "org/empty": "this repository has no model that jingu reads",
        "org/tiny:train": "a model has no split",
        "modelscope:org/tiny": "needs the package modelscope",
    }
    results = resolve(hub, tmp_path, *(("model", name) for name in expected))
    for (name, message), (result, _) in zip(expected.items(), results, strict=True):
        assert message in str(result) and str(result).startswith(name), (name, result)
    [(rows, _), (config, _)] = resolve(hub, tmp_path, ("rows", "org/rows:dev"), ("rows", "org/rows:other:train"))
    assert "one of its splits has to be named. Write org/rows:SPLIT. It has train, test." in str(rows)
    assert "one of its configurations has to be named" in str(config)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"HF_TOKEN": "wrong"}, "hf auth login"),
        ({"HF_HUB_OFFLINE": "1"}, "the repository is not in the cache"),
        ({"HF_ENDPOINT": "http://127.0.0.1:9"}, "the hub cannot be reached. Check the connection, or set HF_ENDPOINT"),
    ],
)
def test_without_access(variables: dict[str, str], message: str, hub: Hub, tmp_path: Path) -> None:
    [(result, _)] = resolve(hub, tmp_path, ("model", "org/tiny"), **variables)
    assert message in str(result)


def test_a_private_repository_opens_with_its_token(hub: Hub, tmp_path: Path) -> None:
    [(files, _)] = resolve(hub, tmp_path, ("model", "org/private"), HF_TOKEN="secret")
    assert "model.safetensors" in str(files)


def test_a_cut_download_resumes(hub: Hub, tmp_path: Path) -> None:
    weights = bytes(range(256)) * 12_000
    hub.add("org/large", {"config.json": b"{}", "model.safetensors": weights})
    hub.cut_after = 2_000_000
    hub.requests.clear()
    [(files, _)] = resolve(hub, tmp_path, ("model", "org/large"))
    assert hub.cut_after is None
    assert files == ["config.json", "model.safetensors"]
    [file] = tmp_path.rglob("model.safetensors")
    assert file.read_bytes() == weights


def test_a_plan_needs_the_config_only(hub: Hub, tmp_path: Path) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 128,
        "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    }  # fmt: skip
    hub.add("org/llama", {"config.json": json.dumps(config).encode(), "model.safetensors": bytes(100)})
    hub.requests.clear()
    process = hub.start([sys.executable, "-m", "jingu", "plan", "org/llama", "--json"], tmp_path)
    assert process.returncode == 0, process.stderr
    assert json.loads(process.stdout)
    assert not any("model.safetensors" in request and "/resolve/" in request for request in hub.requests)


def test_names_of_folders_in_the_cache(tmp_path: Path) -> None:
    assert hub_name_of(tmp_path) is None
    assert hub_name_of(tmp_path / "models--a--b" / "snapshots" / "main") is None
    folder = tmp_path / "models--a--b" / "snapshots" / ("a" * 40)
    for path in (folder, folder / "model.gguf"):
        assert hub_name_of(path) == HubName("hf", "a/b", revision="a" * 40)


class NotExistError(Exception):
    """An error of `modelscope` with the name of its own."""


class NoValidRevisionError(NotExistError):
    """Another one."""


class AuthenticationError(Exception):
    """Another one."""


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (NotExistError("x"), "no such repository"),
        (NoValidRevisionError("x"), "has no revision v9"),
        (AuthenticationError("x"), "modelscope login"),
        (OSError(errno.ENOSPC, "No space left"), "MODELSCOPE_CACHE"),
        (TimeoutError("slow"), "TimeoutError: slow"),
    ],
)
def test_errors_of_modelscope_say_what_to_do(error: Exception, words: str) -> None:
    with (
        pytest.raises(JinguError, match=words) as caught,
        explain_hub_errors(HubName("modelscope", "a/b", revision="v9")),
    ):
        raise error
    assert "HF_" not in str(caught.value)
