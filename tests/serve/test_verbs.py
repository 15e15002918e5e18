"""`jingu serve`: what is wrong with its options, and how they become settings."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jingu.cli import VERBS
from jingu.errors import JinguError
from jingu.infer.load import Loaded
from jingu.serve import server, verbs
from jingu.serve.service import ServeSettings
from jingu.verb import parse


def test_keys_come_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    with pytest.raises(JinguError, match="cannot be read"):
        verbs.serve(tmp_path, api_key_file=file)
    file.write_text("\n  \n", encoding="utf-8")
    with pytest.raises(JinguError, match=r"has none. Write a key a line"):
        verbs.serve(tmp_path, api_key_file=file)
    file.write_text("one\n\n two \n", encoding="utf-8")
    with pytest.raises(JinguError, match="an API key is empty"):
        verbs.serve(tmp_path, api_key_file=file, api_key=["one", " "])


def test_adapters_have_names_of_their_own(tmp_path: Path) -> None:
    base = tmp_path / "base"
    with pytest.raises(JinguError, match=r"poems does not say an adapter. Write NAME=PATH"):
        verbs.serve(base, adapter=["poems"])
    for given in (["base=a"], ["tgi=a"], ["one=a", "one=b"]):
        with pytest.raises(JinguError, match=r"is already what clients call another model here"):
            verbs.serve(base, adapter=given)
    with pytest.raises(JinguError, match=r"b is already"):
        verbs.serve(base, name="b", adapter=["base=a", "b=a"])


def test_a_server_that_others_can_reach_has_any_name(
    monkeypatch: pytest.MonkeyPatch, loaded: Loaded, tmp_path: Path
) -> None:
    seen: list[tuple[ServeSettings, str]] = []
    monkeypatch.setattr("jingu.infer.verbs.load", lambda *_: loaded)
    monkeypatch.setattr(server, "run", lambda _engine, *told: seen.append(told[:2]))
    for host, options in (("127.0.0.1", {}), ("::1", {"allow_host": ["gate"]}), ("0.0.0.0", {"name": "mine"})):
        asked: dict[str, Any] = options
        verbs.serve(tmp_path / "SmolLM2-1.7B", host=host, port=0, adapter=["a=b"], api_key=["k"], **asked)
    assert seen[0][0].hosts == ("localhost", "127.0.0.1", "[::1]", "127.0.0.1")
    assert seen[1][0].hosts[-1] == "gate"
    assert seen[2][0].hosts == () and seen[2][0].keys == ("k",)
    assert [name for _, name in seen] == ["SmolLM2-1.7B", "SmolLM2-1.7B", "mine"]


def test_a_port_that_is_taken_is_told_before_the_model_is_loaded(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(JinguError, match=rf"127.0.0.1:{port}: .*Address already in use.*another --port"):
            verbs.serve(tmp_path, port=port)
    for port in ("70000", "-1", "8.5"):
        with pytest.raises(JinguError, match=rf"--port takes a whole number \(0 to 65535\), not {port}"):
            parse("serve", VERBS["serve"], [str(tmp_path), "--port", port])


@pytest.mark.parametrize(
    ("option", "given", "told"),
    [
        ("host", "", "--host: an address is missing"),
        ("cors", ["https://fine.example", "example.com"], "--cors: example.com is not an origin"),
        ("cors", ["https://example.com/page"], "--cors: https://example.com/page is not an origin"),
        ("allow_host", ["gate", "[fe80::1]", "gate:8080"], "--allow-host: gate:8080 is not a name"),
    ],
)
def test_what_would_never_match_is_told(option: str, given: object, told: str, tmp_path: Path) -> None:
    asked: dict[str, Any] = {option: given}
    with pytest.raises(JinguError, match=re.escape(told)):
        verbs.serve(tmp_path, **asked)


def test_names_say_nothing_where_every_name_is_allowed(tmp_path: Path) -> None:
    with pytest.raises(JinguError, match=r"--allow-host: on 0\.0\.0\.0 the server answers to every name"):
        verbs.serve(tmp_path, host="0.0.0.0", allow_host=["example.com"])


def test_a_missing_package_is_named() -> None:
    code = (
        "import sys; sys.modules['fastapi'] = None; from jingu.cli import main; raise SystemExit(main(['serve', 'x']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    assert (
        done.stderr
        == "jingu: a package is missing that the server needs (fastapi). Install it: `pip install 'jingu[serve]'`.\n"
    )
