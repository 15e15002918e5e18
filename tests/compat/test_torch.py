"""What the private names of PyTorch do that one process needs."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from jingu.compat.torch import TorchDispatchMode, tree_leaves
from tests.limits import PATIENCE


def test_a_name_that_is_gone_is_reported(torch_compat: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch, "_foreach_sign_")
    with pytest.raises(pytest.fail.Exception, match=r"_foreach_sign_.*adapt `foreach_sign_` in jingu/compat/torch\.py"):
        torch_compat.foreach_sign_([torch.ones(2)])


def test_cpu_has_bf16_units(torch_compat: Any) -> None:
    assert torch_compat.cpu_has_bf16_units() in (True, False)


def test_units_that_onednn_may_not_use_do_not_count() -> None:
    code = "from jingu.compat.torch import cpu_has_bf16_units; print(cpu_has_bf16_units())"
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2"}
    process = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, timeout=PATIENCE)
    assert process.stdout.split() == [b"False"]


def test_cpu_has_fp16_units(torch_compat: Any) -> None:
    assert torch_compat.cpu_has_fp16_units() in (True, False)


def test_has_triton(torch_compat: Any) -> None:
    # Without a GPU Triton has nothing to generate code for, installed or not.
    assert not torch_compat.has_triton() or importlib.util.find_spec("triton") is not None


def test_compiler_is_loaded(torch_compat: Any) -> None:
    import torch._dynamo  # noqa: F401

    assert torch_compat.compiler_is_loaded() is True


def test_set_recompile_limit(torch_compat: Any) -> None:
    before = torch._dynamo.config.recompile_limit
    try:
        torch_compat.set_recompile_limit(before + 1)
        assert torch._dynamo.config.recompile_limit == before + 1
    finally:
        torch._dynamo.config.recompile_limit = before


def test_raised_by_compiler(torch_compat: Any) -> None:
    from torch._dynamo.exc import Unsupported
    from torch._inductor.exc import InductorError

    assert all(torch_compat.raised_by_compiler(kind.__new__(kind)) for kind in (Unsupported, InductorError))
    assert not torch_compat.raised_by_compiler(RuntimeError())


def test_apply_to_tensors(torch_compat: Any) -> None:
    module = nn.BatchNorm1d(3)
    torch_compat.apply_to_tensors(module, lambda tensor: torch.full_like(tensor, 7))
    assert all(bool((tensor == 7).all()) for tensor in (*module.parameters(), *module.buffers()))


def test_call_directly(torch_compat: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = nn.Linear(2, 2)
    hooked = nn.Linear(2, 2)
    calls = []
    hooked.register_forward_hook(lambda *_: calls.append(1))
    for module in (plain, hooked):
        torch_compat.call_directly(module, module.forward)
    monkeypatch.setattr(nn.Module, "_call_impl", lambda *_: pytest.fail("hooks were searched"))
    assert plain(torch.ones(2)).shape == (2,)
    monkeypatch.undo()
    hooked(torch.ones(2))
    assert calls == [1]
    torch_compat.call_directly(plain, torch.neg)
    assert torch.equal(plain(torch.ones(2)), -torch.ones(2))


def test_in_backward(torch_compat: Any) -> None:
    answers = []

    def block(x: torch.Tensor) -> torch.Tensor:
        answers.append(torch_compat.in_backward())
        return x * x

    checkpoint(block, torch.ones(2, requires_grad=True), use_reentrant=False).sum().backward()
    assert answers == [False, True]


def test_without_dispatch_modes(torch_compat: Any) -> None:
    operations = []

    class Note(TorchDispatchMode):
        def __torch_dispatch__(self, operation: Any, _types: Any, arguments: Any = (), keywords: Any = None) -> Any:
            operations.append(str(operation))
            return operation(*arguments, **(keywords or {}))

    with Note():
        with torch_compat.without_dispatch_modes():
            torch.ones(2).mul(2)
        torch.ones(2).add(1)
    assert any("add" in name for name in operations) and not any("mul" in name for name in operations)


def pairs() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    return [torch.tensor([1.0, -2.0]), torch.tensor([3.0])], [torch.tensor([5.0, 6.0]), torch.tensor([-7.0])]


def test_foreach_copy(torch_compat: Any) -> None:
    targets, values = pairs()
    torch_compat.foreach_copy_(targets, values, non_blocking=True)
    assert all(map(torch.equal, targets, values))


def test_foreach_mul(torch_compat: Any) -> None:
    for factor in (2.0, torch.tensor(2.0)):
        targets, _ = pairs()
        torch_compat.foreach_mul_(targets, factor)
        assert [tensor.tolist() for tensor in targets] == [[2.0, -4.0], [6.0]]


def test_foreach_add(torch_compat: Any) -> None:
    targets, values = pairs()
    torch_compat.foreach_add_(targets, values, alpha=-2.0)
    assert [tensor.tolist() for tensor in targets] == [[-9.0, -14.0], [17.0]]


def test_foreach_lerp(torch_compat: Any) -> None:
    starts, ends = pairs()
    expected = [start.lerp(end, 0.25) for start, end in zip(starts, ends, strict=True)]
    assert all(map(torch.equal, torch_compat.foreach_lerp(starts, ends, 0.25), expected))
    torch_compat.foreach_lerp_(starts, ends, 0.25)
    assert all(map(torch.equal, starts, expected))


def test_foreach_sign(torch_compat: Any) -> None:
    targets, _ = pairs()
    torch_compat.foreach_sign_(targets)
    assert [tensor.tolist() for tensor in targets] == [[1.0, -1.0], [1.0]]


def test_byte_matmul(torch_compat: Any) -> None:
    if not torch_compat.has_byte_kernels():
        pytest.skip("this build of PyTorch has no products of bytes")
    generator = torch.Generator().manual_seed(1)
    # Two neighbors sum to at most 127, so that AVX2 does not saturate.
    values_OI = torch.randint(-63, 64, (48, 96), generator=generator, dtype=torch.int8)
    scales_O = torch.rand(48, generator=generator)
    x_NI = torch.randint(-127, 128, (5, 96), generator=generator).float()
    expected = ((x_NI.double() @ values_OI.double().T) * scales_O).float()
    engine = torch.backends.quantized.engine
    packed = torch_compat.pack_bytes(values_OI, scales_O)
    torch.testing.assert_close(torch_compat.byte_matmul(x_NI, packed), expected)
    torch.testing.assert_close(torch_compat.byte_matmul(x_NI + 0.3, packed), expected)
    assert torch.backends.quantized.engine == engine


def test_int8_matmul(torch_compat: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    x_NI = torch.randn(3, 32, generator=generator)
    values_OI = torch.randint(-128, 128, (16, 32), dtype=torch.int8, generator=generator)
    scales_O = torch.rand(16, generator=generator)
    expected = x_NI @ (values_OI.float() * scales_O[:, None]).T
    actual = torch_compat.int8_matmul(x_NI, values_OI, scales_O)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-4)


def test_int4_matmul(torch_compat: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    x_NI = torch.randn(3, 64, generator=generator)
    values_OI = torch.randint(0, 16, (16, 64), dtype=torch.int32, generator=generator)
    scales_and_zeros = torch.rand(2, 16, 2, generator=generator)
    scales_OI, zeros_OI = (part.T.repeat_interleave(32, 1) for part in scales_and_zeros.unbind(-1))
    expected = x_NI @ ((values_OI - 8) * scales_OI + zeros_OI).T
    packed = torch_compat.pack_int4(values_OI)
    torch.testing.assert_close(torch_compat.int4_matmul(x_NI, packed, 32, scales_and_zeros), expected)


UNPACK = """
import torch
from jingu.compat import torch as torch_compat
for shape in ((16, 32), (48, 96), (64, 32), (176, 64)):
    values_OI = torch.randint(0, 16, shape, dtype=torch.int32)
    assert torch.equal(torch_compat.unpack_int4(torch_compat.pack_int4(values_OI)).int(), values_OI), shape
