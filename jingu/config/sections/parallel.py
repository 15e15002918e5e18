"""Settings of the layout over ranks, and of the device."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Discriminator

from jingu.config.sections.base import PathText, Positive, Settings, default_type, reject_bool_and_float


class NoOffloadSettings(Settings):
    """Keep everything on the device."""

    type: Literal["none"] = "none"


class HostOffloadSettings(Settings):
    """Keep master weights, gradients and optimizer state in host memory, and only the compute weights on the device."""

    type: Literal["host"] = "host"


class DiskOffloadSettings(Settings):
    """As `host`, but with master weights and optimizer state in a file, of which host memory caches what it has room
    for.

    Attributes:
        path: Folder on a local disk; null: the folder `offload` of the run.
    """

    type: Literal["disk"] = "disk"
    path: PathText | None = None


Offload = Annotated[
    NoOffloadSettings | HostOffloadSettings | DiskOffloadSettings, Discriminator("type"), default_type("none")
]


class ParallelSettings(Settings):
    """The layout over ranks. Their number is the product of replicate, shard, context, tensor and pipeline.

    Attributes:
        zero_stage: What to shard over data-parallel ranks: 0 nothing, 1 optimizer state, 2 also gradients, 3 also
            parameters.
        replicate: Data-parallel replicas, each with the whole model; auto: 1, or with ZeRO 0 all remaining ranks.
        shard: Data-parallel ranks that share one copy of the model (ZeRO 1 to 3); auto: all remaining ranks.
        tensor: Ranks that split the heads, inner dimensions and vocabulary of each block; auto: all remaining ranks.
        async_tensor_parallel: Whether compiled blocks split the products around the messages of `tensor`, so that both
            overlap; CUDA only.
        context: Ranks that split the tokens of each row; auto: all remaining ranks.
        context_method: ulysses: ranks exchange tokens for heads around attention, and the number of heads must be
            divisible; ring: keys and values are passed around a ring, with any number of heads.
        pipeline: Ranks that split the blocks into stages, one or more for each rank; auto: all remaining ranks.
        pipeline_schedule: gpipe: all forward passes, then all backward passes; 1f1b: alternating; interleaved:
            alternating, with several stages for each rank; zero_bubble: the same with split backward passes; zbv: the
            same with two stages for each rank.
        stages_per_rank: Pipeline stages for each rank (interleaved and zero_bubble); auto: 2, or 1 with gpipe and 1f1b.
        layers_per_stage: Number of blocks in each pipeline stage, in order; null: balanced by cost, with embedding and
            head counted.
        expert: Ranks, of those of shard × context, that split the experts; auto: as many as possible.
    """

    zero_stage: Annotated[Literal[0, 1, 2, 3], BeforeValidator(reject_bool_and_float)] = 1
    replicate: Positive | Literal["auto"] = "auto"
    shard: Positive | Literal["auto"] = "auto"
    tensor: Positive | Literal["auto"] = 1
    async_tensor_parallel: bool = False
    context: Positive | Literal["auto"] = 1
    context_method: Literal["ulysses", "ring"] = "ulysses"
    pipeline: Positive | Literal["auto"] = 1
    pipeline_schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble", "zbv"] = "1f1b"
    stages_per_rank: Positive | Literal["auto"] = "auto"
    layers_per_stage: list[Positive] | None = None
    offload: Offload = NoOffloadSettings()
    expert: Positive | Literal["auto"] = 1


DeviceType = Literal["auto", "cpu", "cuda", "xpu", "npu", "mps"]


class DeviceSettings(Settings):
    """The device on which the run computes.

    Attributes:
        type: auto: the machine's accelerator (CUDA and ROCm are `cuda`, Intel GPUs `xpu`, Ascend NPUs `npu`, Apple GPUs
            `mps`), or else the CPU.
        threads: CPU threads for each rank; auto: the number of cores divided by the number of local ranks.
    """

    type: DeviceType = "auto"
    threads: Positive | Literal["auto"] = "auto"
