"""Every family in every kind of layout takes steps on the fake device, and the host never waits for it.

All ranks but one are pretended, too: collectives return at once. Values mean nothing then; that they are right, real
ranks show in `test_training.py`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from jingu.compat.torch_distributed import pretend_ranks, static_pipeline_stages
from jingu.model.families import FAMILIES
from jingu.model.feed_forward_specs import Experts
from jingu.model.mixer_specs import StateSpace
from jingu.model.spec import ModelSpec
from jingu.parallel.stages import SPLIT_BACKWARD_SCHEDULES
from jingu.runtime.ranks import clear_mesh_caches
from tests.dist.test_layouts import EXPERTS, tiny
from tests.fake_device.test_training import train, unexpected
from tests.rank_pool import RankPool

Waits = dict[str, list[tuple[str, str]]]
# World size and layout. Of a pipeline the first and the last rank take steps, of others the first.
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "zero 3": (2, {"zero_stage": 3}),
    "tensor": (2, {"tensor": 2}),
    "ring": (2, {"context": 2, "context_method": "ring"}),
    "interleaved": (2, {"pipeline": 2, "pipeline_schedule": "interleaved"}),
    "expert and others": (8, {"expert": 2, "tensor": 2, "pipeline": 2, "zero_stage": 2}),
}
# What differs from those in little that concerns a device.
MORE_LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "zero 0": (2, {"zero_stage": 0}),
    "zero 2": (2, {"zero_stage": 2}),
    "replicas": (4, {"zero_stage": 3, "replicate": 2, "shard": 2}),
    "zero 1": (2, {"zero_stage": 1}),
    "context": (2, {"context": 2}),
    "1f1b": (2, {"pipeline": 2}),
    "all": (16, {"pipeline": 2, "tensor": 2, "context": 2, "zero_stage": 2}),
    "expert": (2, {"expert": 2}),
    "gpipe": (2, {"pipeline": 2, "pipeline_schedule": "gpipe"}),
    "zero bubble": (2, {"pipeline": 2, "pipeline_schedule": "zero_bubble"}),
    "zbv": (2, {"pipeline": 2, "pipeline_schedule": "zbv"}),
}
NUM_DECODERS = sum(
    family.template.num_encoder_layers is None and not family.template.has_state for family in FAMILIES.values()
)
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in MORE_LAYOUTS]


def spec_of(family: str, layers: int) -> ModelSpec:
    """Return a tiny model of a family."""
    template = FAMILIES[family].template
    changes: dict[str, Any] = {}
    if template.num_encoder_layers is not None:
        changes["num_encoder_layers"] = layers
    if isinstance(template.feed_forward, Experts):
        changes["feed_forward"] = EXPERTS
    # Groups that two ranks can divide.
    if isinstance(template.mixer, StateSpace):
        changes["mixer.num_groups"] = 2
    changes["layer_kinds"] = {
        name: {**kind, "mixer": {**kind["mixer"], "num_groups": 2}}
        if kind.get("mixer", {}).get("type") == "state_space"
        else kind
        for name, kind in template.layer_kinds.items()
    }
    return tiny(family, layers=layers, **changes)


def walk(_rank: int, _world: int, name: str) -> Waits:
    """Return what let the host wait, by family and rank, after the first step."""
    world, layout = (LAYOUTS | MORE_LAYOUTS)[name]
    has_split_backward = layout.get("pipeline_schedule") in SPLIT_BACKWARD_SCHEDULES
    has_chunks = has_split_backward or layout.get("pipeline_schedule") == "interleaved"
    waits: Waits = {}
    dist.destroy_process_group()
    for family in FAMILIES:
        spec = spec_of(family, 4 if has_chunks else 2)
        if "expert" in layout and not isinstance(spec.feed_forward, Experts):
            continue
        # Runs refuse to divide the sequences of layers with a state.
        if "context" in layout and spec.has_state:
            continue
        # A run refuses these schedules for encoder-decoders.
        if has_split_backward and spec.num_encoder_layers is not None:
            continue
        if "pipeline" in layout and (spec.has_shared_kv or spec.per_layer_inputs):
            continue
        for rank in {0, world - 1} if "pipeline" in layout else {0}:
            pretend_ranks(rank, world)
            with static_pipeline_stages():
                _, waits[f"{family} on rank {rank}"] = train(rank, world, spec, layout)
            dist.destroy_process_group()
            clear_mesh_caches()
    # The pool ends the group of a call.
    pretend_ranks(0, 1)
    return waits


@pytest.mark.parametrize("name", [*LAYOUTS, *SLOW])
def test_every_family(name: str, device_ranks: RankPool) -> None:
    [waits] = device_ranks.run(walk, 1, name)
    assert len(waits) >= (NUM_DECODERS if "expert" not in name else 2)
    assert {place: unexpected(lines) for place, lines in waits.items() if unexpected(lines)} == {}
