"""Settings of training: batch, optimizer, schedule, precision."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Discriminator, Field

from jingu.config.sections.base import Fraction, NonNegative, Positive, Settings, default_type


class BatchSettings(Settings):
    """The batch of one optimizer step. Gradient accumulation steps and tokens per step follow from it.

    Attributes:
        sequence_length: Tokens in a sequence.
        global_batch_size: Sequences in an optimizer step, over all ranks.
        micro_batch_size: Sequences in a forward pass of one rank; auto: the largest divisor with at most 8,192 tokens.
    """

    sequence_length: Positive = 512
    global_batch_size: Positive = 32
    micro_batch_size: Positive | Literal["auto"] = "auto"


class ParamGroupSettings(Settings):
    """Parameters with another learning rate or weight decay.

    Attributes:
        match: Pattern of their names, such as `embedding.*` or `blocks.0.*`. If several groups match, the last one
            counts.
        lr_multiplier: Their learning rate, as a multiple of the schedule's.
        weight_decay: Their weight decay; null: the optimizer's.
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
        state_dtype: Format of both moments; int8 (for matrices whose rows have a multiple of 256 elements) needs the
            bitsandbytes package.
        lr: Peak learning rate.
        beta1: Decay rate of the first moment.
        beta2: Decay rate of the second moment.
        eps: Epsilon added to the root of the second moment.
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
    """Lion (Chen et al., 2023): updates by the sign of an interpolated momentum.

    Attributes:
        lr: Peak learning rate, about a tenth of AdamW's.
        beta1: Weight of the momentum in the direction of the update.
        beta2: Decay rate of the momentum.
        weight_decay: Decoupled weight decay, multiplied by the learning rate; never applied to norms and biases.
    """

    type: Literal["lion"] = "lion"
    lr: Annotated[float, Field(gt=0)] = 1e-4
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.99
    weight_decay: Annotated[float, Field(ge=0)] = 1.0


class AdafactorSettings(OptimizerBase):
    """Adafactor (Shazeer and Stern, 2018): stores only row and column means of a matrix's second moment, and scales
    updates by the size of the weights.

    Attributes:
        lr: Peak learning rate, relative to the size of the weights, and at most 1 / √step.
        decay_rate: The second moment of step t has weight t ^ -decay_rate.
        clip_threshold: Root mean square above which an update is scaled down.
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
        lr: Peak learning rate of both; Muon's updates are scaled to the size of AdamW's (Liu et al., 2025).
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
    """A length given in steps (a whole number) or as a fraction of the run, in steps."""
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
    """Decay with the inverse square root of the step, from the peak at the end of warmup (Vaswani et al., 2017)."""

    type: Literal["inverse_sqrt"] = "inverse_sqrt"


class ExponentialSettings(ScheduleBase):
    """Decay exponentially over the run.

    Attributes:
        decay: Fraction of the peak learning rate at the last step.
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
    """Activations that are stored for the backward pass; it recomputes the others.

    Attributes:
        type: none: store everything; selective: results of matrix products, attention and communication; full: only
            block inputs.
        every: Recompute only every n-th block; the others store everything.
    """

    type: Literal["none", "selective", "full"] = "none"
    every: Positive = 1


class ProfileSettings(Settings):
    """Traces of the PyTorch profiler, in the run's folder `profile`; log and report get tables of operators.

    Attributes:
        steps: Number of steps to profile, after the first one; 0: none.
    """

    steps: NonNegative = 0


class TrainSettings(Settings):
    """The training loop.

    Attributes:
        steps: Number of optimizer steps.
        max_grad_norm: Maximum global norm of the gradient; null: no clipping.
        label_smoothing: Probability that is spread evenly over the vocabulary in each target; evaluations ignore it.
        z_loss_coef: Weight of the squared log of the softmax's normalizer, such as 1e-4; evaluations ignore it.
        neftune_alpha: Scale of the noise on token embeddings (NEFTune's alpha, such as 5), for decoders.
        compile: Whether to compile the blocks; auto: if there is a compiler and the run is long enough to benefit.
        on_divergence: What to do when the loss is not finite for several steps: stop with an error; rollback: load the
            newest checkpoint and halve the learning rate; or continue.
        log_every: Steps between lines of metrics.jsonl.
        tensorboard: Also write TensorBoard events to the run's folder (needs the tensorboard package).
        trackers: Services that also receive the numbers of metrics.jsonl: wandb, mlflow (their packages are needed, and
            their own settings say where they send them).
        hang_timeout: Seconds (or 10 steps, if they take longer) without progress after which a run of several ranks is
            ended, and the rank at fault named; null: never.
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
        reduce: Format in which gradients are accumulated over micro-batches and ranks; auto: that of the master
            weights.
    """

    type: str
    reduce: Literal["auto", "fp64", "fp32", "bf16", "fp16"] = "auto"


class PrecisionSettings(PrecisionBase):
    """bf16 computes in bf16 with fp32 master weights; auto: bf16 if the device is fast at it, else fp32."""

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
    """bf16 with fp32 master weights, in which the matrices of the blocks are multiplied in FP8, forward and backward:
    for GPUs with FP8 units. Experts, the head and matrices whose sizes are no multiples of 16 stay in bf16.

    Attributes:
        scaling: Scales of the factors of a product: row: one for each row or column; tensor: one for each matrix, which
            is faster and less exact.
    """

    type: Literal["fp8"] = "fp8"
    scaling: Literal["row", "tensor"] = "row"


Precision = Annotated[PrecisionSettings | FP16Settings | FP8Settings, Discriminator("type"), default_type("auto")]
