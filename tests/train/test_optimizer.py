"""Optimizers against the papers' formulas and torch's own, with their state by name."""

import pytest
import torch
from torch import nn

from jingu.config.schema import AdamWSettings, LionSettings
from jingu.train.optimizer import build_optimizer, named_state, set_learning_rate


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


@pytest.mark.parametrize("settings", [AdamWSettings(), LionSettings()], ids=lambda s: s.type)
def test_state_is_there_before_the_first_step_and_goes_by_name(settings):
    model = small(torch.float32)
    optimizer = build_optimizer(settings, model)
    names = [name for name, _ in named_state(optimizer, model)]
    assert "exp_avg/linear.weight" in names
    model(torch.randn(2, 3)).backward()
    optimizer.step()
    assert [name for name, _ in named_state(optimizer, model)] == names
    set_learning_rate(optimizer, 0.5)
    assert {group["lr"] for group in optimizer.param_groups} == {0.5}
