"""A mixture of experts (Shazeer et al., 2017) in the place of a block's feed-forward.

Shapes: B rows, T tokens, D width, N = B·T tokens, E experts, K experts a token, M = N·K choices.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import ceil
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from jingu.model import spec as specs
from jingu.model.assignment import balanced_assignment
from jingu.model.grouped import PackedProduct, TakenRows, grouped_product, groups
from jingu.model.layers import FeedForwardLayer, Linear, activate, steadily
from jingu.model.packed import Packed
from jingu.model.products import linear
from jingu.model.sharding import Table

Product = Callable[[Tensor], Tensor]


class Routing(NamedTuple):
    """What one layer's router did, as means over the tokens of each row, in fp32 at least.

    Means of rows, not of the micro-batch: the balancing loss is not linear in what it averages over, so that any
    wider mean would depend on how the step is cut into micro-batches and ranks.
    """

    load: Tensor
    """[B, E] share of the tokens that chose each expert; sums to K. Without gradient."""
    probability: Tensor
    """[B, E] mean probability of each expert."""
    z: Tensor
    """[B] mean squared log-sum-exp of the router's logits."""
    dropped: Tensor
    """[B] share of the choices that found no place."""


class GroupedLinear(nn.Module):
    """A matrix for each expert, in one parameter [E, out, in]."""

    def __init__(self, number: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(number, outputs, inputs))

    def forward(self, x_MI: Tensor, ends_E: Tensor) -> Tensor:
        """What the matrices make of rows sorted by expert; `ends_E`: where those of each end.

        To generate on CPUs they are taken in turn. What becomes of a row then depends on nothing else, to the last bit.
        """
        at_once = x_MI.is_cuda and isinstance(self.weight, Tensor)  # a packed matrix is made whole where it is asked
        if at_once or torch.is_grad_enabled() or torch.compiler.is_compiling():
            return self.all(x_MI, ends_E)
        parts = [self.one(expert, x_MI[rows]) for expert, rows in groups(ends_E)]
        return torch.cat(parts) if parts else self.one(0, x_MI)

    def all(self, x_MI: Tensor, ends_E: Tensor) -> Tensor:
        """`forward` as one operation."""
        weight: Tensor | Packed = self.weight
        if isinstance(weight, Packed):
            return PackedProduct.apply(x_MI, weight.values, weight.scales, weight.kind, ends_E)
        return grouped_product(x_MI, weight.to(x_MI.dtype), ends_E)

    def one(self, number: int, x_MI: Tensor) -> Tensor:
        """What one of the matrices makes of rows that are all its own."""
        weight: Tensor | Packed = self.weight
        return linear(x_MI, weight.whole(number) if isinstance(weight, Packed) else weight[number])


