"""Mixers against the layers of transformers, with random weights of awkward sizes: outputs and gradients.

Every parameter of transformers' layer is carried over and its gradient compared under the mixer's names.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from jingu.model.gated_delta import GatedDeltaMixer
from jingu.model.mixer_specs import GatedDelta, ShortConv, StateSpace
from jingu.model.short_conv import ShortConvMixer
from jingu.model.state_space import StateSpaceMixer
from tests.parity.fp64 import fp64_in_place_of_fp32

WIDTH, TOKENS = 20, 75
KEY_HEADS, HEADS, KEY, VALUE = 2, 6, 8, 10
GROUPS, STATE, HEAD = 3, 7, 8
EPS = 1e-5

Tensors = dict[str, Tensor]

CONFIG = SimpleNamespace(
    hidden_size=WIDTH,
    hidden_act="silu",
    rms_norm_eps=EPS,
    layer_types=["linear_attention"],
    # delta rule
    linear_num_value_heads=HEADS,
    linear_num_key_heads=KEY_HEADS,
    linear_key_head_dim=KEY,
    linear_value_head_dim=VALUE,
    linear_conv_kernel_dim=4,
    linear_allow_neg_eigval=True,
    linear_a_log_min=1.0,
    linear_a_log_max=16.0,
    linear_dt_min=0.001,
    linear_dt_max=0.1,
    linear_dt_init_floor=1e-4,
    # Kimi Delta Attention
    linear_head_dim=KEY,
    linear_num_heads=HEADS,
    linear_lower_bound=-5.0,
    kda_safe_gate=True,
    kda_lower_bound=-4.0,
    # Mamba-2
    mamba_n_heads=HEADS,
    mamba_num_heads=HEADS,
    num_heads=HEADS,
    mamba_d_head=HEAD,
    mamba_head_dim=HEAD,
    head_dim=HEAD,
    mamba_d_state=STATE,
    ssm_state_size=STATE,
    state_size=STATE,
    mamba_d_conv=4,
    conv_kernel=4,
    mamba_expand=HEADS * HEAD / WIDTH,
    expand=HEADS * HEAD / WIDTH,
    mamba_d_ssm=HEADS * HEAD,
    mamba_n_groups=GROUPS,
    n_groups=GROUPS,
    mamba_conv_bias=True,
    use_conv_bias=True,
    mamba_proj_bias=False,
    projectors_bias=False,
    use_bias=False,
    mamba_chunk_size=32,
    chunk_size=32,
    mamba_hidden_act="silu",
    layer_norm_epsilon=EPS,
    time_step_limit=(0.01, 0.9),
    time_step_min=0.02,
    time_step_max=0.1,
    time_step_floor=1e-4,
    time_step_rank=3,
    use_mamba_kernels=True,
    mamba_rms_norm=True,
    mamba_norm_before_gate=True,
    ssm_in_multiplier=0.6875,
    ssm_multipliers=[0.625, 1.25, 0.875, 1.125, 0.75],
    # short convolution
    conv_L_cache=3,
    conv_bias=True,
)


class Case(NamedTuple):
    """A layer of transformers and its counterpart.

    Attributes:
        layer: model and class.
        settings: differences from CONFIG.
        mixer: the mixer.
        convert: returns tensors by the mixer's names.
    """

    layer: str
    settings: dict[str, Any]
    mixer: nn.Module
    convert: Callable[[Tensors], Tensors]


def divide(tensors: Tensors, name: str, sizes: list[int], names: str) -> Tensors:
    """Return a weight (and its bias) divided along its outputs, by the names of the pieces."""
    pieces = {}
    for leaf in ("weight", "bias"):
        if f"{name}.{leaf}" in tensors:
            # Weights of convolutions have a dim of size 1.
            tensor = tensors[f"{name}.{leaf}"]
            parts = (tensor.squeeze(1) if tensor.dim() == 3 else tensor).split(sizes)
            pieces |= {f"{part}.{leaf}": piece for part, piece in zip(names.split(), parts, strict=True)}
    return pieces


def rename(tensors: Tensors, names: dict[str, str]) -> Tensors:
    return {ours: tensors[theirs].flatten() if "log" in ours else tensors[theirs] for theirs, ours in names.items()}


def delta_tensors(tensors: Tensors, names: dict[str, str], key: int = KEY_HEADS * KEY, value: int = 0) -> Tensors:
    common = {"A_log": "log_rate.weight", "dt_bias": "decay_bias.weight"}
    names = {theirs: ours for theirs, ours in (common | names).items() if theirs in tensors}
    convolutions = divide(tensors, "conv1d", [key, key, value or HEADS * VALUE], "q_conv k_conv v_conv")
    return convolutions | rename(tensors, names)


def qwen3_5(tensors: Tensors) -> Tensors:
    letters = {"in_proj_z": "gate", "in_proj_b": "beta", "in_proj_a": "decay", "norm": "norm", "out_proj": "output"}
    names = {f"{theirs}.weight": f"{ours}.weight" for theirs, ours in letters.items()}
    sizes = [KEY_HEADS * KEY, KEY_HEADS * KEY, HEADS * VALUE]
    return delta_tensors(tensors, names) | divide(tensors, "in_proj_qkv", sizes, "q k v")


def qwen3_next(tensors: Tensors) -> Tensors:
    """The projections are grouped by key head."""
    share = HEADS // KEY_HEADS
    letters = {"norm": "norm", "out_proj": "output"}
    result = delta_tensors(tensors, {f"{theirs}.weight": f"{ours}.weight" for theirs, ours in letters.items()})
    for name, sizes, names in (
        ("in_proj_qkvz", [KEY, KEY, share * VALUE, share * VALUE], "q k v gate"),
        ("in_proj_ba", [share, share], "beta decay"),
    ):
        parts = tensors[f"{name}.weight"].unflatten(0, (KEY_HEADS, -1)).split(sizes, 1)
        result |= {f"{part}.weight": piece.flatten(0, 1) for part, piece in zip(names.split(), parts, strict=True)}
    return result


def olmo_hybrid(tensors: Tensors) -> Tensors:
    letters = {"q": "q", "k": "k", "v": "v", "a": "decay", "b": "beta", "g": "gate", "o": "output"}
    names = {f"{theirs}_proj.weight": f"{ours}.weight" for theirs, ours in letters.items()}
    return delta_tensors(tensors, names | {"o_norm.weight": "norm.weight"})


def kimi(tensors: Tensors) -> Tensors:
    """Also GLM 5 and Ling, which has no product of two matrices."""
    letters = {"q": "q", "k": "k", "v": "v", "b": "beta", "o": "output", "g": "gate", "g_a": "gate_down", "g_b": "gate"}
    letters |= {"forget_gate.f": "decay", "forget_gate.f_a": "decay_down", "forget_gate.f_b": "decay"}
    names = {f"{theirs}_proj.weight": f"{ours}.weight" for theirs, ours in letters.items()}
    names |= {"forget_gate.A_log": "log_rate.weight", "forget_gate.dt_bias": "decay_bias.weight"}
    return delta_tensors(tensors, names | {"o_norm.weight": "norm.weight"}, HEADS * KEY, HEADS * KEY)


def mamba(tensors: Tensors) -> Tensors:
    inner, shared = HEADS * HEAD, GROUPS * STATE
    names = {"A_log": "log_rate.weight", "dt_bias": "step_bias.weight", "D": "skip.weight"}
    names |= {"out_proj.weight": "output.weight", "out_proj.bias": "output.bias", "norm.weight": "norm.weight"}
    return (
        divide(tensors, "in_proj", [inner, inner, shared, shared, HEADS], "gate x b c step")
        | divide(tensors, "conv1d", [inner, shared, shared], "x_conv b_conv c_conv")
        | rename(tensors, {theirs: ours for theirs, ours in names.items() if theirs in tensors})
    )


def lfm2(tensors: Tensors) -> Tensors:
    names = {f"out_proj.{leaf}": f"output.{leaf}" for leaf in ("weight", "bias")}
    pieces = divide(tensors, "in_proj", [WIDTH, WIDTH, WIDTH], "gate_in gate_out x")
    return pieces | divide(tensors, "conv", [WIDTH], "conv") | rename(tensors, names)


def delta(**settings: Any) -> nn.Module:
    sizes = {"num_heads": HEADS, "num_key_heads": KEY_HEADS, "key_head_dim": KEY, "value_head_dim": VALUE, "eps": EPS}
    spec = GatedDelta(**(sizes | settings))
    return GatedDeltaMixer(spec, spec.rows(WIDTH))


def kda(**settings: Any) -> nn.Module:
    heads = {"num_key_heads": HEADS, "value_head_dim": KEY, "decay_per_channel": True, "gate_activation": "sigmoid"}
    return delta(**heads, **settings)


def state_space(**settings: Any) -> nn.Module:
    sizes = {"num_heads": HEADS, "num_groups": GROUPS, "head_dim": HEAD, "state_size": STATE, "eps": EPS}
    spec = StateSpace(**(sizes | {"step_limits": (0.01, 0.9)} | settings))
    return StateSpaceMixer(spec, spec.rows(WIDTH))


def short_conv(**settings: Any) -> nn.Module:
    spec = ShortConv(**settings)
    return ShortConvMixer(spec, spec.rows(WIDTH))


FALCON = {"input_scale": 0.6875, "part_scales": (0.625, 1.25, 0.875, 1.125, 0.75)}
CASES = {
    "qwen3_next": Case("qwen3_next.Qwen3NextGatedDeltaNet", {}, delta(), qwen3_next),
    "qwen3_5": Case("qwen3_5.Qwen3_5GatedDeltaNet", {}, delta(), qwen3_5),
    "olmo_hybrid": Case(
        "olmo_hybrid.OlmoHybridGatedDeltaNet", {}, delta(negative_eigenvalues=True, eps=1e-5), olmo_hybrid
    ),
    "kimi_linear": Case("kimi_linear.KimiLinearDeltaAttention", {}, kda(gate_rank=KEY), kimi),
    "glm5_next": Case("glm5_next.Glm5NextTextLinearAttention", {}, kda(gate_rank=KEY, decay_bound=-5.0), kimi),
    "bailing_hybrid": Case("bailing_hybrid.BailingHybridDeltaAttention", {}, kda(decay_bound=-4.0), kimi),
    "granitemoehybrid": Case("granitemoehybrid.GraniteMoeHybridMambaLayer", {}, state_space(), mamba),
    "bamba with biases": Case(
        "bamba.BambaMixer",
        {"mamba_proj_bias": True, "mamba_conv_bias": False},
        state_space(bias=True, output_bias=True, conv_bias=False),
        mamba,
    ),
    "nemotron_h": Case("nemotron_h.NemotronHMamba2Mixer", {}, state_space(step_limits=(0.02, None)), mamba),
    "mamba2": Case("mamba2.Mamba2Mixer", {}, state_space(), mamba),
    "falcon_h1": Case("falcon_h1.FalconH1Mixer", {}, state_space(norm="before_gate", **FALCON), mamba),
    "falcon_h1 without norm": Case(
        "falcon_h1.FalconH1Mixer", {"mamba_rms_norm": False}, state_space(norm="none", **FALCON), mamba
    ),
    "lfm2": Case("lfm2.Lfm2ShortConv", {}, short_conv(bias=True), lfm2),
    "lfm3": Case("lfm3.Lfm3ShortConv", {"conv_L_cache": 7}, short_conv(bias=True, num_taps=7), lfm2),
}


def build(case: Case) -> nn.Module:
    """Return transformers' layer in fp32 with random weights."""
    model, name = case.layer.split(".")
    module = import_module(f"transformers.models.{model}.modeling_{model}")
    config = SimpleNamespace(**(vars(CONFIG) | case.settings))
    layer: nn.Module = getattr(module, name)(config, 0)
    if model == "falcon_h1":
        layer.register_buffer("mup_vector", module.compute_mup_vector(config))
    torch.manual_seed(0)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, 0.1 if parameter.dim() == 1 else 0.0, 0.3)
    return layer


