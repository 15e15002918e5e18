"""On a real card, what tests compare on the CPU elsewhere: `python -m bench cuda checks`, or pytest -m cuda."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from jingu.checkpoint.async_save import AsyncSaver
from jingu.checkpoint.retention import Retention
from jingu.checkpoint.store import CheckpointReader
from jingu.config.batch_plan import plan_batch
from jingu.config.schema import RunConfig
from jingu.config.sections.optimizers import AdamWSettings
from jingu.config.sections.parallel import ParallelSettings
from jingu.config.sections.train import BatchSettings
from jingu.errors import JinguError
from jingu.infer.attention_backend import BackendName
from jingu.infer.cuda_graphs import CudaGraphRunner
from jingu.infer.engine import Engine
from jingu.infer.engine_interface import EngineSettings
from jingu.infer.inference_model import InferenceModel
from jingu.infer.model_runner import compile_blocks
from jingu.infer.request import Request
from jingu.infer.sampling import SamplingParams
from jingu.model import mixer_kernels
from jingu.model.decoder import build_model
from jingu.model.gated_delta import chunked_delta_rule
from jingu.model.quantized_weight import PrepackedQuantizedWeight, pack_for_gpu, quantize
from jingu.model.scaled_matmul import Scaling, scaled_linear
from jingu.model.spec import ModelSpec, QuantizationFormat, replace_fields
from jingu.model.state_space import StateSpaceInputs, chunked_state_space
from jingu.model.weight_init import init_weights
from jingu.parallel.layout import Layout, Precision
from jingu.parallel.materialize import materialize
from jingu.parallel.mesh import build_mesh, resolve_axis_sizes
from jingu.runtime.device import check_fp8, device_module, find_device_type, has_compiler, peak_memory
from jingu.runtime.ranks import join_process_group
from jingu.text.tokenizer_training import train_tokenizer
from jingu.training.optimizer import build_optimizer
from jingu.training.pretraining import Pretraining
from jingu.training.step import train_step
from tests.dist.test_layouts import MODELS, ROWS, STEPS, TOKENS, batch_of, tiny
from tests.tune.test_method_layouts import METHODS, spec_of

pytestmark = pytest.mark.cuda


@pytest.fixture(scope="module")
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    kind = request.config.getoption("--device-type") or find_device_type("auto")
    if kind == "cpu" and request.config.getoption("--device-type") is None:
        pytest.skip("there is no card")
    with join_process_group(kind, 1) as ranks:
        yield ranks.device


def train(
    spec: ModelSpec, device: torch.device, dtype: torch.dtype, offload: str = "none", compiled: bool = False
) -> tuple[list[float], Any, Any]:
    """Return the losses of a few steps, the model and the optimizer."""
    settings = ParallelSettings.model_validate({"offload": {"type": offload}})
    mesh = build_mesh(resolve_axis_sizes(settings, 1, spec), device)
    model = materialize(spec, mesh, Layout(settings, compile=compiled), Precision.uniform(dtype), 3)
    optimizer = build_optimizer(AdamWSettings(lr=1e-2), model)
    rows = staticmethod(lambda *where: batch_of(*where, True, bool(spec.num_encoder_layers)))
    source: Any = type("Source", (), {"batch": rows})
    task = Pretraining(source, spec, mesh, RunConfig(), compile=compiled)
    plan = plan_batch(BatchSettings(sequence_length=TOKENS, global_batch_size=ROWS, micro_batch_size=4), 1)
    losses = []
    for step in range(STEPS):
        losses.append(float(train_step(model, optimizer, task, plan, step=step, max_grad_norm=1.0).loss))
    return losses, model, optimizer


@pytest.mark.parametrize("name", MODELS)
def test_training_equals_the_cpu(name: str, device: torch.device) -> None:
    expected, _, _ = train(MODELS[name], torch.device("cpu"), torch.float64)
    assert train(MODELS[name], device, torch.float64)[0] == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("scaling", ["row", "tensor"])
def test_products_in_fp8_equal_the_cpu(scaling: Scaling, device: torch.device) -> None:
    try:
        check_fp8(device)
    except JinguError as error:
        pytest.skip(str(error))
    generator = torch.Generator().manual_seed(1)
    values = [torch.randn(37, 64, generator=generator), torch.randn(48, 64, generator=generator)]
    results = []
    for place in (torch.device("cpu"), device):
        x, weight = (value.to(place, torch.bfloat16).requires_grad_() for value in values)
        y = scaled_linear(x, weight, None, scaling)
        y.square().sum().backward()
        results.append([tensor.detach().cpu().float() for tensor in (y, x.grad, weight.grad)])
    for expected, result in zip(*results, strict=True):
        torch.testing.assert_close(result, expected, rtol=2e-2, atol=2e-2 * float(expected.abs().max()))


@pytest.mark.parametrize("channels", [(), (64,)], ids=["a decay per head", "a decay per channel"])
def test_kernels_of_the_delta_rule(channels: tuple[int, ...], device: torch.device) -> None:
    _need_fla(device)
    torch.manual_seed(5)
    q, k = torch.randn(2, 2, 150, 4, 64, device=device, dtype=torch.bfloat16).unbind()
    v = torch.randn(2, 150, 4, 64, device=device, dtype=torch.bfloat16)
    parts = (q, k, v, -torch.rand(2, 150, 4, *channels, device=device), torch.rand(2, 150, 4, device=device))
    _compare_kernels(mixer_kernels.delta_rule, chunked_delta_rule, parts)


def test_kernels_of_the_state_space(device: torch.device) -> None:
    _need_fla(device)
    torch.manual_seed(6)
    x, b, c = torch.randn(3, 2, 150, 4, 64, device=device, dtype=torch.bfloat16).unbind()
    parts = (x, torch.rand(2, 150, 4, device=device), b, c, -torch.rand(4, device=device), None)
    _compare_kernels(
        lambda *inputs: mixer_kernels.state_space(StateSpaceInputs(*inputs[:6]), *inputs[6:]),
        lambda *inputs: chunked_state_space(StateSpaceInputs(*inputs[:6]), *inputs[6:]),
        parts,
    )


def _need_fla(device: torch.device) -> None:
    if device.type != "cuda" or find_spec("fla") is None:
        pytest.skip("needs CUDA and flash-linear-attention")


def _compare_kernels(kernel: Any, reference: Any, parts: tuple[Any, ...]) -> None:
    """Compare outputs, states and gradients for documents that begin anywhere, within the precision of bf16."""
    starts_BT = torch.zeros(2, 150, dtype=torch.bool, device=parts[0].device)
    starts_BT[0, [10, 64]] = True
    results = []
    for form in (kernel, reference):
        inputs = [None if part is None else part.detach().clone().requires_grad_() for part in parts]
        y, state = form(*inputs, starts_BT)
        (y.float().square().mean() + state.float().square().mean()).backward()
        results.append([y, state, *(part.grad for part in inputs if part is not None)])
    for computed, expected in zip(*results, strict=True):
        assert (computed.float() - expected.float()).norm() < 2e-2 * expected.float().norm()


@pytest.mark.parametrize("kind", ["int8", "int4", "fp8"])
def test_quantized_products_equal_the_cpu(kind: QuantizationFormat, device: torch.device) -> None:
    if kind == "fp8":
        try:
            check_fp8(device)
        except JinguError as error:
            pytest.skip(str(error))
    generator = torch.Generator().manual_seed(1)
    x_NI = torch.randn(5, 64, generator=generator).bfloat16()
    values, scales = quantize(torch.randn(48, 64, generator=generator), kind)
    expected = PrepackedQuantizedWeight.pack(kind, values, scales, torch.bfloat16).times(x_NI)
    pack = PrepackedQuantizedWeight.pack if kind == "fp8" or device.type == "cpu" else pack_for_gpu
    packed = pack(kind, values.to(device), scales.to(device), torch.bfloat16)
    torch.testing.assert_close(packed.times(x_NI.to(device)).cpu(), expected, rtol=2e-2, atol=0.1)


@pytest.mark.parametrize("method", METHODS)
def test_tuning_equals_the_cpu(method: str, device: torch.device) -> None:
    spec = spec_of("llama", method)
    expected, _, _ = train(spec, torch.device("cpu"), torch.float64)
    assert train(spec, device, torch.float64)[0] == pytest.approx(expected, rel=1e-9)


def test_training_is_deterministic(device: torch.device) -> None:
    assert train(MODELS["llama"], device, torch.bfloat16)[0] == train(MODELS["llama"], device, torch.bfloat16)[0]


def test_compiled_training(device: torch.device) -> None:
    if not has_compiler(device) or device.type == "cpu":
        pytest.skip("nothing is compiled here")
    expected, _, _ = train(MODELS["llama"], device, torch.float32)
    assert train(MODELS["llama"], device, torch.float32, compiled=True)[0] == pytest.approx(expected, rel=1e-4)


def test_offload(device: torch.device) -> None:
    expected, _, _ = train(MODELS["llama"], device, torch.float32)
    assert train(MODELS["llama"], device, torch.float32, offload="host")[0] == pytest.approx(expected, rel=1e-5)


def test_a_checkpoint_is_copied_beside_training(device: torch.device, tmp_path: Path) -> None:
    """Values that change after `wait_for_copy` are not those of the checkpoint."""
    _, model, optimizer = train(MODELS["llama"], device, torch.float32)
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    expected = {name: tensor.cpu().clone() for name, tensor in tensors.items()}
    saver = AsyncSaver(tensors, optimizer=optimizer)
    saver.save(tmp_path / "step-00000001", tensors, {}, Retention(1))
    saver.wait_for_copy()
    for tensor in tensors.values():
        tensor.add_(1.0)
    result = saver.poll(None)
    saver.close()
    assert result is not None and result.problem is None
    reader = CheckpointReader(tmp_path / "step-00000001")
    for name, tensor in expected.items():
        assert torch.equal(reader.read(name), tensor), name


def test_memory_of_weights_and_optimizer(device: torch.device) -> None:
    if device.type == "cpu":
        pytest.skip("the host's memory holds more than this")
    module = device_module(device)
    module.reset_peak_memory_stats()
    before = peak_memory(device)
    _, model, _ = train(tiny("llama", kv_heads=2), device, torch.float32)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    # Weights, gradients and two moments at least.
    assert peak_memory(device) - before >= 4 * weights


def model_on(device: torch.device) -> InferenceModel:
    changes = {"vocab_size": 270, "max_position_embeddings": 64, "initializer_range": 0.3}
    spec = replace_fields(tiny("llama", kv_heads=2), **changes)
    model = build_model(spec)
    init_weights(model, spec, 1)
    tokenizer = train_tokenizer(iter(["some text"]), 270, ["<|endoftext|>"])
    return InferenceModel(model.eval().to(device), spec, tokenizer)


def answers(engine: Engine) -> list[list[int]]:
    requests = [Request((7, 8, 9 + number), SamplingParams(), 12, ignore_eos=True) for number in range(5)]
    ids: dict[int, list[int]] = {engine.submit(request): [] for request in requests}
    while engine.busy:
        for event in engine.step():
            ids[event.request_id] += [event.token.id] if event.token else []
    return list(ids.values())


@pytest.mark.parametrize("backend", ["gather", "flex"])
@pytest.mark.parametrize("kind", ["plain", "graphs", "compiled"])
def test_generation_equals_the_cpu(kind: str, backend: BackendName, device: torch.device) -> None:
    if (kind != "plain" or backend == "flex") and device.type != "cuda":
        pytest.skip("CUDA's alone")
    expected = answers(Engine(model_on(torch.device("cpu"))))
    model = model_on(device)
    graphs = CudaGraphRunner() if kind == "graphs" else None
    model = compile_blocks(model) if kind == "compiled" else model
    assert answers(Engine(model, EngineSettings(attention_backend=backend), None, graphs)) == expected
