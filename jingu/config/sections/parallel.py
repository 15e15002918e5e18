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
    """As `host`, but with master weights and optimizer state in a file on disk. Host memory caches as much of it as
    fits.

    Attributes:
        path: Folder on a local disk; null: the folder `offload` of the run.
    """

    type: Literal["disk"] = "disk"
    path: PathText | None = None


Offload = Annotated[
    NoOffloadSettings | HostOffloadSettings | DiskOffloadSettings, Discriminator("type"), default_type("none")
]


class ParallelSettings(Settings):
    """The layout over ranks. The number of ranks is replicate × shard × context × tensor × pipeline.

    Attributes:
        zero_stage: What to shard over data-parallel ranks: 0 nothing, 1 optimizer state, 2 also gradients, 3 also
            parameters.
        replicate: Data-parallel replicas, each with the whole model; auto: 1, or with ZeRO 0 all remaining ranks.
        shard: Data-parallel ranks that share one copy of the model (ZeRO 1 to 3); auto: all remaining ranks.
        tensor: Ranks that split the heads, intermediate dims and vocabulary of each block; auto: all remaining ranks.
        async_tensor_parallel: Whether compiled blocks split matmuls so that they overlap with the communication of
            `tensor`; CUDA only.
        context: Ranks that split the tokens of each row; auto: all remaining ranks.
        context_method: ulysses: ranks exchange tokens for heads around attention, and the number of heads must be
            divisible; ring: keys and values are passed around a ring, with any number of heads.
        pipeline: Ranks that split the blocks into pipeline stages, one or more per rank; auto: all remaining ranks.
        pipeline_schedule: gpipe: all forward passes, then all backward passes; 1f1b: forward and backward passes
            alternate; interleaved: 1f1b with several stages per rank; zero_bubble: interleaved, with the backward pass
            split into gradients of inputs and of weights; zbv: zero_bubble with two stages per rank, placed in a V.
        stages_per_rank: Pipeline stages per rank (interleaved and zero_bubble); auto: 2, or 1 with gpipe and 1f1b.
        layers_per_stage: Number of blocks in each pipeline stage, in order; null: balanced by cost, including embedding
            and head.
        expert: Ranks that split the experts, out of the shard × context ranks; auto: as many as possible.
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
        type: auto: the machine's accelerator if it has one, otherwise the CPU. `cuda` stands for CUDA and ROCm, `xpu`
            for Intel GPUs, `npu` for Ascend NPUs, `mps` for Apple GPUs.
        threads: CPU threads per rank; auto: the number of cores divided by the number of local ranks.
    """

    type: DeviceType = "auto"
    threads: Positive | Literal["auto"] = "auto"
