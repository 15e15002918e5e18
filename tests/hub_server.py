"""A server on this machine with the part of the hub's HTTP interface that `huggingface_hub` and `datasets` use."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

Files = dict[str, bytes]


@dataclass
class Repository:
    """A repository of the server.

    Attributes:
        commits: the files of each commit, the oldest first.
        tags: commits by the name of a branch or tag; `main` is the newest.
        token: the only token that may read it; empty: everyone may.
        is_gated: whether readers must have been granted access.
        is_private: whether it was created as a private one.
    """

    commits: dict[str, Files] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    token: str = ""
    is_gated: bool = False
    is_private: bool = False

    def commit(self, files: Files) -> str:
        """Add a commit that `main` then names; return it."""
        name = hashlib.sha1(json.dumps([len(self.commits), sorted(files)]).encode()).hexdigest()
        self.commits[name] = files
        self.tags["main"] = name
        return name


@dataclass
class Hub:
    """The repositories of a server by `models/ORG/NAME` or `datasets/ORG/NAME`.

    Attributes:
        requests: method and path of every request.
        cut_after: number of bytes after which the next download of a file is cut; None: none is.
    """

    repositories: dict[str, Repository] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    cut_after: int | None = None
    url: str = ""
    uploads: dict[str, bytes] = field(default_factory=dict)

    def add(self, name: str, files: Files, kind: str = "models", **fields: Any) -> Repository:
        """Add a repository with one commit."""
        repository = self.repositories[f"{kind}/{name}"] = Repository(**fields)
        repository.commit(files)
        return repository

    def run(self, code: str, cache: Path, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run Python code in a process whose hub is this server."""
        return self.start([sys.executable, "-c", code], cache, **variables)

    def start(
        self, words: list[str], cache: Path, folder: Path | None = None, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in a process whose hub is this server, in a folder or here."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        environment |= {"HF_ENDPOINT": self.url, "HF_HOME": str(cache), "HF_HUB_DISABLE_TELEMETRY": "1"}
        environment |= {"HF_HUB_DISABLE_XET": "1", "NO_PROXY": "127.0.0.1", **variables}
        return subprocess.run(
            words, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
        )


@contextmanager
def serve_hub() -> Iterator[Hub]:
    """Serve a hub while the context is open."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""

    def do_HEAD(self) -> None:
        self._get(has_body=False)

    def do_GET(self) -> None:
        self._get(has_body=True)

    def _get(self, *, has_body: bool) -> None:
        self.hub.requests.append(f"{self.command} {self.path}")
        path = unquote(urlsplit(self.path).path)
        if match := re.fullmatch(r"/api/(models|datasets)/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?(?:/(.*))?", path):
            kind, name, what, revision, folder = match.groups()
            files = self._find(f"{kind}/{name}", revision or "main")
            if files is None:
                return
            if what == "tree":
                self._list(files, f"{folder}/" if folder else "", is_recursive="recursive=True" in self.path)
            else:
                self._describe(f"{kind}/{name}", files, revision or "main")
            return
        if match := re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            is_dataset, name, revision, file = match.groups()
            key = f"{'datasets' if is_dataset else 'models'}/{name}"
            files = self._find(key, revision)
            if files is not None:
                self._send_file(key, files, revision, file, has_body=has_body)
            return
        if path == "/api/whoami-v2":
            self._send({"name": "someone", "type": "user", "orgs": []})
            return
        self._fail(404, "EntryNotFound")

    def do_POST(self) -> None:
        self.hub.requests.append(f"{self.command} {self.path}")
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = unquote(urlsplit(self.path).path)
        if path == "/api/repos/create":
            self._create(json.loads(body))
        elif match := re.fullmatch(r"/api/(models|datasets)/([^/]+/[^/]+)/paths-info/([^/]+)", path):
            files = self._find(f"{match[1]}/{match[2]}", match[3])
            asked = re.findall(r"paths=([^&]+)", body.decode()) or json.loads(body or b"{}").get("paths", [])
            names = {unquote(name) for name in asked}
            if files is not None:
                self._send([_entry(name, content) for name, content in files.items() if name in names])
        elif match := re.fullmatch(r"/api/(models|datasets)/([^/]+/[^/]+)/preupload/.*", path):
            names = [file["path"] for file in json.loads(body)["files"]]
            modes = ["lfs" if name.endswith((".safetensors", ".gguf")) else "regular" for name in names]
            modes_by_file = zip(names, modes, strict=True)
            self._send(
                {"files": [{"path": name, "uploadMode": mode, "shouldIgnore": False} for name, mode in modes_by_file]}
            )
        elif path.endswith(".git/info/lfs/objects/batch"):
            objects = json.loads(body)["objects"]
            actions = [{"upload": {"href": f"{self.hub.url}/upload/{item['oid']}"}} for item in objects]
            pairs = zip(objects, actions, strict=True)
            self._send({"transfer": "basic", "objects": [{**item, "actions": action} for item, action in pairs]})
        elif match := re.fullmatch(r"/api/(models|datasets)/([^/]+/[^/]+)/commit/.*", path):
            self._commit(f"{match[1]}/{match[2]}", body)
        else:
            self._send({})

    def do_PUT(self) -> None:
        self.hub.requests.append(f"{self.command} {self.path}")
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.hub.uploads[self.path.rpartition("/")[2]] = body
        self._send({})

    def _create(self, body: dict[str, Any]) -> None:
        name = f"{body.get('organization') or 'someone'}/{body['name']}"
        key = f"{body.get('type') or 'model'}s/{name}"
        if key in self.hub.repositories:
            self._send({"error": "You already created this repo", "url": f"{self.hub.url}/{name}"}, 409)
            return
        self.hub.repositories[key] = Repository(is_private=body.get("visibility") == "private")
        self.hub.repositories[key].commit({".gitattributes": b""})
        self._send({"url": f"{self.hub.url}/{name}"})

    def _commit(self, key: str, body: bytes) -> None:
        repository = self.hub.repositories[key]
        files = dict(repository.commits[repository.tags["main"]])
        for line in body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                files[value["path"]] = self.hub.uploads[value["oid"]]
            elif entry["key"] == "deletedFile":
                files.pop(value["path"])
        commit = repository.commit(files)
        url = f"{self.hub.url}/{key.partition('/')[2]}/commit/{commit}"
        self._send({"success": True, "commitOid": commit, "commitUrl": url})

    def _find(self, key: str, revision: str) -> Files | None:
        """Return the files of a revision; None after sending an error."""
        repository = self.hub.repositories.get(key)
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if token == "wrong":
            self._fail(401, "", "Invalid credentials in Authorization header")
        elif repository is None:
            self._fail(404 if token else 401, "RepoNotFound", "Invalid username or password.")
        elif repository.is_gated:
            self._fail(403, "GatedRepo", "Access to this repository is restricted.")
        elif repository.token and token != repository.token:
            self._fail(404, "RepoNotFound")
        else:
            files = repository.commits.get(repository.tags.get(revision, revision))
            if files is None:
                self._fail(404, "RevisionNotFound")
            return files
        return None

    def _list(self, files: Files, folder: str, *, is_recursive: bool) -> None:
        """Send the files and folders in a folder, or below it."""
        entries = {}
        for name, content in files.items():
            if not name.startswith(folder):
                continue
            parts = name.removeprefix(folder).split("/")
            for depth in range(1, len(parts)):
                path = folder + "/".join(parts[:depth])
                if is_recursive or depth == 1:
                    entries[path] = {"type": "directory", "path": path, "oid": "0" * 40, "size": 0}
            if is_recursive or len(parts) == 1:
                entries[name] = _entry(name, content)
        if entries:
            self._send([*entries.values()])
        else:
            self._fail(404, "EntryNotFound")

    def _describe(self, key: str, files: Files, revision: str) -> None:
        repository = self.hub.repositories[key]
        name = key.partition("/")[2]
        siblings = [{"rfilename": file} for file in files]
        commit = repository.tags.get(revision, revision)
        self._send({"id": name, "modelId": name, "sha": commit, "siblings": siblings, "private": False, "tags": []})

    def _send_file(self, key: str, files: Files, revision: str, file: str, *, has_body: bool) -> None:
        if file not in files:
            self._fail(404, "EntryNotFound")
            return
        content = files[file]
        match = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        start = int(match[1]) if match else 0
        repository = self.hub.repositories[key]
        self.send_response(206 if match else 200)
        self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", repository.tags.get(revision, revision))
        self.send_header("Content-Length", str(len(content) - start))
        if match:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        if not has_body:
            return
        cut = self.hub.cut_after
        if cut is not None and len(content) - start > cut:
            self.hub.cut_after = None
            self.wfile.write(content[start : start + cut])
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
            return
        self.wfile.write(content[start:])

    def _send(self, value: Any, status: int = 200) -> None:
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _fail(self, status: int, code: str, message: str = "not found") -> None:
        content = json.dumps({"error": message}).encode()
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", message)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def _entry(name: str, content: bytes) -> dict[str, Any]:
    return {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
