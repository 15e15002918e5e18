"""How far a run is."""

from __future__ import annotations

from dataclasses import dataclass, field

from jingu.data.receipt import Receipt
from jingu.train.precision import LossScale


@dataclass
class Progress:
    """What a checkpoint must remember besides tensors."""

    step: int = 0
    """Steps done."""
    tokens: int = 0
    """Tokens seen."""
    seconds: float = 0.0
    """Time spent training, over all starts of the run; evaluation and saving left out."""
    loss_sum: float = 0.0
    """Losses of the steps since the last line of metrics.jsonl."""
    loss_steps: int = 0
    evaluation: dict[str, float | None] | None = None
    """What the last evaluation measured."""
    evaluation_due: bool = False
    """Whether the run was stopped at a step that it should have evaluated."""
    loss_scale: LossScale = field(default_factory=LossScale)
    fresh_since: int | None = None
    """Step at which the optimizer began anew, where every start since then asked for that."""
    receipt: Receipt = field(default_factory=Receipt)
    """What it has been trained on."""
