"""A row of a matmul does not depend on the number of rows or its place, whichever kernels MKL selects."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import jingu

PROGRAM = """
import torch
import jingu.runtime
from jingu.model.matmul_kernels import linear

torch.set_num_threads(2)
generator = torch.Generator().manual_seed(0)
for width, height in [(30, 90), (50, 40), (120, 30), (1100, 48), (42, 3), (50, 1), (5, 7)]:
    x = torch.randn(100, width, generator=generator)
    weight = torch.randn(height, width, generator=generator)
    with torch.no_grad():
        expected = linear(x, weight)
        for rows in [1, 2, 3, 5, 7, 16, 33, 97]:
            # The copy also has another address.
            assert torch.equal(linear(x[:rows].clone(), weight), expected[:rows]), (width, height, rows)
            assert torch.equal(linear(x[-rows:].clone(), weight), expected[-rows:]), (width, height, rows)
"""


@pytest.mark.parametrize("instructions", ["AVX2", "AVX512"])
def test_rows_do_not_depend_on_their_number(instructions: str) -> None:
    environment = {
        **os.environ,
        "MKL_ENABLE_INSTRUCTIONS": instructions,
        "PYTHONPATH": str(Path(jingu.__file__).parents[1]),
    }
    environment.pop("MKL_CBWR", None)  # set in this process already
    subprocess.run([sys.executable, "-c", PROGRAM], env=environment, check=True)
