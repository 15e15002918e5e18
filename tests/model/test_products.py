"""Narrow products against fp32 arithmetic that is rounded once."""

from __future__ import annotations

import pytest
import torch

from jingu.model import matmul_kernels
from jingu.model.grouped_matmul import QuantizedGroupedMatmul, StoredGroupedMatmul
from jingu.model.matmul_kernels import dot_product_attention, linear, matmul
from jingu.model.quantized_weight import FrozenWeight, QuantizedWeight, StoredWeight, quantize


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


def frozen_matrix(kind: str, *shape: int) -> FrozenWeight:
    """A matrix in a format of jingu, or as another tool has stored it."""
    wide_matrix = torch.randn(shape, generator=torch.Generator().manual_seed(4))
    values, scales = quantize(wide_matrix, "int8" if kind == "stored" else kind)
    if kind == "stored":
        factors = scales.view(torch.bfloat16).float()
        whole = values.float() * factors
        return StoredWeight(wide_matrix.shape, lambda n: whole + 0 if n is None else whole[n] + 0, lambda: [values])
    weight = QuantizedWeight(kind, shape)
    weight.values.data.copy_(values)
    weight.scales.data.copy_(scales)
    return weight


@pytest.mark.parametrize("kind", ["int8", "int4", "nf4", "fp8", "stored"])
@pytest.mark.parametrize("grouped", [False, True], ids=["dense", "experts"])
def test_compiled_code_does_not_keep_dequantized_matrices(kind: str, grouped: bool) -> None:
    """Between forward and backward pass, which both dequantize them: the memory that quantization saves."""
    shape = (3, 192, 128) if grouped else (192, 128)
    weight = frozen_matrix(kind, *shape)
    ends = torch.tensor([10, 20, 32], dtype=torch.int32)

    def multiply(x: torch.Tensor) -> torch.Tensor:
        if not grouped:
            return linear(x, weight)
        if isinstance(weight, QuantizedWeight):
            return QuantizedGroupedMatmul.apply(x, weight.values, weight.scales, kind, ends)
        return StoredGroupedMatmul.apply(x, weight, shape[1], ends)

    def branch(x: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(multiply(x @ a)).sum()

    saved: list[torch.Size] = []

    def record(tensor: torch.Tensor) -> torch.Tensor:
        saved.extend([tensor.shape] * tensor.is_floating_point())
        return tensor

    gradients = []
    torch.compiler.reset()
    for function in (branch, torch.compile(branch, backend="aot_eager_decomp_partition")):
        x, a = operands(torch.float32, (32, 128), (128, 128))
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
            result = function(x, a)
        result.backward()
        gradients.append(a.grad)
        assert saved and not any(size[-2:] in (shape[-2:], shape[:-3:-1]) for size in saved), saved
    torch.testing.assert_close(gradients[1], gradients[0])
