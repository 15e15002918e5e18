"""Checkpoints of one layout load bitwise in any other: every ordered pair of layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "zero0 × 2": (2, {"zero_stage": 0}),
    "zero1 × 4": (4, {"zero_stage": 1}),
    "zero2 × 2": (2, {"zero_stage": 2}),
    "zero3 × 4": (4, {"zero_stage": 3}),
    "replicate 2 × shard 2": (4, {"zero_stage": 3, "replicate": 2, "shard": 2}),
    "tensor 2": (2, {"tensor": 2}),
    "tensor 2 × shard 2": (4, {"tensor": 2, "shard": 2, "zero_stage": 3}),
    "pipeline 2": (2, {"pipeline": 2}),
    "pipeline 2 × shard 2": (4, {"pipeline": 2, "shard": 2, "zero_stage": 2}),
}
EXPERT_LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "expert 2": (2, {"expert": 2}),
    "expert 2 × tensor 2": (4, {"expert": 2, "tensor": 2}),
    "expert 2 × zero3 × 4": (4, {"expert": 2, "zero_stage": 3}),
    "host × zero3 × 2": (2, {"zero_stage": 3, "offload": {"type": "host"}}),
    "disk × zero2 × 2": (2, {"zero_stage": 2, "offload": {"type": "disk"}}),
    "eight": (8, {"pipeline": 2, "tensor": 2, "shard": 2, "zero_stage": 3}),
}


def pass_through(rank: int, world: int, config: Any, journeys: list[tuple[Path, Path]]) -> None:
    """In this layout, load each checkpoint and save what was loaded."""
    from jingu.checkpoint import store
    from jingu.parallel.mesh import build_mesh, resolve_axis_sizes
    from jingu.runtime.ranks import gather_from_all
    from jingu.training import checkpointing, session
    from jingu.training.precision import choose_precision
    from jingu.training.run import open_run

    run, device = open_run(config), torch.device("cpu")
    mesh = build_mesh(resolve_axis_sizes(config.parallel, world, run.spec), device)
    precision = choose_precision(config.precision, device)
    model, optimizer = session.build_model_and_optimizer(run, mesh, precision, compile=False)
    for source, target in journeys:
        tensors = checkpointing.checkpoint_tensors(model, optimizer)
        with torch.no_grad():
            for tensor in tensors.values():
                tensor.local.zero_()
        store.load(source, tensors, whole=model.is_whole, gather=gather_from_all)
        store.save(target, tensors, {}, rank=rank, ranks=world, gather=gather_from_all)


def assert_same(folder: Path, expected: dict[str, torch.Tensor]) -> None:
    from jingu.checkpoint import save_folder, store

    assert save_folder.tensor_names(folder) == sorted(expected)
    reader = store.CheckpointReader(folder)
    for name, tensor in expected.items():
        assert torch.equal(reader.read(name), tensor), (folder, name)


@pytest.mark.parametrize("layouts", [list(LAYOUTS)[1::2], pytest.param(list(LAYOUTS), marks=pytest.mark.slow)])
def test_every_ordered_pair_of_layouts(layouts, tiny_run, train_on, done, ranks, tmp_path):
    load_all_in_all(LAYOUTS, layouts, {}, tiny_run, train_on, done, ranks, tmp_path)


@pytest.mark.slow
def test_every_ordered_pair_with_experts_offload_and_eight_ranks(tiny_run, train_on, done, ranks, tmp_path):
    experts = {"model.family": "mixtral", "model.experts.num_experts": 6, "model.experts.num_experts_per_token": 2}
    load_all_in_all(EXPERT_LAYOUTS, list(EXPERT_LAYOUTS), experts, tiny_run, train_on, done, ranks, tmp_path)


def load_all_in_all(known, layouts, model, tiny_run, train_on, done, ranks, tmp_path):
    changes = {"model.num_heads": 4, "model.num_kv_heads": 2, "train.steps": 2, "precision.type": "fp32", **model}
    begun = tiny_run(changes, name="begun")
    train_on(1, begun)
    expected = done(begun).tensors()
    places = {name: tmp_path / str(number) for number, name in enumerate(["begun", *layouts])}

    def go(layout: str, journeys: list[tuple[Path, Path]]) -> None:
        world, parallel = known[layout]
        config = tiny_run({**changes, **{f"parallel.{key}": value for key, value in parallel.items()}}, name="laid-out")
        ranks.run(pass_through, world, config, journeys)
        for _, target in journeys:
            assert_same(target, expected)

    for layout in layouts:
        go(layout, [(done(begun).checkpoint(), places[layout])])
    for layout in layouts:
        others = [other for other in layouts if other != layout]
        go(layout, [(places[other], places[layout] / f"from-{places[other].name}") for other in others])
