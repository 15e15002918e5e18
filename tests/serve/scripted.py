"""A server with scripted answers in OpenAI's protocol, which also serves the page's files."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from jingu.serve.app import SECURITY_HEADERS, load_static_files
from jingu.serve.mathml import convert

Answer = Callable[[dict[str, Any]], Iterator[str | dict[str, Any]]]


class Scripted(ThreadingHTTPServer):
    """`answer` gives the pieces of each answer, or whole chunks; `asked` has the requests, `gone` how many clients
    left before their answers were whole."""

    daemon_threads = True

    def __init__(self, answer: Answer) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answer = answer
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.gone = threading.Semaphore(0)
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()


class _Handler(BaseHTTPRequestHandler):
    server: Scripted
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        result = load_static_files().get(self.path)
        if result:
            self._reply(200, bytes(result.body), str(result.media_type), SECURITY_HEADERS)
        elif self.path == "/v1/models":
            names = [{"id": name, "object": "model"} for name in ("small", "large")]
            self._reply(200, json.dumps({"object": "list", "data": names}).encode(), "application/json", {})
        else:
            self._reply(404, b"", "text/plain", {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/math":
            trees = [convert(item["latex"], item["display"]) for item in body["formulas"]]
            self._reply(200, json.dumps({"formulas": trees}).encode(), "application/json", {})
            return
        self.server.asked.append(body)
        self.server.keys.append(self.headers.get("Authorization"))
        pieces = self.server.answer(body)
        first = next(pieces)
        if isinstance(first, dict) and "status" in first:
            self._reply(first["status"], json.dumps(first["body"]).encode(), "application/json", {})
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        try:
            self._chunk(first)
            for piece in pieces:
                if piece == "[BREAK]":
                    return
                self._chunk(piece)
            self._chunk({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
            self._chunk({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 7, "total_tokens": 10}})
            self.wfile.write(b"data: [DONE]\n\n")
        except OSError:
            self.server.gone.release()

    def _chunk(self, piece: str | dict[str, Any]) -> None:
        if isinstance(piece, str):
            piece = {"choices": [{"index": 0, "delta": {"content": piece}, "finish_reason": None}]}
        self.wfile.write(f"data: {json.dumps(piece, ensure_ascii=False)}\n\n".encode())
        self.wfile.flush()

    def _reply(self, status: int, content: bytes, kind: str, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)
