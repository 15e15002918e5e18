"""Delta rule, state space and short convolution against the torch paths of transformers: outputs, states, gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from jingu.model.gated_delta import chunked_delta_rule, recurrent_delta_rule
from jingu.model.short_conv import causal_convolution
from jingu.model.state_space import StateSpaceInputs, chunked_state_space, recurrent_state_space, step_lengths
from tests.parity.fp64 import fp64_in_place_of_fp32

ROWS, GROUPS, HEADS, KEY, VALUE, TOKENS = 2, 2, 6, 24, 20, 131

Function = Callable[..., tuple[Tensor, Tensor]]


def compare(ours: Function, theirs: Function, inputs: Sequence[Tensor], dtype: torch.dtype) -> None:
    """Compare outputs, states, and gradients by all inputs."""
    results = []
    for function in (ours, theirs):
        leaves = [part.to(dtype).requires_grad_() for part in inputs]
        y, state = function(*leaves)
        generator = torch.Generator().manual_seed(1)
        weights = [torch.randn(part.shape, generator=generator).to(dtype) for part in (y, state)]
        (y * weights[0]).sum().add((state * weights[1]).sum()).backward()
        results.append((y.detach(), state.detach(), *(leaf.grad for leaf in leaves)))
    for a, b in zip(*results, strict=True):
        assert a is not None and b is not None and a.dtype == b.dtype == dtype
        bound = (1e-12 if dtype == torch.float64 else 2e-6) * b.abs().max().item()
        torch.testing.assert_close(a, b, rtol=1e-9 if dtype == torch.float64 else 1e-4, atol=bound)


def theirs(model: str, name: str) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(import_module(f"transformers.models.{model}.modeling_{model}"), name)
    return function


def in_dtype(monkeypatch: pytest.MonkeyPatch, model: str, dtype: torch.dtype) -> Any:
    """Return the context in which transformers computes in this dtype what it computes in fp32."""
    if dtype == torch.float64:
        monkeypatch.setattr(Tensor, "float", Tensor.double)
        return fp64_in_place_of_fp32(monkeypatch, model)
    return torch.enable_grad()


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])


def delta_inputs(per_channel: bool, largest_beta: float, tokens: int) -> list[Tensor]:
    torch.manual_seed(0)
    heads = HEADS if per_channel else GROUPS
    q, k = torch.randn(2, ROWS, tokens, heads, KEY)
    log_decay = -torch.rand(ROWS, tokens, HEADS, KEY) if per_channel else -torch.rand(ROWS, tokens, HEADS)
    beta, state = largest_beta * torch.rand(ROWS, tokens, HEADS), torch.randn(ROWS, HEADS, KEY, VALUE)
    return [q, k, torch.randn(ROWS, tokens, HEADS, VALUE), log_decay, beta, state]


@DTYPES
@pytest.mark.parametrize(
    ("model", "chunked", "recurrent"),
    [
        ("qwen3_next", "torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"),
        ("olmo_hybrid", "torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"),
        ("kimi_linear", "chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"),
    ],
)
def test_delta_rule(
    model: str, chunked: str, recurrent: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    largest_beta = 2.0 if model == "olmo_hybrid" else 1.0
    for name, ours, tokens in ((chunked, chunked_delta_rule, TOKENS), (recurrent, recurrent_delta_rule, 5)):
        function = theirs(model, name)

        def run(*inputs: Tensor, function: Callable[..., Any] = function) -> tuple[Tensor, Tensor]:
            *parts, state = inputs
            result: tuple[Tensor, Tensor] = function(
                *parts, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True
            )
            return result

        inputs = delta_inputs(model == "kimi_linear", largest_beta, tokens)
        with in_dtype(monkeypatch, model, dtype):
            compare(lambda *parts, ours=ours: ours(*parts[:-1], None, parts[-1]), run, inputs, dtype)


@DTYPES
def test_state_space(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    limits = (0.01, 1.5)
    b, c = torch.randn(2, ROWS, TOKENS, GROUPS, KEY)
    x, step = torch.randn(ROWS, TOKENS, HEADS, VALUE), torch.randn(ROWS, TOKENS, HEADS)
    weights = [-2 * torch.rand(HEADS), torch.randn(HEADS), torch.randn(HEADS)]
    state = torch.randn(ROWS, HEADS, KEY, VALUE)
    scan = theirs("granitemoehybrid", "mamba2_chunk_scan")

    def ours(form: Function) -> Function:
        def run(x: Tensor, step: Tensor, b: Tensor, c: Tensor, rate: Tensor, skip: Tensor, *more: Tensor) -> Any:
            bias, state = more
            return form(StateSpaceInputs(x, step_lengths(step, bias, limits), b, c, rate, skip), None, state)

        return run

    def reference(x: Tensor, step: Tensor, b: Tensor, c: Tensor, rate: Tensor, skip: Tensor, *more: Tensor) -> Any:
        bias, state = more
        settings = {"dt_softplus": True, "dt_limit": limits, "return_final_states": True}
        y, after = scan(x, step, rate, b, c, 64, D=skip, dt_bias=bias, initial_states=state.transpose(2, 3), **settings)
        return y, after.transpose(2, 3)

    inputs = [x, step, b, c, *weights, state]
    with in_dtype(monkeypatch, "granitemoehybrid", dtype):
        for form in (chunked_state_space, recurrent_state_space):
            compare(ours(form), reference, inputs, dtype)


@pytest.mark.parametrize("has_bias", [True, False])
def test_causal_convolution(has_bias: bool) -> None:
    torch.manual_seed(0)
    channels, taps = 21, 4
    x, weight = torch.randn(ROWS, TOKENS, channels), torch.randn(channels, taps)
    bias = torch.randn(channels) if has_bias else None
    y, state = causal_convolution(x, weight, bias)
    expected = theirs("lfm2", "causal_conv1d_fn")(x.transpose(1, 2), weight, bias)
    torch.testing.assert_close(y, expected.transpose(1, 2))
    # The next token.
    token, their_state = torch.randn(ROWS, 1, channels), x[:, 1 - taps :].transpose(1, 2).clone()
    y, state = causal_convolution(token, weight, bias, None, state)
    expected = theirs("lfm2", "causal_conv1d_update")(token.transpose(1, 2), their_state, weight, bias)
    torch.testing.assert_close(y, expected.transpose(1, 2))
    torch.testing.assert_close(state, their_state.transpose(1, 2))
