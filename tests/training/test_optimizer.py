"""Optimizers against the papers' formulas and torch's own, with their state by name."""

import pytest
import torch
from torch import nn

from jingu.config.sections.optimizers import (
    AdafactorSettings,
    AdamWSettings,
    LionSettings,
    MuonSettings,
    ParamGroupSettings,
    SgdSettings,
)
from jingu.errors import JinguError
from jingu.training.optimizer import (
    build_optimizer,
    check_param_groups,
    named_optimizer_state,
    orthogonalize,
    set_learning_rate,
)


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 5)
        self.norm = nn.LayerNorm(5)

    def forward(self, x):
        return self.norm(self.linear(x)).square().sum()


def small(dtype=torch.float64):
    torch.manual_seed(0)
    model = Small().to(dtype)
    with torch.no_grad():
        model.norm.weight.uniform_(0.5, 1.5)
    return model


def test_lion_is_algorithm_2_of_the_paper():
    model, copy = small(), small()
    settings = LionSettings(lr=0.01, beta1=0.8, beta2=0.95, weight_decay=0.5)
    optimizer = build_optimizer(settings, model)
    momenta = {name: torch.zeros_like(p) for name, p in copy.named_parameters()}
    for number in range(4):
        x = torch.randn(7, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(number))
        for net in (model, copy):
            net.zero_grad()
            net(x).backward()
        optimizer.step()
        with torch.no_grad():
            for name, p in copy.named_parameters():
                update = torch.sign(0.8 * momenta[name] + 0.2 * p.grad)
                decay = 0.5 if p.dim() == 2 else 0.0
                momenta[name] = 0.95 * momenta[name] + 0.05 * p.grad
                p -= 0.01 * (update + decay * p)
    for (name, ours), theirs in zip(model.named_parameters(), copy.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14, msg=name)


