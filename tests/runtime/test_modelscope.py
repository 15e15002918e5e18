"""Models by name on ModelScope: its real client, against a server on this machine."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("modelscope") is None, reason="modelscope is not installed"),
]
WEIGHTS = bytes(range(256)) * 12_000
MODEL = {
    "config.json": b"{}",
    "model.safetensors": WEIGHTS,
    "pytorch_model.bin": b"pickle",
    "tokenizer.json": b"{}",
    "onnx/model.onnx": b"graph",
}
REPOSITORIES = {
    "org/tiny": {"master": MODEL, "v1": {**MODEL, "config.json": b'{"version": 1}'}},
    "org/pickles": {"master": {"config.json": b"{}", "pytorch_model.bin": b"pickle"}},
}
# Prints the files of each name, with the text of config.json, or the error.
SCRIPT = """
import json, sys
from jingu.errors import JinguError
from jingu.runtime.hub import local_path
results = []
for name in {names!r}:
    try:
        folder = local_path(name)
        names = sorted(file.name for file in folder.iterdir() if not file.name.startswith("."))
        results.append([names, (folder / "config.json").read_text(), (folder / "model.safetensors").stat().st_size])
    except JinguError as error:
        results.append(str(error))
print(json.dumps(results))
"""


class _Server(ThreadingHTTPServer):
    """ModelScope's interface for the files of a repository.

    Attributes:
        requests: paths of the requests.
        cut_after: the next file that is longer is cut after so many bytes; None: no file is.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.requests: list[str] = []
        self.cut_after: int | None = None


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""

    def do_GET(self) -> None:
        self.server.requests.append(self.path)
        parts = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(parts.query).items()}
        match = re.fullmatch(r"/api/v1/models/([^/]+/[^/]+)/(repo(?:/files)?)", parts.path)
        files = REPOSITORIES.get(match[1], {}).get(query.get("Revision", "master")) if match else None
        if files is None or match is None:
            self._send(json.dumps({"Code": 10010205001, "Message": "not found", "Success": False}).encode(), 404)
        elif match[2] == "repo":
            self._send_file(files[query["FilePath"]])
        else:
            entries = [
                {"Path": path, "Name": Path(path).name, "Type": "blob", "Size": len(content), "Revision": "1" * 40,
                 "Sha256": hashlib.sha256(content).hexdigest()}
                for path, content in files.items()
            ]  # fmt: skip
            self._send(json.dumps({"Code": 200, "Success": True, "Data": {"Files": entries}}).encode())

    def _send_file(self, content: bytes) -> None:
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        start = int(match[1]) if match else 0
        end = int(match[2]) + 1 if match and match[2] else len(content)
        self.send_response(206 if match else 200)
        self.send_header("Content-Length", str(end - start))
        if match:
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(content)}")
        self.end_headers()
        cut = self.server.cut_after
        if cut is not None and end - start > cut:
            self.server.cut_after = None
            end = start + cut
            self.close_connection = True
        self.wfile.write(content[start:end])

    def _send(self, content: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@pytest.fixture
def server() -> Iterator[_Server]:
    with _Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def resolve(server: _Server, cache: Path, *names: str, **variables: str) -> list[Any]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MODELSCOPE")}
    endpoint = f"http://127.0.0.1:{server.server_port}"
    environment |= {
        "MODELSCOPE_ENDPOINT": endpoint,
        "MODELSCOPE_CACHE": str(cache),
        "NO_PROXY": "127.0.0.1",
        **variables,
    }
    process = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(names=names)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return list(json.loads(process.stdout.splitlines()[-1]))


def test_models_and_revisions_are_downloaded(server: _Server, tmp_path: Path) -> None:
    latest, tagged = resolve(server, tmp_path, "modelscope:org/tiny", "modelscope:org/tiny@v1")
    assert latest == [["config.json", "model.safetensors", "tokenizer.json"], "{}", len(WEIGHTS)]
    assert tagged[1] == '{"version": 1}'
    assert not any("pytorch_model" in request or "onnx" in request for request in server.requests)


def test_a_cut_download_arrives_complete(server: _Server, tmp_path: Path) -> None:
    server.cut_after = 2_000_000
    [result] = resolve(server, tmp_path, "modelscope:org/tiny")
    assert server.cut_after is None and result[2] == len(WEIGHTS)
    [file] = [file for file in tmp_path.rglob("model.safetensors") if file.is_file()]
    assert file.read_bytes() == WEIGHTS


def test_errors_say_what_to_do(server: _Server, tmp_path: Path) -> None:
    expected = {
        "modelscope:org/none": "no such repository",
        "modelscope:org/tiny@v9": "no such revision of it",
        "modelscope:org/pickles": "its weights only as pickles (pytorch_model.bin)",
    }
    results = resolve(server, tmp_path, *expected)
    for (name, words), result in zip(expected.items(), results, strict=True):
        assert words in str(result) and str(result).startswith(name), (name, result)


def test_without_a_network(server: _Server, tmp_path: Path) -> None:
    [result] = resolve(server, tmp_path, "modelscope:org/tiny", MODELSCOPE_ENDPOINT="http://127.0.0.1:9")
    assert "ModelScope cannot be reached" in str(result)
