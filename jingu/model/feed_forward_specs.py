"""The specs of feed-forwards, with their routers and experts: fields, rows and saved bytes."""

from __future__ import annotations

from math import expm1, log
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from jingu.errors import JinguError
from jingu.model.norm_specs import RmsNorm
from jingu.model.part_spec import Component, ModuleRow, PositiveFloat, PositiveInt, optional, with_prefix

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "xielu"]


class FeedForwardBase(Component):
    """What every feed-forward declares. It has a field `intermediate_size`, too.

    Attributes:
        module: the class of its module, which receives the spec and the rows.
    """

    module: ClassVar[str]

    def rows(self, width: int, std: float | None = None) -> dict[str, ModuleRow]:
        """Return the rows of the feed-forward.

        Args:
            width: the hidden size.
            std: standard deviation of the initial weights of `down`.
        """
        raise NotImplementedError

    def saved_bytes(self, width: int, size: float, *, is_compiled: bool = False) -> float:
        """Return the bytes per token that the feed-forward saves for its backward pass, beside its input.

        Args:
            width: the hidden size.
            size: bytes of the compute dtype.
            is_compiled: whether the block is compiled.
        """
        raise NotImplementedError

    def routed_bytes(self, width: int, size: float, *, is_compiled: bool = False) -> float:
        """Return the part of `saved_bytes` that moves tokens to experts and back."""
        return 0.0

    def dense_equivalent(self) -> FeedForwardBase:
        """Return the feed-forward of the size that a token uses of a mixture of experts; a dense one is its own."""
        return self

    @property
    def has_correction(self) -> bool:
        """Whether it is a mixture of experts whose router has corrections."""
        return False

    def parallel_branch(self) -> FeedForwardBase | None:
        """Return the dense feed-forward beside a mixture of experts; None if there is none."""
        return None


def _activation_bytes(
    part: PlainFeedForward | GatedFeedForward, size: float, gates: int, *, is_compiled: bool = False
) -> float:
    # The input (for ReLU, the output) of the activation, both factors of the gate, and the input of the last matmul.
    # Compiled code computes the activation again, and needs only the signs of the inputs of a ReLU.
    if is_compiled:
        is_relu = part.activation == "relu" and not gates
        return part.intermediate_size * (size + 1 if is_relu else (gates + 2) * size)
    tensors = 2 * gates + 1 + (part.activation != "relu")
    # xIELU saves three more tensors and a mask.
    extra = 3 * size + 1 if part.activation == "xielu" else 0.0
    return part.intermediate_size * (tensors * size + extra)


class PlainFeedForward(FeedForwardBase):
    """down(activation(up(x)))."""

    module = "jingu.model.layers:FeedForwardLayer"
    type: Literal["plain"] = "plain"
    intermediate_size: PositiveInt
    activation: Activation = "gelu_tanh"
    bias: bool = False

    def rows(self, width: int, std: float | None = None) -> dict[str, ModuleRow]:
        size = self.intermediate_size
        # The two trained numbers of xIELU, before softplus: 0.8 and 0.8 - 0.5.
        numbers = {"alpha_p": log(expm1(0.8)), "alpha_n": log(expm1(0.3))} if self.activation == "xielu" else {}
        return {
            "up": ModuleRow((size, width), "column", self.bias),
            "down": ModuleRow((width, size), "row", self.bias, std=std),
            **{name: ModuleRow((1,), initial=number) for name, number in numbers.items()},
        }

    def saved_bytes(self, width: int, size: float, *, is_compiled: bool = False) -> float:
        return _activation_bytes(self, size, 0, is_compiled=is_compiled)


class GatedFeedForward(FeedForwardBase):
    """down(activation(gate(x)) · up(x)) (Shazeer, 2020).

    Attributes:
        gate_scale: multiplies the gate before the activation.
        output_scale: multiplies the results.
    """

    module = "jingu.model.layers:FeedForwardLayer"
    type: Literal["gated"] = "gated"
    intermediate_size: PositiveInt
    activation: Activation = "silu"
    bias: bool = False
    gate_scale: PositiveFloat = optional(1.0)
    output_scale: PositiveFloat = optional(1.0)

    def rows(self, width: int, std: float | None = None) -> dict[str, ModuleRow]:
        size = self.intermediate_size
        matrices = {name: ModuleRow((size, width), "column", self.bias) for name in ("gate", "up")}
        return {**matrices, "down": ModuleRow((width, size), "row", self.bias, std=std)}

    def saved_bytes(self, width: int, size: float, *, is_compiled: bool = False) -> float:
        return _activation_bytes(self, size, 1, is_compiled=is_compiled)