def test_adamw_equals_torch_and_spares_norms_and_biases():
    model, copy = small(), small()
    optimizer = build_optimizer(AdamWSettings(lr=0.01, weight_decay=0.3, beta2=0.9), model)
    reference = torch.optim.AdamW(
        [
            {"params": [copy.linear.weight], "weight_decay": 0.3},
            {"params": [copy.linear.bias, copy.norm.weight, copy.norm.bias], "weight_decay": 0.0},
        ],
        lr=0.01,
        betas=(0.9, 0.9),
    )
    for number in range(4):
        x = torch.randn(7, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(number))
        for net, steps in ((model, optimizer), (copy, reference)):
            net.zero_grad()
            net(x).backward()
            steps.step()
    for ours, theirs in zip(model.parameters(), copy.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


def steps(model, optimizer, number=4):
    for step in range(number):
        x = torch.randn(7, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        model.zero_grad()
        model(x).backward()
        optimizer.step()


@pytest.mark.parametrize("lr", [0.02, 0.7])
def test_adafactor_equals_torch(lr):
    model, copy = small(), small()
    with torch.no_grad():
        for net in (model, copy):
            net.linear.bias.mul_(1e-5)  # below the floor
    steps(model, build_optimizer(AdafactorSettings(lr=lr, weight_decay=0.1, clip_threshold=1.0), model))
    groups = [
        {"params": [copy.linear.weight], "weight_decay": 0.1},
        {"params": [copy.linear.bias, copy.norm.weight, copy.norm.bias], "weight_decay": 0.0},
    ]
    steps(copy, torch.optim.Adafactor(groups, lr=lr, d=1.0))
    for ours, theirs in zip(model.parameters(), copy.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-13)


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Small()])

    def forward(self, x):
        return self.blocks[0](x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_muon_equals_torch_for_matrices_and_adamw_for_the_rest(dtype):
    """torch's iterates in bf16 whatever the dtype; ours in fp64 where that is it."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Blocks().to(dtype))
    model, copy = models
    ours = build_optimizer(MuonSettings(lr=0.01, weight_decay=0.3, beta2=0.9), model)
    block = copy.blocks[0]
    theirs = [
        torch.optim.Muon([block.linear.weight], lr=0.01, weight_decay=0.3, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW([block.linear.bias, *block.norm.parameters()], lr=0.01, weight_decay=0.0, betas=(0.9, 0.9)),
    ]
    for number in range(3):
        x = torch.randn(7, 3, dtype=dtype, generator=torch.Generator().manual_seed(number))
        for net, optimizers in ((model, [ours]), (copy, theirs)):
            net.zero_grad()
            net(x).backward()
            for optimizer in optimizers:
                optimizer.step()
    for mine, others in zip(model.parameters(), copy.parameters(), strict=True):
        torch.testing.assert_close(mine, others, rtol=0.0, atol=2e-4)


def test_what_is_orthogonal():
    """Singular values near one, of matrices tall, wide, and several at once."""
    for shape in ((5, 9), (9, 5), (3, 4, 6)):
        matrix = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        values = torch.linalg.svdvals(orthogonalize(matrix))
        assert values.min() > 0.3 and values.max() < 1.3
        u, _, v = torch.linalg.svd(matrix, full_matrices=False)
        assert (orthogonalize(matrix) - u @ v).abs().max() < 0.35


def test_groups_by_name():
    model = small(torch.float32)
    groups = [
        ParamGroupSettings(match="*", lr_multiplier=0.5),
        ParamGroupSettings(match="norm.*", lr_multiplier=2.0, weight_decay=0.2),
        ParamGroupSettings(match="linear.bias", lr_multiplier=0.0),
    ]
    optimizer = build_optimizer(AdamWSettings(weight_decay=0.1, param_groups=groups), model)
    set_learning_rate(optimizer, 0.1)
    found = {id(p): (g["lr"], g["weight_decay"]) for g in optimizer.param_groups for p in g["params"]}
    assert found[id(model.linear.weight)] == (0.05, 0.1)
    assert found[id(model.norm.bias)] == (0.2, 0.2)
    assert found[id(model.linear.bias)] == (0.0, 0.0)
    check_param_groups(AdamWSettings(param_groups=groups), ["norm.weight", "linear.bias"])
    with pytest.raises(JinguError, match=r"no parameter of the model matches norm\.\*"):
        check_param_groups(AdamWSettings(param_groups=groups), ["linear.bias", "linear.weight"])


@pytest.mark.parametrize(
    "settings", [AdamWSettings(), LionSettings(), AdafactorSettings(), MuonSettings()], ids=lambda s: s.type
)
def test_state_is_there_before_the_first_step_and_goes_by_name(settings):
    model = small(torch.float32)
    optimizer = build_optimizer(settings, model)
    names = [name for name, *_ in named_optimizer_state(optimizer, model)]
    assert {"exp_avg/linear.weight", "row_var/linear.weight"} & set(names)
    model(torch.randn(2, 3)).backward()
    optimizer.step()
    assert [name for name, *_ in named_optimizer_state(optimizer, model)] == names
    set_learning_rate(optimizer, 0.5)
    assert {group["lr"] for group in optimizer.param_groups} == {0.5}


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.9, False), (0.9, True), (0.0, False)])
def test_sgd_equals_torch(momentum, nesterov):
    """torch adds weight decay to the gradient, so it is compared without; decay follows AdamW's rule."""
    model, copy = small(), small()
    optimizer = build_optimizer(SgdSettings(lr=0.01, momentum=momentum, nesterov=nesterov), model)
    reference = torch.optim.SGD(copy.parameters(), lr=0.01, momentum=momentum, nesterov=nesterov)
    for number in range(4):
        x = torch.randn(7, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(number))
        for net, step in ((model, optimizer), (copy, reference)):
            net.zero_grad()
            net(x).backward()
            step.step()
    for (name, ours), theirs in zip(model.named_parameters(), copy.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14, msg=name)


def test_the_decay_of_sgd_is_decoupled():
    model = small()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = build_optimizer(SgdSettings(lr=0.01, weight_decay=0.5), model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        factor = 1 - 0.01 * 0.5 if parameter.dim() == 2 else 1.0
        torch.testing.assert_close(parameter, before[name] * factor, rtol=1e-14, atol=0.0)
