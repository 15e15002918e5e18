"""Families that are tables, through files: transformers' folder read, and ours read by transformers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import jingu
from jingu.errors import JinguError
from jingu.formats.export import export_hf
from jingu.formats.huggingface import open_hf
from jingu.formats.stored_model import load_model
from jingu.model.families import FAMILIES
from jingu.model.mixer_specs import GatedDelta
from jingu.model.spec import ModelSpec
from jingu.text.tokenizer import Tokenizer
from jingu.text.tokenizer_training import train_tokenizer
from tests.parity import test_components as components
from tests.parity.expert_configs import EXPERT_CONFIGS
from tests.parity.fp64 import randomize
from tests.parity.state_configs import STATE_CONFIGS
from tests.parity.test_layer_kinds import smollm3

ROPE = {"rope_type": "default", "rope_theta": 50.0}
NO_DROPOUT = {"attention_dropout": 0.0, "residual_dropout": 0.0}
NO_DROPOUTS = {"attention_dropout": 0.0, "dropout": 0.0, "resid_pdrop": 0.0}
BLOCKS = {"vocab_size": 317, "n_layer": 5, "n_head": 3, "bos_token_id": 0, "eos_token_id": 0}
FALCON_40B = {"new_decoder_architecture": True, "num_attention_heads": 6, "num_kv_heads": 2}
CONFIGS: dict[str, Callable[[], Any]] = {
    "gemma3_text": lambda: components.gemma3()[0],
    "olmo3": lambda: components.olmo3()[0],
    "cohere2": lambda: components.cohere2()[0],
    "smollm3": lambda: smollm3()[0],
    "gemma": lambda: components.config("Gemma", head_dim=22),
    "gemma2": lambda: components.gemma2()[0],
    "olmo2": lambda: components.olmo2()[0],
    "glm4": lambda: components.glm4()[0],
    "phi3": lambda: components.phi3()[0],
    "phi3-short": lambda: components.config("Phi3", sliding_window=9, resid_pdrop=0.0),
    "ministral": lambda: components.config("Ministral", sliding_window=7, head_dim=20),
    "ministral3": lambda: components.ministral3()[0],
    "cohere": lambda: components.config("Cohere", logit_scale=0.3),
    "granite": lambda: components.granite()[0],
    "granite-bias": lambda: components.config("Granite", attention_bias=True, mlp_bias=True, logits_scaling=3.0),
    "exaone4": lambda: components.config("Exaone4", sliding_window=7, layer_types=components.KINDS),
    "exaone4-full": lambda: components.config("Exaone4", sliding_window=None, layer_types=["full_attention"] * 5),
    "seed_oss": lambda: components.config("SeedOss", head_dim=20, attention_out_bias=True, **NO_DROPOUT),
    "ernie4_5": lambda: components.config("Ernie4_5", head_dim=20, use_bias=True),
    "starcoder2": lambda: components.config("Starcoder2", sliding_window=9),
    "stablelm": lambda: components.config("StableLm", use_qkv_bias=True),
    "apertus": lambda: components.apertus()[0],
    "arcee": lambda: components.config("Arcee", attention_bias=True, mlp_bias=True),
    "nanochat": lambda: components.nanochat()[0],
    "gpt_neox": lambda: components.neox()[0],
    "gpt_neox-sequential": lambda: components.config("GPTNeoX", use_parallel_residual=False, hidden_act="gelu"),
    "cohere-norms": lambda: components.config("Cohere", num_attention_heads=6, num_key_value_heads=2, use_qk_norm=True),
    "stablelm-parallel": lambda: components.config("StableLm", use_parallel_residual=True),
    "opt": lambda: components.config("OPT", ffn_dim=88, tie_word_embeddings=True, **NO_DROPOUTS),
    "gptj": lambda: transformers.GPTJConfig(n_embd=48, n_positions=96, rotary_dim=10, **BLOCKS),
    "phi": lambda: components.config("Phi", num_key_value_heads=3, hidden_act="gelu_new", **NO_DROPOUTS),
    "phi-norms": lambda: components.config("Phi", qk_layernorm=True, partial_rotary_factor=0.25, hidden_act="gelu_new"),
    "falcon": lambda: components.config("Falcon", bias=True),
    "falcon-two": lambda: components.config("Falcon", **FALCON_40B, tie_word_embeddings=True),
    "falcon-one": lambda: components.config("Falcon", **FALCON_40B, num_ln_in_parallel_attn=1, ffn_hidden_size=88),
    "falcon-sequential": lambda: components.config("Falcon", multi_query=False, parallel_attn=False, bias=True),
    "hunyuan_v1_dense": lambda: components.hunyuan()[0],
    **EXPERT_CONFIGS,
    **STATE_CONFIGS,
}
EACH = pytest.mark.parametrize("name", CONFIGS)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer: Tokenizer = train_tokenizer(iter(["some text"]), 290, ["<|endoftext|>"])
    tokenizer.save(folder)
    return folder


def written(name: str, folder: Path) -> Any:
    """Write transformers' model with random parameters to a folder, and return it."""
    torch.manual_seed(len(name))
    config = CONFIGS[name]()
    # AutoModelForCausalLM does not know all classes.
    architecture = FAMILIES[name.partition("-")[0]].architectures[0]
    model = getattr(transformers, architecture)._from_config(config, attn_implementation="eager", dtype=torch.float32)
    model = randomize(model, torch.float32, 0.1)
    model.save_pretrained(folder)
    return model


