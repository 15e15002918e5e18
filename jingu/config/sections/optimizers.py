"""Optimizers: settings of each, and the state that it holds for a parameter.

An optimizer is one class of this file and the class that `IMPLEMENTATION` names. Allocation, checkpoints and the
planned memory follow from `slots`. Nothing here needs PyTorch.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, NamedTuple

from pydantic import Field

from jingu.config.sections.base import Settings, registry_of, variants_of

# Number of elements in a row that share a scale of 8-bit moments.
QUANTIZATION_BLOCK = 256


class Slot(NamedTuple):
    """A tensor of state that an optimizer holds for a parameter.

    Attributes:
        layout: sharded: divided like the parameter; replicated: whole on every rank; counter: one fp32 number.
        shape: shape before ranks divide it; that of a counter is ().
        dtype: master: the dtype of the master weights.
        group_size: neighboring elements of a row of the parameter for which a sharded slot has one value.
        on_host: whether a counter is in main memory, for kernels that take it as a number.
    """

    layout: Literal["sharded", "replicated", "counter"]
    shape: tuple[int, ...] = ()
    dtype: Literal["master", "fp32", "uint8"] = "master"
    group_size: int = 1
    on_host: bool = False

    def num_bytes(self, num_local: int, master_bytes: float) -> float:
        """Return the bytes on a rank.

        Args:
            num_local: elements of the parameter on the rank.
            master_bytes: bytes of a master weight.
        """
        itemsize = {"master": master_bytes, "fp32": 4.0, "uint8": 1.0}[self.dtype]
        if self.layout == "sharded":
            return num_local / self.group_size * itemsize
        return prod(self.shape) * itemsize


Slots = dict[str, Slot]


def counter(*, on_host: bool = False) -> Slot:
    """Return the slot of a counter of steps."""
    return Slot("counter", dtype="fp32", on_host=on_host)


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

    # The class that computes the updates, as module:name. Plans do not import it, because it needs PyTorch.
    IMPLEMENTATION: ClassVar[str]

    type: str
    param_groups: list[ParamGroupSettings] = []

    if TYPE_CHECKING:
        # Every optimizer has these two settings, with its own defaults.
        lr: float = 0.0
        weight_decay: float = 0.0

    @property
    def implementation(self) -> str:
        """`IMPLEMENTATION`, unless settings choose between several classes."""
        return self.IMPLEMENTATION

    def slots(self, shape: tuple[int, ...], *, is_in_block: bool) -> Slots:
        """Return the state of a parameter by name, in the order in which it is allocated and saved.

        Args:
            shape: shape of the whole parameter.
            is_in_block: whether the parameter belongs to a block of the model.
        """
        raise NotImplementedError


def adam_slots(shape: tuple[int, ...]) -> Slots:
    """Return the state of AdamW: a counter of steps and both moments."""
    return {"step": counter(), "exp_avg": Slot("sharded", shape), "exp_avg_sq": Slot("sharded", shape)}


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

    IMPLEMENTATION: ClassVar[str] = "jingu.training.optimizer:AdamW"

    type: Literal["adamw"] = "adamw"
    state_dtype: Literal["fp32", "int8"] = "fp32"
    lr: Annotated[float, Field(gt=0)] = 1e-3
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    eps: Annotated[float, Field(gt=0)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.1

    @property
    def implementation(self) -> str:
        return self.IMPLEMENTATION + "8bit" * (self.state_dtype == "int8")

    def slots(self, shape: tuple[int, ...], *, is_in_block: bool) -> Slots:
        if self.state_dtype == "fp32" or len(shape) < 2 or shape[-1] % QUANTIZATION_BLOCK:
            return adam_slots(shape)
        codes = Slot("sharded", shape, "uint8")
        scales = Slot("sharded", (*shape[:-1], shape[-1] // QUANTIZATION_BLOCK), "fp32", QUANTIZATION_BLOCK)
        moments = {"exp_avg": codes, "exp_avg_scale": scales, "exp_avg_sq": codes, "exp_avg_sq_scale": scales}
        # The kernel takes the step as a number of the host. Reading a counter on the device would make the host wait.
        return {"step": counter(on_host=True), **moments}


class LionSettings(OptimizerBase):
    """Lion (Chen et al., 2023): updates by the sign of an interpolation of momentum and gradient.

    Attributes:
        lr: Peak learning rate; usually about a tenth of AdamW's.
        beta1: Weight of the momentum in this interpolation.
        beta2: Decay rate of the momentum.
        weight_decay: Decoupled weight decay, multiplied by the learning rate; never applied to norms and biases.
    """

    IMPLEMENTATION: ClassVar[str] = "jingu.training.optimizer:Lion"

    type: Literal["lion"] = "lion"
    lr: Annotated[float, Field(gt=0)] = 1e-4
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.99
    weight_decay: Annotated[float, Field(ge=0)] = 1.0

    def slots(self, shape: tuple[int, ...], *, is_in_block: bool) -> Slots:
        return {"exp_avg": Slot("sharded", shape)}


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

    IMPLEMENTATION: ClassVar[str] = "jingu.training.optimizer:Adafactor"

    type: Literal["adafactor"] = "adafactor"
    lr: Annotated[float, Field(gt=0)] = 1e-2
    decay_rate: Annotated[float, Field(gt=0)] = 0.8
    clip_threshold: Annotated[float, Field(gt=0)] = 1.0
    min_weight_rms: Annotated[float, Field(gt=0)] = 1e-3
    weight_decay: Annotated[float, Field(ge=0)] = 0.0

    def slots(self, shape: tuple[int, ...], *, is_in_block: bool) -> Slots:
        if len(shape) == 1:
            return {"step": counter(), "variance": Slot("sharded", shape)}
        rows, columns = shape[:-1], (*shape[:-2], shape[-1])
        return {"step": counter(), "row_var": Slot("replicated", rows), "col_var": Slot("replicated", columns)}


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

    IMPLEMENTATION: ClassVar[str] = "jingu.training.optimizer:Muon"

    type: Literal["muon"] = "muon"
    lr: Annotated[float, Field(gt=0)] = 1e-3
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.95
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    eps: Annotated[float, Field(gt=0)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.1

    def slots(self, shape: tuple[int, ...], *, is_in_block: bool) -> Slots:
        return {"exp_avg": Slot("sharded", shape)} if is_in_block and len(shape) > 1 else adam_slots(shape)


class SgdSettings(OptimizerBase):
    """Stochastic gradient descent with momentum, which holds one number of state for each weight.

    Attributes:
        lr: Peak learning rate; usually ten to a hundred times AdamW's.
        momentum: Decay rate of the momentum, the sum of earlier gradients; 0: no momentum and no state.
        nesterov: Whether to take Nesterov's step, from where the momentum alone leads.
        weight_decay: Decoupled weight decay, multiplied by the learning rate; never applied to norms and biases.
    """

    IMPLEMENTATION: ClassVar[str] = "jingu.training.sgd:Sgd"

    type: Literal["sgd"] = "sgd"
    lr: Annotated[float, Field(gt=0)] = 0.1
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    nesterov: bool = False
    weight_decay: Annotated[float, Field(ge=0)] = 0.0

    def slots(self, shape: tuple[int, ...], *, is_in_block: bool) -> Slots:
        return {"momentum": Slot("sharded", shape)} if self.momentum else {}


OPTIMIZERS = registry_of("optimizers", OptimizerBase)
"""The optimizers by the names of `optimizer.type`."""

Optimizer = Annotated[OptimizerBase, variants_of(OPTIMIZERS, "adamw")]
