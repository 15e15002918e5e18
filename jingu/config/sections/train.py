"""Settings of training: batch, optimizer, schedule, precision."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Discriminator, Field

from jingu.config.sections.base import Fraction, NonNegative, Positive, Settings, default_type


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


class ParamGroupSettings(Settings):
    """Parameters with another learning rate or weight decay.

    Attributes:
        match: Pattern for the names of the parameters, such as `embedding.*` or `blocks.0.*`. If several groups match,
            the last one applies.
        lr_multiplier: Learning rate of these parameters, as a multiple of the schedule's.
        weight_decay: Weight decay of these parameters; null: the optimizer's.
    """

    match: Annotated[str, Field(min_length=1)] = "*"
    lr_multiplier: Annotated[float, Field(ge=0)] = 1.0
    weight_decay: Annotated[float, Field(ge=0)] | None = None


class OptimizerBase(Settings):
    """Settings of every optimizer.

    Attributes:
        param_groups: Parameters with another learning rate or weight decay.
    """

    type: str
    param_groups: list[ParamGroupSettings] = []


class AdamWSettings(OptimizerBase):
    """AdamW (Loshchilov and Hutter, 2019).

    Attributes:
        state_dtype: Dtype of both moments. int8 needs the bitsandbytes package, and applies to matrices whose rows have
            a multiple of 256 elements.
        lr: Peak learning rate.
        beta1: Decay rate of the first moment.
        beta2: Decay rate of the second moment.
        eps: Epsilon added to the square root of the second moment.
        weight_decay: Decoupled weight decay, multiplied by the learning rate; never applied to norms and biases.
    """

    type: Literal["adamw"] = "adamw"
    state_dtype: Literal["fp32", "int8"] = "fp32"
    lr: Annotated[float, Field(gt=0)] = 1e-3
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    eps: Annotated[float, Field(gt=0)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.1


class LionSettings(OptimizerBase):
    """Lion (Chen et al., 2023): updates by the sign of an interpolation of momentum and gradient.

    Attributes:
        lr: Peak learning rate; usually about a tenth of AdamW's.
        beta1: Weight of the momentum in this interpolation.
        beta2: Decay rate of the momentum.
        weight_decay: Decoupled weight decay, multiplied by the learning rate; never applied to norms and biases.
    """

    type: Literal["lion"] = "lion"
    lr: Annotated[float, Field(gt=0)] = 1e-4
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.99
    weight_decay: Annotated[float, Field(ge=0)] = 1.0


class AdafactorSettings(OptimizerBase):
    """Adafactor (Shazeer and Stern, 2018): stores only the row and column means of a matrix's second moment, and scales
    updates by the root mean square of the weights.

    Attributes:
        lr: Peak learning rate, relative to the root mean square of the weights; never more than 1 / √step.
        decay_rate: In step t, the new squared gradient enters the second moment with weight t ^ -decay_rate.
        clip_threshold: Maximum root mean square of an update, before it is scaled; a larger update is scaled down to
            it.
        min_weight_rms: Lower bound for the root mean square of the weights.
        weight_decay: Decoupled weight decay, multiplied by the learning rate; never applied to norms and biases.
    """

    type: Literal["adafactor"] = "adafactor"
    lr: Annotated[float, Field(gt=0)] = 1e-2
    decay_rate: Annotated[float, Field(gt=0)] = 0.8
    clip_threshold: Annotated[float, Field(gt=0)] = 1.0
    min_weight_rms: Annotated[float, Field(gt=0)] = 1e-3
    weight_decay: Annotated[float, Field(ge=0)] = 0.0


class MuonSettings(OptimizerBase):
    """Muon (Jordan, 2024): orthogonalized momentum for the matrices of blocks, AdamW for all other parameters.

    Attributes:
        lr: Peak learning rate of Muon and AdamW; Muon's updates are scaled to the size of AdamW's (Liu et al., 2025).
        momentum: Decay rate of the Nesterov momentum.
        beta1: AdamW's decay rate of the first moment.
        beta2: AdamW's decay rate of the second moment.
        eps: AdamW's epsilon.
        weight_decay: Decoupled weight decay, multiplied by the learning rate; never applied to norms and biases.
    """

    type: Literal["muon"] = "muon"
    lr: Annotated[float, Field(gt=0)] = 1e-3
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.95
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    eps: Annotated[float, Field(gt=0)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.1


Optimizer = Annotated[
    AdamWSettings | LionSettings | AdafactorSettings | MuonSettings, Discriminator("type"), default_type("adamw")
]


def resolve_steps(length: int | float, steps: int) -> int:
    """Return a length in steps.

    Args:
        length: a number of steps (int), or a fraction of the run (float).
        steps: number of steps of the run.
    """
    return length if isinstance(length, int) else round(length * steps)


class ScheduleBase(Settings):
    """Settings of every schedule.

    Attributes:
        warmup: Linear warmup: steps (a whole number), or a fraction of the run (with a decimal point).
        min_lr: Lower bound of the learning rate after warmup.
    """

    type: str
    warmup: NonNegative | Fraction = 0.02
    min_lr: Annotated[float, Field(ge=0)] = 0.0


class ConstantSettings(ScheduleBase):
    """Keep the peak learning rate to the end."""

    type: Literal["constant"] = "constant"


class LinearSettings(ScheduleBase):
    """Decay linearly from the peak to the minimum."""

    type: Literal["linear"] = "linear"


class CosineSettings(ScheduleBase):
    """Decay along half a cosine from the peak to the minimum."""

    type: Literal["cosine"] = "cosine"


class InverseSqrtSettings(ScheduleBase):
    """Decay with the inverse square root of the step, from the peak at the end of the warmup (Vaswani et al., 2017)."""

    type: Literal["inverse_sqrt"] = "inverse_sqrt"


class ExponentialSettings(ScheduleBase):
    """Decay exponentially over the run.

    Attributes:
        decay: Learning rate at the last step, as a fraction of the peak.
    """

    type: Literal["exponential"] = "exponential"
    decay: Annotated[float, Field(gt=0, le=1)] = 0.1


class WsdSettings(ScheduleBase):
    """Warmup-stable-decay: constant after warmup, then linear decay over the last part of the run (Hu et al., 2024).

    Attributes:
        decay: Length of the decay: steps (a whole number), or a fraction of the run (with a decimal point).
    """

    type: Literal["wsd"] = "wsd"
    decay: NonNegative | Fraction = 0.2


Schedule = Annotated[
    ConstantSettings | LinearSettings | CosineSettings | InverseSqrtSettings | ExponentialSettings | WsdSettings,
    Discriminator("type"),
    default_type("cosine"),
]


class ActivationCheckpointingSettings(Settings):
    """Which activations are stored for the backward pass. It recomputes the others.

    Attributes:
        type: none: store all activations; selective: store the results of matmuls, attention and communication; full:
            store only the inputs of blocks.
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
        on_divergence: What to do when the loss is not finite for several steps: stop with an error; rollback: load the
            newest checkpoint and halve the learning rate; or continue.
        log_every: Steps between lines of metrics.jsonl.
        tensorboard: Also write TensorBoard events to the run's folder (needs the tensorboard package).
        trackers: Services that also receive the values of metrics.jsonl: wandb, mlflow. Each needs its package; the
            package's own settings decide where the values go.
        hang_timeout: Seconds without progress (or 10 steps, if they take longer) after which a run of several ranks
            counts as hung: it is stopped, and the rank at fault is named; null: never.
    """

    steps: Positive = 1000
    max_grad_norm: Annotated[float, Field(gt=0)] | None = 1.0
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    z_loss_coef: Annotated[float, Field(ge=0)] = 0.0
    neftune_alpha: Annotated[float, Field(ge=0)] = 0.0
    compile: bool | Literal["auto"] = "auto"
    activation_checkpointing: ActivationCheckpointingSettings = ActivationCheckpointingSettings()
    on_divergence: Literal["stop", "rollback", "continue"] = "stop"
    log_every: Positive = 10
    tensorboard: bool = False
    trackers: list[Literal["wandb", "mlflow"]] = []
    hang_timeout: Annotated[float, Field(gt=0)] | None = 60.0
    profile: ProfileSettings = ProfileSettings()


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
