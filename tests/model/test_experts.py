"""Mixtures of experts beside the plain sums they stand for: routers, products, capacity, shared experts, losses."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from jingu.errors import JinguError
from jingu.model.assignment import balanced_assignment
from jingu.model.count import count_parameters, flops_per_token
from jingu.model.decoder import parameter_shapes
from jingu.model.experts import MoELayer, auxiliary_losses
from jingu.model.families import FAMILIES
from jingu.model.feed_forward_specs import BalancedRouter, Experts, RandomProjectionRouter, TopKRouter
from jingu.model.grouped_matmul import grouped_matmul
from jingu.model.layers import activate
from jingu.model.spec import replace_fields

WIDTH = 11


def layer(dtype: torch.dtype = torch.float64, **changes: Any) -> MoELayer:
    torch.manual_seed(3)
    spec = Experts(**{"num_experts": 5, "num_experts_per_token": 2, "intermediate_size": 7, **changes})
    made = MoELayer(spec, spec.rows(WIDTH)).to(dtype)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return made


def states(rows: int = 3, tokens: int = 9, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(rows, tokens, WIDTH, generator=generator, dtype=dtype).requires_grad_()


def token_by_token(made: MoELayer, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    """The definition: each token's experts, one after another."""
    rows = []
    for token, chosen, shares in zip(x.flatten(0, 1), experts.flatten(0, 1), weights.flatten(0, 1), strict=True):
        total = torch.zeros_like(token)
        for expert, share in zip(chosen.tolist(), shares, strict=True):
            up = made.up.weight[expert] @ token
            hidden = activate(made.gate.weight[expert] @ token, made.spec.activation) * up
            total = total + share * (made.down.weight[expert] @ hidden)
        rows.append(total)
    return torch.stack(rows).view_as(x)


CHOICES = {
    "before": {"router": TopKRouter(norm_topk_prob=False)},
    "normalised": {"router": TopKRouter(norm_topk_prob=True)},
    "after": {"router": TopKRouter(softmax="after"), "num_experts_per_token": 3},
    "all": {"num_experts_per_token": 5},
    "relu": {"activation": "relu"},
    "projection": {"router": RandomProjectionRouter()},
    "balanced": {"router": BalancedRouter(), "num_experts_per_token": 1},
}


def chosen(made: MoELayer, x: Tensor) -> tuple[Tensor, Tensor]:
    """Experts and weights, by the definitions of the routers at inference."""
    logits, router, active = x @ made.router.weight.T, made.spec.router, made.spec.num_experts_per_token
    best = logits.argsort(-1, descending=True)[..., :active]
    if isinstance(router, BalancedRouter):
        return best, logits.gather(-1, best).sigmoid()
    if isinstance(router, RandomProjectionRouter):
        return best, torch.full_like(logits.gather(-1, best), 1 / active)
    share = logits.exp().gather(-1, best)
    sums_to_one = router.softmax == "after" or router.norm_topk_prob
    return best, share / (share if sums_to_one else logits.exp()).sum(-1, keepdim=True)


@pytest.mark.parametrize("name", CHOICES)
def test_output_and_gradients_are_those_of_token_by_token(name: str) -> None:
    made, x = layer(**CHOICES[name]).eval(), states()
    y, routing = made(x)
    assert routing is None
    expected = token_by_token(made, x, *chosen(made, x))
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    upstream = torch.randn(y.shape, dtype=y.dtype)
    inputs = [x, *(parameter for parameter in made.parameters() if parameter.requires_grad)]
    ours = torch.autograd.grad(y, inputs, upstream, allow_unused=True)
    theirs = torch.autograd.grad(expected, inputs, upstream, allow_unused=True)
    for our, their in zip(ours, theirs, strict=True):
        assert (our is None) == (their is None)
        if our is not None:
            torch.testing.assert_close(our, their, rtol=1e-10, atol=1e-12)
    assert made.router.weight.requires_grad == (name != "projection")


