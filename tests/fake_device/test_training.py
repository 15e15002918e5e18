"""Training on a fake device equals training on the CPU, and the host never waits for the device in a step."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch

from jingu.config.batch_plan import plan_batch
from jingu.config.schema import RunConfig
from jingu.config.sections.optimizers import AdamWSettings
from jingu.config.sections.parallel import ParallelSettings
from jingu.config.sections.train import BatchSettings
from jingu.model.scaled_matmul import Scaling, scaled_linear
from jingu.model.spec import ModelSpec
from jingu.parallel.layout import Layout, Precision
from jingu.parallel.materialize import materialize
from jingu.parallel.mesh import build_mesh, num_data_ranks, resolve_axis_sizes
from jingu.training.optimizer import build_optimizer
from jingu.training.pretraining import Pretraining
from jingu.training.step import train_step
from tests.dist.test_layouts import MODELS, ROWS, STEPS, TOKENS, batch_of, few_steps
from tests.fake_device import fake_device
from tests.rank_pool import RankError, RankPool
from tests.tune.test_method_layouts import METHODS, spec_of

# What may wait: ranks of `expert` tell each other how many rows they send.
ALLOWED = ("parallel/tensor.py", "send_sizes, receive_sizes =")


def train(
    _rank: int, world: int, spec: ModelSpec, layout: dict[str, Any], documents: bool = False, fault: str = ""
) -> tuple[list[float], list[tuple[str, str]]]:
    """Return the losses of a few steps on the device, and what let the host wait after the first step."""
    fake_device.install()
    settings = ParallelSettings(**layout)
    mesh = build_mesh(resolve_axis_sizes(settings, world, spec), torch.device(fake_device.NAME))
    model = materialize(spec, mesh, Layout(settings), Precision.uniform(torch.float64), 3)
    optimizer = build_optimizer(AdamWSettings(lr=1e-2), model)
    has_encoder = bool(spec.num_encoder_layers)
    source: Any = type("Source", (), {"batch": staticmethod(lambda *where: batch_of(*where, documents, has_encoder))})
    task = Pretraining(source, spec, mesh, RunConfig())
    if fault:
        plant(task, fault)
    micro_size = max(1, ROWS // num_data_ranks(mesh) // 2)
    batch_settings = BatchSettings(sequence_length=TOKENS, global_batch_size=ROWS, micro_batch_size=micro_size)
    plan = plan_batch(batch_settings, num_data_ranks(mesh))
    losses = []
    waits: list[tuple[str, str]] = []
    for step in range(STEPS):
        with fake_device.watch() as lines:
            outcome = train_step(model, optimizer, task, plan, step=step, max_grad_norm=1.0)
        # The first step creates what later ones use.
        waits += lines if step else []
        losses.append(float(outcome.loss))
    return losses, waits


def plant(task: Any, fault: str) -> None:
    """Make a mistake in the loss, as the code of a task might."""
    plain = task.loss

    def loss(model: Any, batch: Any) -> torch.Tensor:
        total: torch.Tensor = plain(model, batch)
        if fault == "host tensor":
            return total * torch.ones(1)
        if fault == "item":
            return total * (1.0 if total.sum().item() else 0.0)
        if fault == "nonzero":
            return total * len(batch.labels.nonzero().sum().view(1))
        return total + total.detach().cpu().sum().to(total.device) * 0

    task.loss = loss


def unexpected(waits: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the waits that a step must not have."""
    return [wait for wait in waits if not all(part in wait[1] for part in ALLOWED)]


def compare(device_ranks: RankPool, ranks: RankPool, spec: ModelSpec, world: int, *layouts: dict[str, Any]) -> None:
    """Compare layouts on fake devices with one process on the CPU."""
    [expected] = ranks.run(few_steps, 1, spec, [{}], False)[0]
    for layout in layouts:
        for losses, waits in device_ranks.run(train, world, spec, layout):
            assert losses == pytest.approx([float(row[0]) for row in expected.losses], rel=1e-9), layout
            assert unexpected(waits) == [], layout


@pytest.mark.parametrize("name", MODELS)
def test_every_family(name: str, device_ranks: RankPool, ranks: RankPool) -> None:
    compare(device_ranks, ranks, MODELS[name], 1, {})


# The LSTM of a device is its vendor's library.
@pytest.mark.parametrize("method", sorted(METHODS.keys() - {"p_tuning_lstm"}))
def test_every_tuning_method(method: str, device_ranks: RankPool, ranks: RankPool) -> None:
    compare(device_ranks, ranks, spec_of("llama", method), 1, {})


LAYOUTS: list[dict[str, Any]] = [
    {"zero_stage": 3},
    {"tensor": 2},
    {"pipeline": 2},
    {"context": 2},
    {"context": 2, "context_method": "ring"},
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_layouts(layout: dict[str, Any], device_ranks: RankPool, ranks: RankPool) -> None:
    compare(device_ranks, ranks, MODELS["llama"], 2, layout)


def test_expert_parallelism(device_ranks: RankPool, ranks: RankPool) -> None:
    compare(device_ranks, ranks, MODELS["mixtral"], 2, {"expert": 2})


def multiply_in_fp8(_rank: int, _world: int) -> list[tuple[str, str]]:
    """Compare products on the device with those on the CPU; return what let the host wait."""
    fake_device.install()
    results = []
    for device in ("cpu", fake_device.NAME):
        x, weight = (
            torch.ones(*size, dtype=torch.bfloat16).to(device).requires_grad_() for size in ((5, 32), (16, 32))
        )
        with fake_device.watch() as waits:
            for scaling in get_args(Scaling):
                scaled_linear(x, weight, None, scaling).square().sum().backward()
        results.append([tensor.grad.cpu() for tensor in (x, weight) if tensor.grad is not None])
    assert all(map(torch.equal, *results))
    return waits


def test_matmuls_in_fp8(device_ranks: RankPool) -> None:
    assert device_ranks.run(multiply_in_fp8, 1) == [[]]


@pytest.mark.parametrize(
    ("fault", "operation", "line"),
    [
        ("item", "_local_scalar_dense", "total.sum().item()"),
        ("nonzero", "nonzero", "batch.labels.nonzero()"),
        ("copy", "copy to the host", "total.detach().cpu()"),
    ],
)
def test_a_planted_wait_is_named(fault: str, operation: str, line: str, device_ranks: RankPool) -> None:
    _, waits = device_ranks.run(train, 1, MODELS["llama"], {}, fault=fault)[0]
    assert any(kind == operation and line in place for kind, place in waits)


def test_a_tensor_of_the_host_is_named(device_ranks: RankPool) -> None:
    with pytest.raises(
        RankError, match=r"mul got a tensor of the device and one of the host, at .*total \* torch.ones"
    ):
        device_ranks.run(train, 1, MODELS["llama"], {}, fault="host tensor")