@EACH
def test_logits_through_files_both_ways(name: str, tokenizer: Path, tmp_path: Path) -> None:
    theirs = written(name, tmp_path / "theirs")
    ids = components.sample()
    with torch.no_grad():
        expected = theirs(ids).logits
        stored = open_hf(tmp_path / "theirs")
        ours = load_model(stored, torch.float32).eval()
        assert stored.spec.family == name.partition("-")[0]
        logits = ours.logits(ours(ids))
        if rounds_widely(stored.spec):
            # transformers' own rounding is above the tolerance. `test_family_proofs.py` compares in fp64.
            wide = load_model(stored, torch.float64).eval()
            check_rounding(logits, expected, wide.logits(wide(ids)))
        else:
            components.close(logits, expected)
        # Back to files: transformers reads the same model, and so do we, to the bit.
        export_hf(stored.spec, stored.read, tokenizer, tmp_path / "ours")
        again = type(theirs).from_pretrained(tmp_path / "ours", attn_implementation="eager")
        components.close(again(ids).logits, expected)
    back = open_hf(tmp_path / "ours")
    assert back.spec == stored.spec
    for key in ours.state_dict():
        assert torch.equal(back.read(key), stored.read(key)), key


def rounds_widely(spec: ModelSpec) -> bool:
    """Return whether transformers' rounding in fp32 is above the tolerance: with the delta rule, or with normalized
    values and scores that are not scaled down."""
    return any(isinstance(layer.mixer, GatedDelta) or layer.attention.value_norm for layer in spec.kinds)


def check_rounding(actual: torch.Tensor, theirs: torch.Tensor, exact: torch.Tensor) -> None:
    """Check that numbers in fp32 are not much further from those in fp64 than transformers' own."""
    error, limit = (float((x - exact).norm() / exact.norm()) for x in (actual, theirs))
    assert error < 1e-6 + 2 * limit
    assert limit < 1e-3


