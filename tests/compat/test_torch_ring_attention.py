"""Ring attention on real ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.compat.conftest import Compat

compat: Any = Compat("torch_ring_attention")


def ring(rank: int, world: int) -> None:
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(2, 4, 8, 16, generator=generator, requires_grad=True) for _ in range(3)]
    expected = F.scaled_dot_product_attention(*whole, is_causal=True, scale=0.3)
    expected.square().sum().backward()
    mine = [tensor.detach().chunk(world, 2)[rank].requires_grad_() for tensor in whole]
    y = compat.ring_attention(*mine, 0.3, dist.group.WORLD)
    torch.testing.assert_close(y, expected.chunk(world, 2)[rank])
    y.square().sum().backward()
    for part, tensor in zip(mine, whole, strict=True):
        torch.testing.assert_close(part.grad, tensor.grad.chunk(world, 2)[rank])


def test_ring_attention_is_attention_over_all_ranks(ranks: Any) -> None:
    ranks.run(ring, 2)
