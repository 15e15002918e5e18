"""What travels between pipeline stages: a stage's part of the model, and its output as plain tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from jingu.data.batch import Batch
from jingu.model.decoder import AuxiliaryLoss, Decoder, FurtherLoss, LossFunction, StageOutput
from jingu.model.experts import RoutingStats
from jingu.model.inputs import Inputs
from jingu.model.spec import ModelSpec

# Called with a model (or stage) and a micro-batch. Returns the losses [n], each summed over the micro-batch; for a
# stage that is not the last, the stage's output.
Loss = Callable[[Any, Batch], Any]


@dataclass(frozen=True)
class StageModel:
    """A stage and the tensors that it has received, with the call signature of a whole model.

    Attributes:
        received: the output of the stage before; None for the first stage.
    """

    stage: Decoder
    received: StageOutput | None

    @property
    def spec(self) -> ModelSpec:
        return self.stage.spec

    @property
    def stages(self) -> list[Decoder]:
        return [self.stage]

    def __call__(
        self,
        inputs: Inputs,
        loss: LossFunction | None = None,
        auxiliary: AuxiliaryLoss | None = None,
        further: FurtherLoss | None = None,
    ) -> Any:
        return self.stage(inputs, loss, auxiliary, self.received, further)


def pack(output: StageOutput) -> tuple[Tensor, ...]:
    """Return a stage's output as tensors to send: hidden states, encoder states, routing statistics [L, B, 2E + 2].

    The last two are left out if the output has none.
    """
    tensors = [output.states]
    if output.encoder_states is not None:
        tensors.append(output.encoder_states)
    if output.routings:
        rows = [
            torch.cat([stats.load, stats.probability, stats.z.unsqueeze(1), stats.dropped.unsqueeze(1)], 1)
            for stats in output.routings
        ]
        tensors.append(torch.stack(rows))
    return tuple(tensors)


def unpack(tensors: Sequence[Tensor], with_encoder_states: bool) -> StageOutput:
    """Return the stage's output whose tensors `pack` has returned: the inverse of `pack`."""
    states, *tensor_list = tensors
    encoder_states = tensor_list.pop(0) if with_encoder_states and tensor_list else None
    routings = []
    for row in tensor_list[0] if tensor_list else ():
        experts = (row.shape[1] - 2) // 2
        load, probability, z, overflow = row.split([experts, experts, 1, 1], 1)
        routings.append(RoutingStats(load, probability, z.squeeze(1), overflow.squeeze(1)))
    return StageOutput(states, routings, encoder_states)
