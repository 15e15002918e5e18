"""The updates of Signum."""

from __future__ import annotations

from torch import nn

from jingu.parallel.sharding import local_tensor
from jingu.training.optimizer import ParamGroup, ShardedOptimizer, local_gradient
from jingu_example.settings import SignumSettings


class Signum(ShardedOptimizer):
    """Signum over this rank's share of each parameter: the update of an element needs no other element."""

    settings: SignumSettings

    def update(self, params: list[nn.Parameter], group: ParamGroup) -> None:
        for parameter in params:
            weight = local_tensor(parameter)
            momentum = local_tensor(self.state[parameter]["momentum"])
            momentum.lerp_(local_gradient(parameter), 1.0 - self.settings.momentum)
            weight.mul_(1.0 - group["lr"] * group["weight_decay"])
            weight.add_(momentum.sign(), alpha=-group["lr"])
