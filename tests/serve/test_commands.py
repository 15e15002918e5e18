"""`jingu serve`: its options, and errors in them."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jingu.command import parse
from jingu.command_table import COMMANDS
from jingu.errors import JinguError
from jingu.infer.inference_model import InferenceModel
from jingu.serve import commands, server
from jingu.serve.commands import AccessOptions
from jingu.serve.settings import ServeSettings
from tests.limits import PATIENCE


def test_api_keys_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    with pytest.raises(JinguError, match="cannot be read"):
        commands.serve(tmp_path, access=AccessOptions(api_key_file=file))
    file.write_text("\n  \n", encoding="utf-8")
    with pytest.raises(JinguError, match=r"has no API key. Write a key on each line"):
        commands.serve(tmp_path, access=AccessOptions(api_key_file=file))
    file.write_text("one\n\n two \n", encoding="utf-8")
    with pytest.raises(JinguError, match="an API key is empty"):
        commands.serve(tmp_path, access=AccessOptions(["one", " "], file))


def test_adapter_names_are_unique(tmp_path: Path) -> None:
    base = tmp_path / "base"
    with pytest.raises(JinguError, match=r"poems does not name an adapter. Write NAME=PATH"):
        commands.serve(base, adapter=["poems"])
    for value in (["base=a"], ["tgi=a"], ["one=a", "one=b"]):
        with pytest.raises(JinguError, match=r"is already the name of another model here"):
            commands.serve(base, adapter=value)
    with pytest.raises(JinguError, match=r"b is already"):
        commands.serve(base, name="b", adapter=["base=a", "b=a"])


def test_a_public_server_accepts_any_host_name(
    monkeypatch: pytest.MonkeyPatch, tiny_model: InferenceModel, tmp_path: Path
) -> None:
    observed: list[tuple[ServeSettings, str]] = []
    monkeypatch.setattr("jingu.infer.generate.load", lambda *_: tiny_model)
    monkeypatch.setattr(server, "run_server", lambda _engine, *output: observed.append(output[:2]))
    for host, options in (("127.0.0.1", []), ("::1", ["--allow-host", "gate"]), ("0.0.0.0", ["--name", "mine"])):
        words = [str(tmp_path / "SmolLM2-1.7B"), "--host", host, "--port=0", "--adapter=a=b", "--api-key=k", *options]
        parsed = parse("serve", COMMANDS["serve"], words)
        assert parsed is not None and parsed.pop("processes") is None
        assert COMMANDS["serve"].run(parsed) == 0
    assert observed[0][0].hosts == ("localhost", "127.0.0.1", "[::1]", "127.0.0.1")
    assert observed[1][0].hosts[-1] == "gate"
    assert observed[2][0].hosts == () and observed[2][0].keys == ("k",)
    assert [name for _, name in observed] == ["SmolLM2-1.7B", "SmolLM2-1.7B", "mine"]


def test_a_port_in_use_is_reported_before_the_model_loads(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(JinguError, match=rf"127.0.0.1:{port}: .*Address already in use.*another --port"):
            commands.serve(tmp_path, ServeSettings(port=port))
    for port in ("70000", "-1", "8.5"):
        with pytest.raises(JinguError, match=rf"--port takes a whole number \(0 to 65535\), not {port}"):
            parse("serve", COMMANDS["serve"], [str(tmp_path), "--port", port])


@pytest.mark.parametrize(
    ("option", "value", "output"),
    [
        ("host", "", "--host: the address is empty"),
        ("cors", ["https://fine.example", "example.com"], "--cors: example.com is not an origin"),
        ("cors", ["https://example.com/page"], "--cors: https://example.com/page is not an origin"),
        ("allow_host", ["gate", "[fe80::1]", "gate:8080"], "--allow-host: gate:8080 is not a host name"),
    ],
)
def test_values_that_never_match_are_refused(option: str, value: object, output: str, tmp_path: Path) -> None:
    fields: dict[str, Any] = {option: value}
    settings, access = (fields, {}) if option == "host" else ({}, fields)
    with pytest.raises(JinguError, match=re.escape(output)):
        commands.serve(tmp_path, ServeSettings(**settings), AccessOptions(**access))


def test_allow_host_is_refused_on_a_public_address(tmp_path: Path) -> None:
    with pytest.raises(JinguError, match=r"--allow-host: on 0\.0\.0\.0 the server answers to every host name"):
        commands.serve(tmp_path, ServeSettings(host="0.0.0.0"), AccessOptions(allow_host=["example.com"]))


def test_a_missing_package_is_reported() -> None:
    code = (
        "import sys; sys.modules['fastapi'] = None; from jingu.cli import main; raise SystemExit(main(['serve', 'x']))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE)
    assert result.returncode == 2
    assert (
        result.stderr
        == "jingu: the server needs a package that is missing (fastapi). Install it: `pip install 'jingu[serve]'`.\n"
    )
