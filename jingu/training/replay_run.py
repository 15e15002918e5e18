"""Replay of a step in a run's layout on one rank, which `jingu.plan.replay` records.

The other ranks may be simulated. Their collectives then return at once, so sizes are right, but values are meaningless.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from jingu.compat.torch_distributed import hold_sent_tensors, pretend_ranks, static_pipeline_stages
from jingu.config.schema import RunConfig
from jingu.data.batch import Batch, EncoderInputs, make_seq2seq_batch
from jingu.model.spec import ModelSpec
from jingu.parallel.layout import Precision
from jingu.parallel.materialize import materialize
from jingu.parallel.mesh import build_mesh
from jingu.parallel.pipeline import ParallelModel
from jingu.parallel.stages import plan_layout
from jingu.plan.replay import StepRecord, recording
from jingu.training.optimizer import build_optimizer, optimizer_settings
from jingu.training.pretraining import Pretraining
from jingu.training.session import training_layout
from jingu.training.step import train_step


class _AnyText(Pretraining):
    """Pretraining on arbitrary tokens, because only their number matters."""

    def batch(self, step: int, first: int, count: int) -> Batch:
        length = self.config.batch.sequence_length
        ids: Tensor = torch.arange(count * (length + 1)).view(count, length + 1) % self.spec.vocab_size
        if self.spec.num_encoder_layers is None:
            return Batch(ids[:, :-1], ids[:, 1:])
        # An encoder-decoder reads a row and predicts another of the same length.
        return make_seq2seq_batch(EncoderInputs(ids[:, :-1]), ids[:, 1:], 0)


def prepare_step(
    config: RunConfig, spec: ModelSpec, precision: Precision, ranks: int
) -> tuple[Callable[[int], None], ParallelModel, torch.optim.Optimizer]:
    """Build this rank's part of a run on the CPU, in an existing process group.

    Returns:
        A function that takes the step of a number, the model and the optimizer.
    """
    sizes, plan = plan_layout(config, ranks, spec)
    mesh = build_mesh(sizes, torch.device("cpu"))
    model = materialize(spec, mesh, training_layout(config, compile=False), precision, config.seed)
    optimizer = build_optimizer(optimizer_settings(config), model)
    task = _AnyText(None, spec, mesh, config)  # type: ignore[arg-type]

    def step(number: int) -> None:
        train_step(model, optimizer, task, plan, step=number, max_grad_norm=config.train.max_grad_norm)

    return step, model, optimizer


def replay_on_rank(config: RunConfig, spec: ModelSpec, precision: Precision, ranks: int) -> StepRecord:
    """Build this rank's part of a run in an existing process group, take two steps, and return the second's record."""
    step, model, optimizer = prepare_step(config, spec, precision, ranks)
    # The first step also builds schedules, buffers and the optimizer's kernels, which later steps reuse.
    step(0)
    state = [list(model.parameters()), list(optimizer.state.values()), list(model.buffers())]
    with recording([state, model.receive_buffers()]) as record:
        step(1)
    return record


def replay_run(config: RunConfig, spec: ModelSpec, precision: Precision, ranks: int, rank: int) -> StepRecord:
    """Return the record of a step on one rank of a run; the other ranks are simulated.

    Args:
        ranks: number of ranks of the run.
        rank: the rank to replay.
    """
    pretend_ranks(rank, ranks)
    try:
        with static_pipeline_stages(), hold_sent_tensors():
            return replay_on_rank(config, spec, precision, ranks)
    finally:
        dist.destroy_process_group()
