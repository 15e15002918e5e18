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
from jingu.model.feed_forward_specs import (
    BalancedRouter,
    Experts,
    RandomProjectionRouter,
    SparseMixerRouter,
    TopKRouter,
)
from jingu.model.grouped_matmul import (
    GatherRows,
    QuantizedGroupedMatmul,
    StoredGroupedMatmul,
    grouped_matmul,
    iterate_groups,
)
from jingu.model.layers import FeedForwardLayer, Vector, activate, apply_batch_invariant, build_linear, build_norm
from jingu.model.matmul_kernels import linear
from jingu.model.part_spec import ModuleRow, Rows, child_rows, styles
from jingu.model.quantized_weight import FrozenWeight, QuantizedWeight, StoredWeight
from jingu.model.spec import ModelSpec

ExpertProjection = Callable[[Tensor], Tensor]
# Beginning of the names of the terms that are loads of experts.
LOAD_PREFIX = "load."


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
    """A linear layer per expert, with all weights in one parameter [E, O, I], and all biases in one [E, O].

    Attributes:
        bias_share: as in `Linear`.
    """

    bias_share = 1.0

    def __init__(self, row: ModuleRow) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(row.shape))
        self.bias = nn.Parameter(torch.empty(row.shape[:-1])) if row.bias else None

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
        weight: Tensor | FrozenWeight = self.weight
        y_MO: Tensor
        if isinstance(weight, QuantizedWeight):
            y_MO = QuantizedGroupedMatmul.apply(x_MI, weight.values, weight.scales, weight.kind, ends_E)
        elif isinstance(weight, StoredWeight):
            y_MO = StoredGroupedMatmul.apply(x_MI, weight, weight.shape[1], ends_E)
        else:
            y_MO = grouped_matmul(x_MI, weight.to(x_MI.dtype), ends_E)
        if self.bias is None:
            return y_MO
        # A product with zeros and ones: the gradient of a lookup would sum in any order on GPUs.
        rows_M = torch.arange(len(x_MI), device=x_MI.device)
        expert_M = torch.searchsorted(ends_E, rows_M, right=True)
        is_own_ME = expert_M.unsqueeze(1) == torch.arange(len(ends_E), device=x_MI.device)
        return y_MO + is_own_ME.to(y_MO.dtype) @ (self.bias * self.bias_share).to(y_MO.dtype)

    def one(self, number: int, x_MI: Tensor) -> Tensor:
        """Multiply rows that all belong to the same expert by its matrix."""
        weight: Tensor | FrozenWeight = self.weight
        whole = weight.whole(number) if isinstance(weight, FrozenWeight) else weight[number]
        return linear(x_MI, whole, self.bias_of(number))

    def bias_of(self, number: int) -> Tensor | None:
        """Return the bias of an expert; None if there are none."""
        return None if self.bias is None else self.bias[number] * self.bias_share