class ExpertsLayer(nn.Module):
    """A router, gated feed-forwards as experts, and one that all tokens share, where the spec has it."""

    SHARDING: ClassVar[Table] = {"gate": "column", "up": "column", "down": "row"}

    def __init__(self, spec: specs.Experts, width: int) -> None:
        super().__init__()
        self.spec = spec
        self.router = Linear(width, spec.number, bias=False)
        self.router.weight.requires_grad_(not isinstance(spec.router, specs.RandomProjection))
        self.gate = GroupedLinear(spec.number, width, spec.size)
        self.up = GroupedLinear(spec.number, width, spec.size)
        self.down = GroupedLinear(spec.number, spec.size, width)
        shared = spec.shared and specs.GatedFeedForward(size=spec.shared, activation=spec.activation)
        self.shared = FeedForwardLayer(shared, width) if shared else None
        self.shared_gate = Linear(width, 1, bias=False) if shared and spec.shared_gated else None

    def forward(self, x_BTD: Tensor) -> tuple[Tensor, Routing | None]:
        """The layer's output, and while training what the router did."""
        wide = torch.promote_types(x_BTD.dtype, torch.float32)
        experts_BTK, weights_BTK, routing = self.route(linear(x_BTD.to(wide), self.router.weight.to(x_BTD.dtype)))
        y_BTD = self._mix(x_BTD, experts_BTK, weights_BTK)
        if self.shared is not None:
            shared_BTD = self.shared(x_BTD)
            if self.shared_gate is not None:
                shared_BTD = steadily(torch.sigmoid, self.shared_gate(x_BTD)) * shared_BTD
            y_BTD = y_BTD + shared_BTD
        return y_BTD, routing

    def route(self, logits_BTE: Tensor) -> tuple[Tensor, Tensor, Routing | None]:
        """Each token's experts, the weights of what they say, and while training what that makes of whole rows."""
        experts_BTK, weights_BTK = self._choose(logits_BTE)
        if not self.training:
            return experts_BTK, weights_BTK, None
        dropped_BTK = None
        if self.spec.capacity is not None:
            dropped_BTK = _beyond_capacity(experts_BTK, self.spec.number, self.spec.capacity)
            weights_BTK = weights_BTK.masked_fill(dropped_BTK, 0.0)
        count_BE = logits_BTE.new_zeros(logits_BTE.shape[0], self.spec.number)
        count_BE = count_BE.scatter_add(1, experts_BTK.flatten(1), torch.ones_like(weights_BTK.flatten(1)))
        none_B = torch.zeros_like(count_BE[:, 0])
        routing = Routing(
            load=count_BE / logits_BTE.shape[1],
            probability=logits_BTE.softmax(-1).mean(1),
            z=logits_BTE.logsumexp(-1).square().mean(1),
            dropped=none_B if dropped_BTK is None else dropped_BTK.flatten(1).to(count_BE.dtype).mean(1),
        )
        return experts_BTK, weights_BTK, routing

    def _choose(self, logits_BTE: Tensor) -> tuple[Tensor, Tensor]:
        """Each token's experts, and the weights of what they say."""
        router, active = self.spec.router, self.spec.active
        if isinstance(router, specs.Balanced):
            best = balanced_assignment(logits_BTE) if self.training else logits_BTE.argmax(-1)
            return best.unsqueeze(-1), steadily(torch.sigmoid, logits_BTE.gather(-1, best.unsqueeze(-1)))
        if isinstance(router, specs.RandomProjection):
            top_BTK = logits_BTE.topk(active, dim=-1).indices
            return top_BTK, torch.full_like(top_BTK, 1.0 / active, dtype=logits_BTE.dtype)
        if router.softmax == "after":
            top = logits_BTE.topk(active, dim=-1)
            return top.indices, top.values.softmax(-1)
        top = logits_BTE.softmax(-1).topk(active, dim=-1)
        return top.indices, top.values / top.values.sum(-1, keepdim=True) if router.normalised else top.values

    def _mix(self, x_BTD: Tensor, experts_BTK: Tensor, weights_BTK: Tensor) -> Tensor:
        """Sort the choices by expert, compute, and add up in the tokens' order."""
        active = experts_BTK.shape[-1]
        order_M = experts_BTK.flatten().argsort(stable=True)
        place_M = torch.empty_like(order_M).scatter_(0, order_M, torch.arange(len(order_M), device=order_M.device))
        count_E = order_M.new_zeros(self.spec.number).scatter_add_(0, experts_BTK.flatten(), torch.ones_like(order_M))
        x_MD = TakenRows.apply(x_BTD.flatten(0, 1), order_M // active, place_M, active)
        y_MD = TakenRows.apply(self.compute(x_MD, count_E), place_M, order_M, 1)
        y_BTKD = y_MD.view(*experts_BTK.shape, -1) * weights_BTK.unsqueeze(-1).to(y_MD.dtype)
        return y_BTKD.sum(2)

    def compute(self, x_MD: Tensor, count_E: Tensor) -> Tensor:
        """What the experts say to rows sorted by expert, so many for each."""
        ends_E = count_E.cumsum(0).to(torch.int32)
        gate, up, down = (partial(part, ends_E=ends_E) for part in (self.gate, self.up, self.down))
        return self.speak(x_MD, gate, up, down)

    def speak(self, x_MD: Tensor, gate: Product, up: Product, down: Product) -> Tensor:
        """What experts of these matrices say."""
        return down(activate(gate(x_MD), self.spec.activation) * up(x_MD))


def _beyond_capacity(experts_BTK: Tensor, number: int, factor: float) -> Tensor:
    """Which choices find their expert full: each takes ⌈factor·T·K/E⌉ of a row, all first choices before second ones
    (Lepikhin et al., 2021)."""
    rows, tokens, active = experts_BTK.shape
    asked = nn.functional.one_hot(experts_BTK.transpose(1, 2).flatten(1), number)
    before = (asked.cumsum(1) * asked).sum(2) - 1
    return (before >= ceil(factor * tokens * active / number)).view(rows, active, tokens).transpose(1, 2)


def auxiliary_losses(routings: list[Routing], spec: specs.Experts, trained_B: Tensor) -> Tensor:
    """Balancing loss, z loss and share of dropped choices [3], as sums over trained tokens, without coefficients.

    A row's value counts once for each of its trained tokens: so these are sums as the loss is, they are divided by
    the same global count, and neither micro-batches nor ranks change them.

    The balancing loss of a row is E · Σ load · probability (Fedus et al., 2022, equations 4 to 6): per layer, then
    averaged; or, as transformers has it, of loads and probabilities averaged over all layers first. The z loss is
    that of Zoph et al. (2022).
    """
    load_LBE = torch.stack([routing.load for routing in routings])
    probability_LBE = torch.stack([routing.probability for routing in routings])
    if spec.balance_over == "model":
        balance_B = spec.number * (load_LBE.mean(0) * probability_LBE.mean(0)).sum(-1)
    else:
        balance_B = spec.number * (load_LBE * probability_LBE).sum(-1).mean(0)
    z_B = torch.stack([routing.z for routing in routings]).mean(0)
    dropped_B = torch.stack([routing.dropped for routing in routings]).mean(0)
    return torch.stack([balance_B, z_B, dropped_B]) @ trained_B.to(balance_B.dtype)
