"""Settings of training: batch, optimizer, schedule, precision."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Discriminator, Field

from jingu.config.sections.base import NonNegative, Positive, Settings, default_type, names_of
from jingu.plugins import Registry


class BatchSettings(Settings):
    """The batch of one optimizer step. Gradient accumulation steps and tokens per step follow from it.

    Attributes:
        sequence_length: Tokens per sequence.
        global_batch_size: Sequences per optimizer step, over all ranks.
        micro_batch_size: Sequences in a forward pass of one rank; auto: the largest divisor with at most 8,192 tokens.
    """

    sequence_length: Positive = 512
    global_batch_size: Positive = 32
    micro_batch_size: Positive | Literal["auto"] = "auto"


class ActivationCheckpointingSettings(Settings):
    """Which activations are stored for the backward pass. It recomputes the others.

    Attributes:
        type: none: store all activations; selective: store the results of matmuls, attention and communication except
            gathers; full: store only the inputs of blocks.
        every: Recompute only in every n-th block; the other blocks store everything.
    """

    type: Literal["none", "selective", "full"] = "none"
    every: Positive = 1


class ProfileSettings(Settings):
    """Traces of the PyTorch profiler, in the folder `profile` of the run. The log and the report show tables of
    operators.

    Attributes:
        steps: Number of steps to profile, after the first one; 0: none.
    """

    steps: NonNegative = 0


TRACKERS = Registry(
    "trackers",
    {
        "wandb": "jingu.training.trackers:WandbTracker",
        "mlflow": "jingu.training.trackers:MlflowTracker",
        "swanlab": "jingu.training.trackers:SwanlabTracker",
    },
)
"""The classes of the services of `train.trackers`, each as `module:name`."""

TrackerName = Annotated[str, names_of(TRACKERS)]
# Seconds that compiling the blocks and the loss of a model takes on CPU.
COMPILE_SECONDS = 30.0
# Share of a run's time that compiled blocks save at least.
COMPILE_SAVING = 0.05


class TrainSettings(Settings):
    """The training loop.

    Attributes:
        steps: Number of optimizer steps.
        max_grad_norm: Maximum global norm of the gradient; null: no clipping.
        label_smoothing: Probability that each target spreads evenly over the vocabulary; evaluations ignore it.
        z_loss_coef: Weight of the z-loss, the squared log of the softmax's normalizer, such as 1e-4; evaluations ignore
            it.
        neftune_alpha: Scale of the noise on token embeddings (NEFTune's alpha, such as 5); 0: no noise. Only for
            decoders.
        compile: Whether to compile the blocks; auto: if there is a compiler and the run is long enough to benefit.
        mixer_kernels: What computes layers with a state, such as Mamba-2: torch: PyTorch; fla: the kernels of
            flash-linear-attention, on CUDA in bf16 or fp16, not yet tried on a GPU; auto: fla where it can be used,
            otherwise torch.
        on_divergence: What to do when the loss is not finite for several steps: stop with an error; rollback: load the
            newest checkpoint and halve the learning rate; or continue.
        log_every: Steps between lines of metrics.jsonl.
        tensorboard: Also write TensorBoard events to the run's folder (needs the tensorboard package).
        trackers: Services that also receive the values of metrics.jsonl: wandb, mlflow, swanlab. Each needs its
            package, whose own settings decide where the values go.
        hang_timeout: Seconds without progress (or 10 steps, if they take longer) after which a run counts as hung: it
            is stopped, and the rank at fault is named; null: never.
    """

    steps: Positive = 1000
    max_grad_norm: Annotated[float, Field(gt=0)] | None = 1.0
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    z_loss_coef: Annotated[float, Field(ge=0)] = 0.0
    neftune_alpha: Annotated[float, Field(ge=0)] = 0.0
    compile: bool | Literal["auto"] = "auto"
    mixer_kernels: Literal["auto", "torch", "fla"] = "torch"
    activation_checkpointing: ActivationCheckpointingSettings = ActivationCheckpointingSettings()
    on_divergence: Literal["stop", "rollback", "continue"] = "stop"
    log_every: Positive = 10
    tensorboard: bool = False
    trackers: list[TrackerName] = []
    hang_timeout: Annotated[float, Field(gt=0)] | None = 60.0
    profile: ProfileSettings = ProfileSettings()

    def uses_compiler(self, training_seconds: float) -> bool:
        """Return whether blocks are to be compiled, by `compile`.

        Args:
            training_seconds: rough estimate of how long the run takes.
        """
        if self.compile == "auto":
            return training_seconds * COMPILE_SAVING >= COMPILE_SECONDS
        return self.compile


class PrecisionBase(Settings):
    """Settings of every precision.

    Attributes:
        reduce: Dtype in which gradients are accumulated over micro-batches and ranks; auto: that of the master weights.
    """

    type: str
    reduce: Literal["auto", "fp64", "fp32", "bf16", "fp16"] = "auto"


class PrecisionSettings(PrecisionBase):
    """bf16: compute in bf16 with fp32 master weights; fp32 and fp64: compute and store weights in this dtype; auto:
    bf16 if the device is fast at it, otherwise fp32."""

    type: Literal["auto", "fp32", "bf16", "fp64"] = "auto"


class FP16Settings(PrecisionBase):
    """fp16 with fp32 master weights and dynamic loss scaling.

    Attributes:
        initial_loss_scale: Initial loss scale.
        loss_scale_window: Double the loss scale after this many steps without overflow.
        hysteresis: Halve the loss scale after this many overflows within a window; a step that overflows is always
            skipped.
        min_loss_scale: Lower bound of the loss scale.
    """

    type: Literal["fp16"] = "fp16"
    initial_loss_scale: Annotated[float, Field(gt=0)] = 65536.0
    loss_scale_window: Positive = 1000
    hysteresis: Positive = 2
    min_loss_scale: Annotated[float, Field(gt=0)] = 1.0


class FP8Settings(PrecisionBase):
    """bf16 with fp32 master weights, where the matmuls of the blocks are in FP8, forward and backward. For GPUs with
    FP8 units. Experts, the head, and matrices whose sizes are not multiples of 16 stay in bf16.

    Attributes:
        scaling: Granularity of the FP8 scales of both operands of a matmul: row: one scale per row or column; tensor:
            one scale per matrix, which is faster and less exact.
    """

    type: Literal["fp8"] = "fp8"
    scaling: Literal["row", "tensor"] = "row"


Precision = Annotated[PrecisionSettings | FP16Settings | FP8Settings, Discriminator("type"), default_type("auto")]
