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
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from jingu.config.sections.parallel import ParallelSettings
from jingu.data.batch import Batch
from jingu.model.decoder import Decoder, Passed, make_model
from jingu.model.experts import Routing
from jingu.model.spec import Experts, ModelSpec
from jingu.parallel.sharing import local
from jingu.parallel.stages import SPLIT_BACKWARD, divide_blocks, rank_of_stage

_NAMES = {"interleaved": "Interleaved1F1B", "zero_bubble": "InterleavedZeroBubble", "zbv": "ZBVZeroBubble"}
SCHEDULES = {name: get_schedule_class(_NAMES.get(name, name)) for name in ("gpipe", "1f1b", *_NAMES)}
Loss = Callable[[Any, Batch], Any]
"""Summed losses [n] of a micro-batch by a model; or, by a stage that is not the last, what it passes on."""
Announce = Callable[[Decoder, bool], None]
"""Tells the engine of a stage whether the next backward pass is the last of its step."""


class Pipeline(nn.Module):
    """The stages of this rank, as one model.

    Parameters have the names that they have in the whole model. A parameter that several stages use (the weight of
    a tied embedding and head) is one of the first such stage; the others hold a copy of it, whose gradient goes to
    the first (`collect_gradients`), and which follows when that has changed (`refresh_copies`).

    Args:
        compute: dtype of the states that travel.
        masters: that of the weights, which are on the meta device.
        announce: called before each backward pass of a stage, unless the schedule splits it.
    """

    def __init__(
        self,
        spec: ModelSpec,
        mesh: DeviceMesh,
        settings: ParallelSettings,
        compute: torch.dtype,
        masters: torch.dtype,
        announce: Announce,
        prepare: Callable[[Decoder], object],
    ) -> None:
        super().__init__()
        ranks, self.place = mesh["pipeline"].size(), mesh.get_local_rank("pipeline")
        self.spec, self.compute, self.device = spec, compute, torch.device(mesh.device_type)
        self.group = mesh.get_group("pipeline")
        self.schedule = settings.schedule
        self._announce = announce
        # Ranks that share the tokens of a row.
        self._token_ranks = mesh["context"].size() * mesh["tensor"].size()
        # The blocks of each stage, and the place of its rank on the axis.
        self.parts = divide_blocks(settings, ranks, spec)
        self.owners = [rank_of_stage(settings, ranks, stage) for stage in range(len(self.parts))]
        self.mine = [stage for stage, owner in enumerate(self.owners) if owner == self.place]
        self._users: dict[str, list[int]] = {}
        with torch.device("meta"):
            every = [make_model(spec, part) for part in self.parts]
        for number, stage in enumerate(every):
            prepare(stage)
            for name, _ in stage.named_parameters():
                self._users.setdefault(name, []).append(number)
        self.stages = nn.ModuleList(every[number].to(masters) for number in self.mine)
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
        return list(zip(self.mine, self.stages, strict=True))  # type: ignore[arg-type]

    def _with_source(self, stage: int) -> bool:
        """Whether a stage is given an encoder's states beside those of the decoder."""
        encoders = self.spec.encoder_layers
        return encoders is not None and self.parts[stage].start > encoders

    def _received(self, stage: int, rows: int, tokens: int, source: int) -> tuple[Tensor, ...]:
        """Tensors on meta such as the stage receives.

        Args:
            source: tokens that an encoder reads; 0: there is none, or a cache has what it made of them.
        """
        spec, before = self.spec, self.parts[stage].start
        lengths = [tokens, source] if self._with_source(stage) else [source if spec.encoder_layers else tokens]
        # Rows are filled up so that each rank has as many of their tokens.
        shapes = [(rows, -(-length // self._token_ranks), spec.width) for length in lengths if length and stage]
        found = [torch.empty(shape, dtype=self.compute, device="meta", requires_grad=True) for shape in shapes]
        if found and self.training and isinstance(spec.feed_forward, Experts):
            wide = torch.promote_types(self.compute, torch.float32)
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
        dist.all_reduce(work.total_n, group=self.group)
        self.collect_gradients()
        return work.total_n

    def _build_schedule(self, micro_batches: int, rows: int, tokens: int, source: int) -> tuple[Any, _Work]:
        work, splits = _Work(), self.schedule in SPLIT_BACKWARD
        ends = [self._received(stage, rows, tokens, source) for stage in range(len(self.parts))]
        ends.append((torch.empty(1, device="meta"),))
        stages = [
            _Stage(
                stage,
                work,
                self._with_source(number),
                None if splits else partial(self._announce, stage),
                stage_index=number,
                num_stages=len(self.parts),
                device=self.device,
                group=self.group,
                input_args=ends[number],
                output_args=ends[number + 1],
            )
            for number, stage in self._numbered()
        ]
        given = stages[0] if self.schedule in ("gpipe", "1f1b") else stages
        made = SCHEDULES[self.schedule](given, micro_batches, loss_fn=work.weighted, scale_grads=False)
        return made, work

    def rehearse(self, batch: Batch, loss: Loss) -> None:
        """Forward and backward of each stage by itself, on states of zeros: nothing waits for another stage."""
        for number, stage in self._numbered():
            self._announce(stage, True)
            received = self._received(number, *_row_shape(batch))
            inputs = [torch.zeros_like(tensor, device=self.device).requires_grad_() for tensor in received]
            given = loss(_Given(stage, _unpack(inputs, self._with_source(number)) if inputs else None), batch)
            outputs = _pack(given) if isinstance(given, Passed) else (given,)
            outputs = tuple(output for output in outputs if output.requires_grad)
            torch.autograd.backward(outputs, [torch.zeros_like(output) for output in outputs])
        self.zero_grad()

    # Scoring and generation

    def forward(self, tokens_BT: Tensor, *arguments: Any, cache: Any = None, **keywords: Any) -> Tensor:
        """As `Decoder.forward`, through all stages, without gradients; every rank of the pipeline gets the result."""
        group, owners, place = self.group, self.owners, self.place
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
        group, last = self.group, self.owners[-1]
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
        for original, copy, home, away in self._copies():
            if all(held is None or held.requires_grad for held in (original, copy)):
                theirs, own = (None if held is None else held.grad for held in (copy, original))
                gradient = self._carried(theirs, own, away, home)
                if gradient is not None and own is not None:
                    local(own).add_(gradient)
                if copy is not None:
                    copy.grad = None

    @torch.no_grad()
    def refresh_copies(self) -> None:
        """Give copies the values of the parameters that they copy."""
        for original, copy, home, away in self._copies():
            values = self._carried(original, copy, home, away)
            if values is not None and copy is not None:
                local(copy).copy_(values)

    def _carried(self, sent: Tensor | None, like: Tensor | None, source: int, target: int) -> Tensor | None:
        """What the rank at place `source` has, at the place `target`; None elsewhere."""
        if sent is not None and like is not None:
            return local(sent)
        if sent is not None:
            dist.send(local(sent).contiguous().view(torch.uint8), group=self.group, group_dst=target)
        elif like is not None:
            received = torch.empty_like(local(like))
            dist.recv(received.view(torch.uint8), group=self.group, group_src=source)
            return received
        return None

    def _copies(self) -> Iterator[tuple[nn.Parameter | None, nn.Parameter | None, int, int]]:
        """A parameter, a copy of it (None where another rank has it), and the places of the two."""
        held = {number: dict(stage.named_parameters()) for number, stage in self._numbered()}
        owners = self.owners
        for name, (first, *others) in self._users.items():
            for other in others:
                yield held.get(first, {}).get(name), held.get(other, {}).get(name), owners[first], owners[other]


Model = Decoder | Pipeline
"""What is trained: a model, or this rank's stages of one."""


def stages_of(model: nn.Module) -> list[Decoder]:
    """What a rank has of a model: its stages, or the model itself."""
    found: Any = model.stages if isinstance(model, Pipeline) else [model]
    return list(found)


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
