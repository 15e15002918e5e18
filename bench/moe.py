"""A mixture of 8 experts, 2 per token, compared with a dense feed-forward with the same number of active parameters.

Only the forward and backward pass of the layer is measured. Both sides alternate in one process (A B A B …), with the
same number of threads.
"""

from __future__ import annotations

import time
from statistics import median

import torch

from jingu.model.experts import MoELayer
from jingu.model.feed_forward_specs import Experts, GatedFeedForward
from jingu.model.layers import FeedForwardLayer

WIDTH, SIZE, EXPERTS, ACTIVE, ROWS, SEQUENCE, THREADS = 384, 512, 8, 2, 8, 512, 2
"""Two experts with 512 intermediate dims have as many parameters as a dense feed-forward with 1024."""


def one_pass(layer: torch.nn.Module, x_BTD: torch.Tensor, upstream_BTD: torch.Tensor) -> float:
    """Return the seconds of a forward and backward pass."""
    layer.zero_grad(set_to_none=True)
    started = time.perf_counter()
    y = layer(x_BTD)
    if isinstance(y, tuple):
        y, routing = y
        (y * upstream_BTD).sum().add(routing.z.sum()).backward()
    else:
        (y * upstream_BTD).sum().backward()
    return time.perf_counter() - started


def compare(dtype: torch.dtype, rounds: int) -> list[str]:
    """Return rows of the table for a dtype: tokens/s, absolute and relative to the dense layer."""
    dense = GatedFeedForward(intermediate_size=ACTIVE * SIZE)
    experts = Experts(num_experts=EXPERTS, num_experts_per_token=ACTIVE, intermediate_size=SIZE, z_loss_coef=1e-3)
    layers = {
        "dense": FeedForwardLayer(dense, dense.rows(WIDTH)),
        "experts": MoELayer(experts, experts.rows(WIDTH)),
    }
    for layer in layers.values():
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        layer.to(dtype)
    x, upstream = (torch.randn(ROWS, SEQUENCE, WIDTH, dtype=dtype) for _ in range(2))
    x.requires_grad_()
    seconds: dict[str, list[float]] = {name: [] for name in layers}
    for _ in range(rounds + 2):
        for name, layer in layers.items():
            seconds[name].append(one_pass(layer, x, upstream))
    rates = {name: ROWS * SEQUENCE / median(values[2:]) for name, values in seconds.items()}
    kind = str(dtype).removeprefix("torch.")
    return [f"| {name} {kind} | {rate:,.0f} | {rate / rates['dense']:.2f} |" for name, rate in rates.items()]


def run() -> str:
    """Return the table as Markdown."""
    torch.set_num_threads(THREADS)
    torch.manual_seed(0)
    rows = [*compare(torch.float32, rounds=15), *compare(torch.bfloat16, rounds=7)]
    return "\n".join(["| | tokens/s | × dense |", "|---|---|---|", *rows])


if __name__ == "__main__":
    print(run())
