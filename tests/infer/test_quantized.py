"""Matrices of 8 and 4 bits compared with their dequantized matrices."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from jingu.cli import main
from jingu.compat.torch import has_byte_kernels
from jingu.config.sections.model import ModelSettings
from jingu.errors import JinguError
from jingu.formats.export import export_hf
from jingu.infer.engine import Engine
from jingu.infer.engine_interface import EngineSettings
from jingu.infer.generate import InferenceOptions
from jingu.infer.inference_model import load
from jingu.infer.kv_cache import block_bytes
from jingu.infer.request import Request
from jingu.infer.sampling import SamplingParams
from jingu.model.byte_weight import ByteWeight
from jingu.model.decoder import build_model, parameter_shapes
from jingu.model.experts import MoELayer
from jingu.model.inputs import Inputs
from jingu.model.matmul_kernels import linear
from jingu.model.quantized_weight import (
    PrepackedQuantizedWeight,
    PromptRows,
    QuantizedWeight,
    ScaledWeight,
    can_quantize,
    dequantize,
    quantize,
)
from jingu.model.resolve import spec_from_settings
from jingu.model.spec import QuantizationFormat
from jingu.model.weight_init import init_weights
from jingu.text.tokenizer import Tokenizer
from tests.infer.answers import answer_together

SPECS: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 64, "num_heads": 4, "intermediate_size": 96},
    "baichuan2": {"family": "baichuan2", "hidden_size": 64, "num_heads": 4, "intermediate_size": 96},
    "mixtral": {
        "family": "mixtral",
        "hidden_size": 64,
        "num_heads": 4,
        "intermediate_size": 96,
        "experts": {"num_experts": 3},
    },
    "partly": {
        "family": "mixtral",
        "hidden_size": 64,
        "num_heads": 4,
        "intermediate_size": 48,
        "experts": {"num_experts": 5},
    },  # of 4 bits in part
    "t5": {"family": "t5", "hidden_size": 64, "num_heads": 4, "intermediate_size": 96, "num_encoder_layers": 2},
    "odd": {"hidden_size": 36, "num_heads": 3, "intermediate_size": 50},  # no kernel takes these
}


needs_byte_kernels = pytest.mark.skipif(not has_byte_kernels(), reason="this build of PyTorch has no products of bytes")


def plain(matrix: torch.Tensor, kind: QuantizationFormat) -> torch.Tensor:
    """Return the dequantized matrix."""
    return dequantize(*quantize(matrix, kind), kind)


def with_all_kernels(test: Callable[..., None]) -> Callable[..., None]:
    """Call a test with matrices of several sizes, in both formats of the kernels and both dtypes."""
    sizes = pytest.mark.parametrize(("outputs", "inputs"), [(16, 32), (48, 96), (176, 1024)])
    kinds = pytest.mark.parametrize("kind", ["int8", "int4"])
    dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    return dtypes(kinds(sizes(test)))


@with_all_kernels
def test_kernels_multiply_by_the_dequantized_matrix(
    outputs: int, inputs: int, kind: QuantizationFormat, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(outputs)
    matrix = torch.randn(outputs, inputs, generator=generator) * 0.1 + 0.02
    matrix[3] = 0.0
    x = torch.randn(2, 7, inputs, generator=generator).to(dtype)
    mine = PrepackedQuantizedWeight.quantize(matrix, kind, dtype)
    bias = torch.randn(outputs, generator=generator)
    result = linear(x, mine, bias)
    whole = plain(matrix, kind)
    expected = x.double() @ whole.double().T + bias.double()
    assert result.dtype == dtype and result.shape == (2, 7, outputs)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    assert (result.double() - expected).norm() <= tolerance * expected.norm()
    # Rounding itself: half a step of a row's 254, and of a group's 15 (whose ends may be cut off where that helps).
    off = (whole.double() - matrix).abs()
    if kind == "int8":
        assert (off <= matrix.abs().amax(1, keepdim=True) * (0.5 / 127 + 2**-8)).all()
    else:
        groups = matrix.unflatten(1, (-1, 32))
        span = groups.amax(-1) - groups.amin(-1)
        assert (off.unflatten(1, (-1, 32)).square().mean(-1) <= (span / 15) ** 2 / 3 + 1e-9).all()
        assert off.norm() < 0.1 * matrix.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("outputs", "inputs"), [(16, 32), (176, 1024)])
def test_products_in_fp8_are_those_of_pytorch(outputs: int, inputs: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(outputs)
    matrix = torch.randn(outputs, inputs, generator=generator) * 0.1 + 0.02
    matrix[3] = 0.0
    x = torch.randn(2, 8, inputs, generator=generator).to(dtype)
    # Each row is divided by what brings its largest number to the largest one of E4M3, which is 448.
    (x8, x_scale), (matrix8, scale) = (
        (rows.div(scale).to(torch.float8_e4m3fn), scale)
        for rows in (x[:, :].flatten(0, 1), matrix)
        for scale in [(rows.float().abs().amax(1, keepdim=True) / 448).clamp_min(1e-14)]
    )
    bias = torch.randn(outputs, generator=generator)
    recipe = F.ScalingType.RowWise
    arguments = (x8, matrix8.t(), x_scale, recipe, scale.t().contiguous(), recipe)
    expected = F.scaled_mm(*arguments, output_dtype=torch.float32) + bias
    mine = PrepackedQuantizedWeight.quantize(matrix, "fp8", dtype)
    result = mine.times(x, bias).flatten(0, 1).float()
    torch.testing.assert_close(result, expected, rtol=2**-7 if dtype == torch.bfloat16 else 1e-5, atol=2**-6)
    # They are not those of the unrounded numbers.
    exact = x.flatten(0, 1).double() @ matrix.double().T + bias
    assert 0.005 < (result - exact).norm() / exact.norm() < 0.05
    assert mine.nbytes == outputs * (inputs + 4)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("kind", ["int8", "int4", "fp8"])
def test_a_row_does_not_depend_on_others(kind: QuantizationFormat, threads: int) -> None:
    """This keeps answers independent of the rest of the batch."""
    generator = torch.Generator().manual_seed(2)
    mine = PrepackedQuantizedWeight.quantize(torch.randn(1536, 576, generator=generator), kind, torch.bfloat16)
    x = torch.randn(130, 576, generator=generator).bfloat16()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        together = mine.times(x)
        for first, last in ((0, 1), (129, 130), (3, 5), (7, 23), (1, 66), (0, 129)):
            assert torch.equal(mine.times(x[first:last]), together[first:last]), (first, last)
    finally:
        torch.set_num_threads(before)


@with_all_kernels
def test_rows_of_long_prompts_are_multiplied_by_the_dequantized_matrix(
    outputs: int, inputs: int, kind: QuantizationFormat, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(outputs)
    matrix = torch.randn(outputs, inputs, generator=generator) * 0.1 + 0.02
    x = torch.randn(1, 70, inputs, generator=generator).to(dtype)
    rows = PromptRows(kind)
    mine = PrepackedQuantizedWeight.pack(kind, *quantize(matrix, kind), dtype, rows)
    torch.testing.assert_close(mine.dequantize(torch.float32), plain(matrix, kind), rtol=1e-6, atol=1e-7)
    bias = torch.randn(outputs, generator=generator)
    expected = x.double() @ plain(matrix, kind).double().T + bias.double()
    with torch.inference_mode():
        by_row = linear(x, mine, bias)
        with rows.select([range(66)], 70):
            result = linear(x, mine, bias)
        assert torch.equal(result[:, 66:], by_row[:, 66:])
        tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
        assert (result.double() - expected).norm() <= tolerance * expected.norm()
        # A row does not depend on how many others there are.
        for start, stop in ((0, 1), (65, 66), (3, 20)):
            with rows.select([range(stop - start)], stop - start):
                assert torch.equal(linear(x[:, start:stop], mine, bias), result[:, start:stop])


@pytest.mark.parametrize("has_bytes", [True, False])
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_answers_to_long_prompts_do_not_depend_on_the_batch(
    folders: dict[str, Path], kind: Any, has_bytes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither on chunks, nor on preemption, nor on what the prefix cache has from prompts or from answers."""
    if has_bytes and not has_byte_kernels():
        pytest.skip("this build of PyTorch has no products of bytes")
    monkeypatch.setattr("jingu.infer.inference_model.has_fast_bf16", lambda _: False)
    monkeypatch.setattr("jingu.infer.inference_model.has_byte_kernels", lambda: has_bytes)
    model = load(folders["llama"], kind, "cpu")
    assert (model.prompt_rows is None) == has_bytes
    long = tuple(range(5, 140))
    (answer,) = _answers(Engine(model), [long])
    # The same tokens once as an answer and once as a part of a longer prompt, and prompts that begin alike.
    prompts = [long, (*long, *answer[0]), (*long[:70], 9, *long[:70]), *(long[:n] for n in (40, 63, 64, 127, 128))]
    expected = [_answers(Engine(model), [prompt])[0] for prompt in prompts]
    small = block_bytes(model.spec, 8, model.parameter.itemsize) * 24
    for settings in (EngineSettings(), EngineSettings(3, kv_cache_bytes=small, prefill_chunk_size=7)):
        engine = Engine(model, settings)
        assert _answers(engine, prompts) == expected
        assert [_answers(engine, [prompt])[0] for prompt in prompts] == expected
    # Scores are those of generation.
    (score,) = Engine(model).score(long, [answer[0]])
    assert list(score.token_logprobs) == answer[1]


