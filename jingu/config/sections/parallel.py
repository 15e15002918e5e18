"""Settings of the layout over ranks, and of where they compute."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Discriminator

from jingu.config.sections.base import Place, Positive, Settings, type_or, whole


class NoOffloadSettings(Settings):
    """Everything stays on the device that computes."""

    type: Literal["none"] = "none"


class HostOffloadSettings(Settings):
    """Master weights, gradients and optimizer state in main memory; the device has what it computes with."""

    type: Literal["host"] = "host"


class DiskOffloadSettings(Settings):
    """As `host`, with master weights and optimizer state in a file, of which memory holds what there is room for."""

    type: Literal["disk"] = "disk"
    path: Place | None = None
    """Folder on a local disk; null: the folder `offload` of the run."""


Offload = Annotated[
    NoOffloadSettings | HostOffloadSettings | DiskOffloadSettings, Discriminator("type"), type_or("none")
]


class ParallelSettings(Settings):
    """The layout over ranks, whose number is the product of replicate, shard, context, tensor and pipeline."""

    zero: Annotated[Literal[0, 1, 2, 3], BeforeValidator(whole)] = 1
    """What is sharded over data-parallel ranks: nothing, optimizer state, also gradients, also parameters."""
    replicate: Positive | Literal["auto"] = "auto"
    """Groups of ranks with rows of their own that each hold the whole model; auto: 1, with ZeRO 0 all that is left."""
    shard: Positive | Literal["auto"] = "auto"
    """Ranks with rows of their own that share one copy of the model (ZeRO 1 to 3); auto: all that is left."""
    tensor: Positive | Literal["auto"] = 1
    """Ranks that share the heads, inner dims and vocabulary of each block; auto: all that is left."""
    context: Positive | Literal["auto"] = 1
    """Ranks that share the tokens of each row; auto: all that is left."""
    context_by: Literal["heads", "ring"] = "heads"
    """How attention sees all tokens of a row: for it, ranks exchange tokens for heads, whose number must divide; or
    keys and values go around in a ring, whatever the number of heads."""
    pipeline: Positive | Literal["auto"] = 1
    """Ranks that share the blocks, each of them a stage or more; auto: all that is left."""
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble", "zbv"] = "1f1b"
    """Order of a pipeline's work: all forward, then all backward; in turns; in turns with several stages a rank; that
    with backward passes split to fill the gaps; that with two stages a rank, there and back."""
    stages_per_rank: Positive | Literal["auto"] = "auto"
    """Stages of a pipeline that a rank has (interleaved and zero_bubble); auto: 2, with gpipe and 1f1b 1."""
    parts: list[Positive] | None = None
    """Number of blocks of each stage of a pipeline, in order; null: even by their cost, embedding and head counted."""
    offload: Offload = NoOffloadSettings()
    expert: Positive | Literal["auto"] = 1
    """Ranks, of those of shard × context, that share a mixture's experts; auto: as many as can."""


class DeviceSettings(Settings):
    """Where the run computes."""

    type: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: CUDA where there is a card, else CPU."""
    threads: Positive | Literal["auto"] = "auto"
    """CPU threads a rank; auto: the cores divided by the local ranks."""
