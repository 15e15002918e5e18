"""What is asked of the system about memory."""

from __future__ import annotations

import torch

from jingu.runtime.device import gather_in_large_pages


def test_what_lies_in_large_pages_is_what_lay_there() -> None:
    block = torch.arange(1 << 20)
    gather_in_large_pages([(block.data_ptr(), block.nbytes), (1 << 12, 10)])  # nothing lies at the second
    assert torch.equal(block, torch.arange(1 << 20))
