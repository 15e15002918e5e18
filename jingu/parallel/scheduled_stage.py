"""Adapt the stages of a pipeline to the schedules of `torch.distributed.pipelining`."""

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
from jingu.parallel.stage_tensors import Loss, StageModel, pack, unpack
from jingu.watch.activity import Activity

_CLASS_NAMES = {"interleaved": "Interleaved1F1B", "zero_bubble": "InterleavedZeroBubble", "zbv": "ZBVZeroBubble"}
SCHEDULES = {name: get_schedule_class(_CLASS_NAMES.get(name, name)) for name in ("gpipe", "1f1b", *_CLASS_NAMES)}


class PipelineStep:
    """The micro-batches and the loss function of the current step.

    A schedule can pass only tensors to its stages, so stages and the schedule's loss function read the rest here.

    Attributes:
        activity: records the current operation for the watchdog.
        batches: the micro-batches.
        loss: computes the losses [n] of a micro-batch.
        weight_n: the weights of the losses in the sum that is differentiated.
        total_n: the losses of the step so far; zeros on ranks without the last stage.
    """

    def __init__(self, activity: Activity) -> None:
        self.activity = activity

    def begin(self, batches: Sequence[Batch], loss: Loss, weight_n: Tensor) -> None:
        self.batches = batches
        self.loss = loss
        self.weight_n = weight_n
        self.total_n = torch.zeros_like(weight_n)

    def weighted_loss(self, losses_n: Tensor, number: Tensor) -> Tensor:
        """Return the weighted sum of a micro-batch's losses, and add the losses to `total_n`."""
        self.total_n += losses_n.detach()
        return losses_n @ self.weight_n.to(losses_n.dtype)


class ScheduledStage(PipelineStage):
    """A stage that a schedule can run.

    If backward passes are not split, FSDP's hooks gather parameters and reduce gradients block by block, as without a
    pipeline. PyTorch's `PipelineStage` would do that for the whole stage at once if its module were an FSDP module; so
    the module that it receives is a plain container around the model. With a schedule that splits backward passes, only
    PyTorch's own handling works, and it receives the model itself.

    Args:
        model: the stage.
        step: the current step, shared by all stages of this rank.
        receives_encoder_states: whether the second tensor that the stage receives is the encoder's hidden states.
        prepare_backward: called before each backward pass with whether it is the last of the step; None if the
            schedule splits backward passes.
        arguments: keywords of `PipelineStage`.
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

    def forward_maybe_with_nosync(self, *input_tensors: Tensor, number: Tensor) -> Any:
        """Run the forward pass of micro-batch `number`; return the losses [n] in the last stage, else a tuple to send.

        The schedule calls this, and passes the tensors that the stage has received.
        """
        self._step.activity.enter("micro-batch", micro_batch=int(number))
        inputs = unpack(input_tensors, self._receives_encoder_states) if input_tensors else None
        result = self._step.loss(StageModel(self._model, inputs), self._step.batches[int(number)])
        if not isinstance(result, StageOutput):
            return result.view(-1)
        outputs = []
        for tensor in pack(result):
            # Clone a tensor that is only passed on: input and output need gradients of their own.
            if any(tensor is input_tensor for input_tensor in input_tensors):
                tensor = tensor.clone()
            # PyTorch expects a gradient for every output, even if no earlier parameter is trained.
            outputs.append(tensor if tensor.requires_grad else tensor.requires_grad_())
        return tuple(outputs)

    def backward_maybe_with_nosync(self, backward_type: str, bwd_kwargs: Any, last_backward: bool = False) -> Any:
        """Run a backward pass. The schedule calls this."""
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

    def receive_buffers(self) -> list[Tensor]:
        """Return the tensors into which the stage receives hidden states and gradients of all micro-batches."""
        # What the first stage gets are arguments. Before PyTorch 2.13, these have no buffer.
        hidden_states = () if self.is_first else self.args_recv_info.values()
        infos = (*hidden_states, *self.grad_recv_info.values())
        buffers = (entry.buffer for entries in infos for entry in entries)
        return [buffer for buffer in buffers if buffer is not None]

    def _record(self, phase: str, number: int, operations: list[dist.P2POp]) -> list[dist.P2POp]:
        """Record an exchange with another rank that the schedule is about to start; return the operations unchanged."""
        if operations:
            self._step.activity.enter(phase, micro_batch=number, peer=operations[0].peer)
        return operations
