"""How a model is divided over the ranks of a mesh, and its dtypes. Independent of the training settings."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from jingu.config.sections.parallel import ParallelSettings
from jingu.config.sections.train import ActivationCheckpointingSettings
from jingu.model.mixer_specs import MixerKernels
from jingu.model.scaled_matmul import Scaling


@dataclass(frozen=True)
class Precision:
    """The dtypes of a model.

    Attributes:
        name: a name to show, such as `bf16`.
        compute: dtype of matmuls and activations.
        masters: dtype of the master weights, their gradients and the optimizer state.
        reduce: dtype in which gradients are summed over ranks.
        scaling: how operands are scaled if the blocks' matmuls run in FP8; None: matmuls run in `compute`.
    """

    name: str
    compute: torch.dtype
    masters: torch.dtype
    reduce: torch.dtype
    scaling: Scaling | None = None

    @staticmethod
    def uniform(dtype: torch.dtype) -> Precision:
        """Return a precision with one dtype for everything, as inference uses it."""
        return Precision(str(dtype).removeprefix("torch."), dtype, dtype, dtype)


@dataclass(frozen=True)
class Layout:
    """How a model is divided over a mesh, and how its blocks run.

    Attributes:
        parallel: sizes of the mesh axes, ZeRO stage, pipeline schedule and offload.
        activation_checkpointing: which activations of a block are recomputed in the backward pass.
        compile: whether blocks are compiled.
        mixer_kernels: what computes the layers with a state.
    """

    parallel: ParallelSettings = field(default_factory=ParallelSettings)
    activation_checkpointing: ActivationCheckpointingSettings = field(default_factory=ActivationCheckpointingSettings)
    compile: bool = False
    mixer_kernels: MixerKernels = "torch"
