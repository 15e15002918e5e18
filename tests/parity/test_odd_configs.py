"""Configs that no class of transformers writes: what they say is computed, or refused by the name of its key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from jingu.errors import JinguError
from jingu.formats.huggingface import spec_from_config
from tests.parity.test_components import KINDS, config
from tests.parity.test_tabled_families import CONFIGS

ROPE = {"rope_type": "default", "rope_theta": 50.0}
BOTH = {"full_attention": ROPE, "sliding_attention": ROPE}
PLAIN = {
    "llama": lambda: config("Llama"),
    "qwen2": lambda: config("Qwen2"),
    "glm": lambda: config("Glm", head_dim=16),
}


def read(family: str, folder: Path, **changes: Any) -> Any:
    make = (PLAIN if family in PLAIN else CONFIGS)[family]
    settings = json.loads(make().to_json_string(use_diff=False))
    architecture = transformers.AutoModelForCausalLM._model_mapping[type(make())].__name__
    (folder / "config.json").write_text(json.dumps({**settings, "architectures": [architecture], **changes}))
    return spec_from_config(folder / "config.json")


CONTRADICTIONS: list[tuple[str, dict[str, Any]]] = [
    # Of the models' own code.
    ("llama", {"is_causal": False}),
    ("qwen2", {"is_causal": False}),
    ("deepseek_v3", {"scoring_func": "softmax"}),
    ("deepseek_v2", {"scoring_func": "sigmoid"}),
    ("minimax_m2", {"scoring_func": "softmax"}),
    ("afmoe", {"score_func": "softmax"}),
    ("afmoe", {"route_norm": False}),
    ("hy_v3", {"moe_router_use_sigmoid": False}),
    ("deepseek_v3", {"moe_layer_freq": 2}),
    ("mimo_v2_flash", {"moe_layer_freq": [1, 0, 1, 0, 1]}),
    ("mimo_v2_flash", {"hybrid_layer_pattern": [0, 1]}),
    ("mimo_v2_flash", {"swa_rope_theta": 5.0}),
    # Patterns and lists of layers.
    ("exaone4", {"sliding_window_pattern": "LLLG", "layer_types": None}),
    ("gemma3_text", {"sliding_window_pattern": 0, "layer_types": None}),
    ("gemma3_text", {"sliding_window_pattern": 2.5, "layer_types": None}),
    ("llama4_text", {"moe_layers": [9]}),
    ("llama4_text", {"moe_layers": [-1]}),
    ("qwen2_moe", {"mlp_only_layers": [1, 40]}),
    ("bamba", {"attn_layer_indices": [1, 17]}),
    ("lfm2", {"full_attn_idxs": [0, 9], "layer_types": None}),
    ("qwen3_next", {"full_attention_interval": 0, "layer_types": None}),
    ("smollm3", {"no_rope_layer_interval": 0, "no_rope_layers": None}),
    ("deepseek_v3", {"first_k_dense_replace": -1}),
    # Nested rotary configs.
    ("llama", {"rope_parameters": BOTH}),
    ("glm", {"rope_parameters": BOTH}),
    ("llama", {"rope_parameters": {**ROPE, "llama_4_scaling_beta": 0.3}}),
    ("gemma3_text", {"rope_parameters": {"full_attention": ROPE}}),
    ("gemma3_text", {"rope_parameters": {**BOTH, "chunked_attention": ROPE}}),
    ("gemma3_text", {"rope_parameters": {**BOTH, "sliding_attention": None}}),
    ("gemma3_text", {"rope_parameters": {**BOTH, "factor": 8.0}}),
    ("gemma3_text", {"rope_parameters": {**BOTH, "full_attention": {"inner": ROPE}}}),
    ("olmo3", {"rope_parameters": {"sliding_attention": ROPE}}),
]


@pytest.mark.parametrize(("family", "changes"), CONTRADICTIONS, ids=str)
def test_what_would_be_computed_otherwise_is_refused(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    read(family, tmp_path)
    with pytest.raises(JinguError, match=f"{next(iter(changes))}|llama_4_scaling_beta"):
        read(family, tmp_path, **changes)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("deepseek_v3", {"scoring_func": "sigmoid", "moe_layer_freq": 1, "is_causal": True}),
        ("deepseek_v2", {"scoring_func": "softmax"}),
        ("dots1", {"scoring_func": "noaux_tc"}),
        ("afmoe", {"score_func": "sigmoid", "route_norm": True}),
        ("mimo_v2_flash", {"hybrid_layer_pattern": [int(kind == "sliding_attention") for kind in KINDS]}),
        ("mimo_v2_flash", {"moe_layer_freq": [0, 1, 1, 0, 1], "swa_rope_theta": 50}),
    ],
    ids=str,
)
def test_keys_that_agree_are_accepted(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    assert read(family, tmp_path, **changes) == read(family, tmp_path)


def test_transformers_computes_another_model_without_a_causal_mask() -> None:
    """The reason why `is_causal` is refused."""
    ids = torch.arange(20)[None]
    logits = []
    for changes in ({}, {"is_causal": False}):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config("Qwen2", **changes)).eval()
        with torch.no_grad():
            logits.append(model(ids).logits)
    assert (logits[0] - logits[1]).abs().max() > 1e-3


def test_the_scale_of_queries_is_read_from_the_former_key(tmp_path: Path) -> None:
    rope = {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 50.0,
        "llama_4_scaling_beta": 0.3,
    }  # fmt: skip
    former = read("ministral3", tmp_path, rope_parameters=None, rope_scaling=rope)
    assert former == read("ministral3", tmp_path, rope_parameters=rope)
    assert former.attention.query_scaling.beta == 0.3
