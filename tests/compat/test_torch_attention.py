"""Attention to parts of the keys, joined by their logsumexp, is attention to all."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from tests.compat.conftest import Compat

compat: Any = Compat("torch_attention")


def test_parts_of_the_keys_join_to_the_whole() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 4, 5, 16), (2, 2, 7, 16), (2, 2, 7, 16))
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for shape in shapes)
    expected = F.scaled_dot_product_attention(q, k, v, scale=0.3, enable_gqa=True)
    gradients = torch.autograd.grad(expected.square().sum(), (q, k, v))

    q, k, v = (x.detach() for x in (q, k, v))
    cuts = [(k[:, :, part], v[:, :, part]) for part in (slice(0, 3), slice(3, 7))]
    parts = [compat.cpu_attention(q, *keys, causal=False, scale=0.3) for keys in cuts]
    logsumexp = torch.logaddexp(parts[0][1], parts[1][1])
    y = sum(part * (own - logsumexp).exp().unsqueeze(-1) for part, own in parts)
    torch.testing.assert_close(y, expected.detach(), rtol=1e-12, atol=1e-12)
    back = [compat.cpu_attention_backward(2 * y, q, *keys, y, logsumexp, causal=False, scale=0.3) for keys in cuts]
    joined = (back[0][0] + back[1][0], *(torch.cat([back[0][n], back[1][n]], 2) for n in (1, 2)))
    for ours, theirs in zip(joined, gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
