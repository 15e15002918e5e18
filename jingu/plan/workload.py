"""Workloads: the sizes of a model's parts, and the step of a run that estimates of memory and time are made for.

The sizes come from the table of the model's parameters. Models with adapters have no such table: one block of each kind
is built on the meta device, and its sharding table says how its parameters are sharded.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from math import prod
from typing import Any, Literal, NamedTuple

from jingu.config.sections.optimizers import AdamWSettings, OptimizerBase
from jingu.config.sections.parallel import ParallelSettings
from jingu.config.sections.train import ActivationCheckpointingSettings
from jingu.model.components import LayerSpec
from jingu.model.feed_forward_specs import Experts, NoFeedForward
from jingu.model.parameter_table import has_table, parameter_sizes, parameter_table
from jingu.model.parts import attention_width, kv_heads, norm_places, saved_bytes
from jingu.model.sharding_table import ShardedDim, divided_dims, sharded_dims
from jingu.model.spec import ModelSpec
from jingu.model.trainable import is_trained
from jingu.parallel.mesh import AxisSizes
from jingu.parallel.stages import rank_of_stage, split_blocks, splits_backward
from jingu.plan.software import Software

# One object for all workloads: hashes and caches compare these by identity.
_ADAMW, _JINGU = AdamWSettings(), Software()
_TABLES = ("embedding.weight", "positions.weight", "relative_bias.weight")


@dataclass(frozen=True)
class Weight:
    """A parameter: its shape, the dims that can be sharded, and whether it is trained.

    Attributes:
        is_matmul: whether it is the matrix of a matmul with tokens.
        storage: how a rank stores it: in the dtype of master weights, in the compute dtype (frozen, with adapters), or
            in this number of bytes per element.
        is_stored: whether it stays as the files of the initial model have it, but for the experts of other ranks.
        packing: values per stored element, for quantized matrices.
        is_copy: whether another stage updates it, as for the head that is tied to an embedding.
        kv_heads: key-value heads of its layer. If `tensor` has more ranks, several hold the same head.
    """

    shape: tuple[int, ...]
    dims: tuple[ShardedDim, ...]
    is_trained: bool
    is_matmul: bool
    storage: Literal["master", "compute"] | float = "master"
    packing: int = 1
    is_copy: bool = False
    kv_heads: int = 1
    is_stored: bool = False

    @property
    def is_expert(self) -> bool:
        """Whether ranks of `expert` divide it."""
        return bool(self.dims) and self.dims[0].kind == "experts"

    def itemsize(self, software: Software) -> float:
        """Return the bytes of an element on a rank."""
        if isinstance(self.storage, int | float):
            return self.storage
        return software.weight_bytes if self.storage == "master" else software.compute_bytes

    def cut(self, tensor: int, expert: int) -> tuple[int, ...]:
        """Return the shape of the first rank's part before ZeRO shards it; no rank has a larger one."""
        shape = list(self.shape)
        ranks = {"inner": tensor, "kv_heads": min(tensor, self.kv_heads), "experts": expert}
        for kind, dim in self.dims:
            shape[dim] = -(-shape[dim] // ranks[kind])
        return tuple(shape)

    def numbers(self, sizes: tuple[int, int, int]) -> tuple[int, int]:
        """Return the elements of the first rank's shard under `plan_sharding`, and those before ZeRO shards it.

        Args:
            sizes: number of ranks of `tensor`, of `expert`, and of ZeRO's sharding group.
        """
        tensor, expert, ranks = sizes
        if self.is_stored:
            # It is divided by experts alone.
            local = prod(self.cut(1, expert))
            return local, local
        shape = self.cut(tensor, expert)
        dim = 0
        if self.is_expert:
            # If ZeRO's ranks do not divide the number of experts, it shards them by rows.
            ranks //= expert
            by_rows = self.shape[1] % (ranks * (tensor if self.dims[-1].dim == 1 else 1)) == 0
            dim = int(bool(self.shape[0] // expert % ranks) and by_rows)
        unsharded = prod(shape)
        return unsharded // shape[dim] * -(-shape[dim] // ranks), unsharded


@dataclass(frozen=True, eq=False)
class BlockSizes:
    """A block of a model, or the part before or after the blocks.

    Attributes:
        weights: its parameters.
        saved_bytes: bytes per token that are saved for the backward pass, without attention scores.
        matmul_outputs: outputs of matmuls and attention per token, which selective checkpointing saves.
        num_attention: number of attention layers.
        is_causal: whether attention is causal.
        layer: what the block is; None before and after the blocks.
        has_backward: whether it has a backward pass: not if neither it nor any part before it is trained.
        compiled_bytes: `saved_bytes` of a compiled block.
    """

    weights: tuple[Weight, ...] = ()
    saved_bytes: float = 0.0
    matmul_outputs: float = 0.0
    num_attention: int = 0
    is_causal: bool = True
    layer: LayerSpec | None = None
    has_backward: bool = True
    compiled_bytes: float = 0.0

    @property
    def experts(self) -> Experts | None:
        """The experts of the block, if it has some."""
        part = None if self.layer is None else self.layer.feed_forward
        return part if isinstance(part, Experts) else None


@dataclass(frozen=True, eq=False)
class Workload:
    """One step of a run in one layout.

    Attributes:
        sequence: tokens of a row; micro_batch: rows of a forward pass; accumulation: micro-batches of a step.
        checkpointing: activation checkpointing: none, selective or full, for every n-th block.
    """

    model: ModelSizes
    sizes: AxisSizes
    parallel: ParallelSettings
    sequence: int
    micro_batch: int
    accumulation: int
    checkpointing: ActivationCheckpointingSettings = field(default_factory=ActivationCheckpointingSettings)
    optimizer: OptimizerBase = _ADAMW
    software: Software = _JINGU

    @property
    def ranks(self) -> int:
        return prod(self.sizes.shape)

    @property
    def is_compiled(self) -> bool:
        """Whether blocks are compiled."""
        return self.software.compiles_blocks and not splits_backward(self.parallel, self.sizes.pipeline)

    @property
    def block_software(self) -> Software:
        """The software with blocks as they are executed, compiled or not."""
        return self.software if self.is_compiled else self.software.eager()

    @property
    def tokens_per_step(self) -> int:
        return self.sequence * self.micro_batch * self.accumulation * self.sizes.data

    @property
    def tokens(self) -> int:
        """Tokens of a forward pass on one rank of `context`, before sequence parallelism shards them."""
        return self.micro_batch * -(-self.sequence // self.sizes.context)

    @property
    def spec(self) -> ModelSpec:
        return self.model.spec

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The distinct stages. Of equal ones, only that with the most micro-batches in flight is listed.

        That is the first, or the last if backward passes are split, because gradients of weights wait longer there.
        """
        return _merge_stages(self.rank_stages, splits_backward(self.parallel, self.sizes.pipeline))

    @property
    def rank_stages(self) -> tuple[Stage, ...]:
        """The part of the model that each rank of the pipeline has, in the order of the ranks."""
        return _rank_stages(self.model, self.sizes.pipeline, self.stage_key)

    @property
    def single_stages(self) -> tuple[Stage, ...]:
        """The stages of the pipeline in order, of which a rank may have several."""
        return _single_stages(self.model, self.sizes.pipeline, self.stage_key)

    @property
    def stage_key(self) -> tuple[Any, ...]:
        """The settings that divide the model into stages, as a key of caches."""
        layers = self.parallel.layers_per_stage
        return (
            self.parallel.pipeline_schedule,
            self.parallel.stages_per_rank,
            None if layers is None else tuple(layers),
        )


@dataclass(frozen=True, eq=False)
class Stage:
    """The part of the model that a rank of the pipeline has.

    Attributes:
        rank: the first or last of `count` ranks with an equal part.
        blocks: kinds of blocks, each with the indices of its blocks.
        ends: the embedding, and the norm with the head, if it has them.
    """

    rank: int
    count: int
    blocks: tuple[tuple[BlockSizes, tuple[int, ...]], ...]
    ends: tuple[BlockSizes, ...]
    has_head: bool

    @cached_property
    def num_blocks(self) -> int:
        return sum(len(numbers) for _, numbers in self.blocks)

    @cached_property
    def parts(self) -> tuple[tuple[BlockSizes, int], ...]:
        """Kinds of blocks and ends, and the number of each."""
        return (*((kind, len(numbers)) for kind, numbers in self.blocks), *((end, 1) for end in self.ends))


@dataclass(frozen=True, eq=False)
class ModelSizes:
    """The parts of a model: blocks (encoder blocks first), embedding, last norm, and head (with that norm).

    Attributes:
        embedding: also has the parameters of the layers of multi-token prediction.
        prediction: the block of such a layer, and the projection before it, if they are trained.
    """

    spec: ModelSpec
    blocks: tuple[BlockSizes, ...]
    embedding: BlockSizes
    norm: BlockSizes
    head: BlockSizes
    prediction: BlockSizes | None = None


@lru_cache(maxsize=1024)
def _rank_stages(model: ModelSizes, ranks: int, key: tuple[Any, ...]) -> tuple[Stage, ...]:
    """Return the stages of all ranks of the pipeline; `key` is the hashable part of `ParallelSettings`."""
    ranges, owners = _divide_blocks(model, ranks, key)
    numbers = ([number for number, owner in enumerate(owners) if owner == rank] for rank in range(ranks))
    return tuple(_make_stage(model, rank, ranges, own) for rank, own in enumerate(numbers))


@lru_cache(maxsize=1024)
def _single_stages(model: ModelSizes, ranks: int, key: tuple[Any, ...]) -> tuple[Stage, ...]:
    """Return each stage by itself; `key` is the hashable part of `ParallelSettings`."""
    ranges, owners = _divide_blocks(model, ranks, key)
    return tuple(_make_stage(model, rank, ranges, [number]) for number, rank in enumerate(owners))


@lru_cache(maxsize=1024)
def stages_by_rank(model: ModelSizes, ranks: int, key: tuple[Any, ...]) -> tuple[tuple[Stage, ...], ...]:
    """Return the stages of each rank, in the order of the pipeline; `key` is `Workload.stage_key`."""
    stages: list[list[Stage]] = [[] for _ in range(ranks)]
    for stage in _single_stages(model, ranks, key):
        stages[stage.rank].append(stage)
    return tuple(map(tuple, stages))


def _divide_blocks(model: ModelSizes, ranks: int, key: tuple[Any, ...]) -> tuple[list[range], list[int]]:
    """Return the blocks of each stage, and its rank."""
    if ranks == 1:
        return [range(len(model.blocks))], [0]
    schedule, stages, layers = key
    settings = ParallelSettings(
        pipeline_schedule=schedule, stages_per_rank=stages, layers_per_stage=layers and list(layers)
    )
    ranges = split_blocks(settings, ranks, model.spec)
    return ranges, [rank_of_stage(settings, ranks, number) for number in range(len(ranges))]


def _make_stage(model: ModelSizes, rank: int, ranges: list[range], numbers: list[int]) -> Stage:
    """Return the part of the model that has the stages of these numbers.

    Args:
        ranges: the blocks of each stage.
    """
    kinds: dict[BlockSizes, list[int]] = {}
    for block in (block for number in numbers for block in ranges[number]):
        kinds.setdefault(model.blocks[block], []).append(block)
    has_head = len(ranges) - 1 in numbers
    ends = (model.embedding,) * (0 in numbers)
    # A tied embedding and head of the same stage are one parameter. Another stage of the same rank has a copy.
    if has_head:
        ends += (model.norm if len(ranges) == 1 and model.spec.tie_word_embeddings else model.head,)
    return Stage(rank, 1, tuple((kind, tuple(members)) for kind, members in kinds.items()), ends, has_head)


@lru_cache(maxsize=1024)
def _merge_stages(stages: tuple[Stage, ...], lists_last: bool) -> tuple[Stage, ...]:
    distinct: dict[tuple[Any, ...], Stage] = {}
    for stage in stages:
        load = (*((kind, len(members)) for kind, members in stage.blocks), stage.ends, stage.has_head)
        first = distinct.get(load)
        if first is not None:
            stage = replace(stage if lists_last else first, count=first.count + 1)
        distinct[load] = stage
    return tuple(distinct.values())


class _Parameter(NamedTuple):
    """A parameter of a model of one block.

    Attributes:
        itemsize: bytes of an element if it is not floating-point.
        is_trained: whether it is ever trained.
    """

    shape: tuple[int, ...]
    dims: tuple[ShardedDim, ...]
    itemsize: int | None = None
    is_trained: bool = True


@lru_cache(maxsize=64)
def model_sizes(spec: ModelSpec, compute_bytes: float, stored_bytes: float = 0.0) -> ModelSizes:
    """Return the sizes of a model, derived from one block of each kind.

    Args:
        stored_bytes: mean bytes of a number in the blocks' matrices, if they stay as they are stored.
    """
    # A model with the first block of each kind.
    layers = spec.layers
    first = {layer: layers.index(layer) for layer in dict.fromkeys(layers)}
    small = spec.select_layers(list(first.values()))
    place = {layer: number for number, layer in enumerate(first)}
    if spec.num_encoder_layers:
        small = small.model_copy(update={"num_encoder_layers": 1})
    parameters = _parameters(small)
    if spec.per_layer_inputs is not None:
        # The tables of inputs of all layers are before the blocks.
        shapes = parameter_sizes(spec)
        for name, parameter in parameters.items():
            if "blocks." not in name:
                parameters[name] = parameter._replace(shape=shapes[name])
    if spec.tie_word_embeddings:
        # A tied head has no parameter of its own, but its matmul costs the same.
        parameters["head.weight"] = parameters["embedding.weight"]

    def block(layer: LayerSpec, source: str, prefix: str, num_attention: int, *, is_causal: bool) -> BlockSizes:
        # Blocks of a kind may differ in which parameters are trained, which depends on their names.
        weights = tuple(
            _weight(parameters[name], name, spec, layer, prefix + name.removeprefix(source), stored_bytes)
            for name in parameters
            if name.startswith(source)
        )
        outputs = sum(_outputs(weight, layer) for weight in weights if weight.is_matmul)
        outputs += num_attention * attention_width(layer)
        saved, of_compiled = (
            layer_bytes(trainable, layer, compute_bytes, is_causal=is_causal, is_compiled=is_compiled)
            for is_compiled in (False, True)
        )
        return _block(weights, saved, outputs, num_attention, is_causal, layer, True, of_compiled)

    def end(names: Iterable[str]) -> BlockSizes:
        weights = tuple(_weight(parameters[name], name, spec, spec.default_layer, name) for name in names)
        outputs = sum(_outputs(weight, spec.default_layer) for weight in weights if weight.is_matmul)
        return _block(weights, 0.0, outputs, 0, True, None, True)

    ends = ("norm.", "head.")
    embedding = end(name for name in parameters if "blocks." not in name and not name.startswith(ends))
    norm, head = (end(name for name in parameters if name.startswith(prefixes)) for prefixes in (ends[:1], ends))
    # A block saves at most as much as one whose parameters are all trained.
    trainable = spec.model_copy(update={"frozen_parameters": ()})
    encoders = [
        block(spec.default_layer, "encoder.blocks.0.", f"encoder.blocks.{n}.", 1, is_causal=False)
        for n in range(spec.num_encoder_layers or 0)
    ]
    decoders = [
        block(layer, f"blocks.{place[layer]}.", f"blocks.{n}.", 1 + bool(encoders), is_causal=True)
        for n, layer in enumerate(layers)
    ]
    prediction = None
    if spec.mtp_loss_weight:
        names = ("mtp.0.block.", "mtp.0.projection.")
        parameters |= {names[0] + name: parameters[name] for name in parameters if name.startswith(names[1])}
        prediction = block(spec.prediction_layer, names[0], names[0], 1, is_causal=True)
    blocks = _mark_frozen((*encoders, *decoders), embedding) if spec.adapter is None else (*encoders, *decoders)
    return ModelSizes(spec, blocks, embedding, norm, head, prediction)


def _mark_frozen(blocks: tuple[BlockSizes, ...], embedding: BlockSizes) -> tuple[BlockSizes, ...]:
    """Return blocks, of which the first have no backward pass if they are frozen, and the embedding as well."""
    parts = (embedding, *blocks)
    trainable = (number for number, part in enumerate(parts) if any(weight.is_trained for weight in part.weights))
    first = max(0, next(trainable, len(parts)) - 1)
    frozen = (vars(block) | {"has_backward": False} for block in blocks[:first])
    return (*(_block(*fields.values()) for fields in frozen), *blocks[first:])


def _parameters(spec: ModelSpec) -> dict[str, _Parameter]:
    """Return the parameters of a model by name."""
    if has_table(spec):
        table = parameter_table(spec)
        return {
            name: _Parameter(
                entry.shape,
                divided_dims(entry.style, name.rpartition(".")[2], entry.shape) if entry.style else (),
                is_trained=entry.is_trained,
            )
            for name, entry in table.items()
        }
    import torch

    from jingu.model.decoder import build_model

    with torch.device("meta"):
        model = build_model(spec)
    dims = sharded_dims(model)
    return {
        name: _Parameter(
            tuple(parameter.shape), dims[name], None if parameter.is_floating_point() else parameter.itemsize
        )
        for name, parameter in model.named_parameters()
    }


@lru_cache(maxsize=256)
def _block(*sizes: Any) -> BlockSizes:
    """Return the sizes of a block; equal blocks are the same object, because `BlockSizes` compares by identity."""
    return BlockSizes(*sizes)


def _weight(
    parameter: _Parameter, name: str, spec: ModelSpec, layer: LayerSpec, full_name: str, stored_bytes: float = 0.0
) -> Weight:
    learns = (parameter.is_trained and is_trained(full_name, spec)) or (name == "head.weight" and spec.adapter is None)
    storage: Literal["master", "compute"] | float = "master"
    is_frozen_matrix = spec.adapter is not None and not learns and len(parameter.shape) >= 2 and "router" not in name
    is_stored = spec.quantization == "stored" and is_frozen_matrix and stored_bytes > 0
    if parameter.itemsize is not None:
        storage = parameter.itemsize
    elif is_frozen_matrix:
        storage = stored_bytes if is_stored else "compute"
    is_matmul = len(parameter.shape) >= 2 and not name.endswith((*_TABLES, ".scales"))
    packing = 2 if name.endswith(".values") and spec.quantization in ("int4", "nf4") else 1
    is_copy = name == "head.weight" and spec.tie_word_embeddings
    heads = kv_heads(layer, f".{name}")
    return Weight(parameter.shape, parameter.dims, learns, is_matmul, storage, packing, is_copy, heads, is_stored)


def _outputs(weight: Weight, layer: LayerSpec) -> float:
    """Return the outputs of a matmul per token; for experts, those of the chosen ones."""
    outputs, part = float(weight.shape[-2]), layer.feed_forward
    return outputs * part.num_experts_per_token if len(weight.shape) == 3 and isinstance(part, Experts) else outputs


@lru_cache(maxsize=64)
def layer_bytes(
    spec: ModelSpec, layer: LayerSpec, compute_bytes: float, *, is_causal: bool, is_compiled: bool = False
) -> float:
    """Return the bytes per token that a block saves for its backward pass: one of the decoder, or not causal."""
    has_formula = layer.mixer is None and not isinstance(layer.feed_forward, NoFeedForward)
    if has_table(spec) and not spec.frozen_parameters and has_formula:
        return saved_bytes(spec, layer, compute_bytes, None if is_causal else 1, is_compiled=is_compiled)
    part = layer.feed_forward
    # A layer that shares keys and values cannot stand alone.
    dense = spec.uniform(layer.with_own_kv().model_copy(update={"feed_forward": part.dense_equivalent()}))
    saved = part.routed_bytes(spec.hidden_size, compute_bytes) + _count_saved(dense, compute_bytes)
    if not is_compiled:
        return saved
    # Mixers count as they are without a compiler; norms and the feed-forward are compiled.
    eager, of_compiled = (_common_bytes(spec, layer, compute_bytes, is_compiled=kind) for kind in (False, True))
    return saved - eager + of_compiled


def _common_bytes(spec: ModelSpec, layer: LayerSpec, compute_bytes: float, *, is_compiled: bool) -> float:
    """Return the bytes per token that norms and the feed-forward of a block save."""
    branches = ["attention"] + ["feed_forward"] * (not isinstance(layer.feed_forward, NoFeedForward))
    norms = sum(sum(norm_places(layer, branch)) for branch in branches)
    width = spec.hidden_size
    saved = layer.feed_forward.saved_bytes(width, compute_bytes, is_compiled=is_compiled)
    # Nothing is saved for the gradient of a frozen weight.
    norm = layer.norm if spec.adapter is None else layer.norm.without_weight()
    return saved + norms * norm.saved_bytes(width, 1, compute_bytes, is_compiled=is_compiled)


@lru_cache(maxsize=64)
def _count_saved(spec: ModelSpec, compute_bytes: float) -> float:
    """Return the bytes per token that autograd saves in a block, counted with modules on the meta device."""
    from jingu.model.chunked_scan import CHUNK_SIZE

    # Layers with a state compute whole chunks, and the first one saves more than the others.
    length = 4 * CHUNK_SIZE if spec.has_state else min(64, spec.max_position_embeddings // 3)
    # Attention on the meta device saves its probabilities, unlike the kernels of real devices. They grow with the
    # square of the length, and layers with a state have constants of the size of a chunk. Three lengths separate them
    # from the linear part: with f(n) = c + a·n + b·n², -5·f(n) + 8·f(2n) - 3·f(3n) = 2·a·n.
    saved = [
        _count_saved_by_model(spec, 2, size, compute_bytes) - _count_saved_by_model(spec, 1, size, compute_bytes)
        for size in (length, 2 * length, 3 * length)
    ]
    return (-5 * saved[0] + 8 * saved[1] - 3 * saved[2]) / (2 * length)


def _count_saved_by_model(spec: ModelSpec, layers: int, length: int, compute_bytes: float) -> int:
    import torch
    from torch import Tensor

    from jingu.model.decoder import build_model
    from jingu.model.inputs import Inputs

    small = spec.uniform(spec.default_layer, layers).model_copy(update={"quantization": None})
    dtype = {8: torch.float64, 4: torch.float32}.get(int(compute_bytes), torch.bfloat16)
    with torch.device("meta"):
        model = build_model(small).to(dtype)
        tokens = torch.zeros(1, length, dtype=torch.int64)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and is_trained(name, small))
    weights = {id(parameter.untyped_storage()) for parameter in model.parameters()}
    storages: dict[int, torch.UntypedStorage] = {}

    def record(tensor: Tensor) -> Tensor:
        storages[id(tensor.untyped_storage())] = tensor.untyped_storage()
        return tensor

    inputs = Inputs(tokens, source=Inputs(tokens)) if spec.num_encoder_layers else Inputs(tokens)
    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        model(inputs)
    return sum(storage.nbytes() for number, storage in storages.items() if number not in weights)


def num_parameters(spec: ModelSpec) -> int:
    """Return the number of a model's parameters."""
    return sum(map(prod, parameter_sizes(spec).values()))
