"""Kernels of flash-linear-attention in place of the chunked forms: documents, states, and when they are used.

The package needs a GPU. A stand-in computes what its documentation says, token by token; `tests/card` uses the real
one.
"""

from __future__ import annotations

import sys
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from jingu.errors import JinguError
from jingu.model import mixer_kernels
from jingu.model.decoder import build_model
from jingu.model.gated_delta import GatedDeltaMixer, recurrent_delta_rule
from jingu.model.mixer_specs import MixerKernels
from jingu.model.resolve import find_family
from jingu.model.spec import ModelSpec, replace_fields
from jingu.model.state_space import StateSpaceInputs, recurrent_state_space

ROWS, TOKENS, KEY_HEADS, HEADS, SIZE = 3, 19, 2, 4, 8


def linear_attention(q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return the outputs [T, H, V] and the state [H, K, V] of one sequence of linear attention with decay."""
    outputs = []
    for q_HK, k_HK, v_HV, g_H in zip(q, k, v, g, strict=True):
        state = state * g_H.exp()[:, None, None] + k_HK[:, :, None] * v_HV[:, None, :]
        outputs.append((q_HK[:, :, None] * state).sum(1))
    return torch.stack(outputs), state


def by_sequence(compute: Any, parts: tuple[Tensor, ...], initial: Tensor | None, cu_seqlens: Tensor | None) -> Any:
    """Return joined outputs and states of `compute`, called for each sequence as the package divides them."""
    if cu_seqlens is None:
        sequences = [tuple(part[row] for part in parts) for row in range(len(parts[0]))]
    else:
        assert len(parts[0]) == 1
        borders = cu_seqlens.tolist()
        sequences = [tuple(part[0, a:b] for part in parts) for a, b in pairwise(borders)]
        assert initial is None or len(initial) == len(sequences)
    shape = (parts[2].shape[2], parts[1].shape[-1], parts[2].shape[-1])
    states = torch.zeros(len(sequences), *shape) if initial is None else initial
    results = [compute(*sequence, state) for sequence, state in zip(sequences, states, strict=True)]
    outputs = [y for y, _ in results]
    return torch.stack(outputs) if cu_seqlens is None else torch.cat(outputs)[None], torch.stack(
        [s for _, s in results]
    )


@pytest.fixture(autouse=True)
def fla(monkeypatch: pytest.MonkeyPatch) -> None:
    """Install the stand-in."""

    def chunk_delta(*parts: Tensor, initial_state: Any, output_final_state: bool, **options: Any) -> Any:
        assert options.pop("use_qk_l2norm_in_kernel") and output_final_state

        def compute(*sequence: Tensor) -> tuple[Tensor, Tensor]:
            y, state = recurrent_delta_rule(*(x[None] for x in sequence[:5]), None, sequence[5][None])
            return y[0], state[0]

        return by_sequence(compute, parts, initial_state, options.pop("cu_seqlens", None))

    def chunk_simple_gla(
        *parts: Tensor, scale: float, initial_state: Any, output_final_state: bool, **options: Any
    ) -> Any:
        assert output_final_state
        q, *others = parts
        return by_sequence(linear_attention, (q * scale, *others), initial_state, options.pop("cu_seqlens", None))

    functions = {
        "fla.ops.gated_delta_rule": {"chunk_gated_delta_rule": chunk_delta},
        "fla.ops.kda": {"chunk_kda": chunk_delta},
        "fla.ops.simple_gla": {"chunk_simple_gla": chunk_simple_gla},
    }
    for name, members in functions.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)


def starts() -> Tensor:
    """Return document starts: within rows, at the first token of one, next to each other, and nowhere in one row."""
    starts_BT = torch.zeros(ROWS, TOKENS, dtype=torch.bool)
    starts_BT[0, [0, 1, 9]] = True
    starts_BT[2, [5, TOKENS - 1]] = True
    return starts_BT


def states() -> Tensor:
    return torch.randn(ROWS, HEADS, SIZE, SIZE)


CASES = [(None, None), (starts, None), (None, states), (starts, states)]


def agree(left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor]) -> None:
    for a, b in zip(left, right, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("channels", [(), (SIZE,)], ids=["a head", "a channel"])
@pytest.mark.parametrize("make_starts, make_state", CASES)
def test_the_delta_rule_gets_documents_and_states(make_starts: Any, make_state: Any, channels: tuple[int, ...]) -> None:
    torch.manual_seed(3)
    q, k = torch.randn(2, ROWS, TOKENS, KEY_HEADS, SIZE).unbind()
    v, log_decay = torch.randn(ROWS, TOKENS, HEADS, SIZE), -torch.rand(ROWS, TOKENS, HEADS, *channels)
    parts = (q, k, v, log_decay, torch.rand(ROWS, TOKENS, HEADS))
    before = (make_starts and make_starts(), make_state and make_state())
    agree(mixer_kernels.delta_rule(*parts, *before), recurrent_delta_rule(*parts, *before))


@pytest.mark.parametrize("make_starts, make_state", CASES)
def test_the_state_space_gets_documents_and_states(make_starts: Any, make_state: Any) -> None:
    torch.manual_seed(4)
    b, c = torch.randn(2, ROWS, TOKENS, KEY_HEADS, SIZE).unbind()
    x, step = torch.randn(ROWS, TOKENS, HEADS, SIZE), torch.rand(ROWS, TOKENS, HEADS)
    inputs = StateSpaceInputs(x, step, b, c, -torch.rand(HEADS), torch.randn(HEADS))
    before = (make_starts and make_starts(), make_state and make_state())
    agree(mixer_kernels.state_space(inputs, *before), recurrent_state_space(inputs, *before))


def stack(mixer: dict[str, Any] | None) -> ModelSpec:
    fields = {} if mixer is None else {"mixer": mixer}
    return replace_fields(find_family("llama").template, num_layers=2, hidden_size=32, vocab_size=16, **fields)


SIZES = {"num_heads": 4, "num_key_heads": 4, "key_head_dim": 8, "value_head_dim": 8}
HYBRID = stack({"type": "gated_delta", **SIZES})


@pytest.mark.parametrize(
    "device, dtype, kernels, is_used",
    [
        ("cuda", torch.bfloat16, "auto", True),
        ("cuda", torch.float16, "fla", True),
        ("cuda", torch.bfloat16, "torch", False),
        ("cuda", torch.float32, "auto", False),
        ("cpu", torch.bfloat16, "auto", False),
    ],
)
def test_kernels_are_used_on_cuda_in_16_bits(
    device: str, dtype: torch.dtype, kernels: MixerKernels, is_used: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mixer_kernels, "find_spec", lambda name: object() if name == "fla" else None)
    model = build_model(HYBRID)
    mixer_kernels.set_mixer_kernels(model, HYBRID, kernels, device, dtype)
    used = [module.kernel for module in model.modules() if isinstance(module, GatedDeltaMixer)]
    assert used == [mixer_kernels.delta_rule if is_used else None] * 2


@pytest.mark.parametrize(
    "spec, device, dtype, cause",
    [
        (HYBRID, "cpu", torch.bfloat16, "the device is cpu"),
        (HYBRID, "cuda", torch.float32, "computes in float32"),
        (HYBRID, "cuda", torch.bfloat16, "flash-linear-attention is not installed"),
        (stack(None), "cuda", torch.bfloat16, "no layer of the model has the delta rule"),
    ],
)
def test_a_request_that_cannot_be_met_says_why(
    spec: ModelSpec, device: str, dtype: torch.dtype, cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mixer_kernels, "find_spec", lambda name: None)
    with pytest.raises(JinguError, match=cause):
        mixer_kernels.set_mixer_kernels(build_model(spec), spec, "fla", device, dtype)