def change(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def test_old_keys_say_the_same(tmp_path: Path) -> None:
    """Files before release 5 of transformers have a pattern and two bases instead of objects by type."""
    folder = tmp_path / "model"
    written("gemma3_text", folder)
    new = open_hf(folder).spec
    old = {"rope_theta": 700.0, "rope_local_base_freq": 50.0, "rope_scaling": {"rope_type": "linear", "factor": 3.0}}
    change(folder, rope_parameters=None, **old)
    assert open_hf(folder).spec == new
    change(folder, layer_types=None, sliding_window_pattern=2)
    assert open_hf(folder).spec.layer_pattern == tuple(
        "full_attention" if (layer + 1) % 2 == 0 else "sliding_attention" for layer in range(5)
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["full_attention"] * 4}, "names 4 layers, and num_hidden_layers is 5"),
        ({"layer_types": ["full_attention"] * 4 + ["linear_attention"]}, "linear_attention"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ],
)
def test_configs_that_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    written("gemma3_text", folder)
    change(folder, **changes)
    with pytest.raises(JinguError, match=message):
        open_hf(folder)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers names 2 layers, and num_hidden_layers is 5"),
        ("seed_oss", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("opt", {"word_embed_proj_dim": 24}, "word_embed_proj_dim"),
        ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before"),
        ("falcon", {"alibi": True}, "alibi"),
        ("gptj", {"tie_word_embeddings": True}, "has no bias"),
        ("stablelm", {"qk_layernorm": True}, "qk_layernorm"),
    ],
)
def test_options_that_are_refused(name: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    written(name, tmp_path)
    change(tmp_path, **changes)
    with pytest.raises(JinguError, match=message):
        open_hf(tmp_path)


def test_internlm3_is_read_and_written_as_llama(tokenizer: Path, tmp_path: Path) -> None:
    """transformers has no class of it; its published config has keys of its own."""
    rope = {"rope_type": "dynamic", "factor": 6.0, "rope_theta": 50.0}
    config = components.config("Llama", head_dim=20, rope_parameters=rope, attention_bias=True)
    theirs = transformers.LlamaForCausalLM._from_config(config, attn_implementation="eager")
    theirs = randomize(theirs, torch.float32, 0.1)
    theirs.save_pretrained(tmp_path / "theirs")
    names = {"architectures": ["InternLM3ForCausalLM"], "model_type": "internlm3", "auto_map": {"AutoModel": "x.Y"}}
    scaling = {"rope_parameters": None, "rope_theta": 50.0, "rope_scaling": {"rope_type": "dynamic", "factor": 6.0}}
    change(tmp_path / "theirs", **names, **scaling, qkv_bias=True, bias=True, attention_bias=None, mlp_bias=None)
    # The key `bias` says that the feed-forward has biases, which these files lack.
    with pytest.raises(JinguError, match="down_proj"):
        open_hf(tmp_path / "theirs")
    config = components.config("Llama", head_dim=20, rope_parameters=rope, attention_bias=True, mlp_bias=True)
    theirs = randomize(transformers.LlamaForCausalLM._from_config(config), torch.float32, 0.1)
    theirs.save_pretrained(tmp_path / "theirs")
    change(tmp_path / "theirs", **names, **scaling, qkv_bias=True, bias=True, attention_bias=None, mlp_bias=None)
    stored = open_hf(tmp_path / "theirs")
    ids = components.sample()
    with torch.no_grad():
        ours = load_model(stored, torch.float32).eval()
        components.close(ours.logits(ours(ids)), theirs(ids).logits)
        export_hf(stored.spec, stored.read, tokenizer, tmp_path / "ours")
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
        assert isinstance(again, transformers.LlamaForCausalLM)
        components.close(again(ids).logits, theirs(ids).logits)


def test_a_prompt_beyond_the_original_context_of_longrope_is_warned_of(
    tokenizer: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    written("phi3", tmp_path / "model")
    for file in tokenizer.iterdir():
        shutil.copy(file, tmp_path / "model")
    model = jingu.load(tmp_path / "model")
    model.generate("so me te xt", max_tokens=2)
    assert "original context" not in caplog.text
    model.generate("so me te xt " * 8, max_tokens=2)
    assert "more than the model's original context of 20" in caplog.text


def test_convolutions_of_different_sizes_that_transformers_stores_as_thirds(tokenizer: Path, tmp_path: Path) -> None:
    """We store them separately, as the published files have them; transformers reads both alike."""
    config = CONFIGS["olmo_hybrid"]()
    config.linear_value_head_dim = 14
    theirs = transformers.OlmoHybridForCausalLM._from_config(config, attn_implementation="eager")
    theirs = randomize(theirs, torch.float32, 0.1)
    theirs.save_pretrained(tmp_path / "theirs")
    stored = open_hf(tmp_path / "theirs")
    export_hf(stored.spec, stored.read, tokenizer, tmp_path / "ours")
    back = open_hf(tmp_path / "ours")
    again = type(theirs).from_pretrained(tmp_path / "ours", attn_implementation="eager")
    ids = components.sample()
    with torch.no_grad():
        assert torch.equal(again(ids).logits, theirs(ids).logits)
    for name in ("blocks.0.mixer.q_conv.weight", "blocks.0.mixer.v_conv.weight"):
        assert torch.equal(back.read(name), stored.read(name))
        assert len(stored.read(name)) == (60 if "q_conv" in name else 84)
