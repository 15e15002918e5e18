"""What ZeRO costs: bytes of model state a rank, and numbers that collectives move, beside the formulas.

Rajbhandari et al. (2020), with X parameters on N ranks under mixed precision and Adam: 16X, 4X + 12X/N, 2X + 14X/N and
16X/N bytes; and 2X, 2X, 2X and 3X numbers a step.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from jingu.config.batch_plan import plan_batch
from jingu.config.schema import RunConfig
from jingu.config.sections.optimizers import AdamWSettings
from jingu.config.sections.parallel import ParallelSettings
from jingu.config.sections.train import BatchSettings
from jingu.data.batch import Batch
from jingu.model.decoder import Decoder
from jingu.model.resolve import find_family
from jingu.model.spec import replace_fields

TEMPLATE = find_family("llama").template
SPEC = replace_fields(
    TEMPLATE,  # nearly all of it in blocks: what is left, as small as here, stays gathered between the passes
    vocab_size=16,
    hidden_size=64,
    num_layers=4,
    max_position_embeddings=16,
    attention=TEMPLATE.attention.model_copy(update={"num_heads": 4, "num_kv_heads": 4, "head_dim": 16}),
    feed_forward=TEMPLATE.feed_forward.model_copy(update={"intermediate_size": 192}),
    tie_word_embeddings=True,
)
PARAMETERS = sum(parameter.numel() for parameter in Decoder(SPEC).parameters())


def storages(tensors: Any) -> int:
    """Return the bytes of storage of tensors, some of which may share it."""
    from jingu.parallel.sharding import local_tensor

    result = [local_tensor(tensor).untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in result}.values())


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

    from jingu.parallel.layout import Layout, Precision
    from jingu.parallel.materialize import materialize
    from jingu.parallel.mesh import build_mesh, resolve_axis_sizes
    from jingu.training import step as step_module
    from jingu.training.optimizer import build_optimizer
    from jingu.training.pretraining import Pretraining

    mesh = build_mesh(resolve_axis_sizes(settings, world, SPEC), torch.device("cpu"))
    precision = Precision("bf16", torch.bfloat16, torch.float32, torch.float32)
    model = materialize(SPEC, mesh, Layout(settings), precision, 3)
    optimizer = build_optimizer(AdamWSettings(), model)
    seen, moved = [0], [0.0]

    class Task:
        honest = Pretraining(None, SPEC, mesh, RunConfig())
        loss_terms = honest.loss_terms
        denominator = honest.denominator
        begin_step = honest.begin_step
        end_step = honest.end_step

        def batch(self, step: int, first: int, count: int) -> Batch:
            ids = torch.arange(17 * count).view(count, 17) % 16
            return Batch(ids[:, :-1], ids[:, 1:])

        def loss(self, model: Any, batch: Batch) -> Tensor:
            loss = self.honest.loss(model, batch)
            seen[0] = max(seen[0], state_bytes(model, optimizer))
            return loss

    def counting(times: int, original: Any) -> Any:
        def call(*arguments: Any, **keywords: Any) -> Any:
            inputs = (*arguments, *keywords.values())
            numbers = max(tensor.numel() for tensor in inputs if isinstance(tensor, Tensor))
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
        plan = plan_batch(BatchSettings(sequence_length=16, global_batch_size=world, micro_batch_size=1), world)
        for step in range(2):
            moved[0] = 0.0
            step_module.train_step(model, optimizer, Task(), plan, step=step, max_grad_norm=1.0)
    finally:
        step_module.scale_gradients = scaled
        for name, original in originals.items():
            setattr(dist, name, original)
    return seen[0], moved[0]


@pytest.mark.parametrize("world", [4, *(pytest.param(world, marks=pytest.mark.slow) for world in (2, 8))])
def test_memory_and_communication_equal_the_formulas(world, ranks):
    formulas = {
        0: (16.0, 2),
        1: (4 + 12 / world, 2),
        2: (2 + 14 / world, 2),
        3: (16 / world, 3),
    }
    for zero, (peak_bytes, moved) in formulas.items():
        for rank, result in enumerate(ranks.run(measured, world, ParallelSettings(zero_stage=zero))):
            assert result[0] <= 1.02 * peak_bytes * PARAMETERS, (zero, rank, result[0] / PARAMETERS, peak_bytes)
            assert result[1] == pytest.approx(moved * PARAMETERS, rel=0.02), (zero, rank, result[1] / PARAMETERS)