class NoFeedForward(FeedForwardBase):
    """No feed-forward: the layer is attention or a mixer alone."""

    type: Literal["none"] = "none"

    def rows(self, width: int, std: float | None = None) -> dict[str, ModuleRow]:
        return {}

    def saved_bytes(self, width: int, size: float, *, is_compiled: bool = False) -> float:
        return 0.0


class TopKRouter(Component):
    """Selects the experts with the highest logits, and weights their outputs by softmax (Shazeer et al., 2017).

    Attributes:
        softmax: `before`: softmax over all experts, then selection. `after`: softmax over the selected experts only.
        norm_topk_prob: whether the weights of the selected experts are divided by their sum (only for `before`).
        scores: whether the scores are the softmax over all experts, or the sigmoid of each logit (only for `before`).
        bias: whether the logits have a trained bias.
        correction: whether a bias is added to the scores for the selection only, not for the weights (Wang et al.,
            2024). It has no gradient; see `correction_rate`.
        correction_rate: after each step of training, the correction of an expert with fewer tokens than the mean grows
            by this, and that of one with more shrinks.
        num_groups: number of groups that the experts are divided into.
        num_groups_per_token: number of groups that the experts of a token are chosen from: those with the best scores.
        group_score: whether the score of a group is the sum of its two best scores, or the best one.
        sum_offset: is added to the sum that weights are divided by.
        min_sum: the sum that weights are divided by is at least this.
        scaling_factor: multiplies the weights.
        weights_inputs: whether the weights multiply the inputs of the experts instead of their outputs (Llama 4).
        own_norm: whether the router normalizes its inputs without a weight, and multiplies them by a trained vector
            and 1/√hidden_size (Gemma 4).
        expert_scales: whether the weights are multiplied by a trained factor of each expert.
    """

    type: Literal["top_k"] = "top_k"
    softmax: Literal["before", "after"] = "before"
    norm_topk_prob: bool = True
    scores: Literal["softmax", "sigmoid"] = optional("softmax")
    bias: bool = optional(False)
    correction: bool = optional(False)
    correction_rate: Annotated[float, Field(ge=0)] = optional(0.0)
    num_groups: PositiveInt = optional(1)
    num_groups_per_token: PositiveInt = optional(1)
    group_score: Literal["two_best", "best"] = optional("two_best")
    sum_offset: Annotated[float, Field(ge=0)] = optional(0.0)
    min_sum: Annotated[float, Field(ge=0)] = optional(0.0)
    scaling_factor: PositiveFloat = optional(1.0)
    weights_inputs: bool = optional(False)
    own_norm: bool = optional(False)
    expert_scales: bool = optional(False)


class BalancedRouter(Component):
    """The router of BASE layers (Lewis et al., 2021), with one expert per token.

    In training, every expert gets equally many tokens of a sequence, in the assignment that (almost) maximizes the sum
    of scores. Outside training, each token gets its best expert. The weight of an expert is the sigmoid of its score.
    """

    type: Literal["balanced"] = "balanced"


class RandomProjectionRouter(Component):
    """A frozen random projection that sends similar hidden states to the same expert. All weights are equal."""

    type: Literal["random_projection"] = "random_projection"


class SparseMixerRouter(Component):
    """The router of SparseMixer-2 (Liu et al., 2024) with two experts per token, which it chooses one after the other.

    Each choice is the expert with the largest logit. Its weight is its share in the softmax over the experts whose
    logits l are close to the largest one m: m - l is at most 2 · `jitter` · max(|l|, m). The second choice leaves out
    the first. Training uses the same choices and weights: it draws no experts at random.

    Attributes:
        jitter: half of the largest relative difference of logits that are close.
    """

    type: Literal["sparse_mixer"] = "sparse_mixer"
    jitter: Annotated[float, Field(ge=0)] = 0.01


Router = Annotated[
    TopKRouter | BalancedRouter | RandomProjectionRouter | SparseMixerRouter, Field(discriminator="type")
]


class ClampedGate(Component):
    """The activation of gpt-oss's experts: g · sigmoid(alpha · g) · (u + 1), with clamped gate g and up-projection u.

    Attributes:
        limit: g is at most this, and u between its negative and it.
        alpha: factor in the sigmoid.
    """

    limit: PositiveFloat = 7.0
    alpha: PositiveFloat = 1.702


