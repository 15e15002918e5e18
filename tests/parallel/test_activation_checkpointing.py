"""Activation checkpointing: the same numbers to the last digit, and fewer bytes kept with each mode."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from jingu.config.sections.parallel import ParallelSettings
from jingu.config.sections.train import ActivationCheckpointingSettings
from jingu.model.attention import SelfAttention
from jingu.model.spec import ModelSpec
from jingu.parallel.layout import Layout, Precision
from jingu.parallel.materialize import materialize
from jingu.parallel.mesh import build_mesh, resolve_axis_sizes
from jingu.parallel.pipeline import ParallelModel
from jingu.parallel.recomputation import checkpoint_for_split_backward
from jingu.runtime.ranks import join_process_group

MODES: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"type": "selective"},
    "selective, every other": {"type": "selective", "every": 2},
    "full, every other": {"type": "full", "every": 2},
    "full": {"type": "full"},
}


class Storages(TorchDispatchMode):
    """All storages that operations have made."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.seen[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return made

    def kept(self) -> int:
        """Bytes of those that are still there."""
        gc.collect()
        return sum(size for reference, size in self.seen.values() if not reference.expired())


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """One rank."""
    with join_process_group("cpu", 1) as ranks:
        yield build_mesh(resolve_axis_sizes(ParallelSettings(), 1, small("llama")), ranks.device)


def small(family: str, heads: int = 3, hidden_size: int = 24) -> ModelSpec:
    from jingu.config.sections.model import ModelSettings
    from jingu.model.resolve import spec_from_settings

    settings = ModelSettings(
        family=family,
        num_layers=4,
        hidden_size=hidden_size,
        num_heads=heads,
        num_kv_heads=heads,
        intermediate_size=40,
    )
    return spec_from_settings(settings, 37, 19)


def made(mesh: DeviceMesh, spec: ModelSpec, mode: dict[str, Any], compile: bool = False) -> ParallelModel:
    layout = Layout(ParallelSettings(), ActivationCheckpointingSettings(**mode), compile)
    return materialize(spec, mesh, layout, Precision.uniform(torch.float64), 3)


TOKENS = torch.arange(38).view(2, 19) % 37


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_numbers_stay_and_less_is_kept(family: str, mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = small(family)
    calls, forward = Counter[str](), SelfAttention.forward
    current = "none"

    def counting(self: SelfAttention, *arguments: Any) -> Any:
        calls[current] += 1
        return forward(self, *arguments)

    monkeypatch.setattr(SelfAttention, "forward", counting)
    expected, bytes_of = {}, {}
    for current, mode in MODES.items():
        model, storages = made(mesh, spec, mode), Storages()
        with storages:
            loss = model(TOKENS).square().sum()
        bytes_of[current] = storages.kept()
        loss.backward()
        results = {"loss": loss, **{name: parameter.grad for name, parameter in model.named_parameters()}}
        assert all(
            value is not None for name, value in results.items() if "router" not in name and name != "head.weight"
        )
        expected = expected or results
        for name, value in results.items():
            assert value is None if expected[name] is None else torch.equal(value, expected[name]), (current, name)
        del model, loss, results
    again = {name: count - calls["none"] for name, count in calls.items()}
    assert again == {"none": 0, "selective": 4, "selective, every other": 2, "full, every other": 2, "full": 4}
    everything, chosen, chosen_2, full_2, full = (bytes_of[name] for name in ("none", "selective", *list(MODES)[2:]))
    assert full < full_2 < chosen_2 < everything
    assert full < chosen < chosen_2


def test_selective_multiplies_nothing_again(mesh: DeviceMesh) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    spec, counted = small("llama"), {}
    for name in ("none", "selective", "full"):
        model = made(mesh, spec, MODES[name])
        with FlopCounterMode(display=False) as counter:
            model(TOKENS).square().sum().backward()
        counted[name] = counter.get_total_flops()
    assert counted["none"] == counted["selective"] < counted["full"]


@pytest.mark.slow
def test_selective_compiles(mesh: DeviceMesh) -> None:
    spec = small("llama")
    gradients = []
    for compile in (False, True):
        model = made(mesh, spec, MODES["selective"], compile=compile)
        model(TOKENS).square().sum().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-9, atol=1e-12)


def compare_on_ranks(rank: int, world: int, family: str, axes: dict[str, Any]) -> None:
    """The modes on real ranks, which gather, reduce and exchange tensors again while they recompute."""
    settings, spec = ParallelSettings(**axes), small(family, heads=4, hidden_size=32)
    mesh = build_mesh(resolve_axis_sizes(settings, world, spec), torch.device("cpu"))
    expected: dict[str, torch.Tensor] = {}
    sizes = {}
    for name in ("none", "selective", "full"):
        layout = Layout(settings, ActivationCheckpointingSettings(**MODES[name]))
        model, storages = materialize(spec, mesh, layout, Precision.uniform(torch.float64), 3), Storages()
        with storages:
            loss = model(TOKENS[:, :18]).square().sum()
        sizes[name] = storages.kept()
        loss.backward()
        gradients = {key: value.grad for key, value in model.named_parameters() if value.grad is not None}
        expected = expected or gradients
        assert gradients.keys() == expected.keys()
        assert all(torch.equal(gradients[key], value) for key, value in expected.items()), name
    assert sizes["full"] < sizes["selective"] < sizes["none"], sizes


AXES = [
    ("gpt2", {"tensor": 4}),
    ("llama", {"tensor": 2, "context": 2}),
    ("mixtral", {"tensor": 2}),
    ("llama", {"context": 2, "context_method": "ulysses"}),
]


@pytest.mark.parametrize(("family", "axes"), AXES)
def test_numbers_stay_on_several_ranks(ranks: Any, family: str, axes: dict[str, Any]) -> None:
    world = axes.get("tensor", 1) * axes.get("context", 1)
    ranks.run(compare_on_ranks, world, family, axes)


def test_a_split_backward_pass_recomputes_once() -> None:
    """Gradients of inputs, then those of each weight: the same to the last digit, with one recomputation for all."""
    generator = torch.Generator().manual_seed(0)
    x, gradient, *weights = (
        torch.randn(6, 6, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(5)
    )
    calls = []

    def forward(x: torch.Tensor, scale: float) -> torch.Tensor:
        calls.append(x)
        for weight in weights:
            x = torch.tanh(x @ weight) * scale
        return x

    def gradients(result: torch.Tensor) -> list[torch.Tensor]:
        parts = [[x], *([weight] for weight in weights)]
        return [torch.autograd.grad(result, part, gradient.detach(), retain_graph=True)[0] for part in parts]

    expected = gradients(forward(x, 0.5))
    calls.clear()
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        result = checkpoint_for_split_backward(forward, x, scale=0.5)
    assert not saved and len(calls) == 1
    for mine, theirs in zip(gradients(result), expected, strict=True):
        assert torch.equal(mine, theirs)
    assert len(calls) == 2
