"""Products in FP8 equal a plain emulation: rounded factors, multiplied in fp64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from jingu.model.scaled_matmul import Scaling, quantize, scaled_linear


def emulate(a_MK: Tensor, b_KL: Tensor, scaling: Scaling, left: torch.dtype = torch.float8_e4m3fn) -> Tensor:
    """Return the product of rounded factors."""

    def round_to_fp8(x: Tensor, dtype: torch.dtype, dim: int) -> Tensor:
        largest = x.abs().amax(dim, keepdim=True) if scaling == "row" else x.abs().amax()
        scale = largest.float().clamp_min(1e-12) / torch.finfo(dtype).max
        return (x / scale).to(dtype).double() * scale.double()

    return round_to_fp8(a_MK, left, 1) @ round_to_fp8(b_KL, torch.float8_e4m3fn, 0)


@pytest.mark.parametrize("scaling", ["row", "tensor"])
@pytest.mark.parametrize("rows", [1, 16, 37])
def test_forward_and_backward(rows: int, scaling: Scaling) -> None:
    generator = torch.Generator().manual_seed(rows)
    x, weight, bias, g = (
        torch.randn(*size, generator=generator) for size in ((1, rows, 48), (16, 48), (16,), (rows, 16))
    )
    # Rows and columns of very different sizes, and one of zeros.
    x[0, 0] *= 1e-3
    weight[3] *= 10
    weight[5] = 0.0
    x, weight, bias = x.requires_grad_(), weight.requires_grad_(), bias.requires_grad_()
    y = scaled_linear(x, weight, bias, scaling)
    y.backward(g[None])
    close = {"rtol": 1e-5, "atol": 1e-4, "check_dtype": False}
    torch.testing.assert_close(y[0] - bias, emulate(x[0], weight.t(), scaling), **close)
    left = torch.float8_e5m2 if scaling == "tensor" else torch.float8_e4m3fn
    torch.testing.assert_close(x.grad[0], emulate(g, weight, scaling, left), **close)
    torch.testing.assert_close(weight.grad, emulate(g.t(), x[0], scaling, left), **close)
    torch.testing.assert_close(bias.grad, g.sum(0))


def test_error_of_bf16() -> None:
    """With a scale for each row, the product has an error of 4% on average, whatever the sizes of rows."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(64, 256, generator=generator) * torch.logspace(-3, 3, 64)[:, None]
    weight = torch.randn(32, 256, generator=generator)
    expected = x.double() @ weight.double().t()
    result = scaled_linear(x.bfloat16(), weight.bfloat16(), None, "row").double()
    assert ((result - expected).norm(dim=1) / expected.norm(dim=1)).max() < 0.08


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_noticed(value: float) -> None:
    x = torch.ones(2, 16)
    x[1, 3] = value
    values, scale = quantize(x, torch.float8_e4m3fn, "row")
    assert (values.float() * scale)[1].isnan().any()
    assert torch.equal((values.float() * scale)[0], torch.ones(16))