class Experts(FeedForwardBase):
    """A mixture of experts: feed-forwards, of which a router selects a few per token.

    Attributes:
        intermediate_size: intermediate size of one expert.
        gated: whether the experts and the shared expert are gated feed-forwards, or plain ones.
        latent_size: the experts compute in a space of this size, between two projections that all share; None: they
            compute with the hidden states (Nemotron 3).
        bias: whether the matrices of the experts have biases.
        clamped_gate: replaces the activation and its product with the up-projection; None: it does not.
        shared_intermediate_size: intermediate size of a shared expert that every token uses; None: there is none.
        shared_expert_gate: whether the output of the shared expert is multiplied by the sigmoid of a trained score.
        parallel_intermediate_size: intermediate size of a dense feed-forward beside the experts, which have a norm of
            their own before them; behind both are norms of their own, and behind their sum is that of the branch
            (Gemma 4). The router reads hidden states without a norm. None: there is none.
        norm_eps: epsilon of the norms of experts and router.
        capacity_factor: the most token-to-expert assignments that an expert accepts from a training sequence, relative
            to an even share. Assignments beyond it are dropped. None: no limit.
        aux_loss_coef: weight of the load-balancing loss.
        aux_loss_scope: whether each `layer` is balanced, or only the mean over all layers (`model`, as transformers
            computes it).
        z_loss_coef: weight of the router's z-loss.
    """

    module = "jingu.model.experts:MoELayer"
    type: Literal["experts"] = "experts"
    num_experts: PositiveInt
    num_experts_per_token: PositiveInt
    intermediate_size: PositiveInt
    activation: Activation = "silu"
    gated: bool = True
    latent_size: PositiveInt | None = optional(None)
    bias: bool = False
    clamped_gate: ClampedGate | None = optional(None)
    router: Router = TopKRouter()
    shared_intermediate_size: PositiveInt | None = None
    shared_expert_gate: bool = False
    parallel_intermediate_size: PositiveInt | None = optional(None)
    norm_eps: PositiveFloat = optional(1e-6)
    capacity_factor: PositiveFloat | None = None
    aux_loss_coef: Annotated[float, Field(ge=0)] = 0.0
    aux_loss_scope: Literal["layer", "model"] = "layer"
    z_loss_coef: Annotated[float, Field(ge=0)] = 0.0

    @model_validator(mode="after")
    def _experts_fit(self) -> Experts:
        if self.num_experts_per_token > self.num_experts:
            raise JinguError(
                f"a token cannot use {self.num_experts_per_token} of {self.num_experts} experts.",
                where="model.experts",
                fix=f"Choose at most {self.num_experts} active experts.",
            )
        if isinstance(self.router, BalancedRouter) and self.num_experts_per_token != 1:
            raise JinguError(
                f"the balanced router gives each token one expert, not {self.num_experts_per_token}.",
                where="model.experts",
                fix="Set num_experts_per_token to 1, or choose another router.",
            )
        if isinstance(self.router, SparseMixerRouter) and self.num_experts_per_token != 2:
            raise JinguError(
                f"the router of SparseMixer gives each token two experts, not {self.num_experts_per_token}.",
                where="model.experts",
                fix="Set num_experts_per_token to 2, or choose another router.",
            )
        if self.clamped_gate is not None and not self.gated:
            raise JinguError("clamped_gate needs gated experts.", where="model.experts", fix="Set gated to true.")
        if isinstance(self.router, TopKRouter):
            self._check_router(self.router)
        return self

    def _check_router(self, router: TopKRouter) -> None:
        """Raise JinguError if the router cannot choose among these experts."""
        groups, chosen = router.num_groups, router.num_groups_per_token
        problem = None
        if router.softmax == "after" and (router.scores != "softmax" or router.correction or groups > 1):
            problem = "softmax over the selected experts has no other scores, no correction and no groups"
        elif self.num_experts % groups:
            problem = f"{self.num_experts} experts cannot be divided into {groups} groups evenly"
        elif chosen > groups:
            problem = f"a token cannot use experts of {chosen} of {groups} groups"
        elif self.num_experts // groups * chosen < self.num_experts_per_token:
            problem = f"{chosen} of {groups} groups have fewer than {self.num_experts_per_token} experts"
        elif groups > 1 and router.group_score == "two_best" and self.num_experts // groups < 2:
            problem = "a group of one expert has no two best scores"
        elif router.correction_rate and not router.correction:
            problem = "the correction has a rate, and there is no correction"
        if problem is not None:
            raise JinguError(f"{problem}.", where="model.experts", fix="Change the router's fields.")

    def rows(self, width: int, std: float | None = None) -> dict[str, ModuleRow]:
        size, experts, inner = self.intermediate_size, self.num_experts, self.latent_size or width
        rows = {
            "router": ModuleRow(
                (experts, width),
                bias=isinstance(self.router, TopKRouter) and self.router.bias,
                is_trained=not isinstance(self.router, RandomProjectionRouter),
            ),
            "gate": ModuleRow((experts, size, inner), "column", self.bias),
            "up": ModuleRow((experts, size, inner), "column", self.bias),
            "down": ModuleRow((experts, inner, size), "row", self.bias, std=std),
        }
        if not self.gated:
            del rows["gate"]
        if self.latent_size is not None:
            rows |= {"to_latent": ModuleRow((inner, width)), "from_latent": ModuleRow((width, inner), std=std)}
        if self.has_correction:
            rows["correction"] = ModuleRow((experts,), initial=0.0, is_trained=False)
        shared = self.shared_expert()
        if shared is not None:
            rows |= with_prefix("shared", shared.rows(width, std))
            if self.shared_expert_gate:
                rows["shared_gate"] = ModuleRow((1, width))
        if self.parallel_intermediate_size is not None:
            rows |= self.input_norm().rows("input_norm", width)
        if isinstance(self.router, TopKRouter):
            rows |= {"router_scale": ModuleRow((width,), initial=1.0)} if self.router.own_norm else {}
            rows |= {"expert_scale": ModuleRow((experts,), initial=1.0)} if self.router.expert_scales else {}
        return rows

    def input_norm(self) -> RmsNorm:
        """Return the norm of the experts, which is also that of the router, but for its weight."""
        return RmsNorm(eps=self.norm_eps)

    @property
    def has_correction(self) -> bool:
        return isinstance(self.router, TopKRouter) and self.router.correction

    def shared_expert(self) -> PlainFeedForward | GatedFeedForward | None:
        """Return the feed-forward of the shared expert; None if there is none."""
        return None if self.shared_intermediate_size is None else self._alike(self.shared_intermediate_size)

    def parallel_branch(self) -> PlainFeedForward | GatedFeedForward | None:
        size = self.parallel_intermediate_size
        return None if size is None else self._alike(size)

    def _alike(self, size: int) -> PlainFeedForward | GatedFeedForward:
        """Return a feed-forward of the kind of the experts."""
        kind = GatedFeedForward if self.gated else PlainFeedForward
        return kind(intermediate_size=size, activation=self.activation)

    def dense_equivalent(self) -> PlainFeedForward | GatedFeedForward:
        size = self.num_experts_per_token * self.intermediate_size
        return self._alike(size + (self.shared_intermediate_size or 0) + (self.parallel_intermediate_size or 0))

    def routed_bytes(self, width: int, size: float, *, is_compiled: bool = False) -> float:
        # The permuted rows before and behind the experts, and the sum that is projected from the latent space.
        rows = self.num_experts_per_token
        # Weighted inputs are computed again by compiled code, and the outputs are not weighted then.
        weights_inputs = isinstance(self.router, TopKRouter) and self.router.weights_inputs
        copies = 1.0 if is_compiled and weights_inputs else 2.0
        total = (rows * copies * (self.latent_size or width) + (self.latent_size or 0)) * size
        # Logits and scores of the router in at least fp32; of each choice its weight, its expert and two places.
        total += 12.0 * self.num_experts + rows * (28.0 + size)
        if size < 4:
            # The router computes with a wider copy of the hidden states. If no other part multiplies them by a matrix,
            # they are not saved themselves.
            reads_states = self.shared_intermediate_size or self.parallel_intermediate_size or self.latent_size
            total += (4.0 if reads_states else 4.0 - size) * width
            total += 4.0 * width * (isinstance(self.router, TopKRouter) and self.router.own_norm and not is_compiled)
        # The score of the shared expert multiplies its output.
        total += width * size if self.shared_expert_gate else 0.0
        # Biases are multiplied by which expert a row belongs to.
        total += (2 + self.gated) * rows * self.num_experts * size if self.bias else 0.0
        return total

    def saved_bytes(self, width: int, size: float, *, is_compiled: bool = False) -> float:
        saved = self.dense_equivalent().saved_bytes(width, size, is_compiled=is_compiled)
        saved += self.routed_bytes(width, size, is_compiled=is_compiled)
        if self.clamped_gate is not None and not is_compiled:
            # Both factors before they are clamped, and the sigmoid.
            saved += 3 * self.num_experts_per_token * self.intermediate_size * size
        # With a dense feed-forward beside them, the experts have a norm and inputs of their own.
        has_norm = self.parallel_intermediate_size is not None
        return (
            saved + (self.input_norm().saved_bytes(width, 1, size, is_compiled=is_compiled) + width * size) * has_norm
        )


FeedForward = Annotated[PlainFeedForward | GatedFeedForward | Experts | NoFeedForward, Field(discriminator="type")]