def _answers(engine: Engine, prompts: list[tuple[int, ...]]) -> list[tuple[list[int], list[float]]]:
    return answer_together(
        engine, [Request(prompt, SamplingParams(), 20, logprobs=0, ignore_eos=True) for prompt in prompts]
    )


def test_quantized_matrices_are_not_rounded_again() -> None:
    """A matrix with groups of 16 values, like Q4_1 of GGUF, is unchanged."""
    generator = torch.Generator().manual_seed(2)
    codes = torch.randint(0, 16, (32, 4, 32), generator=generator)
    codes[..., 0], codes[..., 1] = 0, 15
    scale = torch.rand(32, 4, 1, generator=generator).mul(32).round().div(1024) + 2**-8
    matrix = ((codes - 8) * scale).flatten(1)
    assert torch.allclose(plain(matrix, "int4"), matrix, rtol=1e-5, atol=1e-7)


def test_rows_of_zeros_change_no_other_row() -> None:
    """Zeros have few levels, but the matrix below them was never in a format of 4 bits."""
    matrix = torch.randn(40, 64, generator=torch.Generator().manual_seed(1))
    padded = torch.cat([torch.zeros(8, 64), matrix])
    assert torch.equal(plain(padded, "int4")[8:], plain(matrix, "int4"))


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q4_K"])
def test_blocks_of_gguf_files_keep_their_levels(kind: str) -> None:
    """A group of a Q4_0 or Q4_K block seldom has all 16 levels, so that its range alone does not give them."""
    library = pytest.importorskip("gguf")
    generator = np.random.default_rng(3)
    number = library.GGMLQuantizationType[kind]
    if kind == "Q4_K":
        # Any 4-bit values; scales and minima of 6 bits, times factors in fp16 at the beginning of each block.
        blocks = generator.integers(0, 256, (96, 2, 144), dtype=np.uint8)
        blocks[..., :4] = np.array([0.003, 0.002], np.float16).view(np.uint8)
        raw = blocks.reshape(96, 288)
    else:
        raw = library.quants.quantize(generator.standard_normal((96, 512), dtype=np.float32), number)
    matrix = torch.from_numpy(library.quants.dequantize(raw, number))
    difference = (plain(matrix, "int4") - matrix).norm() / matrix.norm()
    # Scales and midpoints are rounded to bf16; another step of rounding to 16 levels would lose 5% or more.
    assert difference < 2**-8
    noise = torch.randn(matrix.shape, generator=torch.Generator().manual_seed(1))
    assert (plain(matrix + 0.07 * noise, "int4") - matrix).norm() / matrix.norm() > 0.05


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("rounded")
    tokenizer.save(place / "tokenizer")
    for name, changes in SPECS.items():
        settings = ModelSettings(num_layers=2, initializer_range=0.15, vocab_size=288, **changes)
        spec = spec_from_settings(settings, tokenizer.vocab_size, 192)
        model = build_model(spec)
        init_weights(model, spec, 1)
        export_hf(spec, model.state_dict().__getitem__, place / "tokenizer", place / name)
    return {name: place / name for name in SPECS}


