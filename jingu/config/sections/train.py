"""Settings of training: batch, optimizer, schedule, precision."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Discriminator, Field

from jingu.config.sections.base import Fraction, NotNegative, Positive, Settings, type_or


class BatchSettings(Settings):
    """What one optimizer step sees. The rest (accumulation, tokens a step) is derived."""

    sequence_length: Positive = 512
    """Tokens a sequence."""
    global_size: Positive = 32
    """Sequences an optimizer step, over all ranks."""
    micro_size: Positive | Literal["auto"] = "auto"
    """Sequences a forward pass on one rank; auto: the largest divisor that keeps to 8,192 tokens."""


class GroupSettings(Settings):
    """Parameters that are trained otherwise than the rest."""

    match: Annotated[str, Field(min_length=1)] = "*"
    """Pattern of their names, such as `embedding.*` or `blocks.0.*`; of the groups one is in, the last counts."""
    rate: Annotated[float, Field(ge=0)] = 1.0
    """Their learning rate, as a multiple of the schedule's."""
    weight_decay: Annotated[float, Field(ge=0)] | None = None
    """Their decay; null: the optimizer's."""


class OptimizerBase(Settings):
    """What every optimizer has."""

    type: str
    groups: list[GroupSettings] = []
    """Parameters that have another rate or decay."""


class AdamWSettings(OptimizerBase):
    """AdamW (Loshchilov and Hutter, 2019)."""

    type: Literal["adamw"] = "adamw"
    moments: Literal["fp32", "int8"] = "fp32"
    """Their format; int8 (of matrices with rows of a multiple of 256 elements) needs the bitsandbytes package."""
    lr: Annotated[float, Field(gt=0)] = 1e-3
    """Peak learning rate."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay of the first moment."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Decay of the second moment."""
    epsilon: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the root of the second moment."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """Decoupled decay a unit of learning rate; never on norms and biases."""


class LionSettings(OptimizerBase):
    """Lion (Chen et al., 2023): the sign of an interpolated momentum."""

    type: Literal["lion"] = "lion"
    lr: Annotated[float, Field(gt=0)] = 1e-4
    """Peak learning rate; about a tenth of AdamW's."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Weight of the momentum in the update's direction."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.99
    """Decay of the momentum."""
    weight_decay: Annotated[float, Field(ge=0)] = 1.0
    """Decoupled decay a unit of learning rate; never on norms and biases."""


class AdafactorSettings(OptimizerBase):
    """Adafactor (Shazeer and Stern, 2018): of a matrix's second moment only its rows and columns are kept, and steps
    are relative to the size of the weights."""

    type: Literal["adafactor"] = "adafactor"
    lr: Annotated[float, Field(gt=0)] = 1e-2
    """Peak learning rate, relative to the weights; a step never goes further than 1 / √step."""
    power: Annotated[float, Field(gt=0)] = 0.8
    """Step t gives the second moment a share of t ^ -power."""
    clip: Annotated[float, Field(gt=0)] = 1.0
    """Root mean square above which an update is scaled down."""
    floor: Annotated[float, Field(gt=0)] = 1e-3
    """Least root mean square that weights are taken to have."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled decay a unit of learning rate; never on norms and biases."""


