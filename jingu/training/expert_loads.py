"""Loads of experts in a step: their metrics, and the corrections of router scores that follow them (Wang et al., 2024).

Shapes: L layers with experts, E experts.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from jingu.model.decoder import iterate_blocks
from jingu.model.experts import LOAD_PREFIX, MoELayer
from jingu.model.feed_forward_specs import Experts, TopKRouter
from jingu.model.spec import ModelSpec
from jingu.model.trainable import is_trained
from jingu.parallel.pipeline import ParallelModel


def split_loads(means: Mapping[str, Tensor], experts: Experts | None) -> tuple[dict[str, Tensor], Tensor | None]:
    """Return the mean loss terms without the loads of experts, and the loads [L, E]; None if there are none."""
    losses = {name: value for name, value in means.items() if not name.startswith(LOAD_PREFIX)}
    loads = [value for name, value in means.items() if name.startswith(LOAD_PREFIX)]
    return losses, torch.stack(loads).view(-1, experts.num_experts) if experts is not None and loads else None


def load_metrics(load_LE: Tensor) -> dict[str, Tensor]:
    """Return the loads of the most and of the least loaded expert of any layer, relative to the mean."""
    relative_LE = load_LE / load_LE.mean(-1, keepdim=True).clamp_min(1e-12)
    return {"max_expert_load": relative_LE.max(), "min_expert_load": relative_LE.min()}


@torch.no_grad()
def update_corrections(model: ParallelModel, load_LE: Tensor) -> dict[str, Tensor]:
    """Move the corrections of this rank's routers by the loads of a step; return the largest of all as a metric.

    The correction of an expert with fewer tokens than the mean grows by `TopKRouter.correction_rate`, and that of one
    with more shrinks. All ranks know the loads of the global batch, so copies of a correction stay equal.
    """
    spec = model.spec
    expert_layers = [number for number, layer in enumerate(spec.layers) if isinstance(layer.feed_forward, Experts)]
    rates = {number: _correction_rate(spec, number) for number in expert_layers}
    if not any(rates.values()):
        return {}
    largest = load_LE.new_zeros(())
    for stage in model.stages:
        for number, block in iterate_blocks(stage):
            moe = block.feed_forward
            if not isinstance(moe, MoELayer) or moe.correction is None or not rates[number]:
                continue
            load_E = load_LE[expert_layers.index(number)]
            weight = moe.correction.weight
            weight.add_((load_E.mean() - load_E).sign().to(weight), alpha=rates[number])
            largest = torch.maximum(largest, weight.abs().max().to(largest))
    if model.mesh is not None and model.mesh["pipeline"].size() > 1:
        # The routers of other stages.
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=model.mesh.get_group("pipeline"))
    return {"max_correction": largest}


def _correction_rate(spec: ModelSpec, number: int) -> float:
    """Return the rate of the corrections in a layer with experts; 0: it has none, or they are frozen."""
    part = spec.layers[number].feed_forward
    name = f"blocks.{number}.feed_forward.correction.weight"
    if not isinstance(part, Experts) or not isinstance(part.router, TopKRouter) or not is_trained(name, spec):
        return 0.0
    return part.router.correction_rate if part.router.correction else 0.0