def test_experts_without_tokens_have_zero_gradients_and_few_tokens_pass() -> None:
    made, x = layer().eval(), states(1, 1)
    y, _ = made(x)
    y.sum().backward()
    experts, _ = chosen(made, x)
    for expert in range(5):
        used = expert in experts.flatten().tolist()
        assert bool(made.down.weight.grad[expert].any()) == used  # type: ignore[index]


def test_shared_experts_and_their_gate() -> None:
    x = states()
    for gated in (False, True):
        made = layer(shared_intermediate_size=6, shared_expert_gate=gated).eval()
        y, _ = made(x)
        assert made.shared is not None
        shared = made.shared(x)
        if gated:
            assert made.shared_gate is not None
            shared = shared * torch.sigmoid(x @ made.shared_gate.weight.T)
        torch.testing.assert_close(y, token_by_token(made, x, *chosen(made, x)) + shared, rtol=1e-12, atol=1e-12)


def test_capacity_drops_the_last_choices_of_each_row_while_training() -> None:
    made, x = layer(capacity_factor=0.75), states()
    y, routing = made(x)
    experts, weights = chosen(made, x)
    places, dropped = 3, 0  # ⌈0.75 · 9 · 2 / 5⌉
    for row in range(3):
        held = [0] * 5
        for choice in range(2):
            for token in range(9):
                expert = int(experts[row, token, choice])
                held[expert] += 1
                if held[expert] > places:
                    weights[row, token, choice] = 0.0
                    dropped += 1
    assert dropped > 0
    torch.testing.assert_close(y, token_by_token(made, x, experts, weights), rtol=1e-12, atol=1e-12)
    assert routing is not None and float(routing.dropped.mean()) == pytest.approx(dropped / (3 * 9 * 2))
    full, _ = made.eval()(x)
    torch.testing.assert_close(full, token_by_token(made, x, *chosen(made, x)), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_dtypes_are_near_fp64(dtype: torch.dtype) -> None:
    x = states().detach().to(dtype)
    # The same weights and states on both sides, and every expert active, so that no choice can turn on rounding.
    exact, narrow = layer(num_experts_per_token=5), layer(dtype, num_experts_per_token=5)
    exact.load_state_dict({name: tensor.double() for name, tensor in narrow.state_dict().items()})
    y, routing = narrow(x)
    assert y.dtype == dtype and routing is not None and routing.probability.dtype == torch.float32
    reference = exact(x.double())[0]
    limit = 1e-5 if dtype == torch.float32 else 2e-2
    assert float((y.double() - reference).detach().norm() / reference.detach().norm()) < limit


def test_a_compiler_sees_one_graph_and_the_same_numbers() -> None:
    for changes in ({}, {"router": BalancedRouter(), "num_experts_per_token": 1}, {"capacity_factor": 1.0}):
        made, x = layer(**changes), states()
        seen = torch.compile(made, dynamic=False, fullgraph=True, backend="aot_eager")(x)[0]
        assert torch.equal(seen, made(x)[0])
    with torch.device("meta"):
        assert layer()(torch.empty(2, 3, WIDTH, dtype=torch.float64))[0].shape == (2, 3, WIDTH)


def test_grouped_matmul_passes_gradcheck_with_empty_groups() -> None:
    x = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, 3, 4, dtype=torch.float64, requires_grad=True)
    ends = torch.tensor([0, 2, 2, 6], dtype=torch.int32)
    assert torch.autograd.gradcheck(lambda x, weight: grouped_matmul(x, weight, ends), (x, weight))