class MuonSettings(OptimizerBase):
    """Muon (Jordan, 2024): the momentum of a block's matrices made orthogonal; AdamW for all other parameters."""

    type: Literal["muon"] = "muon"
    lr: Annotated[float, Field(gt=0)] = 1e-3
    """Peak learning rate of both; Muon's steps are of the size of AdamW's (Liu et al., 2025)."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Decay of the momentum, which is Nesterov's."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """AdamW's decay of the first moment."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """AdamW's decay of the second moment."""
    epsilon: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the root of AdamW's second moment."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """Decoupled decay a unit of learning rate; never on norms and biases."""


Optimizer = Annotated[
    AdamWSettings | LionSettings | AdafactorSettings | MuonSettings, Discriminator("type"), type_or("adamw")
]


def in_steps(length: int | float, steps: int) -> int:
    """A length given in steps (a whole number) or as a fraction of the run, in steps."""
    return length if isinstance(length, int) else round(length * steps)


class ScheduleBase(Settings):
    """Warm-up and floor, common to every schedule."""

    type: str
    warmup: NotNegative | Fraction = 0.02
    """Linear warm-up: steps (a whole number) or a fraction of the run (with a decimal point)."""
    minimum: Annotated[float, Field(ge=0)] = 0.0
    """The rate never falls below this, once warmed up."""


class ConstantSettings(ScheduleBase):
    """The peak rate to the end."""

    type: Literal["constant"] = "constant"


class LinearSettings(ScheduleBase):
    """A straight line from the peak to the minimum at the last step."""

    type: Literal["linear"] = "linear"


class CosineSettings(ScheduleBase):
    """Half a cosine from the peak to the minimum at the last step."""

    type: Literal["cosine"] = "cosine"


class NoamSettings(ScheduleBase):
    """Inverse square root of the step (Vaswani et al., 2017), reaching the peak at the end of warm-up."""

    type: Literal["noam"] = "noam"


class ExponentialSettings(ScheduleBase):
    """The rate is multiplied by `decay` over the run, evenly step by step."""

    type: Literal["exponential"] = "exponential"
    decay: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Share of the peak rate left at the last step."""


class WarmupStableDecaySettings(ScheduleBase):
    """Warm up, stay, then fall in a straight line over the last part (Hu et al., 2024)."""

    type: Literal["warmup-stable-decay"] = "warmup-stable-decay"
    decay: NotNegative | Fraction = 0.2
    """Length of the fall: steps (a whole number) or a fraction of the run (with a decimal point)."""


Schedule = Annotated[
    ConstantSettings | LinearSettings | CosineSettings | NoamSettings | ExponentialSettings | WarmupStableDecaySettings,
    Discriminator("type"),
    type_or("cosine"),
]


class ActivationCheckpointingSettings(Settings):
    """What the backward pass finds of a block's activations, and what it computes again."""

    type: Literal["none", "selective", "full"] = "none"
    """Kept: all; what products, attention and exchanges between ranks gave; or only the block's input."""
    every: Positive = 1
    """Only every so many-th block computes again; the others keep all."""


class TrainSettings(Settings):
    """How the loop runs."""

    steps: Positive = 1000
    """Optimizer steps of the run."""
    clip_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """Largest global norm of the gradient; null: no clipping."""
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of each target that is spread evenly over the vocabulary; evaluations leave it out."""
    z_loss: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the squared logarithm of the softmax's sum, such as 1e-4; evaluations leave it out."""
    noise: Annotated[float, Field(ge=0)] = 0.0
    """Size of the noise on embedded tokens (NEFTune's α, such as 5), for decoders."""
    compile: bool | Literal["auto"] = "auto"
    """Compile the blocks; auto: where a compiler is present and the run is long enough to earn it."""
    activation_checkpointing: ActivationCheckpointingSettings = ActivationCheckpointingSettings()
    log_every: Positive = 10
    """Steps between lines of metrics.jsonl."""
    tensorboard: bool = False
    """Also write TensorBoard events into the run's folder (needs the tensorboard package)."""


class PrecisionBase(Settings):
    """Number formats, common to every precision."""

    type: str
    reduce: Literal["auto", "fp64", "fp32", "bf16", "fp16"] = "auto"
    """Format in which gradients are added up over micro-batches and ranks; auto: that of the master weights."""


class PrecisionSettings(PrecisionBase):
    """bf16 computes in bf16 over fp32 master weights; auto: bf16 where the device has units for it, else fp32."""

    type: Literal["auto", "fp32", "bf16", "fp64"] = "auto"


class FP16Settings(PrecisionBase):
    """fp16 over fp32 master weights. The loss is scaled, so that gradients stay within what fp16 can hold."""

    type: Literal["fp16"] = "fp16"
    initial_scale: Annotated[float, Field(gt=0)] = 65536.0
    """Factor on the mean loss at first."""
    window: Positive = 1000
    """Steps without overflow after which the scale is doubled."""
    hysteresis: Positive = 2
    """Overflows within a window from which on the scale is halved; a step that overflows is skipped either way."""
    minimum_scale: Annotated[float, Field(gt=0)] = 1.0
    """The scale never falls below this."""


Precision = Annotated[PrecisionSettings | FP16Settings, Discriminator("type"), type_or("auto")]
