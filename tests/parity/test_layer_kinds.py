"""Stacks whose layers differ, against transformers: logits, gradients, and greedy text past the window.

The weights are those of transformers' model. The spec is written by hand, because these tests are about the stack and
not about reading a config.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3MoeConfig, SmolLM3Config

from jingu.model.decoder import Decoder, build_model
from jingu.model.families import FAMILIES, map_tensors
from jingu.model.parts import cached_tokens
from jingu.model.spec import ModelSpec, replace_fields
from tests.parity.fp64 import randomize
from tests.parity.small_llama import SMALL_LLAMA

BASE = {**SMALL_LLAMA, "num_hidden_layers": 5, "num_key_value_heads": 1, "max_position_embeddings": 96}
WINDOWS = ["full_attention", "sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 22}
EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}
TOKENS = 41


def qwen2() -> tuple[Any, ModelSpec]:
    """Windows of 7 tokens in three of five layers."""
    config = Qwen2Config(**BASE, use_sliding_window=True, sliding_window=7, max_window_layers=0, layer_types=WINDOWS)
    plain = {**config.to_dict(), "use_sliding_window": False, "layer_types": None}
    kinds = {"full_attention": {}, "sliding_attention": {"attention.sliding_window": 7}}
    return config, replace_fields(
        FAMILIES["qwen2"].spec_from_hf(plain), layer_kinds=kinds, layer_pattern=tuple(WINDOWS)
    )


def smollm3() -> tuple[Any, ModelSpec]:
    """No positions in two layers."""
    config = SmolLM3Config(**BASE, no_rope_layers=[1, 0, 1, 1, 0], pad_token_id=0, tie_word_embeddings=True)
    kinds = {"rope": {}, "none": {"position": {"type": "none"}}}
    pattern = ("rope", "none", "rope", "rope", "none")
    plain = {**config.to_dict(), "model_type": "llama"}
    return config, replace_fields(FAMILIES["llama"].spec_from_hf(plain), layer_kinds=kinds, layer_pattern=pattern)


def qwen3_moe() -> tuple[Any, ModelSpec]:
    """Dense first and third layers, experts in the others."""
    config = Qwen3MoeConfig(**{**BASE, **EXPERTS, "head_dim": 22}, mlp_only_layers=[0, 2])
    kinds = {"experts": {}, "dense": {"feed_forward": {"type": "gated", "intermediate_size": 88}}}
    plain = {**config.to_dict(), "mlp_only_layers": []}
    spec = FAMILIES["qwen3_moe"].spec_from_hf(plain)
    return config, replace_fields(
        spec, layer_kinds=kinds, layer_pattern=("dense", "experts", "dense", "experts", "experts")
    )


CASES = {"qwen2": qwen2, "smollm3": smollm3, "qwen3_moe": qwen3_moe}
EACH = pytest.mark.parametrize("name", CASES)


def models(name: str) -> tuple[Any, Decoder]:
    """Return transformers' model with random weights, norms and biases too, and jingu's with the same."""
    torch.manual_seed(len(name))
    config, spec = CASES[name]()
    theirs = randomize(AutoModelForCausalLM.from_config(config, **EAGER), torch.float32, 0.1)
    held = theirs.state_dict()
    # In memory, transformers stacks gate and up of all experts.
    for key in [key for key in held if key.endswith("experts.gate_up_proj")]:
        prefix = key.removesuffix("gate_up_proj")
        for expert, (both, down) in enumerate(zip(held[key], held[f"{prefix}down_proj"], strict=True)):
            gate, up = both.chunk(2)
            held |= {
                f"{prefix}{expert}.{part}_proj.weight": value
                for part, value in (("gate", gate), ("up", up), ("down", down))
            }
    ours = build_model(spec)
    parameters = dict(ours.named_parameters())
    with torch.no_grad():
        for mapping in map_tensors(spec):
            for key, value in mapping.to_jingu(held[mapping.hf_name]).items():
                target = parameters[key] if mapping.expert is None else parameters[key][mapping.expert]
                target.copy_(value)
    return theirs, ours


def sample() -> Tensor:
    return torch.randint(317, (2, TOKENS), generator=torch.Generator().manual_seed(1))


@EACH
def test_logits_and_gradients_equal_those_of_transformers(name: str) -> None:
    theirs, ours = models(name)
    ids = sample()
    expected = theirs(ids).logits
    logits = ours.logits(ours(ids))
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5 * float(expected.detach().std()))
    upstream = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2))
    (expected * upstream).sum().backward()
    (logits * upstream).sum().backward()
    for mapping in map_tensors(ours.spec):
        if mapping.expert is not None:
            continue
        gradient = dict(theirs.named_parameters())[mapping.hf_name].grad
        for key, value in mapping.to_jingu(gradient).items():
            own = dict(ours.named_parameters())[key].grad
            assert float((own - value).norm() / value.norm()) < 1e-5, key


@EACH
def test_text_in_steps_and_greedy_text_equal_those_of_transformers(name: str, in_steps: Callable[..., Tensor]) -> None:
    """Past the window: with a cache in pieces of several tokens and of one, and greedily token by token."""
    theirs, ours = models(name)
    ours.eval()
    ids = sample()[0]
    with torch.no_grad():
        whole = ours.logits(ours(ids[None]))[0]
        pieces = in_steps(ours, ids, [13, 1, 1, 9, 1, 1, 15])
        text = theirs.generate(ids[None, :11], max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0)
        chosen = in_steps(ours, text[0], [11, *[1] * 24]).argmax(-1)
    torch.testing.assert_close(pieces, whole, rtol=1e-5, atol=1e-5 * float(whole.std()))
    assert chosen[10:-1].tolist() == text[0, 11:].tolist()


def test_a_window_counts_only_in_its_layers() -> None:
    spec = qwen2()[1]
    assert [cached_tokens(layer, 50) for layer in spec.layers] == [50, 7, 7, 50, 7]