def test_rows_route_alike_alone_and_together() -> None:
    """So neither micro-batches nor ranks change a training step."""
    for changes in ({}, {"router": BalancedRouter(), "num_experts_per_token": 1}, {"capacity_factor": 0.5}):
        made, x = layer(**changes), states(4, 10)
        y, routing = made(x)
        for row in range(4):
            alone, own = made(x[row : row + 1])
            torch.testing.assert_close(alone[0], y[row], rtol=1e-12, atol=1e-12)
            for whole, part in zip(routing, own, strict=True):
                torch.testing.assert_close(part[0], whole[row], rtol=1e-12, atol=1e-12)


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(1, 3),
    tokens=st.integers(1, 40),
    experts=st.integers(1, 9),
    spread=st.sampled_from([0.0, 1e-6, 1.0, 1e4]),
    seed=st.integers(0, 99),
)
def test_balanced_assignment_is_even(rows: int, tokens: int, experts: int, spread: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(rows, 1, experts, generator=generator) + spread * torch.randn(
        rows, tokens, experts, generator=generator
    )
    chosen_BT = balanced_assignment(scores)
    for row in chosen_BT:
        counts = torch.bincount(row, minlength=experts)
        assert int(counts.sum()) == tokens and int(counts.max()) <= -(-tokens // experts)


def test_balanced_assignment_is_almost_the_best() -> None:
    """Beside every assignment there is, of 6 tokens to 3 experts."""
    scores = torch.randn(40, 6, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    seats = torch.tensor(sorted(set(permutations([0, 0, 1, 1, 2, 2]))))
    best = scores[:, torch.arange(6), seats].sum(-1).max(1).values
    ours = scores.gather(2, balanced_assignment(scores).unsqueeze(2)).sum((1, 2))
    spread = scores.amax((1, 2)) - scores.amin((1, 2))
    assert bool((ours >= best - 6 * 0.01 * spread).all()) and bool((ours <= best + 1e-12).all())
    assert torch.equal(
        balanced_assignment(torch.full((1, 4, 2), torch.nan)).sort().values, torch.tensor([[0, 0, 1, 1]])
    )


def test_auxiliary_losses_weigh_rows_by_their_trained_tokens() -> None:
    made, other, x = layer(), layer(), states()
    torch.nn.init.normal_(other.router.weight)
    routings = [made(x)[1], other(x)[1]]
    trained = torch.tensor([9, 0, 4])
    sums = auxiliary_losses(routings, made.spec, trained)
    expected = torch.zeros(3, dtype=torch.float64)
    for routing in routings:
        for row, count in enumerate(trained.tolist()):
            load, probability = routing.load[row], routing.probability[row]
            expected[0] += count * 5 * float((load * probability).sum().detach()) / 2
            expected[1] += count * float(routing.z[row].detach()) / 2
    torch.testing.assert_close(sums.detach()[:3], expected, rtol=1e-12, atol=0)
    # After these, the loads of the five experts of both layers.
    loads = [sum(count * routing.load[row] for row, count in enumerate(trained.tolist())) for routing in routings]
    torch.testing.assert_close(sums[3:].view(2, 5), torch.stack(loads), rtol=1e-12, atol=0)
    logits = x @ made.router.weight.T
    torch.testing.assert_close(routings[0].z, logits.exp().sum(-1).log().square().mean(1))
    torch.testing.assert_close(routings[0].load.sum(1), torch.full((3,), 2.0, dtype=torch.float64))


def test_a_token_meets_its_own_experts_alone() -> None:
    """Mixtral 8x7B, by its paper: 47B parameters, 13B of them active."""
    template = FAMILIES["mixtral"].template
    spec = replace_fields(
        template,
        hidden_size=4096,
        num_layers=32,
        attention=template.attention.model_copy(update={"num_heads": 32, "num_kv_heads": 8, "head_dim": 128}),
        feed_forward=template.feed_forward.model_copy(update={"intermediate_size": 14336}),
    )
    shapes = parameter_shapes(spec)
    count = count_parameters(spec, shapes)
    assert count.total == 46_702_792_704
    assert count.total - count.active == 32 * 6 * 3 * 4096 * 14336
    weights = count.active - 32000 * 4096 - (2 * 32 + 1) * 4096
    assert flops_per_token(spec, shapes, 512) == 6 * weights + 6 * 32 * 4096 * 512


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"num_experts_per_token": 6},
            "model.experts: a token cannot use 6 of 5 experts. Choose at most 5 active experts.",
        ),
        (
            {"router": BalancedRouter()},
            "model.experts: the balanced router gives each token one expert, not 2. Set num_experts_per_token "
            "to 1, or choose another router.",
        ),
    ],
)
def test_mistakes_are_told_in_words(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(JinguError) as error:
        layer(**changes)
    assert str(error.value) == words
