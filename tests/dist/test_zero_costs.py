"""What ZeRO costs: bytes of model state a rank, and numbers that collectives move, beside the formulas.

Rajbhandari et al. (2020), with X parameters on N ranks under mixed precision and Adam: 16X, 4X + 12X/N, 2X + 14X/N and
16X/N bytes; and 2X, 2X, 2X and 3X numbers a step.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from jingu.config.batch import plan_batch
from jingu.config.schema import RunConfig
from jingu.config.sections.parallel import ParallelSettings
from jingu.config.sections.train import ActivationCheckpointingSettings, AdamWSettings, BatchSettings
from jingu.data.batch import Batch
from jingu.model.build import find_family
from jingu.model.decoder import Decoder
from jingu.model.spec import replaced

TEMPLATE = find_family("llama").template
SPEC = replaced(
    TEMPLATE,  # nearly all of it in blocks: what is left, as small as here, stays gathered between the passes
    vocabulary=16,
    width=64,
    layers=4,
    context=16,
    attention=TEMPLATE.attention.model_copy(update={"heads": 4, "kv_heads": 4, "head_size": 16}),
    feed_forward=TEMPLATE.feed_forward.model_copy(update={"size": 192}),
    tied_embeddings=True,
)
PARAMETERS = sum(parameter.numel() for parameter in Decoder(SPEC).parameters())


def storages(tensors: Any) -> int:
    """Bytes of memory behind tensors, of which several may share one."""
    from jingu.parallel.sharing import local

    found = [local(tensor).untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in found}.values())


def state_bytes(model: Any, optimizer: torch.optim.Optimizer) -> int:
    """Bytes of masters, gathered parameters, gradients and optimizer state."""
    from torch.distributed.fsdp import FSDPModule

    groups = [
        module._get_fsdp_state()._fsdp_param_group for module in model.modules() if isinstance(module, FSDPModule)
    ]
    gathered = [
        each._unsharded_param for group in groups for each in group.fsdp_params if hasattr(each, "_unsharded_param")
    ]
    whole = [each.grad for each in gathered if each.grad is not None]
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    state = [tensor for slots in optimizer.state.values() for tensor in slots.values() if tensor.dim()]
    masters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return storages([*masters, *gathered, *whole, *gradients, *state])


def measured(rank: int, world: int, settings: ParallelSettings) -> tuple[int, float]:
    """Most bytes of a second step, of what is held after its forward pass and at its update; and numbers moved."""
    import torch.distributed as dist

    from jingu.parallel.apply import parallelize
    from jingu.parallel.mesh import axis_sizes, build_mesh
    from jingu.parallel.sharing import sharing_of
    from jingu.train import step as step_module
    from jingu.train.optimizer import build_optimizer
    from jingu.train.task import Pretraining

    mesh = build_mesh(axis_sizes(settings, world, SPEC), torch.device("cpu"))
    with torch.device("meta"):
        whole = Decoder(SPEC)
    model = parallelize(
        whole,
        mesh,
        settings,
        compute=torch.bfloat16,
        reduce=torch.float32,
        activation_checkpointing=ActivationCheckpointingSettings(),
        compile=False,
    )
    model.to_empty(device="cpu")
    sharing_of(model).initialise(model, SPEC, 3)
    optimizer = build_optimizer(AdamWSettings(), model)
    seen, moved = [0], [0.0]

    class Task:
        honest = Pretraining(None, None, SPEC, mesh, RunConfig())
        weights = honest.weights

        def batch(self, step: int, first: int, count: int) -> Batch:
            ids = torch.arange(17 * count).view(count, 17) % 16
            return Batch(ids[:, :-1], ids[:, 1:])

        def loss(self, model: Any, batch: Batch) -> Tensor:
            loss = self.honest.loss(model, batch)
            seen[0] = max(seen[0], state_bytes(model, optimizer))
            return loss

    def counting(times: int, original: Any) -> Any:
        def call(*arguments: Any, **keywords: Any) -> Any:
            given = (*arguments, *keywords.values())
            numbers = max(tensor.numel() for tensor in given if isinstance(tensor, Tensor))
            alone = dist.get_world_size(keywords.get("group")) == 1
            moved[0] += 0 if alone or numbers == 1 else times * numbers
            return original(*arguments, **keywords)

        return call

    names = {"all_gather_into_tensor": 1, "all_gather_single": 1, "reduce_scatter_tensor": 1, "all_reduce": 2}
    names["reduce_scatter_single"] = 1
    originals = {name: getattr(dist, name) for name in names if hasattr(dist, name)}
    scaled = step_module.scale_gradients

    def looking(model: Any, *arguments: Any) -> Any:
        seen[0] = max(seen[0], state_bytes(model, optimizer))
        return scaled(model, *arguments)

    step_module.scale_gradients = looking
    for name, original in originals.items():
        setattr(dist, name, counting(names[name], original))
    try:
        plan = plan_batch(BatchSettings(sequence_length=16, global_size=world, micro_size=1), world)
        for step in range(2):
            moved[0] = 0.0
            step_module.train_step(model, optimizer, Task(), plan, step=step, zero=settings.zero, clip_norm=1.0)
    finally:
        step_module.scale_gradients = scaled
        for name, original in originals.items():
            setattr(dist, name, original)
    return seen[0], moved[0]


@pytest.mark.parametrize("world", [4, *(pytest.param(world, marks=pytest.mark.slow) for world in (2, 8))])
def test_bytes_and_numbers_are_those_of_the_formulas(world, ranks):
    formulas = {
        0: (16.0, 2),
        1: (4 + 12 / world, 2),
        2: (2 + 14 / world, 2),
        3: (16 / world, 3),
    }
    for zero, (held, moved) in formulas.items():
        for rank, found in enumerate(ranks.run(measured, world, ParallelSettings(zero=zero))):
            assert found[0] <= 1.02 * held * PARAMETERS, (zero, rank, found[0] / PARAMETERS, held)
            assert found[1] == pytest.approx(moved * PARAMETERS, rel=0.02), (zero, rank, found[1] / PARAMETERS)
