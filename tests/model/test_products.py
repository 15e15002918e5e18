"""bf16 products against fp32 arithmetic that is rounded once."""

from __future__ import annotations

import pytest
import torch

from jingu.model import products
from jingu.model.products import attend, linear, matmul


@pytest.fixture
def no_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a processor without bf16 units, wherever the test runs."""
    monkeypatch.setattr(products, "CPU_HAS_BF16_UNITS", False)


def operands(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator).bfloat16().requires_grad_() for shape in shapes]


def wide(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.detach().float().requires_grad_() for tensor in tensors]


@pytest.mark.usefixtures("no_units")
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "bias"])
def test_linear_is_rounded_once_forward_and_backward(biased: bool, compiled: bool) -> None:
    tensors = operands((2, 5, 37), (11, 37), (11,))[: 3 if biased else 2]
    function = torch.compile(linear, backend="aot_eager", fullgraph=True) if compiled else linear
    (upstream,) = operands((2, 5, 11))
    y = function(*tensors)
    y.backward(upstream.detach())

    references = wide(tensors)
    expected = torch.nn.functional.linear(*references)
    expected.backward(upstream.detach().float())
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, expected.bfloat16())
    for tensor, reference in zip(tensors, references, strict=True):
        assert tensor.grad is not None and reference.grad is not None
        assert torch.equal(tensor.grad, reference.grad.bfloat16())


@pytest.mark.usefixtures("no_units")
def test_matmul_is_rounded_once() -> None:
    a, b = operands((7, 33), (33, 5))
    assert torch.equal(matmul(a, b), (a.float() @ b.float()).bfloat16())


@pytest.mark.usefixtures("no_units")
def test_attention_is_rounded_once_with_grouped_heads() -> None:
    tensors = operands((2, 6, 9, 8), (2, 2, 9, 8), (2, 2, 9, 8))
    y = attend(*tensors, None, causal=True)
    q, k, v = wide(tensors)
    k, v = (x.repeat_interleave(3, dim=1) for x in (k, v))
    scores = (q @ k.transpose(2, 3)) / 8**0.5 + torch.full((9, 9), -torch.inf).triu(1)
    expected = scores.softmax(-1) @ v
    assert y.dtype == torch.bfloat16
    assert torch.allclose(y.float(), expected, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_other_dtypes_are_left_to_torch(dtype: torch.dtype) -> None:
    x, weight = (torch.randn(3, 3, dtype=dtype) for _ in range(2))
    assert torch.equal(linear(x, weight), torch.nn.functional.linear(x, weight))
    assert torch.equal(matmul(x, weight), x @ weight)
