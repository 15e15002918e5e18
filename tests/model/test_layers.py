"""Parts of models: what an element becomes depends on nothing beside it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import get_args

import pytest
import torch
from torch import Tensor

from jingu.model.feed_forward_specs import Activation
from jingu.model.layers import activate, apply_batch_invariant
from jingu.runtime.device import run_in_thread

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    **{name: partial(activate, activation=name) for name in get_args(Activation) if name != "xielu"},
    "sigmoid": partial(apply_batch_invariant, torch.sigmoid),
}


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_rows_alone_are_as_among_others(name: str, threads: int) -> None:
    """Of as many rows and columns as make PyTorch share the work out, in the middle of vector registers too."""

    def compare() -> None:
        torch.set_num_threads(threads)
        generator = torch.Generator().manual_seed(1)
        for rows, size in ((7, 1), (13, 37), (41, 1001), (523, 96), (3, 40_000), (70_001, 1)):
            x_ND = 3 * torch.randn(rows, size, generator=generator)
            with torch.no_grad():
                together, two = FUNCTIONS[name](x_ND), FUNCTIONS[name](x_ND.view(1, rows, size))
                alone = torch.cat([FUNCTIONS[name](x_ND[row : row + 1]) for row in range(0, rows, 1 + rows // 50)])
            assert torch.equal(together[:: 1 + rows // 50], alone), (rows, size)
            assert two.shape == (1, rows, size) and torch.equal(two[0], together)

    before = torch.get_num_threads()
    try:
        run_in_thread(compare)  # whose threads go with it
    finally:
        torch.set_num_threads(before)
