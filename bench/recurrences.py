"""Recurrences compared with attention over sequences of 2,048 to 16,384 tokens: forward and backward pass.

All sides alternate in one process. The time is CPU time on one thread, the smallest of several rounds.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from jingu.model.chunked_scan import document_starts
from jingu.model.gated_delta import PER_CHANNEL_CHUNK_SIZE, chunked_delta_rule
from jingu.model.short_conv import causal_convolution
from jingu.model.state_space import StateSpaceInputs, chunked_state_space
from jingu.runtime.device import retain_freed_memory

HEADS, SIZE, STATE, TAPS, DOCUMENT = 8, 64, 128, 4, 500
LENGTHS = (2048, 4096, 8192, 16384)


def sides(tokens: int) -> dict[str, tuple[Callable[..., Tensor], list[Tensor]]]:
    """Return the operations with their inputs for sequences of a number of tokens."""
    heads = (1, tokens, HEADS)
    q, k, v = torch.randn(3, *heads, SIZE)
    log_decay, beta = -torch.rand(*heads), torch.rand(*heads)
    b, c = torch.randn(2, 1, tokens, 1, STATE)
    rate, weight = -torch.rand(HEADS), torch.randn(HEADS * SIZE, TAPS)
    starts = document_starts(torch.arange(tokens).unsqueeze(0) // DOCUMENT)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(*parts, is_causal=True)

    return {
        "attention": (attend, [q, k, v]),
        "delta rule": (lambda *parts: chunked_delta_rule(*parts)[0], [q, k, v, log_decay, beta]),
        "delta rule, documents": (lambda *x: chunked_delta_rule(*x, starts)[0], [q, k, v, log_decay, beta]),
        "delta rule, decay per channel": (
            lambda *parts: chunked_delta_rule(*parts, chunk_size=PER_CHANNEL_CHUNK_SIZE)[0],
            [q, k, v, -torch.rand(*heads, SIZE), beta],
        ),
        "state space": (lambda *x: chunked_state_space(StateSpaceInputs(*x, rate))[0], [v, -log_decay, b, c]),
        "convolution": (lambda x: causal_convolution(x, weight)[0], [v.flatten(2)]),
    }


def one_pass(function: Callable[..., Tensor], inputs: list[Tensor]) -> float:
    """Return the seconds of CPU time of a forward and backward pass."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    started = time.process_time()
    y = function(*leaves)
    torch.autograd.grad(y, leaves, torch.ones_like(y))
    return time.process_time() - started


def run(size: str = "") -> str:
    """Return the table as Markdown."""
    lengths, rounds = ((128, 256), 1) if size == "tiny" else (LENGTHS, 5)
    retain_freed_memory()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    seconds: dict[tuple[str, int], float] = {}
    for tokens in lengths:
        operations = sides(tokens)
        for _ in range(rounds):
            for name, (function, inputs) in operations.items():
                seconds[name, tokens] = min(one_pass(function, inputs), seconds.get((name, tokens), torch.inf))
    table = [
        f"| ms per 1,024 tokens | {' | '.join(f'{tokens:,} tokens' for tokens in lengths)} | growth |",
        f"|---|{'---|' * len(lengths)}---|",
    ]
    for name in sides(1):
        per_token = [seconds[name, tokens] / tokens for tokens in lengths]
        figures = " | ".join(f"{value * 1024 * 1000:.1f}" for value in per_token)
        table.append(f"| {name} | {figures} | {per_token[-1] / per_token[0]:.2f} |")
    note = (
        f"{HEADS} heads of {SIZE}, state size {STATE}, {TAPS} taps, documents of {DOCUMENT} tokens, fp32, one thread."
    )
    return "\n".join([*table, "", f"{note} Growth: time per token at the largest length relative to the smallest."])


if __name__ == "__main__":
    print(run())