@pytest.mark.parametrize("precision", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("name", [name for name in SPECS if name != "partly"])
def test_quantized_models_give_nearly_the_same_logits(folders: dict[str, Path], name: str, precision: Any) -> None:
    whole, rounded = load(folders[name], "fp32"), load(folders[name], precision)
    source = Inputs(torch.arange(3, 20)[None]) if whole.spec.num_encoder_layers else None
    tokens_BT = torch.randint(0, 280, (1, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected, result = (
            each.module.logits(each.module(Inputs(tokens_BT, source=source))).double().log_softmax(-1)
            for each in (whole, rounded)
        )
    off = ((result - expected).square().mean() / expected.var()).sqrt()
    assert off < {"int8": 0.06, "int4": 0.5, "fp8": 0.2}[precision]
    few_bits = [
        each
        for each in weights(rounded.module)
        if isinstance(each, QuantizedWeight | PrepackedQuantizedWeight | ByteWeight)
    ]
    assert bool(few_bits) == (name != "odd")
    assert name == "odd" or off > 1e-4
    # FP8 leaves embedding and head as they are.
    if name != "odd" and precision != "fp8":
        remaining = sum(parameter.numel() for parameter in rounded.module.parameters() if parameter.is_floating_point())
        assert remaining < 0.05 * sum(shape.numel() for shape in parameter_shapes(whole.spec).values())
    requests = [Request(tuple(range(5, 5 + length)), SamplingParams(), 6, ignore_eos=True) for length in (2, 9)]
    alone = [Engine(rounded).generate([request])[0] for request in requests]
    assert Engine(rounded).generate(requests) == alone


def weights(model: torch.nn.Module) -> list[Any]:
    result = [getattr(module, "weight", None) for module in model.modules()]
    return [each for weight in result for each in (weight if isinstance(weight, tuple) else (weight,))]


@pytest.mark.parametrize("precision", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("name", ["mixtral", "partly"])
def test_offloaded_experts_are_quantized_alike(folders: dict[str, Path], name: str, precision: Any) -> None:
    whole, some = load(folders[name], precision), load(folders[name], precision, resident_experts="40%")
    requests = [Request(tuple(range(5, 5 + length)), SamplingParams(), 6, ignore_eos=True) for length in (2, 9, 30)]
    assert Engine(some).generate(requests) == Engine(whole).generate(requests)
    tokens_BT = torch.randint(0, 280, (1, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.equal(some.module(tokens_BT), whole.module(tokens_BT))
    assert some.expert_offloader is not None
    result = some.expert_offloader.stats()
    experts = [weight for layer in whole.module.modules() for weight in expert_weights(layer)]
    assert result.total_bytes == sum(weight.nbytes for weight in experts)
    in_part = name == "partly" and precision == "int4"
    rounded = ScaledWeight if precision == "fp8" else PrepackedQuantizedWeight
    assert {type(weight) for weight in experts} == ({rounded, torch.Tensor} if in_part else {rounded})
    assert 0 < result.resident_bytes <= 0.4 * result.total_bytes and result.bytes_read > 0


def expert_weights(layer: torch.nn.Module) -> list[Any]:
    parts = (layer.gate, layer.up, layer.down) if isinstance(layer, MoELayer) else ()
    return [weight for part in parts for weight in part.weight]


def test_too_little_memory_for_quantized_experts_is_reported(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(JinguError, match=r"the disk is full[\s\S]*TMPDIR"):
        load(folders["mixtral"], "int4", resident_experts="40%")


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_cpus_without_bf16_units_use_the_fast_kernels(
    folders: dict[str, Path], precision: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With fp32 activations PyTorch's kernels for quantized matrices are an order of magnitude slower."""
    monkeypatch.setattr("jingu.infer.inference_model.has_fast_bf16", lambda _: False)
    for has_bytes in {has_byte_kernels(), False}:
        monkeypatch.setattr("jingu.infer.inference_model.has_byte_kernels", lambda has_bytes=has_bytes: has_bytes)
        model = load(folders["llama"], precision=precision)
        assert any(isinstance(weight, ByteWeight) for weight in weights(model.module)) == has_bytes
        assert model.parameter.dtype == (torch.float32 if has_bytes else torch.bfloat16)
        assert load(folders["mixtral"], precision=precision).parameter.dtype == torch.bfloat16
    assert load(folders["llama"]).parameter.dtype == torch.float32


@pytest.mark.parametrize(
    ("model", "has_units", "has_bytes", "precision", "warning"),
    [
        (
            "llama",
            False,
            True,
            "int8",
            "is faster than the default (fp32) for a single request, and slower for prompts",
        ),
        ("llama", False, False, "int4", "is slower than the default (fp32) for prompts and for several requests at"),
        ("mixtral", False, True, "int8", "is slower than the default (fp32) for prompts and for several requests at"),
        ("llama", False, True, "bf16", "is several times slower than fp32."),
        ("llama", False, True, "fp32", None),
        ("llama", True, True, "int4", None),
        ("llama", True, True, "bf16", None),
    ],
)
def test_a_format_that_is_slower_on_this_cpu_is_named(
    folders: dict[str, Path],
    model: str,
    has_units: bool,
    has_bytes: bool,
    precision: Any,
    warning: str | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if has_bytes and not has_byte_kernels():
        pytest.skip("this build of PyTorch has no products of bytes")
    for module in ("generate", "inference_model"):
        monkeypatch.setattr(f"jingu.infer.{module}.has_fast_bf16", lambda _: has_units)
    monkeypatch.setattr("jingu.infer.inference_model.has_byte_kernels", lambda: has_bytes)
    InferenceOptions(precision, "cpu").load(folders[model])
    error = capsys.readouterr().err
    assert error.startswith(f"--precision {precision} saves memory. On this CPU it {warning}") if warning else not error


@needs_byte_kernels
@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_of_bytes_does_not_depend_on_others(threads: int) -> None:
    generator = torch.Generator().manual_seed(2)
    mine = ByteWeight.pack(torch.randn(1520, 570, generator=generator))
    x = torch.randn(130, 570, generator=generator) * torch.rand(130, 1, generator=generator)
    x[7] = 0.0
    # Where a magnitude is rounded up to the next power of two, and values that a row by itself cannot scale.
    x[3], x[8], x[9] = 0.0, 1e-35 * x[8], 1e35 * x[9]
    x[3, 5], x[4, 5], x[5, 5] = 255 / 256, 1.0, 255 / 256 - 2**-24
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        together = mine.times(x)
        for first, last in (*((row, row + 1) for row in range(130)), (3, 5), (7, 23), (1, 66), (0, 129)):
            assert torch.equal(mine.times(x[first:last]), together[first:last]), (first, last)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(together[7], torch.zeros(1520))


@needs_byte_kernels
def test_bytes_lose_little_and_never_overflow() -> None:
    """The products of two neighbors are added in 16 bits, by AVX2 at least: large ones of equal sign would saturate."""
    generator = torch.Generator().manual_seed(3)
    matrix = torch.randn(96, 512, generator=generator)
    matrix[0], matrix[1], matrix[2, ::2], matrix[3] = 1.0, -1.0, 1.0, 0.0
    x = torch.randn(5, 512, generator=generator)
    x[0], x[1], x[2, 5], x[3] = 1.0, -1.0, 300.0, 0.0
    mine = ByteWeight.pack(matrix)
    values, scales = bytes_of(matrix)
    whole = values * scales
    assert (whole - matrix).abs().max() <= 0.51 * scales.max()
    bias = torch.randn(96, generator=generator)
    expected = x.double() @ whole.T + bias
    magnitude = x.abs().amax(1, keepdim=True) * whole.abs().sum(1)
    # As much as half a unit of 127 · 254 in the largest element; and the rounding of fp32.
    assert ((mine.times(x, bias) - expected).abs() <= magnitude * (0.51 / 127 / 254) + 1e-4).all()
    assert torch.equal(mine.times(x)[3], torch.zeros(96))
    assert mine.times(torch.full((1, 512), torch.nan)).isnan().all()


def bytes_of(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the values and the scales of a matrix, in fp64: no two neighbors of one sign sum beyond 127."""
    pairs = matrix.unflatten(1, (-1, 2))
    sums = torch.stack([(sign * pairs).clamp_min(0).sum(-1).amax(1) for sign in (1, -1)]).amax(0)
    scales = (sums / 127).clamp_min(1e-30)[:, None]
    return (matrix / scales).round().double(), scales.double()


def test_supported_shapes_of_kernels() -> None:
    assert can_quantize(48, 48, "int8") and not can_quantize(48, 48, "int4") and can_quantize(16, 32, "int4")
    assert not can_quantize(33, 64, "int8") and not can_quantize(32, 40, "int8")


def test_the_command(folders: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(folders["llama"]), "the ", "--max-tokens", "3", "--precision", "int4"]) == 0
    assert capsys.readouterr().out.startswith("the ")


def test_fp8_is_slow_on_cpus_and_says_so(folders: dict[str, Path], caplog: pytest.LogCaptureFixture) -> None:
    assert main(["generate", str(folders["llama"]), "the ", "--max-tokens", "3", "--precision", "fp8"]) == 0
    expected = "CPU has no units for FP8: the matmuls of --precision fp8 are computed in fp32, slowly."
    assert caplog.messages == [expected]


def test_fp8_is_refused_where_it_is_missing(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jingu.infer.inference_model.find_device_type", lambda _: "cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100-SXM4-80GB")
    with pytest.raises(JinguError, match=r"^--precision: NVIDIA A100-SXM4-80GB has no units for FP8"):
        load(folders["llama"], "fp8", "cuda")
