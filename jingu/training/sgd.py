"""Stochastic gradient descent with momentum and decoupled weight decay."""

from __future__ import annotations

from torch import nn

from jingu.compat.torch import foreach_add_, foreach_mul_
from jingu.config.sections.optimizers import SgdSettings
from jingu.parallel.sharding import local_tensor
from jingu.training.optimizer import ParamGroup, ShardedOptimizer, local_gradient


class Sgd(ShardedOptimizer):
    """SGD with heavy-ball or Nesterov momentum (Sutskever et al., 2013), as `torch.optim.SGD` without dampening."""

    settings: SgdSettings

    def update(self, params: list[nn.Parameter], group: ParamGroup) -> None:
        weights = [local_tensor(parameter) for parameter in params]
        directions = [local_gradient(parameter) for parameter in params]
        foreach_mul_(weights, 1.0 - group["lr"] * group["weight_decay"])
        if self.settings.momentum:
            momenta = [local_tensor(self.state[parameter]["momentum"]) for parameter in params]
            foreach_mul_(momenta, self.settings.momentum)
            foreach_add_(momenta, directions)
            if self.settings.nesterov:
                foreach_add_(directions, momenta, alpha=self.settings.momentum)
            else:
                directions = momenta
        foreach_add_(weights, directions, alpha=-group["lr"])