def tensors_of(module: nn.Module, x: Tensor, upstream: Tensor) -> Tensors:
    """Return the output, and the gradients of input and weights."""
    x = x.clone().requires_grad_()
    module.zero_grad()
    y = module(x)
    y = y[0] if isinstance(y, tuple) else y
    y.backward(upstream)
    assert x.grad is not None
    weights = {name: part.grad.clone() for name, part in module.named_parameters() if part.grad is not None}
    return {"y": y.detach(), "x": x.grad, **weights}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_mixers_equal_the_layers_of_transformers(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """To rounding in fp64. In fp32, the distance from the numbers in fp64 is at most twice that of transformers."""
    torch.manual_seed(0)
    inputs = torch.randn(2, 2, TOKENS, WIDTH)
    layer = build(case)
    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "float", Tensor.double)
        with fp64_in_place_of_fp32(patch, case.layer.split(".")[0]):
            exact = tensors_of(layer.double(), *inputs.double())
    narrow = tensors_of(layer.float(), *inputs)
    exact, narrow = ({"y": x["y"], "x": x["x"]} | case.convert(x) for x in (exact, narrow))
    weights = case.convert(dict(layer.named_parameters()))
    assert sum(weight.numel() for weight in weights.values()) == sum(part.numel() for part in layer.parameters())
    for dtype in (torch.float64, torch.float32):
        mixer = case.mixer.to(dtype)
        mixer.load_state_dict(weights)
        results = tensors_of(mixer, *inputs.to(dtype))
        assert results.keys() == exact.keys()
        for name, result in results.items():
            assert result.dtype == dtype
            errors = [(x - exact[name]).abs().max() / exact[name].abs().max() for x in (result, narrow[name])]
            assert errors[0] < (1e-12 if dtype == torch.float64 else 1e-6 + 2 * errors[1]), name