"""


def test_int4_matmul_on_card(torch_compat: Any) -> None:
    """Only a card has the kernels; their shapes are known without one."""
    with FakeTensorMode():
        for inputs, tiles in ((32, 2), (64, 4), (384, 8)):
            packed = torch_compat.pack_int4_on_gpu(torch.empty(16, inputs // 2, dtype=torch.uint8, device="cuda"))
            assert packed.dtype == torch.int32 and packed.shape == (2, inputs // (16 * tiles), 32, tiles // 2)
            x = torch.empty(3, inputs, dtype=torch.bfloat16, device="cuda")
            scales = torch.empty(inputs // 32, 16, 2, dtype=torch.bfloat16, device="cuda")
            assert torch_compat.int4_matmul_on_gpu(x, packed, 32, scales).shape == (3, 16)


def test_unpack_halves(torch_compat: Any) -> None:
    bytes_NB = torch.arange(256, dtype=torch.uint8).view(2, 128)
    expected = torch.stack([bytes_NB & 15, bytes_NB >> 4], -1).flatten(1).float()
    scale, offset = torch.tensor([0.25, 1.5], dtype=torch.float16), torch.tensor([-8.0], dtype=torch.float16)
    numbers = torch_compat.unpack_halves(bytes_NB[:, 3:], scale, offset)
    assert torch.equal(numbers, expected[:, 6:] * scale.float()[:, None] - 8)


@pytest.mark.parametrize("capability", ["", "avx2", "default"])
def test_unpack_int4(capability: str) -> None:
    """In the order of each kind of CPU."""
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": capability}
    subprocess.run([sys.executable, "-c", UNPACK], env=environment, check=True, timeout=PATIENCE)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="PyTorch was built without oneDNN")
def test_prepacked_linear(torch_compat: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight_OI, bias = (torch.randn(*shape, generator=generator) for shape in ((8, 32), (16, 32), (16,)))
    prepacked = torch_compat.prepack_weight(weight_OI, 8)
    torch.testing.assert_close(torch_compat.prepacked_linear(x, prepacked, bias), F.linear(x, weight_OI, bias))
    address, size = torch_compat.prepacked_memory(prepacked)
    assert address > 0 and size >= weight_OI.nbytes


def test_storages_have_different_keys(torch_compat: Any) -> None:
    empty = torch.empty(0)
    tensor = torch.empty(3)
    keys = {torch_compat.storage_key(x.untyped_storage()) for x in (empty, torch.empty(0), tensor, tensor[1:])}
    assert len(keys) == 3


def test_dispatch_mode_sees_operations_and_their_tensors() -> None:
    sizes: list[int] = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            sizes.extend(leaf.numel() for leaf in tree_leaves(args))
            return func(*args, **(kwargs or {}))

    x = torch.ones(2)
    with Recorder():
        torch.cat([x, x])
    assert sizes[:2] == [2, 2]


def test_compiled_code_ends_before_a_function_and_starts_anew_behind_it(torch_compat: Any) -> None:
    graphs: list[torch.fx.GraphModule] = []

    def count(module: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        graphs.append(module)
        return module.forward

    def double(x: Tensor) -> Tensor:
        return 2 * x

    double = torch_compat.interrupt_compiled_code(double)
    compiled = torch.compile(lambda x: double(x + 1) + 3, backend=count)
    assert compiled(torch.ones(2)).tolist() == [7, 7]
    assert len(graphs) > 1
