"""This rank's part of a model: the stages of a pipeline, used as one model.

The blocks of a model are divided over the ranks of the axis `pipeline`; each rank holds one or more stages. Without
pipeline parallelism the axis has one rank, which holds the whole model as its only stage. With several stages, the
schedules of `torch.distributed.pipelining` run them. Stages exchange only hidden states and, with a mixture of experts,
the statistics of the routers. Labels, masks and positions are not sent: every rank of a pipeline has the batch, and
each stage computes them from it.

Shapes: B rows, T tokens, D hidden size, E experts, L blocks before a stage, n losses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from jingu.data.batch import Batch
from jingu.model.decoder import AuxiliaryLoss, Decoder, FurtherLoss, LossFunction, StageOutput, build_model
from jingu.model.experts import routing_terms
from jingu.model.feed_forward_specs import Experts
from jingu.model.inputs import Inputs
from jingu.model.layers import widen_vectors
from jingu.model.spec import ModelSpec
from jingu.parallel.layout import Layout, Precision
from jingu.parallel.mesh import expert_size, fsdp_mesh
from jingu.parallel.sharding import ShardingPlan, local_tensor, plan_sharding
from jingu.parallel.stage_tensors import Loss, StageModel, pack, unpack
from jingu.parallel.stages import SPLIT_BACKWARD_SCHEDULES, check_quantization_groups, rank_of_stage, split_blocks
from jingu.parallel.zero import prepare_backward
from jingu.watch.activity import Activity


class ParallelModel(nn.Module):
    """This rank's stages of a model, used as one model by training, evaluation and generation.

    Parameters keep their names in the whole model. If several stages use a parameter (the weight of a tied embedding
    and head), the first of these stages owns it, and the others hold a copy. After the backward pass, the gradient of
    a copy is added to the owner's gradient; after each update, `synchronize_tied_weights` refreshes the copies.

    Attributes:
        spec: the spec of the whole model.
        ranges: the block numbers of every stage; in an encoder-decoder, the encoder's blocks are numbered first.
        owners: for every stage, its rank on the axis `pipeline`.
        rank: this process's rank on the axis `pipeline`.
        mesh: the device mesh; None if this process has the whole model and there is no process group.
        activity: records the current operation of this rank for the watchdog.
        router_terms: the terms of the loss that routers add, with their weights; see `routing_terms`.
        uses_fsdp: whether FSDP manages the parameters of the stages.

    Args:
        prepare: changes each stage on the meta device before the stage is sharded.
    """

    def __init__(
        self,
        spec: ModelSpec,
        mesh: DeviceMesh | None,
        layout: Layout,
        precision: Precision,
        prepare: Callable[[Decoder], object] = lambda stage: None,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.mesh = mesh
        self.activity = Activity()
        self.router_terms = routing_terms(spec)
        self.uses_fsdp = False
        self._device = torch.device("cpu" if mesh is None else mesh.device_type)
        self._settings = layout.parallel
        self._compute = precision.compute
        self._schedules: dict[Any, tuple[Any, Any, list[Any]]] = {}
        # Divide the blocks. A mesh without a pipeline has one stage, whatever the schedule.
        ranks = 1 if mesh is None else mesh["pipeline"].size()
        self.rank = 0 if mesh is None else mesh.get_local_rank("pipeline")
        self._group = None if mesh is None else mesh.get_group("pipeline")
        # The number of ranks that share the tokens of a row.
        self._token_ranks = 1 if mesh is None else mesh["context"].size() * mesh["tensor"].size()
        self.ranges = [range((spec.num_encoder_layers or 0) + spec.num_layers)]
        self.owners = [0]
        if ranks > 1:
            self.ranges = split_blocks(self._settings, ranks, spec)
            self.owners = [rank_of_stage(self._settings, ranks, stage) for stage in range(len(self.ranges))]
        # Every rank builds all stages on the meta device, to find the parameters that several stages use.
        stages = []
        for blocks in self.ranges:
            with torch.device("meta"):
                stage = build_model(spec, blocks)
            prepare(stage)
            stages.append(stage.to(precision.masters))
            widen_vectors(stage)
        if mesh is not None:
            # Ranks of `tensor` must not divide a group of weights that are quantized together.
            for stage in stages:
                check_quantization_groups(stage, mesh["tensor"].size())
        # For each parameter, the stages that use it; the first one owns it.
        self._users: dict[str, list[int]] = {}
        for number, stage in enumerate(stages):
            for name, _ in stage.named_parameters():
                self._users.setdefault(name, []).append(number)
        self._plan: ShardingPlan | None = None
        if mesh is not None:
            expert_ranks = expert_size(self._settings, fsdp_mesh(mesh).size(), spec)
            self._plan = plan_sharding(stages, mesh, spec, expert_ranks)
        self._stage_numbers = [number for number, owner in enumerate(self.owners) if owner == self.rank]
        self._stages = nn.ModuleList(stages[number] for number in self._stage_numbers)

    @property
    def stages(self) -> list[Decoder]:
        """This rank's stages; each is a `Decoder`."""
        return [cast(Decoder, stage) for stage in self._stages]

    @property
    def sharding(self) -> ShardingPlan:
        """How the parameters are divided over the mesh. Raises ValueError without a mesh."""
        if self._plan is None:
            raise ValueError("a model that was built without a mesh is not divided")
        return self._plan

    @property
    def is_whole(self) -> bool:
        """Whether this rank has a part of every parameter, rather than some stages of a pipeline."""
        return len(self.ranges) == 1

    def named_parameters(self, *arguments: Any, **keywords: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this rank's parameters with their names in the whole model, without copies of tied weights."""
        for number, stage in self._numbered_stages():
            for name, parameter in stage.named_parameters(*arguments, **keywords):
                # A name that `_users` does not have was added after construction, such as a LoRA adapter's.
                if self._users.get(name, [number])[0] == number:
                    yield name, parameter

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of all parameters, including copies of tied weights."""
        for stage in self.stages:
            stage.zero_grad(set_to_none)

    def _numbered_stages(self) -> list[tuple[int, Decoder]]:
        return list(zip(self._stage_numbers, self.stages, strict=True))

    # Training

    def train_micro_batches(self, batches: Sequence[Batch], loss: Loss, weight_n: Tensor) -> Tensor:
        """Run the forward and backward passes of all micro-batches of a step.

        Args:
            batches: the micro-batches of this rank.
            loss: computes the losses [n] of a micro-batch.
            weight_n: the weights [n] with which the losses are summed before the backward pass.

        Returns:
            The losses [n], unweighted and summed over the micro-batches, on every rank of the pipeline.
        """
        if len(self.ranges) > 1:
            return self._run_schedule(batches, loss, weight_n)
        (stage,) = self.stages
        total_n = torch.zeros_like(weight_n)
        for number, batch in enumerate(batches, start=1):
            self.activity.enter("micro-batch", micro_batch=number - 1)
            self._prepare_backward(stage, last=number == len(batches))
            losses_n = loss(self, batch).view(-1)
            (losses_n @ weight_n.to(losses_n.dtype)).backward()
            total_n += losses_n.detach()
        return total_n

    def dry_run(self, batch: Batch, loss: Loss) -> None:
        """Run a forward and a backward pass of each stage alone, with zeros as the hidden states that it receives.

        No stage waits for another one. This compiles the blocks, and fails early if a micro-batch does not fit into
        memory. Gradients are reset afterward.
        """
        for number, stage in self._numbered_stages():
            self._prepare_backward(stage, last=True)
            zeros = self._received_tensors(number, *_row_shape(batch))
            inputs = [torch.zeros_like(tensor, device=self._device).requires_grad_() for tensor in zeros]
            stage_model = StageModel(stage, unpack(inputs, self._receives_encoder_states(number)) if inputs else None)
            result = loss(stage_model, batch)
            outputs = pack(result) if isinstance(result, StageOutput) else (result,)
            outputs = tuple(output for output in outputs if output.requires_grad)
            torch.autograd.backward(outputs, [torch.zeros_like(output) for output in outputs])
        self.zero_grad()

    def _prepare_backward(self, stage: nn.Module, last: bool) -> None:
        if self.uses_fsdp:
            prepare_backward(cast(Any, stage), self._settings.zero_stage, last=last)

    def _run_schedule(self, batches: Sequence[Batch], loss: Loss, weight_n: Tensor) -> Tensor:
        """Run the micro-batches through the stages of all ranks, in the order of the pipeline schedule."""
        key = (len(batches), *_row_shape(batches[0]))
        if key not in self._schedules:
            self._schedules[key] = self._build_schedule(*key)
        schedule, step, _ = self._schedules[key]
        step.begin(batches, loss, weight_n)
        # The schedule passes only tensors to a stage: here the number of a micro-batch, with which the stage finds it.
        numbers = torch.arange(len(batches))
        schedule.step(target=numbers, return_outputs=False, number=numbers)
        dist.all_reduce(step.total_n, group=self._group)
        self._align_gradients()
        self._collect_tied_gradients()
        return step.total_n

    def _align_gradients(self) -> None:
        """Give gradients the memory layout of their parameters, as one backward pass does and split ones do not.

        A matrix that is used transposed would have a transposed gradient, which fused optimizers read in the wrong
        order.
        """
        for parameter in (parameter for stage in self.stages for parameter in stage.parameters()):
            gradient = parameter.grad
            if gradient is not None and gradient.stride() != parameter.stride():
                parameter.grad = torch.empty_like(parameter).copy_(gradient)

    def _build_schedule(self, micro_batches: int, rows: int, tokens: int, source: int) -> tuple[Any, Any, list[Any]]:
        """Return PyTorch's schedule for micro-batches of this shape, what its stages read, and the stages."""
        # PyTorch's schedules are slow to import.
        from jingu.parallel.scheduled_stage import SCHEDULES, PipelineStep, ScheduledStage

        step = PipelineStep(self.activity)
        name = self._settings.pipeline_schedule
        # The tensors that each stage receives, then the output of the last stage (a loss).
        boundaries = [self._received_tensors(stage, rows, tokens, source) for stage in range(len(self.ranges))]
        boundaries.append((torch.empty(1, device="meta"),))
        stages = [
            ScheduledStage(
                stage,
                step,
                self._receives_encoder_states(number),
                None if name in SPLIT_BACKWARD_SCHEDULES else partial(self._prepare_backward, stage),
                stage_index=number,
                num_stages=len(self.ranges),
                device=self._device,
                group=self._group,
                input_args=boundaries[number],
                output_args=boundaries[number + 1],
            )
            for number, stage in self._numbered_stages()
        ]
        # Schedules with one stage per rank take the stage, the others a list.
        argument = stages[0] if name in ("gpipe", "1f1b") else stages
        schedule = SCHEDULES[name](argument, micro_batches, loss_fn=step.weighted_loss, scale_grads=False)
        return schedule, step, stages

    # Tensors that stages exchange

    def receive_buffers(self) -> list[Tensor]:
        """Return the tensors into which stages receive. They exist as long as the schedules, also between steps."""
        stages = (stage for *_, stages in self._schedules.values() for stage in stages)
        return [buffer for stage in stages for buffer in stage.receive_buffers()]

    def _receives_encoder_states(self, stage: int) -> bool:
        """Return whether a stage receives the encoder's hidden states in addition to the decoder's."""
        encoder_layers = self.spec.num_encoder_layers
        return encoder_layers is not None and self.ranges[stage].start > encoder_layers

    def _received_tensors(self, stage: int, rows: int, tokens: int, source: int) -> tuple[Tensor, ...]:
        """Return meta tensors with the shapes and dtypes of the tensors that a stage receives from the one before.

        Args:
            stage: number of the stage; stage 0 receives nothing.
            rows: rows of a micro-batch.
            tokens: tokens per row.
            source: tokens per row that the encoder reads; 0 without an encoder, or if the KV cache already holds the
                keys and values of its hidden states.
        """
        spec = self.spec
        if not stage:
            return ()
        lengths = [source if spec.num_encoder_layers else tokens]
        if self._receives_encoder_states(stage):
            lengths = [tokens, source]
        # Rows are padded, so that every rank has the same number of tokens.
        shapes = [(rows, -(-length // self._token_ranks), spec.hidden_size) for length in lengths if length]
        meta = partial(torch.empty, device="meta", requires_grad=True)
        tensors = [meta(shape, dtype=self._compute) for shape in shapes]
        # Statistics of the routers of all earlier blocks, in fp32 or wider.
        layers = (spec.default_layer,) * (spec.num_encoder_layers or 0) + spec.layers
        routers = sum(isinstance(layer.feed_forward, Experts) for layer in layers[: self.ranges[stage].start])
        if tensors and self.training and spec.experts is not None and routers:
            shape = (routers, rows, 2 * spec.experts.num_experts + 2)
            tensors.append(meta(shape, dtype=torch.promote_types(self._compute, torch.float32)))
        return tuple(tensors)

    # Evaluation and generation

    def forward(
        self,
        inputs: Inputs | Tensor,
        loss: LossFunction | None = None,
        auxiliary: AuxiliaryLoss | None = None,
        further: FurtherLoss | None = None,
    ) -> Any:
        """Compute `Decoder.forward` through all stages; every rank of the pipeline returns the result.

        With several stages, no gradient flows between them: use `train_micro_batches` to train.
        """
        if len(self.ranges) == 1:
            return self._stages[0](inputs, loss, auxiliary, further=further)
        group, owners = self._group, self.owners
        if isinstance(inputs, Tensor):
            inputs = Inputs(inputs)
        device = inputs.tokens.device
        result: Any = None
        for number, stage in self._numbered_stages():
            # The output of the stage before: already here if this rank has that stage, else received.
            stage_input = result
            if number and owners[number - 1] != self.rank:
                shapes = self._received_tensors(number, *_row_shape(inputs))
                tensors = [torch.empty_like(tensor, device=device) for tensor in shapes]
                for tensor in tensors:
                    dist.recv(tensor, group=group, group_src=owners[number - 1])
                stage_input = unpack(tensors, self._receives_encoder_states(number)) if tensors else None
            result = stage(inputs, loss, auxiliary, stage_input)
            if number + 1 < len(owners) and owners[number + 1] != self.rank and result is not None:
                for tensor in pack(result):
                    dist.send(tensor.contiguous(), group=group, group_dst=owners[number + 1])
        return self._broadcast_from_last(result if isinstance(result, Tensor) else None, device)

    def _broadcast_from_last(self, result: Tensor | None, device: torch.device) -> Tensor:
        """Return the last stage's result on every rank of the pipeline.

        The other ranks do not know its dtype and shape, so a header [8] comes first: index of the dtype, number of
        dims, sizes.
        """
        group, last = self._group, self.owners[-1]
        dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
        header = torch.zeros(8, dtype=torch.int64, device=device)
        if result is not None:
            fields = [dtypes.index(result.dtype), result.dim(), *result.shape]
            header[: len(fields)] = torch.tensor(fields, device=device)
        dist.broadcast(header, group=group, group_src=last)
        dtype, dims, *sizes = header.tolist()
        if result is None:
            result = torch.empty(sizes[:dims], dtype=dtypes[dtype], device=device)
        result = result.contiguous()
        dist.broadcast(result, group=group, group_src=last)
        return result

    # Parameters of several stages

    def _collect_tied_gradients(self) -> None:
        """Add the gradient of each copy to that of its original, and clear the copy's."""
        for original, copy, owner, copy_owner in self._tied_weights():
            # A frozen parameter has no gradient on any rank.
            if any(parameter is not None and not parameter.requires_grad for parameter in (original, copy)):
                continue
            copy_gradient = None if copy is None else copy.grad
            own_gradient = None if original is None else original.grad
            gradient = self._transfer(copy_gradient, own_gradient, copy_owner, owner)
            if gradient is not None and own_gradient is not None:
                local_tensor(own_gradient).add_(gradient)
            if copy is not None:
                copy.grad = None

    @torch.no_grad()
    def synchronize_tied_weights(self) -> None:
        """Copy tied weights from their owner to their copies. Call it after each update and after loading weights."""
        for original, copy, owner, copy_owner in self._tied_weights():
            values = self._transfer(original, copy, owner, copy_owner)
            if values is not None and copy is not None:
                local_tensor(copy).copy_(values)

    def _transfer(self, outgoing: Tensor | None, like: Tensor | None, source: int, target: int) -> Tensor | None:
        """Send this rank's part of a tensor from rank `source` to rank `target`; return it there, None elsewhere.

        Ranks are those of the axis `pipeline`. If one rank has both tensors, nothing is sent.

        Args:
            outgoing: the tensor on the source; None on other ranks.
            like: a tensor with the same shape and dtype on the target; None on other ranks.
        """
        if outgoing is not None and like is not None:
            return local_tensor(outgoing)
        # Send bytes, because gloo does not support every dtype.
        if outgoing is not None:
            dist.send(local_tensor(outgoing).contiguous().view(torch.uint8), group=self._group, group_dst=target)
        elif like is not None:
            incoming = torch.empty_like(local_tensor(like))
            dist.recv(incoming.view(torch.uint8), group=self._group, group_src=source)
            return incoming
        return None

    def _tied_weights(self) -> Iterator[tuple[nn.Parameter | None, nn.Parameter | None, int, int]]:
        """Yield (original, copy, rank of the original, rank of the copy) for each copy of a tied parameter.

        A tensor that is on another rank is None. All ranks yield the same pairs in the same order, so that sends and
        receives match.
        """
        parameters = {number: dict(stage.named_parameters()) for number, stage in self._numbered_stages()}
        for name, (first, *users) in self._users.items():
            for user in users:
                original = parameters.get(first, {}).get(name)
                copy = parameters.get(user, {}).get(name)
                yield original, copy, self.owners[first], self.owners[user]


def _row_shape(batch: Batch | Inputs) -> tuple[int, int, int]:
    """Return the number of rows, the tokens per row, and the tokens per row that the encoder reads (0: no encoder)."""
    source = 0 if batch.source is None else batch.source.tokens.shape[1]
    return batch.tokens.shape[0], batch.tokens.shape[1], source


# A model for generation: a whole model, or this rank's part of one. Both have `spec` and `stages`.
Model = Decoder | ParallelModel
