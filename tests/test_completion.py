"""`jingu completion`: bash runs the script, and completes what the table of commands has."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from jingu.cli import main
from jingu.command_table import COMMANDS


def script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (["comp"], {"completion"}),
        (["generate", "--preci"], {"--precision"}),
        (["generate", "--precision", "f"], {"fp32", "fp64", "fp8"}),
        (["generate", "model", "--precision", "sto"], {"stored"}),
        (["tune", "ex"], {"export"}),
        (["tune", "export", "run", "--p"], {"--push", "--public"}),
        (["evaluate", "comp"], {"compare"}),
        (["evaluate", "--devic"], {"--device"}),
        (["completion", ""], set()),
        (["train", "--proc"], {"--processes"}),
        (["train", "run.ya"], set()),
    ],
)
def test_bash_completes(line: list[str], words: set[str], capsys: pytest.CaptureFixture[str]) -> None:
    code = script("bash", capsys)
    names = " ".join(f"'{word}'" for word in ["jingu", *line])
    code += f'\nCOMP_WORDS=({names}); COMP_CWORD={len(line)}; _jingu; printf "%s\\n" "${{COMPREPLY[@]}}"\n'
    bash = shutil.which("bash")
    assert bash is not None
    answer = subprocess.run([bash, "--norc", "-c", code], capture_output=True, text=True, check=True)
    assert set(answer.stdout.split()) == words and answer.stderr == ""


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_command_and_option_is_in_the_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = script(shell, capsys)
    for name, command in COMMANDS.items():
        assert all(word in code for word in name.split())
        for argument, _ in command.arguments:
            assert not argument.startswith("-") or argument.lstrip("-") in code
