"""A mixture of experts (Shazeer et al., 2017) in place of a block's feed-forward.

Shapes: B rows, T tokens, D hidden size, E experts, K experts per token, L layers, M = B·T·K choices. A choice is one
assignment of a token to an expert. I and O are the inputs and outputs of a matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import ceil
from typing import NamedTuple

import torch
from torch import Tensor, nn

from jingu.model.assignment import balanced_assignment
from jingu.model.components import BalancedRouter, Experts, RandomProjectionRouter
from jingu.model.grouped_matmul import GatherRows, QuantizedGroupedMatmul, grouped_matmul, iterate_groups
from jingu.model.layers import FeedForwardLayer, activate, apply_batch_invariant, build_linear
from jingu.model.matmul_kernels import linear
from jingu.model.parts import ModuleRow, Rows, child_rows, shared_expert, styles
from jingu.model.quantized_weight import QuantizedWeight

ExpertProjection = Callable[[Tensor], Tensor]


class RoutingStats(NamedTuple):
    """Statistics of one layer's router: means over the tokens of each row, in at least fp32.

    They are means over rows, not over the micro-batch. The load-balancing loss is not linear in these means, so with
    means over more than a row it would depend on how a step is divided into micro-batches and ranks.

    Attributes:
        load: [B, E] share of the tokens that are assigned to each expert; sums to K. It has no gradient.
        probability: [B, E] mean router probability of each expert.
        z: [B] mean squared log-sum-exp of the router's logits.
        dropped: [B] share of the choices that exceed an expert's capacity.
    """

    load: Tensor
    probability: Tensor
    z: Tensor
    dropped: Tensor


class GroupedLinear(nn.Module):
    """A linear layer without bias per expert, with all weights in one parameter [E, O, I]."""

    def __init__(self, row: ModuleRow) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(row.shape))

    def forward(self, x_MI: Tensor, ends_E: Tensor) -> Tensor:
        """Return [M, O]: each row times the matrix of its expert.

        Args:
            x_MI: rows sorted by expert.
            ends_E: for each expert, the index after its last row.
        """
        # CUDA has one kernel for all experts. Quantized matrices take the loop below, so that only those of experts
        # with rows are dequantized.
        has_kernel = x_MI.is_cuda and isinstance(self.weight, Tensor)
        if has_kernel or torch.is_grad_enabled() or torch.compiler.is_compiling():
            return self.all(x_MI, ends_E)
        # Generation on CPUs: one expert after another, so that a row's result does not depend on other rows, to the
        # last bit.
        parts = [self.one(expert, x_MI[rows]) for expert, rows in iterate_groups(ends_E)]
        return torch.cat(parts) if parts else self.one(0, x_MI)

    def all(self, x_MI: Tensor, ends_E: Tensor) -> Tensor:
        """Compute `forward` as one differentiable operation for all experts."""
        weight: Tensor | QuantizedWeight = self.weight
        if isinstance(weight, QuantizedWeight):
            return QuantizedGroupedMatmul.apply(x_MI, weight.values, weight.scales, weight.kind, ends_E)
        return grouped_matmul(x_MI, weight.to(x_MI.dtype), ends_E)

    def one(self, number: int, x_MI: Tensor) -> Tensor:
        """Multiply rows that all belong to the same expert by its matrix."""
        weight: Tensor | QuantizedWeight = self.weight
        return linear(x_MI, weight.whole(number) if isinstance(weight, QuantizedWeight) else weight[number])


class MoELayer(nn.Module):
    """A mixture of experts: a router, gated feed-forwards as experts, and a shared expert if the spec has one."""

    def __init__(self, spec: Experts, rows: Rows) -> None:
        super().__init__()
        self.spec = spec
        self.sharding = styles(rows)
        self.router = build_linear(rows["router"])
        self.gate = GroupedLinear(rows["gate"])
        self.up = GroupedLinear(rows["up"])
        self.down = GroupedLinear(rows["down"])
        shared = shared_expert(spec)
        self.shared = None if shared is None else FeedForwardLayer(shared, child_rows(rows, "shared"))
        self.shared_gate = build_linear(rows["shared_gate"]) if "shared_gate" in rows else None

    def forward(self, x_BTD: Tensor) -> tuple[Tensor, RoutingStats | None]:
        """Return the layer's output [B, T, D] and, in training, the router's statistics."""
        # The router computes in at least fp32, but with its weight rounded to the dtype of the hidden states.
        wide = torch.promote_types(x_BTD.dtype, torch.float32)
        experts_BTK, weights_BTK, routing = self.route(linear(x_BTD.to(wide), self.router.weight.to(x_BTD.dtype)))
        y_BTD = self._mix(x_BTD, experts_BTK, weights_BTK)
        # Every token also uses the shared expert.
        if self.shared is not None:
            shared_BTD = self.shared(x_BTD)
            if self.shared_gate is not None:
                shared_BTD = apply_batch_invariant(torch.sigmoid, self.shared_gate(x_BTD)) * shared_BTD
            y_BTD = y_BTD + shared_BTD
        return y_BTD, routing

    def route(self, logits_BTE: Tensor) -> tuple[Tensor, Tensor, RoutingStats | None]:
        """Return each token's experts and their weights [B, T, K] and, in training, the router's statistics.

        The rows must be whole: capacity and statistics count all tokens of a row.
        """
        experts_BTK, weights_BTK = self._choose(logits_BTE)
        if not self.training:
            return experts_BTK, weights_BTK, None
        # Choices beyond an expert's capacity get weight 0. The expert still computes them.
        dropped_BTK = None
        if self.spec.capacity_factor is not None:
            dropped_BTK = _beyond_capacity(experts_BTK, self.spec.num_experts, self.spec.capacity_factor)
            weights_BTK = weights_BTK.masked_fill(dropped_BTK, 0.0)
        # Count the tokens per expert, dropped choices included.
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
        """Return each token's experts and their weights [B, T, K], by the rule of the router's type."""
        router, active = self.spec.router, self.spec.num_experts_per_token
        if isinstance(router, BalancedRouter):
            best = balanced_assignment(logits_BTE) if self.training else logits_BTE.argmax(-1)
            return best.unsqueeze(-1), apply_batch_invariant(torch.sigmoid, logits_BTE.gather(-1, best.unsqueeze(-1)))
        if isinstance(router, RandomProjectionRouter):
            top_BTK = logits_BTE.topk(active, dim=-1).indices
            return top_BTK, torch.full_like(top_BTK, 1.0 / active, dtype=logits_BTE.dtype)
        if router.softmax == "after":
            top = logits_BTE.topk(active, dim=-1)
            return top.indices, top.values.softmax(-1)
        top = logits_BTE.softmax(-1).topk(active, dim=-1)
        return top.indices, top.values / top.values.sum(-1, keepdim=True) if router.norm_topk_prob else top.values

    def _mix(self, x_BTD: Tensor, experts_BTK: Tensor, weights_BTK: Tensor) -> Tensor:
        """Return for each token the weighted sum [B, T, D] of the outputs of its experts."""
        active = experts_BTK.shape[-1]
        # Sort the choices by expert. `place_M` is the inverse of the permutation `order_M`.
        order_M = experts_BTK.flatten().argsort(stable=True)
        place_M = torch.empty_like(order_M).scatter_(0, order_M, torch.arange(len(order_M), device=order_M.device))
        count_E = order_M.new_zeros(self.spec.num_experts).scatter_add_(
            0, experts_BTK.flatten(), torch.ones_like(order_M)
        )
        x_MD = GatherRows.apply(x_BTD.flatten(0, 1), order_M // active, place_M, active)
        y_MD = GatherRows.apply(self.compute(x_MD, count_E), place_M, order_M, 1)
        # The outputs are in the order of the tokens again: weight and sum them.
        y_BTKD = y_MD.view(*experts_BTK.shape, -1) * weights_BTK.unsqueeze(-1).to(y_MD.dtype)
        return y_BTKD.sum(2)

    def compute(self, x_MD: Tensor, count_E: Tensor) -> Tensor:
        """Run the experts on rows sorted by expert, of which each expert has `count_E`."""
        ends_E = count_E.cumsum(0).to(torch.int32)
        gate, up, down = (partial(part, ends_E=ends_E) for part in (self.gate, self.up, self.down))
        return self.run_experts(x_MD, gate, up, down)

    def run_experts(self, x_MD: Tensor, gate: ExpertProjection, up: ExpertProjection, down: ExpertProjection) -> Tensor:
        """Run the gated feed-forward of one or several experts, with the given functions for its three matrices."""
        return down(activate(gate(x_MD), self.spec.activation) * up(x_MD))


def _beyond_capacity(experts_BTK: Tensor, number: int, factor: float) -> Tensor:
    """Return which choices [B, T, K] exceed the capacity of their expert, as booleans.

    An expert accepts ⌈factor·T·K/E⌉ choices per row: all first choices come before all second choices, and within
    these the tokens come in order (Lepikhin et al., 2021).
    """
    rows, tokens, active = experts_BTK.shape
    one_hot = nn.functional.one_hot(experts_BTK.transpose(1, 2).flatten(1), number)
    # The number of earlier choices of the same expert.
    before = (one_hot.cumsum(1) * one_hot).sum(2) - 1
    return (before >= ceil(factor * tokens * active / number)).view(rows, active, tokens).transpose(1, 2)


def auxiliary_losses(routings: list[RoutingStats], spec: Experts, trained_B: Tensor) -> Tensor:
    """Return load-balancing loss, z-loss and share of dropped choices [3], as sums over trained tokens.

    They are not yet multiplied by their coefficients. A row's value counts once per trained token of the row. These are
    therefore sums like the loss, are divided by the same global token count, and do not depend on micro-batches or
    ranks.

    The load-balancing loss of a row is E · Σ load · probability (Fedus et al., 2022, equations 4 to 6), averaged over
    layers. With the scope `model`, load and probability are averaged over layers first, as in transformers. The z-loss
    is that of Zoph et al. (2022).

    Args:
        routings: the statistics of all layers.
        trained_B: number of trained tokens of each row, or whatever unit the loss is summed over.
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