class MoELayer(nn.Module):
    """A mixture of experts: a router, feed-forwards as experts, and a shared expert if the spec has one."""

    def __init__(self, spec: Experts, rows: Rows) -> None:
        super().__init__()
        self.spec = spec
        self.sharding = styles(rows)
        self.router = build_linear(rows["router"])
        self.gate = GroupedLinear(rows["gate"]) if "gate" in rows else None
        self.up = GroupedLinear(rows["up"])
        self.down = GroupedLinear(rows["down"])
        self.to_latent, self.from_latent = (
            build_linear(rows[name]) if name in rows else None for name in ("to_latent", "from_latent")
        )
        self.correction = Vector(rows["correction"]) if "correction" in rows else None
        shared = spec.shared_expert()
        self.shared = None if shared is None else FeedForwardLayer(shared, child_rows(rows, "shared"))
        self.shared_gate = build_linear(rows["shared_gate"]) if "shared_gate" in rows else None
        hidden_size = rows["router"].shape[1]
        self.input_norm = build_norm(spec.input_norm(), hidden_size) if "input_norm" in rows else None
        self.router_scale, self.expert_scale = (
            Vector(rows[name]) if name in rows else None for name in ("router_scale", "expert_scale")
        )
        self.router_norm = None
        if self.router_scale is not None:
            self.router_norm = build_norm(spec.input_norm().without_weight(), hidden_size)

    def forward(self, x_BTD: Tensor) -> tuple[Tensor, RoutingStats | None]:
        """Return the layer's output [B, T, D] and, in training, the router's statistics."""
        experts_BTK, weights_BTK, routing = self.route(self.router_logits(x_BTD))
        if self.input_norm is not None:
            x_BTD = self.input_norm(x_BTD)
        if self.to_latent is None or self.from_latent is None:
            y_BTD = self._mix(x_BTD, experts_BTK, weights_BTK)
        else:
            y_BTD = self.from_latent(self._mix(self.to_latent(x_BTD), experts_BTK, weights_BTK))
        # Every token also uses the shared expert.
        if self.shared is not None:
            shared_BTD = self.shared(x_BTD)
            if self.shared_gate is not None:
                shared_BTD = apply_batch_invariant(torch.sigmoid, self.shared_gate(x_BTD)) * shared_BTD
            y_BTD = y_BTD + shared_BTD
        return y_BTD, routing

    def router_logits(self, x_BTD: Tensor) -> Tensor:
        """Return the logits of all experts [B, T, E], in at least fp32, but with weights rounded to the dtype of x."""
        wide = torch.promote_types(x_BTD.dtype, torch.float32)
        if self.router_norm is not None and self.router_scale is not None:
            scale_D = self.router_scale.weight.to(x_BTD.dtype)
            x_BTD = self.router_norm(x_BTD) * scale_D * x_BTD.shape[-1] ** -0.5
        bias = self.router.bias
        return linear(
            x_BTD.to(wide), self.router.weight.to(x_BTD.dtype), None if bias is None else bias.to(x_BTD.dtype).to(wide)
        )

    def route(self, logits_BTE: Tensor) -> tuple[Tensor, Tensor, RoutingStats | None]:
        """Return each token's experts and their weights [B, T, K] and, in training, the router's statistics.

        The rows must be whole: capacity and statistics count all tokens of a row.
        """
        experts_BTK, weights_BTK = self.choose(logits_BTE)
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
            probability=self._probabilities(logits_BTE).mean(1),
            z=logits_BTE.logsumexp(-1).square().mean(1),
            dropped=none_B if dropped_BTK is None else dropped_BTK.flatten(1).to(count_BE.dtype).mean(1),
        )
        return experts_BTK, weights_BTK, routing

    def choose(self, logits_BTE: Tensor) -> tuple[Tensor, Tensor]:
        """Return each token's experts and their weights [B, T, K], by the rule of the router's type."""
        router, active = self.spec.router, self.spec.num_experts_per_token
        if isinstance(router, BalancedRouter):
            best = balanced_assignment(logits_BTE) if self.training else logits_BTE.argmax(-1)
            return best.unsqueeze(-1), apply_batch_invariant(torch.sigmoid, logits_BTE.gather(-1, best.unsqueeze(-1)))
        if isinstance(router, RandomProjectionRouter):
            top_BTK = logits_BTE.topk(active, dim=-1).indices
            return top_BTK, torch.full_like(top_BTK, 1.0 / active, dtype=logits_BTE.dtype)
        if isinstance(router, SparseMixerRouter):
            return _route_sparse_mixer(logits_BTE, router.jitter)
        if router.softmax == "after":
            top = logits_BTE.topk(active, dim=-1)
            return top.indices, top.values.softmax(-1) * router.scaling_factor
        # The scores of the chosen experts are their weights; the choice may use corrected scores of some groups.
        scores_BTE = self._scores(logits_BTE)
        choice_BTE = scores_BTE if self.correction is None else scores_BTE + self.correction.weight.to(scores_BTE.dtype)
        if router.num_groups > 1:
            choice_BTE = _keep_best_groups(choice_BTE, router)
        experts_BTK = choice_BTE.topk(active, dim=-1).indices
        weights_BTK = scores_BTE.gather(-1, experts_BTK)
        if router.norm_topk_prob:
            weights_BTK = weights_BTK / (weights_BTK.sum(-1, keepdim=True) + router.sum_offset).clamp_min(
                router.min_sum
            )
        if self.expert_scale is not None:
            scale_BTE = self.expert_scale.weight.to(weights_BTK.dtype).expand_as(scores_BTE)
            weights_BTK = weights_BTK * scale_BTE.gather(-1, experts_BTK)
        return experts_BTK, weights_BTK if router.scaling_factor == 1.0 else weights_BTK * router.scaling_factor

    def _probabilities(self, logits_BTE: Tensor) -> Tensor:
        """Return probabilities of all experts, whose sum is one: sigmoid scores are divided by their sum."""
        scores_BTE = self._scores(logits_BTE)
        router = self.spec.router
        is_sigmoid = isinstance(router, TopKRouter) and router.scores == "sigmoid"
        return scores_BTE / scores_BTE.sum(-1, keepdim=True) if is_sigmoid else scores_BTE

    def _scores(self, logits_BTE: Tensor) -> Tensor:
        """Return the scores of all experts."""
        router = self.spec.router
        if isinstance(router, TopKRouter) and router.scores == "sigmoid":
            return apply_batch_invariant(torch.sigmoid, logits_BTE)
        return logits_BTE.softmax(-1)

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
        router = self.spec.router
        weights_inputs = isinstance(router, TopKRouter) and router.weights_inputs
        if weights_inputs:
            x_MD = x_MD * GatherRows.apply(weights_BTK.reshape(-1, 1), order_M, place_M, 1).to(x_MD.dtype)
        y_MD = GatherRows.apply(self.compute(x_MD, count_E), place_M, order_M, 1)
        # The outputs are in the order of the tokens again: weight and sum them.
        y_BTKD = y_MD.view(*experts_BTK.shape, -1)
        return (y_BTKD if weights_inputs else y_BTKD * weights_BTK.unsqueeze(-1).to(y_MD.dtype)).sum(2)

    def compute(self, x_MD: Tensor, count_E: Tensor) -> Tensor:
        """Run the experts on rows sorted by expert, of which each expert has `count_E`."""
        ends_E = count_E.cumsum(0).to(torch.int32)
        gate, up, down = (
            None if part is None else partial(part, ends_E=ends_E) for part in (self.gate, self.up, self.down)
        )
        assert up is not None and down is not None
        return self.run_experts(x_MD, gate, up, down)

    def run_experts(
        self, x_MD: Tensor, gate: ExpertProjection | None, up: ExpertProjection, down: ExpertProjection
    ) -> Tensor:
        """Run the feed-forward of one or several experts, with the given functions for its matrices."""
        if gate is None:
            return down(activate(up(x_MD), self.spec.activation))
        clamped = self.spec.clamped_gate
        if clamped is None:
            return down(activate(gate(x_MD), self.spec.activation) * up(x_MD))
        gate_MF = gate(x_MD).clamp(max=clamped.limit)
        up_MF = up(x_MD).clamp(-clamped.limit, clamped.limit)
        alpha = clamped.alpha
        return down(apply_batch_invariant(lambda x: x * torch.sigmoid(alpha * x), gate_MF) * (up_MF + 1))


