"""Stages of a pipeline as the schedules of `torch.distributed.pipelining` drive them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from jingu.data.batch import Batch
from jingu.model.decoder import Decoder, StageOutput
from jingu.parallel.pipeline import Loss, StageModel, pack, unpack
from jingu.watch.activity import Activity

_CLASS_NAMES = {"interleaved": "Interleaved1F1B", "zero_bubble": "InterleavedZeroBubble", "zbv": "ZBVZeroBubble"}
SCHEDULES = {name: get_schedule_class(_CLASS_NAMES.get(name, name)) for name in ("gpipe", "1f1b", *_CLASS_NAMES)}


class PipelineStep:
    """The micro-batches of one step. A schedule hands only tensors to its stages, so they look up the rest here."""

    def __init__(self, activity: Activity) -> None:
        self.activity = activity

    def begin(self, batches: Sequence[Batch], loss: Loss, weight_n: Tensor) -> None:
        self.batches = batches
        self.loss = loss
        self.weight_n = weight_n
        self.total_n = torch.zeros_like(weight_n)

    def weighted_loss(self, losses_n: Tensor, number: Tensor) -> Tensor:
        """Return the sum of a micro-batch's losses that is differentiated."""
        self.total_n += losses_n.detach()
        return losses_n @ self.weight_n.to(losses_n.dtype)


class ScheduledStage(PipelineStage):
    """A stage as a schedule drives it.

    Where backward passes are whole, FSDP's hooks gather parameters and reduce gradients as without a pipeline. The
    engine would do it for the whole stage at once, so it gets a plain container in the place of the model.

    Args:
        prepare_backward: called with whether a backward pass is the last of the step; None if the schedule splits
            backward passes, which only the engine's own way serves.
    """

    def __init__(
        self,
        model: Decoder,
        step: PipelineStep,
        receives_encoder_states: bool,
        prepare_backward: Callable[[bool], None] | None,
        **arguments: Any,
    ) -> None:
        super().__init__(model if prepare_backward is None else nn.ModuleList([model]), **arguments)
        self._model = model
        self._step = step
        self._receives_encoder_states = receives_encoder_states
        self._prepare_backward = prepare_backward

    def forward_maybe_with_nosync(self, *received: Tensor, number: Tensor) -> Any:
        self._step.activity.enter("micro-batch", micro_batch=int(number))
        inputs = unpack(received, self._receives_encoder_states) if received else None
        result = self._step.loss(StageModel(self._model, inputs), self._step.batches[int(number)])
        if not isinstance(result, StageOutput):
            return result.view(-1)
        outputs = []
        for tensor in pack(result):
            # A tensor that is only passed on must not leave as the one that came in: each has its own gradient.
            if any(tensor is other for other in received):
                tensor = tensor.clone()
            # The engine expects a gradient of every output, even if nothing so far is trained.
            outputs.append(tensor if tensor.requires_grad else tensor.requires_grad_())
        return tuple(outputs)

    def backward_maybe_with_nosync(self, backward_type: str, bwd_kwargs: Any, last_backward: bool = False) -> Any:
        if self._prepare_backward is not None:
            self._prepare_backward(last_backward)
        return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._record("receive", fwd_chunk_id, super().get_fwd_recv_ops(fwd_chunk_id))

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._record("receive", bwd_chunk_id, super().get_bwd_recv_ops(bwd_chunk_id))

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._record("send", fwd_chunk_id, super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._record("send", bwd_chunk_id, super().get_bwd_send_ops(bwd_chunk_id))

    def _record(self, phase: str, number: int, operations: list[dist.P2POp]) -> list[dist.P2POp]:
        """Record an exchange with another rank, which the schedule is about to begin."""
        if operations:
            self._step.activity.enter(phase, micro_batch=number, peer=operations[0].peer)
        return operations
