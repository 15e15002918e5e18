"""A mixture of experts (Shazeer et al., 2017) in the place of a block's feed-forward.

Shapes: B rows, T tokens, D hidden size, N = B·T tokens, E experts, K experts a token, M = N·K choices.
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
from jingu.model.grouped_matmul import GatherRows, QuantizedGroupedMatmul, grouped_matmul, iterate_groups
from jingu.model.layers import FeedForwardLayer, Linear, activate, apply_batch_invariant
from jingu.model.matmul_kernels import linear
from jingu.model.quantized_weight import QuantizedWeight
from jingu.model.sharding_table import ShardingTable

ExpertProjection = Callable[[Tensor], Tensor]


class RoutingStats(NamedTuple):
    """Statistics of one layer's router: means over the tokens of each row, in fp32 at least.

    They are means of rows, not of the micro-batch: the balancing loss is not linear in what it averages over, so that
    a wider mean would depend on how the step is divided into micro-batches and ranks.

    Attributes:
        load: [B, E] share of the tokens that chose each expert; sums to K. Without gradient.
        probability: [B, E] mean probability of each expert.
        z: [B] mean squared log-sum-exp of the router's logits.
        dropped: [B] share of the choices that exceeded an expert's capacity.
    """

    load: Tensor
    probability: Tensor
    z: Tensor
    dropped: Tensor


class GroupedLinear(nn.Module):
    """A matrix for each expert, in one parameter [E, out, in]."""

    def __init__(self, number: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(number, outputs, inputs))

    def forward(self, x_MI: Tensor, ends_E: Tensor) -> Tensor:
        """Multiply rows that are sorted by expert by their experts' matrices.

        Args:
            ends_E: where the rows of each expert end.
        """
        # One kernel on CUDA; a quantized matrix is dequantized only where its expert has rows.
        has_kernel = x_MI.is_cuda and isinstance(self.weight, Tensor)
        if has_kernel or torch.is_grad_enabled() or torch.compiler.is_compiling():
            return self.all(x_MI, ends_E)
        # To generate on CPUs, one expert after another: the result of a row depends on nothing else, to the last bit.
        parts = [self.one(expert, x_MI[rows]) for expert, rows in iterate_groups(ends_E)]
        return torch.cat(parts) if parts else self.one(0, x_MI)

    def all(self, x_MI: Tensor, ends_E: Tensor) -> Tensor:
        """Compute `forward` as one operation."""
        weight: Tensor | QuantizedWeight = self.weight
        if isinstance(weight, QuantizedWeight):
            return QuantizedGroupedMatmul.apply(x_MI, weight.values, weight.scales, weight.kind, ends_E)
        return grouped_matmul(x_MI, weight.to(x_MI.dtype), ends_E)

    def one(self, number: int, x_MI: Tensor) -> Tensor:
        """Multiply rows that all belong to one expert by its matrix."""
        weight: Tensor | QuantizedWeight = self.weight
        return linear(x_MI, weight.whole(number) if isinstance(weight, QuantizedWeight) else weight[number])


class MoELayer(nn.Module):
    """A mixture of experts: a router, gated feed-forwards as experts, and a shared expert if the spec has one."""

    SHARDING: ClassVar[ShardingTable] = {"gate": "column", "up": "column", "down": "row"}

    def __init__(self, spec: specs.Experts, width: int) -> None:
        super().__init__()
        self.spec = spec
        self.router = Linear(width, spec.num_experts, bias=False)
        self.router.weight.requires_grad_(not isinstance(spec.router, specs.RandomProjectionRouter))
        self.gate = GroupedLinear(spec.num_experts, width, spec.intermediate_size)
        self.up = GroupedLinear(spec.num_experts, width, spec.intermediate_size)
        self.down = GroupedLinear(spec.num_experts, spec.intermediate_size, width)
        shared = spec.shared_intermediate_size and specs.GatedFeedForward(
            intermediate_size=spec.shared_intermediate_size, activation=spec.activation
        )
        self.shared = FeedForwardLayer(shared, width) if shared else None
        self.shared_gate = Linear(width, 1, bias=False) if shared and spec.shared_expert_gate else None

    def forward(self, x_BTD: Tensor) -> tuple[Tensor, RoutingStats | None]:
        """Return the layer's output [B, T, D] and, in training, the router's statistics."""
        # The router computes in fp32 at least.
        wide = torch.promote_types(x_BTD.dtype, torch.float32)
        experts_BTK, weights_BTK, routing = self.route(linear(x_BTD.to(wide), self.router.weight.to(x_BTD.dtype)))
        y_BTD = self._mix(x_BTD, experts_BTK, weights_BTK)
        # The shared expert, which every token passes.
        if self.shared is not None:
            shared_BTD = self.shared(x_BTD)
            if self.shared_gate is not None:
                shared_BTD = apply_batch_invariant(torch.sigmoid, self.shared_gate(x_BTD)) * shared_BTD
            y_BTD = y_BTD + shared_BTD
        return y_BTD, routing

    def route(self, logits_BTE: Tensor) -> tuple[Tensor, Tensor, RoutingStats | None]:
        """Return each token's experts and their weights [B, T, K] and, in training, the statistics of whole rows."""
        experts_BTK, weights_BTK = self._choose(logits_BTE)
        if not self.training:
            return experts_BTK, weights_BTK, None
        # Choices beyond an expert's capacity get weight 0.
        dropped_BTK = None
        if self.spec.capacity_factor is not None:
            dropped_BTK = _beyond_capacity(experts_BTK, self.spec.num_experts, self.spec.capacity_factor)
            weights_BTK = weights_BTK.masked_fill(dropped_BTK, 0.0)
        count_BE = logits_BTE.new_zeros(logits_BTE.shape[0], self.spec.num_experts)
        count_BE = count_BE.scatter_add(1, experts_BTK.flatten(1), torch.ones_like(weights_BTK.flatten(1)))
        none_B = torch.zeros_like(count_BE[:, 0])
        routing = RoutingStats(
            load=count_BE / logits_BTE.shape[1],
            probability=logits_BTE.softmax(-1).mean(1),
            z=logits_BTE.logsumexp(-1).square().mean(1),
            dropped=none_B if dropped_BTK is None else dropped_BTK.flatten(1).to(count_BE.dtype).mean(1),
        )
        return experts_BTK, weights_BTK, routing

    def _choose(self, logits_BTE: Tensor) -> tuple[Tensor, Tensor]:
        """Return each token's experts and their weights [B, T, K], as the router's type chooses them."""
        router, active = self.spec.router, self.spec.num_experts_per_token
        if isinstance(router, specs.BalancedRouter):
            best = balanced_assignment(logits_BTE) if self.training else logits_BTE.argmax(-1)
            return best.unsqueeze(-1), apply_batch_invariant(torch.sigmoid, logits_BTE.gather(-1, best.unsqueeze(-1)))
        if isinstance(router, specs.RandomProjectionRouter):
            top_BTK = logits_BTE.topk(active, dim=-1).indices
            return top_BTK, torch.full_like(top_BTK, 1.0 / active, dtype=logits_BTE.dtype)
        if router.softmax == "after":
            top = logits_BTE.topk(active, dim=-1)
            return top.indices, top.values.softmax(-1)
        top = logits_BTE.softmax(-1).topk(active, dim=-1)
        return top.indices, top.values / top.values.sum(-1, keepdim=True) if router.norm_topk_prob else top.values

    def _mix(self, x_BTD: Tensor, experts_BTK: Tensor, weights_BTK: Tensor) -> Tensor:
        """Return [B, T, D]: the weighted sum of the outputs of each token's experts."""
        active = experts_BTK.shape[-1]
        # Sort the choices by expert. `place_M` is the inverse of the permutation `order_M`.
        order_M = experts_BTK.flatten().argsort(stable=True)
        place_M = torch.empty_like(order_M).scatter_(0, order_M, torch.arange(len(order_M), device=order_M.device))
        count_E = order_M.new_zeros(self.spec.num_experts).scatter_add_(
            0, experts_BTK.flatten(), torch.ones_like(order_M)
        )
        x_MD = GatherRows.apply(x_BTD.flatten(0, 1), order_M // active, place_M, active)
        y_MD = GatherRows.apply(self.compute(x_MD, count_E), place_M, order_M, 1)
        # Back in the tokens' order: weigh and sum.
        y_BTKD = y_MD.view(*experts_BTK.shape, -1) * weights_BTK.unsqueeze(-1).to(y_MD.dtype)
        return y_BTKD.sum(2)

    def compute(self, x_MD: Tensor, count_E: Tensor) -> Tensor:
        """Run the experts on rows that are sorted by expert; `count_E` rows for each."""
        ends_E = count_E.cumsum(0).to(torch.int32)
        gate, up, down = (partial(part, ends_E=ends_E) for part in (self.gate, self.up, self.down))
        return self.speak(x_MD, gate, up, down)

    def speak(self, x_MD: Tensor, gate: ExpertProjection, up: ExpertProjection, down: ExpertProjection) -> Tensor:
        """Run an expert, or several, with these projections."""
        return down(activate(gate(x_MD), self.spec.activation) * up(x_MD))


def _beyond_capacity(experts_BTK: Tensor, number: int, factor: float) -> Tensor:
    """Return which choices [B, T, K] find their expert full.

    An expert takes ⌈factor·T·K/E⌉ choices of a row, all first choices before second ones (Lepikhin et al., 2021).
    """
    rows, tokens, active = experts_BTK.shape
    one_hot = nn.functional.one_hot(experts_BTK.transpose(1, 2).flatten(1), number)
    # How many choices of the same expert come before each.
    before = (one_hot.cumsum(1) * one_hot).sum(2) - 1
    return (before >= ceil(factor * tokens * active / number)).view(rows, active, tokens).transpose(1, 2)


def auxiliary_losses(routings: list[RoutingStats], spec: specs.Experts, trained_B: Tensor) -> Tensor:
    """Return balancing loss, z loss and share of dropped choices [3]: sums over trained tokens, without coefficients.

    A row's value counts once for each of its trained tokens. So these are sums like the loss, are divided by the same
    global count, and change with neither micro-batches nor ranks.

    The balancing loss of a row is E · Σ load · probability (Fedus et al., 2022, equations 4 to 6): per layer, then
    averaged; or, as transformers has it, of loads and probabilities averaged over all layers first. The z loss is
    that of Zoph et al. (2022).
    """
    load_LBE = torch.stack([routing.load for routing in routings])
    probability_LBE = torch.stack([routing.probability for routing in routings])
    if spec.aux_loss_scope == "model":
        balance_B = spec.num_experts * (load_LBE.mean(0) * probability_LBE.mean(0)).sum(-1)
    else:
        balance_B = spec.num_experts * (load_LBE * probability_LBE).sum(-1).mean(0)
    z_B = torch.stack([routing.z for routing in routings]).mean(0)
    dropped_B = torch.stack([routing.dropped for routing in routings]).mean(0)
    return torch.stack([balance_B, z_B, dropped_B]) @ trained_B.to(balance_B.dtype)