def _route_sparse_mixer(logits_BTE: Tensor, jitter: float) -> tuple[Tensor, Tensor]:
    """Return the two experts of each token and their weights [B, T, 2]; see `SparseMixerRouter`."""
    experts: list[Tensor] = []
    weights: list[Tensor] = []
    candidates_BTE = logits_BTE
    for _ in range(2):
        with torch.no_grad():
            best_BT1, expert_BT1 = candidates_BTE.max(-1, keepdim=True)
            magnitude_BTE = torch.maximum(logits_BTE.abs(), best_BT1)
            is_far_BTE = (best_BT1 - logits_BTE) / magnitude_BTE > 2 * jitter
        shares_BTE = candidates_BTE.masked_fill(is_far_BTE, -torch.inf).softmax(-1)
        experts.append(expert_BT1)
        weights.append(shares_BTE.gather(-1, expert_BT1))
        candidates_BTE = candidates_BTE.scatter(-1, expert_BT1, -torch.inf)
    return torch.cat(experts, -1), torch.cat(weights, -1)


def _keep_best_groups(scores_BTE: Tensor, router: TopKRouter) -> Tensor:
    """Return the scores with -inf for all experts outside the best groups of each token (DeepSeek-V2 and V3)."""
    groups_BTGX = scores_BTE.unflatten(-1, (router.num_groups, -1))
    if router.group_score == "best":
        group_scores_BTG = groups_BTGX.amax(-1)
    else:
        group_scores_BTG = groups_BTGX.topk(2, dim=-1).values.sum(-1)
    best_BTN = group_scores_BTG.topk(router.num_groups_per_token, dim=-1).indices
    is_best_BTG = torch.zeros_like(group_scores_BTG, dtype=torch.bool).scatter(-1, best_BTN, True)
    return groups_BTGX.masked_fill(~is_best_BTG.unsqueeze(-1), -torch.inf).flatten(-2)


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


def routing_terms(spec: ModelSpec) -> dict[str, float]:
    """Return the terms that `auxiliary_losses` computes, with their weights in the loss; empty without experts.

    The last of them are the loads of all experts of all layers, one term for each, by the number of the layer among
    those with experts and the number of the expert.
    """
    experts = spec.experts
    if experts is None:
        return {}
    layers = [*[spec.default_layer] * (spec.num_encoder_layers or 0), *spec.layers]
    number = sum(isinstance(layer.feed_forward, Experts) for layer in layers)
    terms = {"balance_loss": experts.aux_loss_coef, "z_loss": experts.z_loss_coef, "dropped": 0.0}
    loads = (f"{LOAD_PREFIX}{layer}.{expert}" for layer in range(number) for expert in range(experts.num_experts))
    return {**terms, **dict.fromkeys(loads, 0.0)}


def auxiliary_losses(routings: list[RoutingStats], spec: Experts, trained_B: Tensor) -> Tensor:
    """Return load-balancing loss, z-loss, share of dropped choices and the loads of all experts, as sums over trained
    tokens: the terms of `routing_terms`.

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
    weight_B = trained_B.to(balance_B.dtype)
    losses = torch.stack([balance_B, z_B, dropped_B]) @ weight_B
    return torch.cat([losses, (load_LBE.movedim(1, -1) @ weight_B).flatten()])
