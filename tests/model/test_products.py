"""Narrow products against fp32 arithmetic that is rounded once."""

from __future__ import annotations

import pytest
import torch

from jingu.model import matmul_kernels
from jingu.model.matmul_kernels import dot_product_attention, linear, matmul


@pytest.fixture(params=[torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def narrow(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.dtype:
    """A narrow dtype, as on a processor without units for it, wherever the test runs."""
    monkeypatch.setattr(matmul_kernels, "CPU_HAS_BF16_UNITS", False)
    monkeypatch.setattr(matmul_kernels, "CPU_HAS_FP16_UNITS", False)
    return request.param


def operands(dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def wide(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.detach().float().requires_grad_() for tensor in tensors]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "bias"])
def test_linear_is_rounded_once_forward_and_backward(narrow: torch.dtype, biased: bool, compiled: bool) -> None:
    tensors = operands(narrow, (2, 5, 37), (11, 37), (11,))[: 3 if biased else 2]
    function = torch.compile(linear, backend="aot_eager", fullgraph=True) if compiled else linear
    (upstream,) = operands(narrow, (2, 5, 11))
    y = function(*tensors)
    y.backward(upstream.detach())

    references = wide(tensors)
    expected = torch.nn.functional.linear(*references)
    expected.backward(upstream.detach().float())
    assert y.dtype == narrow
    assert torch.equal(y, expected.to(narrow))
    for tensor, reference in zip(tensors, references, strict=True):
        assert tensor.grad is not None and reference.grad is not None
        assert torch.equal(tensor.grad, reference.grad.to(narrow))


def test_matmul_is_rounded_once(narrow: torch.dtype) -> None:
    a, b = operands(narrow, (7, 33), (33, 5))
    assert torch.equal(matmul(a, b), (a.float() @ b.float()).to(narrow))


def test_attention_is_rounded_once_with_grouped_heads(narrow: torch.dtype) -> None:
    tensors = operands(narrow, (2, 6, 9, 8), (2, 2, 9, 8), (2, 2, 9, 8))
    y = dot_product_attention(*tensors, None, causal=True)
    q, k, v = wide(tensors)
    k, v = (x.repeat_interleave(3, dim=1) for x in (k, v))
    scores = (q @ k.transpose(2, 3)) / 8**0.5 + torch.full((9, 9), -torch.inf).triu(1)
    expected = scores.softmax(-1) @ v
    assert y.dtype == narrow
    assert torch.allclose(y.float(), expected, rtol=2**-8, atol=1e-6)


def test_units_for_bf16_are_used_where_the_processor_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(1, dtype=torch.bfloat16)
    for units in (True, False):
        monkeypatch.setattr(matmul_kernels, "CPU_HAS_BF16_UNITS", units)
        assert matmul_kernels.upcasts_matmul(x) != units
    assert not matmul_kernels.upcasts_matmul(x.float()) and not matmul_kernels.upcasts_matmul(x.double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_other_dtypes_are_left_to_torch(dtype: torch.dtype) -> None:
    x, weight = (torch.randn(3, 3, dtype=dtype) for _ in range(2))
    assert torch.equal(linear(x, weight), torch.nn.functional.linear(x, weight))
    assert torch.equal(matmul(x, weight), x @ weight)
