"""The engine on a fake device answers as on the CPU, and the host waits for the device once a decoding step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from jingu.config.sections.model import ModelSettings
from jingu.formats.export import export_hf
from jingu.infer import attention_backend
from jingu.infer.attention_backend import BackendName, FlexBackend
from jingu.infer.cuda_graphs import CudaGraphRunner
from jingu.infer.engine import Engine
from jingu.infer.engine_interface import EngineSettings
from jingu.infer.inference_model import load
from jingu.infer.request import Constraint, Request
from jingu.infer.sampling import SamplingParams
from jingu.model import quantized_weight
from jingu.model.decoder import Decoder
from jingu.model.layers import Linear
from jingu.model.quantized_weight import PrepackedQuantizedWeight, ScaledWeight
from jingu.model.resolve import spec_from_settings
from jingu.model.spec import QuantizationFormat
from jingu.model.weight_init import init_weights
from jingu.text.tokenizer_training import train_tokenizer
from tests.fake_device import fake_device
from tests.infer.test_attention_backend import read_named_blocks
from tests.infer.test_cuda_graphs import Again
from tests.rank_pool import RankPool

GREEDY = SamplingParams()
PENALTIES = SamplingParams(repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.2, logit_bias={40: 2.0})
SCHEMA = (
    '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": false}'
)
DECODING: dict[str, Request] = {
    "greedy": Request((7, 8, 9, 10), GREEDY, 8),
    "penalties": Request((7, 8, 9, 11, 7), PENALTIES, 8),
    "stop ids": Request((7, 8), GREEDY, 8, stop_token_ids=(9, 10, 11), min_tokens=3),
    "log-probabilities": Request((40, 41), GREEDY, 8, logprobs=3),
    "grammar": Request((60, 61), GREEDY, 12, constraint=Constraint("json_schema", SCHEMA)),
}
# The host waits once for all requests of a step together.
SEARCHES: dict[str, list[Request]] = {
    "beams": [Request((7, 8, first), PENALTIES, 6, num_beams=3, n=2) for first in (9, 10)],
    "scores": [Request((7, 8, first), GREEDY, 3, continuations=((4, 5), (6, 7, 8), (9,))) for first in (9, 10)],
}
OTHERS: dict[str, Request] = {
    "prompt log-probabilities": Request((7, 8, 9, 10), GREEDY, 3, logprobs=1, prompt_logprobs=True),
    "embedding": Request((7, 8, 9), GREEDY, 1, pooling="mean"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("model")
    train_tokenizer(iter(["some text"]), 270, ["<|endoftext|>"]).save(place / "tokenizer")
    # Kernels for integers take the second one.
    for name, hidden, intermediate in (("base", 24, 42), ("wide", 64, 96)):
        sizes = {"hidden_size": hidden, "num_heads": 4, "num_kv_heads": 2, "intermediate_size": intermediate}
        spec = spec_from_settings(ModelSettings(**sizes, num_layers=2, initializer_range=0.3), 270, 64)
        model = Decoder(spec)
        init_weights(model, spec, 3)
        export_hf(spec, model.state_dict().__getitem__, place / "tokenizer", place / name)
    return place / "base"


def answer(engine: Engine, requests: list[Request]) -> tuple[list[list[Any]], int]:
    """Return what each request is answered, and how often the host waited in the step in which it waited most."""
    # A request before the others lets the engine allocate its cache.
    engine.submit(Request((3, 4, 5), GREEDY, 2))
    while engine.busy:
        engine.step()
    answers: dict[int, list[Any]] = {engine.submit(request): [] for request in requests}
    most: list[tuple[str, str]] = []
    while engine.busy:
        with fake_device.watch() as waits:
            events = engine.step()
        if len(waits) > len(most):
            most = waits
        for event in events:
            token = event.token and (event.token.id, event.token.logprob, event.token.top)
            prompt = [(token.id, token.logprob) for token in event.prompt_logprobs]
            fields = (event.choice, token, event.finish_reason, event.error, event.cumulative_logprob, prompt)
            answers[event.request_id].append((*fields, event.score and event.score.token_logprobs, event.embedding))
    assert len(most) <= 1, most
    return list(answers.values()), len(most)


def run(_rank: int, _world: int, folder: Path, requests: list[Request], drafts: int) -> Any:
    """Return the answers on the CPU and on the device, and the waits there."""
    fake_device.install()
    settings = EngineSettings(num_speculative_tokens=drafts)
    expected, _ = answer(Engine(load(folder, "fp32", "cpu"), settings), requests)
    return expected, *answer(Engine(load(folder, "fp32", "fakedevice"), settings), requests)  # type: ignore[arg-type]


def flatten(values: Any) -> list[Any]:
    if isinstance(values, (list, tuple)):
        return [leaf for value in values for leaf in flatten(value)]
    return [values]


def assert_equal(result: Any, expected: Any) -> None:
    """Compare answers: numbers nearly, and all else exactly."""
    leaves, expected_leaves = flatten(result), flatten(expected)
    for number, (leaf, expected_leaf) in enumerate(zip(leaves, expected_leaves, strict=True)):
        if isinstance(expected_leaf, float):
            assert leaf == pytest.approx(expected_leaf, rel=1e-4, abs=1e-5), number
        else:
            assert leaf == expected_leaf, number


@pytest.mark.parametrize("drafts", [0, 2])
def test_decoding(drafts: int, folder: Path, device_ranks: RankPool) -> None:
    """All kinds of requests in one batch; also with draft tokens from the text so far."""
    expected, result, waits = device_ranks.run(run, 1, folder, list(DECODING.values()), drafts)[0]
    assert_equal(result, expected)
    assert waits == 1


def run_with_graphs(_rank: int, _world: int, folder: Path, fault: str, backend: BackendName = "gather") -> Any:
    """Return the answers on the device with captured steps and without, the waits, and how many steps were captured."""
    fake_device.install()
    again = Again()

    def record(step: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
        with fake_device.capture():
            return again(step)

    requests = [Request((7, 8, 9, 10), GREEDY, 20, ignore_eos=True), DECODING["penalties"]]
    expected, _ = answer(Engine(load(folder, "fp32", "fakedevice")), requests)  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patch:
        plant(patch, fault)
        patch.setattr(attention_backend, "_flex_obstacle", lambda *_: None)
        settings = EngineSettings(attention_backend=backend)
        engine = Engine(load(folder, "fp32", "fakedevice"), settings, graphs=CudaGraphRunner(record))  # type: ignore[arg-type]
        attention = engine._runner.cache.backend
        assert isinstance(attention, FlexBackend) == (backend == "flex")
        if isinstance(attention, FlexBackend):
            attention.kernel = read_named_blocks
        result, most = answer(engine, requests)
    return expected, result, most, again.recorded


def plant(patch: pytest.MonkeyPatch, fault: str) -> None:
    """Make a mistake in the forward pass."""
    plain = Decoder.forward

    def forward(self: Decoder, inputs: Any, **options: Any) -> Any:
        if fault == "host tensor":
            inputs = replace(inputs, tokens=inputs.tokens * torch.ones(1, dtype=torch.int64))
        if fault == "item" and inputs.tokens.sum().item() < 0:
            raise ValueError
        if fault == "nonzero" and len(inputs.tokens.nonzero()) < 0:
            raise ValueError
        if fault == "copy":
            inputs = replace(inputs, tokens=inputs.tokens + torch.zeros(1, dtype=torch.int64).to(fake_device.NAME))
        return plain(self, inputs, **options)

    if fault:
        patch.setattr(Decoder, "forward", forward)


@pytest.mark.parametrize("backend", ["gather", "flex"])
def test_captured_steps_read_their_inputs_on_the_device(backend: str, folder: Path, device_ranks: RankPool) -> None:
    expected, result, waits, recorded = device_ranks.run(run_with_graphs, 1, folder, "", backend)[0]
    assert_equal(result, expected)
    assert waits == 1
    assert recorded >= 1


FAULTS = {
    "host tensor": r"mul got a tensor of the device and one of the host, at .*torch\.ones",
    "item": r"_local_scalar_dense.*tokens\.sum\(\)\.item",
    "nonzero": r"nonzero.*tokens\.nonzero",
    "copy": r"copy to the device.*torch\.zeros",
}


def find_faults(rank: int, world: int, folder: Path) -> None:
    for fault, words in FAULTS.items():
        with pytest.raises(fake_device.HostTensorError, match=words):
            run_with_graphs(rank, world, folder, fault)


def test_a_fault_in_a_captured_step_is_named(folder: Path, device_ranks: RankPool) -> None:
    device_ranks.run(find_faults, 1, folder)


@pytest.mark.parametrize("name", SEARCHES)
def test_searches(name: str, folder: Path, device_ranks: RankPool) -> None:
    expected, result, waits = device_ranks.run(run, 1, folder, SEARCHES[name], 0)[0]
    assert_equal(result, expected)
    assert waits == 1


@pytest.mark.parametrize("name", OTHERS)
def test_other_requests(name: str, folder: Path, device_ranks: RankPool) -> None:
    expected, result = device_ranks.run(run_unwatched, 1, folder, [OTHERS[name], DECODING["greedy"]])[0]
    assert_equal(result, expected)


def run_unwatched(_rank: int, _world: int, folder: Path, requests: list[Request]) -> Any:
    fake_device.install()
    results = []
    for device in ("cpu", "fakedevice"):
        engine = Engine(load(folder, "fp32", device))  # type: ignore[arg-type]
        answers: dict[int, list[Any]] = {engine.submit(request): [] for request in requests}
        while engine.busy:
            for event in engine.step():
                token = event.token and (event.token.id, event.token.logprob)
                prompt = [(token.id, token.logprob) for token in event.prompt_logprobs]
                score = event.score and event.score.token_logprobs
                numbers = (event.cumulative_logprob, score, event.embedding)
                answers[event.request_id].append((event.choice, token, prompt, *numbers))
        results.append(list(answers.values()))
    return results


def test_seeds(folder: Path, device_ranks: RankPool) -> None:
    """A sample depends on its seed alone: not on other requests, and not on draft tokens."""
    sampled = [
        Request((7, 8, 9), SamplingParams(temperature=1.3, top_k=50, top_p=0.9, seed=seed), 8) for seed in (1, 2, 1)
    ]
    results = [
        device_ranks.run(run, 1, folder, requests, drafts)[0][1]
        for requests, drafts in (([*sampled, DECODING["greedy"]], 0), (sampled[:1], 0), (sampled, 3))
    ]
    ids = [[[event[1][0] for event in answer] for answer in result] for result in results]
    assert ids[0][0] == ids[0][2] == ids[1][0] == ids[2][0] != ids[0][1]


def use_int4_kernel(patch: pytest.MonkeyPatch) -> None:
    """Let the fake device have the kernel for 4 bits: the first number of a byte is in its high half."""

    def pack(pairs: Tensor) -> Tensor:
        return torch.stack([pairs >> 4, pairs & 15], -1).flatten(1).to(torch.int32)

    def multiply(x_NI: Tensor, packed: Tensor, group_size: int, scales: Tensor) -> Tensor:
        scale_OG1, zero_OG1 = scales.float().transpose(0, 1).unsqueeze(-2).unbind(-1)
        groups = packed.unflatten(1, (-1, group_size)).float() - 8
        return (x_NI.float() @ (groups * scale_OG1 + zero_OG1).flatten(1).t()).to(x_NI.dtype)

    patch.setattr(quantized_weight, "pack_int4_on_gpu", pack)
    patch.setattr(quantized_weight, "int4_matmul_on_gpu", multiply)
    for module in ("jingu.model.quantized_weight", "jingu.infer.inference_model"):
        patch.setattr(f"{module}.has_int4_kernel", lambda _device: True)


def run_quantized(_rank: int, _world: int, folder: Path, kind: Any, has_kernel: bool) -> Any:
    """Return the scores on the CPU and on the device, the waits there, and what loading warned of."""
    fake_device.install()
    requests = [Request((7, 8, first), GREEDY, 3, continuations=((4, 5), (6, 7, 8))) for first in (9, 10)]
    expected, _ = answer(Engine(load(folder, kind, "cpu")), requests)
    with pytest.MonkeyPatch.context() as patch:
        # A device computes in bf16, as CPUs do with quantized matrices.
        patch.setattr("jingu.infer.inference_model.has_fast_bf16", lambda _device: True)
        patch.setattr("jingu.runtime.device.has_fast_bf16", lambda _device: True)
        if has_kernel:
            use_int4_kernel(patch)
        warnings: list[str] = []
        patch.setattr("jingu.infer.inference_model.check_fp8", lambda _device, _where: None)
        patch.setattr("jingu.infer.inference_model.log_warning", warnings.append)
        model = load(folder, kind, "fakedevice")  # type: ignore[arg-type]
        blocks: Any = model.module.blocks
        weights = [module.weight for module in blocks.modules() if isinstance(module, Linear)]
        card_kinds = (quantized_weight.GpuQuantizedWeight, quantized_weight.ScaledWeight)
        assert all(isinstance(weight, card_kinds) for weight in weights)
        result, waits = answer(Engine(model), requests)
    scores = ([[event[6] for event in each] for each in answers] for answers in (expected, result))
    return *scores, waits, warnings


NO_KERNEL = (
    "PyTorch has no kernel for int4 on Fake Device: matrices are dequantized for each matmul, which saves memory, "
    "but no time."
)


@pytest.mark.parametrize(
    ("kind", "has_kernel", "expected_warnings"),
    [("int8", False, []), ("int4", False, [NO_KERNEL]), ("int4", True, []), ("fp8", True, [])],
)
def test_quantized_matrices(
    kind: str, has_kernel: bool, expected_warnings: list[str], folder: Path, device_ranks: RankPool
) -> None:
    expected, result, waits, warnings = device_ranks.run(run_quantized, 1, folder.parent / "wide", kind, has_kernel)[0]
    assert warnings == expected_warnings
    # In bf16, whose rounding differs in every product.
    differences = torch.tensor(flatten(result)) - torch.tensor(flatten(expected))
    assert differences.abs().mean() < 0.1
    assert waits == 1


def multiply(_rank: int, _world: int) -> None:
    """Compare products on the device with those of the dequantized matrix."""
    fake_device.install()
    generator = torch.Generator().manual_seed(1)
    x_NI, weight_OI = torch.randn(5, 64, generator=generator), torch.randn(32, 64, generator=generator)
    kinds: tuple[QuantizationFormat, ...] = ("int8", "int4")
    for kind in kinds:
        values, scales = quantized_weight.quantize(weight_OI, kind)
        expected = x_NI @ quantized_weight.dequantize(values, scales, kind).t()
        parts = (values.to(fake_device.NAME), scales.to(fake_device.NAME), torch.float32)
        result = quantized_weight.pack_for_gpu(kind, *parts).times(x_NI.to(fake_device.NAME))
        torch.testing.assert_close(result.cpu(), expected, rtol=1e-5, atol=1e-5)

    mine = PrepackedQuantizedWeight.quantize(weight_OI, "fp8", torch.float32)
    on_device = ScaledWeight("fp8", mine.values.to(fake_device.NAME), mine.scales.to(fake_device.NAME))
    torch.testing.assert_close(on_device.times(x_NI.to(fake_device.NAME)).cpu(), mine.times(x_NI), rtol=1e-5, atol=1e-5)


def test_quantized_matmuls(device_ranks: RankPool) -> None:
    device_ranks.run(multiply, 1)
