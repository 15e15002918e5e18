"""The table of a model's parameters, and what a block saves, are those of the modules."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from jingu.model.decoder import build_model
from jingu.model.families import FAMILIES
from jingu.model.feed_forward_specs import Experts, NoFeedForward, PlainFeedForward
from jingu.model.norm_specs import RmsNorm
from jingu.model.parameter_table import parameter_table
from jingu.model.parts import saved_bytes
from jingu.model.sharding_table import divided_dims, sharded_dims
from jingu.model.spec import ModelSpec
from jingu.plan.workload import _count_saved


def small_specs() -> dict[str, ModelSpec]:
    """Return the template and the models of each family, with two blocks of each kind."""
    named = {
        f"{family.name} {name}": spec
        for family in FAMILIES.values()
        for name, spec in {"template": family.template, **family.presets}.items()
    }
    layers = {
        name: {"num_layers": 2} | ({"num_encoder_layers": 2} if spec.num_encoder_layers else {})
        for name, spec in named.items()
    }
    return {name: spec.model_copy(update=layers[name]) for name, spec in named.items()}


@pytest.mark.parametrize("heads", [{}, {"score_head": True}, {"value_head": True}])
def test_the_table_has_the_parameters_of_the_modules(heads: dict[str, bool]) -> None:
    for name, spec in small_specs().items():
        spec = spec.model_copy(update=heads)
        with torch.device("meta"):
            model = build_model(spec)
        dims = sharded_dims(model)
        expected = [(key, tuple(own.shape), dims[key]) for key, own in model.named_parameters()]
        table = parameter_table(spec).items()
        leaves = {key: key.rpartition(".")[2] for key, _ in table}
        actual = [
            (key, own.shape, divided_dims(own.style, leaves[key], own.shape) if own.style else ()) for key, own in table
        ]
        assert actual == expected, name


@pytest.mark.parametrize("size", [2, 4, 8])
def test_saved_bytes_are_those_that_autograd_counts(size: int) -> None:
    specs = {(spec.family, type(spec.feed_forward), spec.attention.qk_norm): spec for spec in small_specs().values()}
    relu = PlainFeedForward(intermediate_size=64, activation="relu")
    specs["llama", PlainFeedForward, True] = FAMILIES["llama"].template.model_copy(update={"feed_forward": relu})
    for spec in specs.values():
        if not isinstance(spec.feed_forward, Experts | NoFeedForward) and spec.mixer is None:
            # The factor 1 + w of a norm is saved once for all tokens.
            tolerance = 0.01 if isinstance(spec.norm, RmsNorm) and spec.norm.offset else 0.0
            # So are the numbers of xIELU.
            tolerance = 1e-5 if spec.feed_forward.activation == "xielu" else tolerance
            expected = pytest.approx(_count_saved(spec, size), rel=tolerance, abs=0)
            assert saved_bytes(spec, spec.default_layer, size) == expected, spec.family


def test_a_plan_does_not_import_torch() -> None:
    """Its import takes longer than the plan."""
    words = ["plan", "llama-3.2-1b", "--on", "h100", "--gpus", "2", "--search", "--json"]
    code = f"import sys; from jingu.cli import main; assert main({words}) == 0; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=300)
