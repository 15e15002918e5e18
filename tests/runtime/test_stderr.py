"""Messages on a full disk: the exit code stays that of the command."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import jingu


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.parametrize(("words", "code"), [(["train", "no-such-file.yaml"], 2), (["--version"], 0)])
def test_a_command_whose_messages_cannot_be_written_ends_with_its_code(words, code, tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(Path(jingu.__file__).parents[1])}
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "jingu", *words]
        result = subprocess.run(
            command, cwd=tmp_path, env=environment, stderr=full, stdout=subprocess.DEVNULL, check=False
        )
    assert result.returncode == code
