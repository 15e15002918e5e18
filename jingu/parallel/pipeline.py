"""A model cut into stages on the axis `pipeline`, run by the schedules of `torch.distributed.pipelining`.

Only hidden states travel (and of a mixture, the few numbers of its routers): every stage makes labels, masks and
positions from the batch, which all ranks of a pipeline know.

Shapes: B rows, T tokens, D width, E experts, L blocks before a stage, n losses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.tensor import DTensor

from jingu.data.batch import Batch
from jingu.model.decoder import Decoder, Passed, make_model
from jingu.model.experts import Routing
from jingu.model.spec import Experts, ModelSpec

SCHEDULES: dict[str, type] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
}
Loss = Callable[[Any, Batch], Any]
"""Summed losses [n] of a micro-batch by a model; or, by a stage that is not the last, what it passes on."""
Announce = Callable[[Decoder, bool], None]
"""Tells the engine of a stage whether the next backward pass is the last of its step."""


@dataclass(frozen=True)
class Layout:
    """Where the stages are."""

    parts: Sequence[range]
    """Blocks of each stage."""
    owners: Sequence[int]
    """Place of each stage's rank on the axis `pipeline`."""
    group: dist.ProcessGroup
    """The ranks of this pipeline, in their order."""
    schedule: str
    splits_backward: bool
    compute: torch.dtype
    """Dtype of the states that travel."""
    device: torch.device
    """Where they are."""
    token_ranks: int = 1
    """Ranks that share the tokens of a row."""

    @property
    def mine(self) -> list[int]:
        """Stages of this rank."""
        place = dist.get_group_rank(self.group, dist.get_rank())
        return [stage for stage, owner in enumerate(self.owners) if owner == place]

    def tokens_here(self, tokens: int) -> int:
        """Tokens of a row that a rank has, of rows that are filled up so that each has as many."""
        return -(-tokens // self.token_ranks)


class Pipeline(nn.Module):
    """The stages of this rank, as one model.

    Parameters have the names that they have in the whole model. A parameter that several stages use (the weight of
    a tied embedding and head) is one of the first such stage; the others hold a copy of it, whose gradient goes to
    the first (`collect_gradients`), and which follows when that has changed (`refresh_copies`).

    Args:
        stages: of this rank, in their order.
        announce: called before each backward pass of a stage, unless the schedule splits it.
    """

    def __init__(self, spec: ModelSpec, layout: Layout, stages: Sequence[Decoder], announce: Announce) -> None:
        super().__init__()
        self.spec = spec
        self.layout = layout
        self.stages = nn.ModuleList(stages)
        self._announce = announce
        self._users: dict[str, list[int]] = {}
        with torch.device("meta"):
            for number, part in enumerate(layout.parts):
                for name, _ in make_model(spec, part).named_parameters():
                    self._users.setdefault(name, []).append(number)
        self._schedules: dict[Any, tuple[Any, _Work]] = {}

    def named_parameters(self, *arguments: Any, **keywords: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters under their names in the whole model, without copies."""
        for number, stage in self._numbered():
            for name, parameter in stage.named_parameters(*arguments, **keywords):
                if self._users[name][0] == number:
                    yield name, parameter

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Of every parameter, copies included."""
        for stage in self.stages:
            stage.zero_grad(set_to_none)

    def _numbered(self) -> list[tuple[int, Decoder]]:
        return list(zip(self.layout.mine, self.stages, strict=True))  # type: ignore[arg-type]

    def _with_source(self, stage: int) -> bool:
        """Whether a stage is given an encoder's states beside those of the decoder."""
        encoders = self.spec.encoder_layers
        return encoders is not None and self.layout.parts[stage].start > encoders

    def _received(self, stage: int, rows: int, tokens: int, source: int) -> tuple[Tensor, ...]:
        """Tensors on meta such as the stage receives.

        Args:
            source: tokens that an encoder reads; 0: there is none, or a cache has what it made of them.
        """
        spec, layout, before = self.spec, self.layout, self.layout.parts[stage].start
        lengths = [tokens, source] if self._with_source(stage) else [source if spec.encoder_layers else tokens]
        shapes = [(rows, layout.tokens_here(length), spec.width) for length in lengths if length and stage]
        found = [torch.empty(shape, dtype=layout.compute, device="meta", requires_grad=True) for shape in shapes]
        if found and self.training and isinstance(spec.feed_forward, Experts):
            wide = torch.promote_types(layout.compute, torch.float32)
            shape = (before, rows, 2 * spec.feed_forward.number + 2)
            found.append(torch.empty(shape, dtype=wide, device="meta", requires_grad=True))
        return tuple(found)

    # Training

    def train_micro_batches(self, batches: Sequence[Batch], loss: Loss, weight_n: Tensor) -> Tensor:
        """Forward and backward of a step's micro-batches through all stages, as the schedule has it.

        Args:
            weight_n: how much each of the losses counts in what is differentiated.

        Returns:
            Sums of the losses [n], on every rank of the pipeline.
        """
        key = (len(batches), *_row_shape(batches[0]))
        if key not in self._schedules:
            self._schedules[key] = self._build_schedule(*key)
        schedule, work = self._schedules[key]
        work.begin(batches, loss, weight_n)
        numbers = torch.arange(len(batches))
        schedule.step(target=numbers, return_outputs=False, number=numbers)
        dist.all_reduce(work.total_n, group=self.layout.group)
        self.collect_gradients()
        return work.total_n

    def _build_schedule(self, micro_batches: int, rows: int, tokens: int, source: int) -> tuple[Any, _Work]:
        layout, work = self.layout, _Work()
        ends = [self._received(stage, rows, tokens, source) for stage in range(len(layout.parts))]
        ends.append((torch.empty(1, device="meta"),))
        stages = [
            _Stage(
                stage,
                work,
                self._with_source(number),
                None if layout.splits_backward else partial(self._announce, stage),
                stage_index=number,
                num_stages=len(layout.parts),
                device=layout.device,
                group=layout.group,
                input_args=ends[number],
                output_args=ends[number + 1],
            )
            for number, stage in self._numbered()
        ]
        single = layout.schedule in ("gpipe", "1f1b")
        made = SCHEDULES[layout.schedule](
            stages[0] if single else stages, micro_batches, loss_fn=work.weighted, scale_grads=False
        )
        return made, work

    def rehearse(self, batch: Batch, loss: Loss) -> None:
        """Forward and backward of each stage by itself, on states of zeros: nothing waits for another stage."""
        device = self.layout.device
        for number, stage in self._numbered():
            self._announce(stage, True)
            received = self._received(number, *_row_shape(batch))
            inputs = [torch.zeros_like(tensor, device=device).requires_grad_() for tensor in received]
            given = loss(_Given(stage, _unpack(inputs, self._with_source(number)) if inputs else None), batch)
            outputs = _pack(given) if isinstance(given, Passed) else (given,)
            outputs = tuple(output for output in outputs if output.requires_grad)
            torch.autograd.backward(outputs, [torch.zeros_like(output) for output in outputs])
        self.zero_grad()

    # Scoring and generation

    def forward(self, tokens_BT: Tensor, *arguments: Any, cache: Any = None, **keywords: Any) -> Tensor:
        """As `Decoder.forward`, through all stages, without gradients; every rank of the pipeline gets the result."""
        group, owners = self.layout.group, self.layout.owners
        place = dist.get_group_rank(group, dist.get_rank())
        source = keywords.get("source_BS")
        shapes = partial(
            self._received,
            rows=len(tokens_BT),
            tokens=tokens_BT.shape[1],
            source=0 if source is None else source.shape[1],
        )
        result: Any = None
        for number, stage in self._numbered():
            passed = result
            if number and owners[number - 1] != place:
                received = [torch.empty_like(tensor, device=tokens_BT.device) for tensor in shapes(number)]
                for tensor in received:
                    dist.recv(tensor, group=group, group_src=owners[number - 1])
                passed = _unpack(received, self._with_source(number)) if received else None
            result = stage(tokens_BT, *arguments, cache=cache, passed=passed, **keywords)
            if number + 1 < len(owners) and owners[number + 1] != place and result is not None:
                for tensor in _pack(result):
                    dist.send(tensor.contiguous(), group=group, group_dst=owners[number + 1])
        return self._from_last(result if isinstance(result, Tensor) else None, tokens_BT.device)

    def _from_last(self, result: Tensor | None, device: torch.device) -> Tensor:
        """The last stage's result, on every rank of the pipeline."""
        group, last = self.layout.group, self.layout.owners[-1]
        dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
        head = [0] * 8
        if result is not None:
            head = [dtypes.index(result.dtype), result.dim(), *result.shape, *head][:8]
        header = torch.tensor(head, device=device)
        dist.broadcast(header, group=group, group_src=last)
        dtype, dims, *sizes = header.tolist()
        if result is None:
            result = torch.empty(sizes[:dims], dtype=dtypes[dtype], device=device)
        result = result.contiguous()
        dist.broadcast(result, group=group, group_src=last)
        return result

    # Parameters of several stages

    def collect_gradients(self) -> None:
        """Move the gradients of copies to the parameters that they copy, and add them up there."""
        for original, copy, home, away in self._trained_copies():
            if original is not None and copy is not None:
                _local(original.grad).add_(_local(copy.grad))
            elif original is not None:
                gradient = torch.empty_like(_local(original.grad))
                dist.recv(gradient, group=self.layout.group, group_src=away)
                _local(original.grad).add_(gradient)
            elif copy is not None:
                dist.send(_local(copy.grad).contiguous(), group=self.layout.group, group_dst=home)
            if copy is not None:
                copy.grad = None

    @torch.no_grad()
    def refresh_copies(self) -> None:
        """Give copies the values of the parameters that they copy."""
        for original, copy, home, away in self._copies():
            if original is not None and copy is not None:
                _local(copy).copy_(_local(original))
            elif original is not None:
                dist.send(_local(original).contiguous(), group=self.layout.group, group_dst=away)
            elif copy is not None:
                values = torch.empty_like(_local(copy))
                dist.recv(values, group=self.layout.group, group_src=home)
                _local(copy).copy_(values)

    def _trained_copies(self) -> Iterator[tuple[nn.Parameter | None, nn.Parameter | None, int, int]]:
        return (found for found in self._copies() if all(held is None or held.requires_grad for held in found[:2]))

    def _copies(self) -> Iterator[tuple[nn.Parameter | None, nn.Parameter | None, int, int]]:
        """A parameter, a copy of it (None where another rank has it), and the places of the two."""
        held = {number: dict(stage.named_parameters()) for number, stage in self._numbered()}
        owners = self.layout.owners
        for name, (first, *others) in self._users.items():
            for other in others:
                yield held.get(first, {}).get(name), held.get(other, {}).get(name), owners[first], owners[other]


Model = Decoder | Pipeline
"""What is trained: a model, or this rank's stages of one."""


class _Work:
    """What a schedule is busy with: it hands only tensors to its stages, so that they look the rest up here."""

    def begin(self, batches: Sequence[Batch], loss: Loss, weight_n: Tensor) -> None:
        self.batches, self.loss, self.weight_n = batches, loss, weight_n
        self.total_n = torch.zeros_like(weight_n)

    def weighted(self, losses_n: Tensor, number: Tensor) -> Tensor:
        """What is differentiated of a micro-batch."""
        self.total_n += losses_n.detach()
        return losses_n @ self.weight_n.to(losses_n.dtype)


@dataclass(frozen=True)
class _Given:
    """A stage together with what it has received, to be called as a whole model is."""

    stage: Decoder
    passed: Passed | None

    @property
    def spec(self) -> ModelSpec:
        return self.stage.spec

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self.stage(*arguments, passed=self.passed, **keywords)


class _Stage(PipelineStage):
    """A stage as the engine drives it.

    Where backward passes are whole, ZeRO's hooks gather parameters and reduce gradients as without a pipeline; the
    engine, which would do it for the whole stage at once, sees a plain container in the place of the model.

    Args:
        announce: as of `Pipeline`; None where the backward pass is split, which only the engine's own way serves.
    """

    def __init__(
        self,
        model: Decoder,
        work: _Work,
        with_source: bool,
        announce: Callable[[bool], None] | None,
        **arguments: Any,
    ) -> None:
        super().__init__(model if announce is None else nn.ModuleList([model]), **arguments)
        self._model = model
        self._work = work
        self._with_source = with_source
        self._announce = announce

    def forward_maybe_with_nosync(self, *received: Tensor, number: Tensor) -> Any:
        given = _Given(self._model, _unpack(received, self._with_source) if received else None)
        found = self._work.loss(given, self._work.batches[int(number)])
        if not isinstance(found, Passed):
            return found.view(-1)
        # What is only passed on must not come out as the tensor that came in, whose gradient has a place of its own.
        sent = [tensor.clone() if any(tensor is it for it in received) else tensor for tensor in _pack(found)]
        # Where nothing so far is trained, the engine wants a gradient of it all the same.
        return tuple(tensor if tensor.requires_grad else tensor.requires_grad_() for tensor in sent)

    def backward_maybe_with_nosync(self, backward_type: str, bwd_kwargs: Any, last_backward: bool = False) -> Any:
        if self._announce is not None:
            self._announce(last_backward)
        return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)


def _pack(passed: Passed) -> tuple[Tensor, ...]:
    """As the tensors that travel: the states; an encoder's; and of a mixture [L, B, 2E + 2]."""
    tensors = [passed.states, *([] if passed.encoded is None else [passed.encoded])]
    routings = [
        torch.cat([it.load, it.probability, it.z.unsqueeze(1), it.dropped.unsqueeze(1)], 1) for it in passed.routings
    ]
    return (*tensors, torch.stack(routings)) if routings else tuple(tensors)


def _unpack(tensors: Sequence[Tensor], with_source: bool) -> Passed:
    states, *others = tensors
    encoded = others.pop(0) if with_source and others else None
    routings = []
    for routing in others[0] if others else ():
        experts = (routing.shape[1] - 2) // 2
        load, probability, z, dropped = routing.split([experts, experts, 1, 1], 1)
        routings.append(Routing(load, probability, z.squeeze(1), dropped.squeeze(1)))
    return Passed(states, routings, encoded)


def _row_shape(batch: Batch) -> tuple[int, int, int]:
    """Rows, tokens a row, and tokens that an encoder reads."""
    return *batch.tokens.shape, 0 if batch.source is None else batch.source.tokens.shape[1]


def _local(tensor: Any) -> Tensor:
    found: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return found
