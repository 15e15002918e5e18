"""GGUF files that jingu writes, as transformers and llama.cpp read them."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import peft
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from jingu.cli import main
from jingu.errors import JinguError
from jingu.formats.gguf_adapter import write_gguf_adapters
from jingu.formats.gguf_export import LLAMA_CPP_TYPES, PACKAGE_TYPES, export_gguf
from jingu.formats.importance import measure_importance
from jingu.formats.models import load_adapters, open_model
from jingu.formats.stored_model import StoredModel, apply_adapters, load_model
from jingu.model.adapter_specs import Lora
from jingu.model.decoder import parameter_shapes
from jingu.model.inputs import Inputs
from jingu.text.tokenizer import Tokenizer
from jingu.text.tokenizer_training import train_tokenizer

SIZES = {
    "vocab_size": 317,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.1,
    "eos_token_id": 0,
    "bos_token_id": None,
}
MOE = {"num_experts_per_tok": 2}
QWEN_MOE = {**MOE, "num_experts": 4, "moe_intermediate_size": 32}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
CONFIGS: dict[str, transformers.PreTrainedConfig] = {
    "llama": transformers.LlamaConfig(**SIZES),
    "llama3": transformers.LlamaConfig(**SIZES, rope_parameters=LLAMA3, tie_word_embeddings=True),
    "mistral": transformers.MistralConfig(**SIZES, sliding_window=None, head_dim=24),
    "mixtral": transformers.MixtralConfig(**SIZES, **MOE, num_local_experts=4),
    "qwen2": transformers.Qwen2Config(**SIZES),
    "qwen3": transformers.Qwen3Config(**SIZES, head_dim=32),
    "qwen3_moe": transformers.Qwen3MoeConfig(
        **SIZES, **MOE, num_experts=4, moe_intermediate_size=32, head_dim=16, norm_topk_prob=True
    ),
    "gpt2": transformers.GPT2Config(vocab_size=317, n_embd=64, n_layer=3, n_head=4, n_positions=128, eos_token_id=0),
}
ROPE = {"rope_type": "default", "rope_theta": 500.0}
KINDS = {"sliding_window": 7}
TIED = {"tie_word_embeddings": True}
SIX = {**SIZES, "num_hidden_layers": 7}
PATTERN = {
    period: [("sliding" if (number + 1) % period else "full") + "_attention" for number in range(7)]
    for period in (2, 4, 6)
}
GRANITE = {
    "attention_multiplier": 0.1, "embedding_multiplier": 3.0, "residual_multiplier": 0.4, "logits_scaling": 3.0,
}  # fmt: skip
# Families that are tables.
CONFIGS |= {
    "gemma": transformers.GemmaConfig(**SIZES, head_dim=24),
    "gemma2": transformers.Gemma2Config(
        **SIX, **KINDS, head_dim=24, query_pre_attn_scalar=24, layer_types=PATTERN[2], final_logit_softcapping=5.0
    ),
    "gemma3_text": transformers.Gemma3TextConfig(
        **SIX, **KINDS, head_dim=24, query_pre_attn_scalar=24, layer_types=PATTERN[6],
        rope_parameters={
            "sliding_attention": {**ROPE, "rope_theta": 10000.0},
            "full_attention": {"rope_type": "linear", "factor": 3.0, "rope_theta": 700.0},
        },
    ),
    "olmo2": transformers.Olmo2Config(**SIZES, rope_parameters=ROPE, pad_token_id=0),
    "olmo3": transformers.Olmo3Config(
        **SIX, **KINDS, layer_types=PATTERN[4], pad_token_id=0,
        rope_parameters={"sliding_attention": ROPE, "full_attention": ROPE},
    ),
    "smollm3": transformers.SmolLM3Config(**SIX, rope_parameters=ROPE, pad_token_id=0),
    "glm4": transformers.Glm4Config(**SIZES, head_dim=24, attention_bias=True, pad_token_id=0),
    "phi3": transformers.Phi3Config(**SIZES, pad_token_id=0),
    "cohere": transformers.CohereConfig(**SIZES, logit_scale=0.3, pad_token_id=0),
    "cohere2": transformers.Cohere2Config(
        **SIX, **KINDS, layer_types=PATTERN[4], logit_scale=0.3, pad_token_id=0, head_dim=16
    ),
    "granite": transformers.GraniteConfig(**SIZES, **GRANITE, rope_parameters=ROPE, pad_token_id=0),
    "exaone4": transformers.Exaone4Config(**SIX, sliding_window=None, layer_types=["full_attention"] * 7),
    "seed_oss": transformers.SeedOssConfig(**SIZES, head_dim=24),
    "ernie4_5": transformers.Ernie4_5Config(**SIZES, head_dim=24, pad_token_id=0),
    "starcoder2": transformers.Starcoder2Config(**SIZES, sliding_window=None),
    "stablelm": transformers.StableLmConfig(**SIZES, use_qkv_bias=True),
    "arcee": transformers.ArceeConfig(**SIZES, pad_token_id=0),
    "hunyuan_v1_dense": transformers.HunYuanDenseV1Config(**SIZES, head_dim=24, pad_token_id=0),
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
EQUAL = {**SIZES, "num_key_value_heads": 4}
DEEPSEEK = {
    **EXPERTS,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.7,
}
# Further families.
CONFIGS |= {
    "qwen2_moe": transformers.Qwen2MoeConfig(
        **SIZES, **EXPERTS, num_experts=4, shared_expert_intermediate_size=48, decoder_sparse_step=1, mlp_only_layers=[]
    ),
    "olmoe": transformers.OlmoeConfig(**EQUAL, **MOE, num_experts=4, pad_token_id=0),
    "glm4_moe": transformers.Glm4MoeConfig(
        **SIZES, **DEEPSEEK, head_dim=24, use_qk_norm=True, num_nextn_predict_layers=0, pad_token_id=0
    ),
    "dots1": transformers.Dots1Config(**EQUAL, **DEEPSEEK, head_dim=24, sliding_window=None, layer_types=None),
    "minimax_m2": transformers.MiniMaxM2Config(**SIZES, **MOE, num_local_experts=4, head_dim=24, rotary_dim=12),
    "ernie4_5_moe": transformers.Ernie4_5_MoeConfig(
        **SIZES, moe_num_experts=4, moe_k=2, moe_intermediate_size=32, moe_num_shared_experts=2, pad_token_id=0,
        moe_layer_start_index=1, moe_layer_interval=1,
    ),
    "granitemoe": transformers.GraniteMoeConfig(**SIZES, **MOE, **GRANITE, num_local_experts=4, pad_token_id=0),
    "granitemoeshared": transformers.GraniteMoeSharedConfig(
        **SIZES, **MOE, **GRANITE, num_local_experts=4, shared_intermediate_size=48, pad_token_id=0
    ),
    "gpt_neox": transformers.GPTNeoXConfig(**EQUAL, rotary_pct=0.25),
    "gpt_neox-sequential": transformers.GPTNeoXConfig(**SIZES, use_parallel_residual=False),
    "phi": transformers.PhiConfig(**EQUAL, hidden_act="gelu_new"),
}  # fmt: skip
DELTA = {
    "head_dim": 32, "linear_num_value_heads": 6, "linear_num_key_heads": 3, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
}  # fmt: skip
SHARED = {**EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 48}
CONV = {"layer_types": ["conv", "full_attention", "conv"], "conv_bias": False, "pad_token_id": 0}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 2, "mamba_expand": 2}
HYBRID = {**GRANITE, **MAMBA, "layer_types": ["mamba", "attention", "mamba"], "pad_token_id": 0}
# Layers with a state.
CONFIGS |= {
    "lfm2": transformers.Lfm2Config(**SIZES, **CONV, block_auto_adjust_ff_dim=False),
    "lfm2_moe": transformers.Lfm2MoeConfig(**SIZES, **CONV, **EXPERTS, num_experts=4, num_dense_layers=1),
    "granitemoehybrid": transformers.GraniteMoeHybridConfig(
        **SIZES, **HYBRID, **MOE, num_local_experts=4, shared_intermediate_size=48
    ),
    "granitemoehybrid-dense": transformers.GraniteMoeHybridConfig(
        **SIZES, **HYBRID, num_local_experts=0, num_experts_per_tok=0, shared_intermediate_size=96
    ),
    "mamba2": transformers.Mamba2Config(
        vocab_size=317, hidden_size=64, num_hidden_layers=3, num_heads=8, head_dim=16, state_size=16, n_groups=2,
        eos_token_id=0, bos_token_id=0, pad_token_id=0,
    ),
    "qwen3_next": transformers.Qwen3NextConfig(**SIZES, **DELTA, **SHARED, mlp_only_layers=[]),
    "qwen3_5_text": transformers.Qwen3_5TextConfig(**SIZES, **DELTA),
    "qwen3_5_moe_text": transformers.Qwen3_5MoeTextConfig(**SIZES, **DELTA, **SHARED),
}  # fmt: skip
CONFIGS |= {
    "falcon": transformers.FalconConfig(
        vocab_size=317, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, eos_token_id=0, bos_token_id=0
    ),
    "falcon-groups": transformers.FalconConfig(
        vocab_size=317,
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_kv_heads=2,
        new_decoder_architecture=True,
        num_ln_in_parallel_attn=1,
        eos_token_id=0,
        bos_token_id=0,
    ),
    "bloom": transformers.BloomConfig(
        vocab_size=317, hidden_size=64, n_layer=3, n_head=4, eos_token_id=0, bos_token_id=0
    ),
    "hunyuan_v1_moe": transformers.HunYuanMoEV1Config(**SIZES, num_experts=4, moe_topk=2, head_dim=16, pad_token_id=0),
    "gpt_oss": transformers.GptOssConfig(
        **SIZES,
        **MOE,
        num_local_experts=4,
        head_dim=16,
        sliding_window=7,
        rope_parameters=ROPE,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "afmoe": transformers.AfmoeConfig(
        **SIX,
        **EXPERTS,
        num_experts=4,
        num_shared_experts=1,
        num_dense_layers=1,
        head_dim=16,
        sliding_window=7,
        mup_enabled=True,
        route_scale=1.7,
        layer_types=PATTERN[4],
    ),
}
LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 24, "q_lora_rank": 18, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6,
    "v_head_dim": 14, "pad_token_id": 0,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 32, "mscale": 1.0,
    "mscale_all_dim": 1.0,
}  # fmt: skip
GROUPS = {**DEEPSEEK, "n_routed_experts": 8, "n_group": 4, "topk_group": 2}
TWO_ROPES = {
    "full_attention": {"rope_type": "default", "rope_theta": 700.0, "partial_rotary_factor": 0.334},
    "sliding_attention": {"rope_type": "default", "rope_theta": 50.0, "partial_rotary_factor": 0.334},
}
# Latent attention, and layers with shapes or positions of their own.
CONFIGS |= {
    "ministral3": transformers.Ministral3Config(
        **SIZES, head_dim=24, pad_token_id=0,
        rope_parameters={**YARN, "llama_4_scaling_beta": 0.3, "beta_fast": 20.0, "beta_slow": 1.0},
    ),
    "apertus": transformers.ApertusConfig(**SIZES, pad_token_id=0, rope_parameters=LLAMA3),
    "apertus-tied": transformers.ApertusConfig(**SIZES, **TIED, pad_token_id=0, rope_parameters=ROPE),
    "deepseek_v2": transformers.DeepseekV2Config(
        **{**SIZES, **DEEPSEEK, **LATENT, "norm_topk_prob": False},
        rope_parameters={**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
    ),
    "deepseek_v2-lite": transformers.DeepseekV2Config(
        **{**SIZES, **DEEPSEEK, **LATENT, "q_lora_rank": None, "norm_topk_prob": False}, rope_parameters=ROPE
    ),
    "deepseek_v3": transformers.DeepseekV3Config(
        **{**SIZES, **GROUPS, **LATENT}, rope_parameters=YARN, num_nextn_predict_layers=0
    ),
    "glm4_moe_lite": transformers.Glm4MoeLiteConfig(
        **{**SIZES, **DEEPSEEK, **LATENT, "first_k_dense_replace": None}, mlp_layer_types=["dense", "sparse", "sparse"],
        rms_norm_eps=1e-6, rope_parameters=ROPE, num_nextn_predict_layers=0,
    ),
    "mistral4": transformers.Mistral4Config(
        **{**SIZES, **GROUPS, **LATENT}, rope_parameters={**YARN, "type": "yarn", "llama_4_scaling_beta": 0.3},
    ),
    "llama4_text": transformers.Llama4TextConfig(
        **SIX, num_local_experts=4, num_experts_per_tok=1, intermediate_size_mlp=80, head_dim=16, pad_token_id=0,
        interleave_moe_layer_step=2, rope_parameters=ROPE,
    ),
    "exaone_moe": transformers.ExaoneMoeConfig(
        **SIX, **EXPERTS, num_experts=8, num_shared_experts=1, n_group=4, topk_group=2, sliding_window=7,
        layer_types=PATTERN[4], mlp_layer_types=["dense"] + ["sparse"] * 6, pad_token_id=0,
    ),
    "mimo_v2_flash": transformers.MiMoV2FlashConfig(
        **{**SIX, **EXPERTS, "num_key_value_heads": 1}, n_routed_experts=4, head_dim=24, v_head_dim=14,
        sliding_window=7, layer_types=PATTERN[4], mlp_layer_types=["dense", "sparse", "dense", *["sparse"] * 4],
        rope_parameters=TWO_ROPES, n_group=1, topk_group=1, pad_token_id=0,
    ),
    "solar_open": transformers.SolarOpenConfig(
        **{**SIZES, **DEEPSEEK, "first_k_dense_replace": 0}, head_dim=24, pad_token_id=0, partial_rotary_factor=1.0,
    ),
    "falcon-two-norms": transformers.FalconConfig(
        vocab_size=317, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, num_kv_heads=2,
        new_decoder_architecture=True, eos_token_id=0, bos_token_id=0,
    ),
    "glm": transformers.GlmConfig(**SIZES, head_dim=16, attention_bias=True, pad_token_id=0),
}  # fmt: skip
FALCON = {
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_ssm": 128, "mamba_d_state": 16, "mamba_n_groups": 2,
    "attention_in_multiplier": 0.7, "key_multiplier": 1.9, "attention_out_multiplier": 0.6, "ssm_in_multiplier": 1.2,
    "ssm_out_multiplier": 0.8, "ssm_multipliers": [0.9, 1.1, 0.7, 1.3, 0.8], "mlp_multipliers": [0.8, 1.4],
    "embedding_multiplier": 5.0, "lm_head_multiplier": 0.4, "head_dim": 16, "pad_token_id": 0,
}  # fmt: skip
NEMOTRON = {
    **SIZES, "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 16, "head_dim": 24,
    "pad_token_id": 0,
}  # fmt: skip
del NEMOTRON["num_hidden_layers"]
GEMMA4 = {
    **SIX, "layer_types": PATTERN[4], "sliding_window": 7, "head_dim": 16, "global_head_dim": 24, "pad_token_id": 0,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        "full_attention": {"rope_type": "proportional", "rope_theta": 700.0, "partial_rotary_factor": 0.25},
    },
    "final_logit_softcapping": 5.0, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 317, **TIED,
    # llama.cpp looks GELU up in fp16.
    "initializer_range": 0.03,
}  # fmt: skip
GEMMA4["layer_types"] = [*GEMMA4["layer_types"][:6], "full_attention"]
CONFIGS |= {
    "falcon_h1": transformers.FalconH1Config(**SIZES, **FALCON, mamba_rms_norm=True, mamba_norm_before_gate=False),
    "falcon_h1-plain": transformers.FalconH1Config(**SIZES, **FALCON, mamba_rms_norm=False, mlp_bias=True),
    "nemotron_h": transformers.NemotronHConfig(
        **NEMOTRON, layers_block_type=["linear_attention", "mlp", "full_attention", "mlp", "linear_attention"]
    ),
    "nemotron_h-experts": transformers.NemotronHConfig(
        **NEMOTRON, **EXPERTS, n_routed_experts=4, moe_shared_expert_intermediate_size=48, routed_scaling_factor=1.7,
        layers_block_type=["linear_attention", "moe", "full_attention", "moe", "linear_attention"], moe_latent_size=40,
    ),
    "gemma4_text": transformers.Gemma4TextConfig(**GEMMA4),
    "gemma4_unified_text": transformers.Gemma4UnifiedTextConfig(
        **{key: value for key, value in GEMMA4.items() if "per_layer_input" not in key},
        attention_k_eq_v=True,
        num_global_key_value_heads=1,
    ),
    "gemma4_text-equal": transformers.Gemma4TextConfig(
        **GEMMA4, attention_k_eq_v=True, num_global_key_value_heads=1
    ),
    "gemma4_text-experts": transformers.Gemma4TextConfig(
        **{**GEMMA4, "num_hidden_layers": 3, "layer_types": GEMMA4["layer_types"][:1] + GEMMA4["layer_types"][-2:]},
        enable_moe_block=True, num_experts=4, top_k_experts=2, moe_intermediate_size=32,
    ),
    "gemma4_text-shared": transformers.Gemma4TextConfig(
        **{**GEMMA4, "hidden_size_per_layer_input": 8}, num_kv_shared_layers=3, use_double_wide_mlp=True
    ),
}  # fmt: skip
OPT = {"hidden_size": 64, "ffn_dim": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "word_embed_proj_dim": 64}
needs_llama_cpp = pytest.mark.skipif(importlib.util.find_spec("llama_cpp") is None, reason="llama_cpp is not installed")


def build(name: str) -> Any:
    """Return a random model of a family, with random biases and norms."""
    torch.manual_seed(0)
    config = CONFIGS[name]
    mapping = transformers.AutoModelForCausalLM._model_mapping
    kind = mapping.get(type(config), transformers.Mistral4ForCausalLM)
    model = kind(config)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if any(part in parameter_name for part in ("norm", "bias", "ln_", "alpha", "scale")):
                parameter.add_(torch.randn_like(parameter) * 0.1)
                # In bf16, so that norms stored as w and as w - 1 are the same to the bit.
                parameter.copy_(parameter.bfloat16())
            if "router.proj" in parameter_name:
                # llama.cpp looks GELU up in fp16: no two experts have almost the same score.
                parameter.mul_(100)
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith(("layer_scalar", "correction_bias")):
                buffer.add_(torch.randn_like(buffer) * 0.1)
    return model


@pytest.fixture(scope="module")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that saves a random model of a family, with random biases and norms, as a folder."""
    parent = tmp_path_factory.mktemp("models")
    texts = ["some text, and 12345 more text:\n    it is text; isn't it?  中文 text and more words " * 5]
    tokenizer = train_tokenizer(iter(texts), 317, ["<|endoftext|>"])

    def make(name: str) -> Path:
        folder = parent / name
        if not folder.is_dir():
            model = build(name)
            model.save_pretrained(folder)
            tokenizer.save(folder)
        return folder

    return make


def logits_of(path: Path, ids: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        decoder = load_model(open_model(path), torch.float32)
        return decoder.logits(decoder(Inputs(ids)))


QUICK = {
    "llama3", "mixtral", "qwen2", "qwen3_moe", "gpt2", "gemma3_text", "phi3", "cohere2", "granite", "starcoder2",
    "ministral3", "apertus-tied", "deepseek_v3", "mimo_v2_flash", "nemotron_h-experts", "gemma4_text-shared",
    "gemma4_text-experts",
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in CONFIGS]
)
def test_the_numbers_come_back(name: str, make_model: Callable[[str], Path], tmp_path: Path) -> None:
    source = make_model(name)
    file = tmp_path / "model.gguf"
    assert main(["export", str(source), "--to", str(file), "--dtype", "fp32"]) == 0
    ids = torch.arange(100)[None] * 7 % 317
    actual, expected = logits_of(file, ids), logits_of(source, ids)
    # The scalars of Falcon-H1 are multiplied into its weights.
    assert torch.equal(actual, expected) or ("falcon_h1" in name and torch.allclose(actual, expected, atol=1e-5))
    assert Tokenizer.load(open_model(file).tokenizer()).encode("isn't it? 中文 12345") == (
        Tokenizer.load(source).encode("isn't it? 中文 12345")
    )
    assert (tmp_path / "Modelfile").read_text().startswith("FROM ./model.gguf\n")


def rewrite(file: Path, to: Path, changes: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
    """Write a GGUF file again, with other metadata (None: left out) and tensors (empty: left out)."""
    reader = gguf.GGUFReader(file)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(to, architecture)
    for key, field in reader.fields.items():
        value = changes.get(key.removeprefix(f"{architecture}."), field.contents())
        if value is None or key.startswith("GGUF.") or key == "general.architecture":
            continue
        if len(field.types) > 1:
            writer.add_array(key, value)
        else:
            writer.add_key_value(key, value, field.types[0])
    held = {tensor.name: tensor.data for tensor in reader.tensors}
    for name, data in (held | tensors).items():
        if data.size:
            writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_files_of_shared_keys_and_values_may_have_their_own(make_model: Callable[[str], Path], tmp_path: Path) -> None:
    """Files converted from Google's checkpoints have the keys and values of layers that do not use them."""
    source, file = make_model("gemma4_text-shared"), tmp_path / "model.gguf"
    assert main(["export", str(source), "--to", str(file), "--dtype", "fp32"]) == 0
    held = {tensor.name: tensor.data for tensor in gguf.GGUFReader(file).tensors}
    unused = {f"blk.6.{part}.weight": held[f"blk.3.{part}.weight"] for part in ("attn_k", "attn_v", "attn_k_norm")}
    assert not unused.keys() & held.keys()
    rewrite(file, tmp_path / "all.gguf", {"vocab_size": None}, unused)
    ids = torch.arange(100)[None] * 7 % 317
    assert torch.equal(logits_of(tmp_path / "all.gguf", ids), logits_of(source, ids))


@pytest.mark.parametrize("name", ["deepseek_v2-lite", "deepseek_v3"])
def test_the_older_form_of_latent_attention_is_read(
    name: str, make_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """Older files have one matrix for the keys and values of latents, and sizes of heads as in plain attention."""
    source, file, older = make_model(name), tmp_path / "model.gguf", tmp_path / "older.gguf"
    assert main(["export", str(source), "--to", str(file), "--dtype", "fp32"]) == 0
    state = transformers.AutoModelForCausalLM.from_pretrained(source).state_dict()
    changes = {"attention.key_length_mla": None, "attention.value_length_mla": None}
    changes |= {"attention.key_length": 16, "attention.value_length": 14, "attention.head_count_kv": 4}
    tensors: dict[str, np.ndarray] = {}
    for layer in range(3):
        tensors |= {f"blk.{layer}.attn_{part}_b.weight": np.empty(0) for part in "kv"}
        tensors[f"blk.{layer}.attn_kv_b.weight"] = state[f"model.layers.{layer}.self_attn.kv_b_proj.weight"].numpy()
    rewrite(file, older, changes, tensors)
    ids = torch.arange(100)[None] * 7 % 317
    assert torch.equal(logits_of(older, ids), logits_of(source, ids))


@pytest.mark.parametrize("name", ["llama", "llama3", "qwen2"])
def test_transformers_reads_the_file(name: str, make_model: Callable[[str], Path], tmp_path: Path) -> None:
    source = make_model(name)
    assert main(["export", str(source), "--to", str(tmp_path / "model.gguf"), "--dtype", "fp32"]) == 0
    expected = transformers.AutoModelForCausalLM.from_pretrained(source).state_dict()
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf")
    actual = model.state_dict()
    assert expected.keys() == actual.keys()
    for key, value in expected.items():
        torch.testing.assert_close(actual[key], value, rtol=0, atol=0, msg=key)
    config = model.config
    assert config.num_key_value_heads == 2 and config.max_position_embeddings == 128


@pytest.mark.parametrize("dtype", PACKAGE_TYPES)
def test_types_are_those_of_the_package(dtype: str, make_model: Callable[[str], Path], tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    assert main(["export", str(make_model("qwen3_moe")), "--to", str(file), "--dtype", dtype]) == 0
    reader = gguf.GGUFReader(file)
    kind = Kind[PACKAGE_TYPES[dtype]]
    state = transformers.AutoModelForCausalLM.from_pretrained(make_model("qwen3_moe")).state_dict()
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    up = state["model.layers.1.mlp.experts.gate_up_proj"][:, 32:].numpy()
    assert tensors["blk.1.ffn_up_exps.weight"].tensor_type == kind
    np.testing.assert_array_equal(tensors["blk.1.ffn_up_exps.weight"].data, gguf.quants.quantize(up, kind))
    assert tensors["blk.1.ffn_gate_inp.weight"].tensor_type == Kind.F32
    assert tensors["output_norm.weight"].tensor_type == Kind.F32


def test_rows_that_are_no_whole_blocks_stay_fp16(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(**{**SIZES, "hidden_size": 40, "num_attention_heads": 2, "intermediate_size": 64})
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    train_tokenizer(iter(["text " * 50]), 300, ["<|endoftext|>"]).save(tmp_path / "model")
    file = tmp_path / "model.gguf"
    assert main(["export", str(tmp_path / "model"), "--to", str(file), "--dtype", "q8_0"]) == 0
    kinds = {tensor.name: tensor.tensor_type for tensor in gguf.GGUFReader(file).tensors}
    assert kinds["blk.0.ffn_up.weight"] == Kind.F16 and kinds["blk.0.ffn_down.weight"] == Kind.Q8_0


@pytest.mark.parametrize(
    ("config", "words", "message"),
    [
        (CONFIGS["llama"], ["--dtype", "q4_k_m"], "needs the package llama-cpp-python"),
        (transformers.MistralConfig(**SIZES, sliding_window=64), [], "ignores the window of 64 tokens"),
        (transformers.OPTConfig(vocab_size=317, **OPT), [], "does not write OPTForCausalLM as GGUF"),
        (
            transformers.DeepseekV2Config(**{**SIZES, **GROUPS, **LATENT}, topk_method="group_limited_greedy"),
            [],
            "scores groups of experts by their two best experts",
        ),
        (
            transformers.DeepseekV3Config(**{**SIZES, **DEEPSEEK, **LATENT}, rope_parameters={**YARN, "mscale": 0.5}),
            [],
            "it would have layers.0.position.scaling.attention_factor = 1.0 instead of 0.93",
        ),
        (transformers.FalconH1Config(**SIZES, **FALCON, **TIED), [], "no scalars of embedding and logits for a tied"),
        (
            transformers.NemotronHConfig(**NEMOTRON, **EXPERTS, layers_block_type=["full_attention", "moe", "mlp"]),
            [],
            "no models of this architecture with both experts and dense layers",
        ),
        (
            transformers.Llama4TextConfig(**SIX, head_dim=16, pad_token_id=0, attention_chunk_size=64),
            [],
            "it would have layers.0.attention.chunk_size = 8192 instead of 64",
        ),
        (
            transformers.LlamaConfig(**SIZES, rope_parameters=DYNAMIC),
            [],
            "does not compute rotary scaling of the type dynamic",
        ),
        (
            transformers.Qwen3MoeConfig(**SIZES, **QWEN_MOE, norm_topk_prob=False),
            [],
            "router.norm_topk_prob = True instead of False",
        ),
    ],
)
def test_what_llama_cpp_cannot_run_is_refused(
    config: Any, words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "llama_cpp", None)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    train_tokenizer(iter(["text " * 50]), 300, ["<|endoftext|>"]).save(tmp_path / "model")
    assert main(["export", str(tmp_path / "model"), "--to", str(tmp_path / "a" / "model.gguf"), *words]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.glob("a/*"))


def test_places_and_types(
    make_model: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = str(make_model("llama"))
    assert main(["export", source, "--to", str(tmp_path / "folder"), "--dtype", "q8_0"]) == 2
    assert "q8_0 is a type of GGUF files only. Name the file with --to MODEL.gguf." in capsys.readouterr().err
    assert main(["export", source, "--to", str(tmp_path / "model.gguf")]) == 0
    assert main(["export", source, "--to", str(tmp_path / "model.gguf")]) == 2
    assert "the file exists already" in capsys.readouterr().err


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "q8_0"])
def test_nan_and_infinity_are_reported(
    dtype: str, make_model: Callable[[str], Path], tmp_path: Path, capsys: Any, caplog: pytest.LogCaptureFixture
) -> None:
    source = Path(shutil.copytree(make_model("llama"), tmp_path / "model"))
    tensors = load_file(source / "model.safetensors")
    tensors["model.norm.weight"][3] = torch.nan
    tensors["model.layers.1.mlp.up_proj.weight"][-1, -1] = -torch.inf
    # Too large for fp16, and its sum for fp32.
    tensors["lm_head.weight"][:2] = torch.finfo(torch.float32).max
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    names = ["blk.1.ffn_up.weight", "output_norm.weight", *["output.weight"][: dtype == "fp16"]]
    text = f"{len(names)} of the weights contain NaN or infinity in {dtype}: {', '.join(names)}."
    file = tmp_path / "to" / "model.gguf"
    assert main(["export", str(source), "--to", str(file), "--dtype", dtype, "--check"]) == 2
    assert text in capsys.readouterr().err
    assert not list(file.parent.iterdir())
    assert main(["export", str(source), "--to", str(file), "--dtype", dtype]) == 0
    assert f"{file}: {text}" in caplog.text and file.is_file()


@needs_llama_cpp
@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_llama_cpp_computes_the_same(name: str, make_model: Callable[[str], Path], tmp_path: Path) -> None:
    """The check compares ids of odd texts and log-probabilities; then 100 tokens of greedy text."""
    import llama_cpp

    source = make_model(name)
    file = tmp_path / "model.gguf"
    assert main(["export", str(source), "--to", str(file), "--dtype", "fp32", "--check"]) == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(source)
    ids = [11, 12, 13]
    expected = model.generate(torch.tensor([ids]), max_new_tokens=100, do_sample=False, eos_token_id=None)[0].tolist()
    opened = llama_cpp.Llama(str(file), n_ctx=128, verbose=False, n_threads=1, type_k=0, type_v=0, flash_attn=False)
    generated = opened.generate(ids, temp=0.0)
    assert [next(generated) for _ in range(100)] == expected[3:]


LONG_TEXTS = ["llama", "qwen3", "gemma3_text", "qwen3_moe", "granitemoehybrid", "phi3", "olmo2", "granite"]


@needs_llama_cpp
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("name", LONG_TEXTS)
def test_llama_cpp_generates_the_same_200_tokens(
    name: str, dtype: str, make_model: Callable[[str], Path], tmp_path: Path
) -> None:
    import llama_cpp

    source = Path(shutil.copytree(make_model(name), tmp_path / "model"))
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 256}))
    file = tmp_path / "model.gguf"
    assert main(["export", str(source), "--to", str(file), "--dtype", dtype]) == 0
    opened = llama_cpp.Llama(str(file), n_ctx=256, verbose=False, n_threads=1, type_k=0, type_v=0, flash_attn=False)
    decoder = load_model(open_model(file), torch.float32)
    # Varied prompts, since random models repeat themselves.
    distinct: set[int] = set()
    for start in (3, 5, 9):
        prompt = [start * number**2 % 317 for number in range(50)]
        generated = opened.generate(prompt, temp=0.0)
        ids = prompt + [next(generated) for _ in range(200)]
        distinct |= set(ids[50:])
        # What jingu chooses after each token of a text that it would have generated up to there.
        with torch.inference_mode():
            logits = decoder.logits(decoder(Inputs(torch.tensor([ids[:-1]]))))[0, 49:]
        assert ids[50:] == logits.argmax(-1).tolist()
    assert len(distinct) > 20


@needs_llama_cpp
@pytest.mark.slow
def test_the_check_knows_that_llama_cpp_does_not_normalize(make_model: Callable[[str], Path], tmp_path: Path) -> None:
    """Qwen's tokenizer composes letters and accents."""
    content = json.loads((make_model("qwen2") / "tokenizer.json").read_text())
    content["normalizer"] = {"type": "NFC"}
    shutil.copytree(make_model("qwen2"), tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text(json.dumps(content))
    file = tmp_path / "model.gguf"
    assert main(["export", str(tmp_path / "model"), "--to", str(file), "--dtype", "fp32", "--check"]) == 0
    decomposed = "e\u0301 a\u0308"
    again = Tokenizer.load(open_model(file).tokenizer())
    assert again.encode(decomposed) == Tokenizer.load(tmp_path / "model").encode(decomposed)


@needs_llama_cpp
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp16", "q8_0"])
@pytest.mark.parametrize("name", CONFIGS)
def test_llama_cpp_runs_small_types(name: str, dtype: str, make_model: Callable[[str], Path], tmp_path: Path) -> None:
    """It stops the process where a tensor has a type that it does not compute with."""
    assert main(["export", str(make_model(name)), "--to", str(tmp_path / "a.gguf"), "--dtype", dtype, "--check"]) == 0


@needs_llama_cpp
@pytest.mark.slow
def test_llama_cpp_opens_a_file_that_is_named_after_phi3(make_model: Callable[[str], Path], tmp_path: Path) -> None:
    """It concludes from the name that the tokenizer is that of Phi-3."""
    file = tmp_path / "my-Phi-3.5.gguf"
    assert main(["export", str(make_model("phi3")), "--to", str(file), "--check"]) == 0
    assert gguf.GGUFReader(file).fields["general.name"].contents() == "my-Phi 3.5"


@needs_llama_cpp
@pytest.mark.slow
@pytest.mark.parametrize("size", [32, 64])
def test_llama_cpp_computes_with_few_columns(size: int, tmp_path: Path) -> None:
    """Its kernels for AMX compute other products where a row has one block."""
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SIZES, "intermediate_size": size})).save_pretrained(
        tmp_path / "model"
    )
    train_tokenizer(iter(["text " * 50]), 300, ["<|endoftext|>"]).save(tmp_path / "model")
    for dtype in ("q8_0", "q4_0", "q4_1", "q5_0", "mxfp4"):
        file = tmp_path / f"{dtype}.gguf"
        assert main(["export", str(tmp_path / "model"), "--to", str(file), "--dtype", dtype, "--check"]) == 0


@needs_llama_cpp
@pytest.mark.slow
@pytest.mark.parametrize("dtype", LLAMA_CPP_TYPES)
def test_k_quants(dtype: str, tmp_path: Path) -> None:
    sizes = {**SIZES, "hidden_size": 256, "intermediate_size": 512}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).save_pretrained(tmp_path / "model")
    train_tokenizer(iter(["text " * 50]), 300, ["<|endoftext|>"]).save(tmp_path / "model")
    file = tmp_path / "model.gguf"
    assert main(["export", str(tmp_path / "model"), "--to", str(file), "--dtype", dtype, "--check"]) == 0
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["Modelfile", "model", "model.gguf"]


@needs_llama_cpp
@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama3", "mixtral"])
def test_an_importance_matrix_reduces_the_error_of_important_columns(
    name: str, make_model: Callable[[str], Path], tmp_path: Path
) -> None:
    source = make_model(name)
    text = tmp_path / "text.txt"
    text.write_text("some text, and 12345 more text; it is text " * 100)
    importance = measure_importance(open_model(source), text)
    errors = []
    for folder, words in (("plain", []), ("weighted", ["--calibrate", str(text)])):
        file = tmp_path / folder / "model.gguf"
        assert main(["export", str(source), "--to", str(file), "--dtype", "iq4_nl", *words]) == 0
        opened, exact = open_model(file), open_model(source)
        differences = [
            ((opened.read(key).float() - exact.read(key).float()).square() * values.unsqueeze(-2)).sum()
            for key, values in importance.items()
        ]
        errors.append(float(sum(differences)))
    assert errors[1] < 0.95 * errors[0]


# Adapters


ADAPTED = ["llama3", "mixtral", "qwen2", "qwen3_moe", "gpt2", "phi3", "gemma3_text", "qwen3_5_text"]


def random_adapters(source: Path, **changes: Any) -> tuple[StoredModel, StoredModel]:
    """Random LoRA adapters of all matrices of the blocks, with ranks and alphas that differ, and their base."""
    base = open_model(source)
    options = {"rank_pattern": (("*.attention.*", 5),), "alpha_pattern": (("*.up", 3.0),), **changes}
    adapter = Lora(rank=4, alpha=6.0, target_modules=("blocks.*",), **options)
    spec = base.spec.model_copy(update={"adapter": adapter})
    shapes = parameter_shapes(spec)

    def read(name: str, expert: int | None = None) -> torch.Tensor:
        value = torch.randn(shapes[name], generator=torch.Generator().manual_seed(len(name) + sum(shapes[name]))) / 10
        return value if expert is None else value[expert]

    return StoredModel(spec, read, None, source), base


@pytest.mark.parametrize("name", ADAPTED)
@pytest.mark.parametrize("rslora", [False, True])
def test_adapters_come_back(name: str, rslora: bool, make_model: Callable[[str], Path], tmp_path: Path) -> None:
    source, file = make_model(name), tmp_path / "adapter.gguf"
    experts = {"rank_pattern": (), "alpha_pattern": ()} if "mo" in name or "mix" in name else {}
    adapters, base = random_adapters(source, use_rslora=rslora, **experts)
    write_gguf_adapters(adapters, base, source, file)
    merged, read = (apply_adapters(each, base) for each in (adapters, load_adapters(file, base)))
    ids = torch.arange(40)[None] * 7 % 317
    with torch.no_grad():
        expected, ours, plain = (
            decoder.logits(decoder(Inputs(ids)))
            for decoder in (load_model(each, torch.float64) for each in (merged, read, base))
        )
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
    assert (expected - plain).abs().max() > 0.1
    fields = {key: field.contents() for key, field in gguf.GGUFReader(file).fields.items()}
    assert (fields["general.type"], fields["adapter.type"], fields["adapter.lora.alpha"]) == ("adapter", "lora", 6.0)
    assert (tmp_path / "Modelfile").read_text() == f"FROM {source}\nADAPTER ./adapter.gguf\n"


def test_an_adapter_of_peft_as_gguf(make_model: Callable[[str], Path], tmp_path: Path) -> None:
    source, file = make_model("llama"), tmp_path / "adapter.gguf"
    model = transformers.AutoModelForCausalLM.from_pretrained(source)
    tuned = peft.get_peft_model(model, peft.LoraConfig(r=3, lora_alpha=5, target_modules="all-linear"))
    with torch.no_grad():
        for name, parameter in tuned.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    tuned.save_pretrained(tmp_path / "peft")
    assert main(["tune", "export", str(tmp_path / "peft"), "--to", str(file)]) == 0
    assert main(["tune", "merge", str(file), "--base", str(source), "--to", str(tmp_path / "merged")]) == 0
    ids = torch.arange(40)[None] * 7 % 317
    with torch.no_grad():
        torch.testing.assert_close(logits_of(tmp_path / "merged", ids), tuned(ids).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"use_dora": True}, "llama.cpp has no adapters with use_dora"),
        ({"target_modules": ("embedding", "blocks.*")}, "no adapters such as embedding.lora_a"),
        ({"modules_to_save": ("norm",)}, "no adapters such as norm.weight"),
    ],
)
def test_adapters_that_llama_cpp_lacks_are_refused(
    changes: dict[str, Any], words: str, make_model: Callable[[str], Path], tmp_path: Path
) -> None:
    source = make_model("llama")
    adapters, base = random_adapters(source, rank_pattern=(), alpha_pattern=())
    adapter = adapters.spec.adapter
    assert adapter is not None
    spec = base.spec.model_copy(update={"adapter": adapter.model_copy(update=changes)})
    shapes = parameter_shapes(spec)
    adapters = replace(adapters, spec=spec, read=lambda name, expert=None: torch.ones(shapes[name]))
    with pytest.raises(JinguError, match=words):
        write_gguf_adapters(adapters, base, source, tmp_path / "adapter.gguf")
    assert not (tmp_path / "adapter.gguf").exists()


def test_files_that_are_no_adapters_of_the_model_are_refused(make_model: Callable[[str], Path], tmp_path: Path) -> None:
    source, file = make_model("llama"), tmp_path / "adapter.gguf"
    adapters, base = random_adapters(source)
    write_gguf_adapters(adapters, base, source, file)
    with pytest.raises(JinguError, match="the file has adapters, and no model"):
        open_model(file)
    with pytest.raises(JinguError, match="the adapters are for llama, and the model is qwen2"):
        load_adapters(file, open_model(make_model("qwen2")))
    export_gguf(base, tmp_path / "model.gguf")
    with pytest.raises(JinguError, match="the file has no LoRA adapters"):
        load_adapters(tmp_path / "model.gguf", base)


@needs_llama_cpp
@pytest.mark.slow
@pytest.mark.parametrize("name", ADAPTED)
def test_llama_cpp_computes_the_same_with_an_adapter(
    name: str, make_model: Callable[[str], Path], tmp_path: Path
) -> None:
    import llama_cpp

    source, file = make_model(name), tmp_path / "adapter.gguf"
    experts = {"rank_pattern": (), "alpha_pattern": ()} if "mo" in name or "mix" in name else {}
    adapters, base = random_adapters(source, **experts)
    write_gguf_adapters(adapters, base, source, file)
    export_gguf(base, tmp_path / "model.gguf", "fp32")
    opened = llama_cpp.Llama(
        str(tmp_path / "model.gguf"), lora_path=str(file), n_ctx=128, n_threads=1, logits_all=True, verbose=False,
        type_k=0, type_v=0, flash_attn=False,
    )  # fmt: skip
    ids = [number * 7 % 317 for number in range(60)]
    opened.eval(ids)
    theirs = torch.from_numpy(np.array(opened.scores[: len(ids)]))
    with torch.no_grad():
        decoders = [load_model(each, torch.float32) for each in (apply_adapters(adapters, base), base)]
        ours, plain = (decoder.logits(decoder(Inputs(torch.tensor([ids]))))[0] for decoder in decoders)
    # llama.cpp looks GELU up in fp16.
    torch.testing.assert_close(theirs, ours, rtol=5e-3, atol=5e-3)
    assert (ours - plain).abs().max() > 0.1


# MXFP4


@pytest.fixture
def packed_gpt_oss(make_model: Callable[[str], Path], tmp_path: Path) -> Path:
    """A gpt-oss whose experts are stored in MXFP4, with codes of every kind and scales of their own."""
    folder = Path(shutil.copytree(make_model("gpt_oss"), tmp_path / "packed"))
    tensors = load_file(folder / "model.safetensors")
    random = torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        sizes = (experts, outputs, inputs // 32)
        tensors[f"{name}_blocks"] = torch.randint(256, (*sizes, 16), dtype=torch.uint8, generator=random)
        tensors[f"{name}_scales"] = torch.randint(118, 122, sizes, dtype=torch.uint8, generator=random)
    tensors = {name: each if each.dtype == torch.uint8 else each.bfloat16() for name, each in tensors.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "mxfp4"}}))
    return folder


@pytest.mark.parametrize(("words", "others"), [([], Kind.BF16), (["--dtype", "mxfp4"], Kind.Q8_0)])
def test_stored_mxfp4_is_copied(words: list[str], others: Kind, packed_gpt_oss: Path, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    assert main(["export", str(packed_gpt_oss), "--to", str(file), *words]) == 0
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    stored = load_file(packed_gpt_oss / "model.safetensors")
    for name, part, rows in (("gate", "gate_up", 0), ("up", "gate_up", 1), ("down", "down", None)):
        source = f"model.layers.1.mlp.experts.{part}_proj"
        chosen = slice(None) if rows is None else slice(rows, None, 2)
        blocks, scales = (stored[f"{source}_{kind}"][:, chosen] for kind in ("blocks", "scales"))
        numbers = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).transpose(1, 2)
        written = tensors[f"blk.1.ffn_{name}_exps.weight"]
        assert written.tensor_type == Kind.MXFP4
        np.testing.assert_array_equal(gguf.quants.dequantize(written.data, Kind.MXFP4), numbers.numpy())
        # The scales are those that were stored, also where the package would choose others.
        assert np.array_equal(written.data.reshape(*scales.shape, 17)[..., 0], scales.numpy())
    assert tensors["blk.1.attn_q.weight"].tensor_type == others
    if others == Kind.BF16:
        ids = torch.arange(50)[None] * 7 % 317
        torch.testing.assert_close(logits_of(file, ids), logits_of(packed_gpt_oss, ids), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["qwen3_moe", "llama"])
def test_matrices_are_rounded_to_mxfp4(name: str, make_model: Callable[[str], Path], tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    assert main(["export", str(make_model(name)), "--to", str(file), "--dtype", "mxfp4"]) == 0
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    leaf = "ffn_down_exps" if name == "qwen3_moe" else "ffn_down"
    matrix = open_model(make_model(name)).read("blocks.1.feed_forward.down.weight").numpy()
    np.testing.assert_array_equal(tensors[f"blk.1.{leaf}.weight"].data, gguf.quants.quantize(matrix, Kind.MXFP4))
    kinds = {key: tensors[key].tensor_type for key in ("blk.1.attn_q.weight", "output.weight", "output_norm.weight")}
    assert list(kinds.values()) == [Kind.Q8_0, Kind.Q8_0, Kind.F32]
    assert gguf.GGUFReader(file).fields["general.file_type"].contents() == gguf.LlamaFileType.MOSTLY_MXFP4_MOE


def test_mxfp4_of_gguf_files_is_not_calibrated(
    make_model: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--to", str(tmp_path / "model.gguf"), "--dtype", "mxfp4", "--calibrate", str(tmp_path)]
    assert main(["export", str(make_model("llama")), *words]) == 2
    assert "mxfp4 of GGUF files has nothing to calibrate" in capsys.readouterr().err


@needs_llama_cpp
@pytest.mark.slow
def test_llama_cpp_computes_with_mxfp4(packed_gpt_oss: Path, tmp_path: Path) -> None:
    assert main(["export", str(packed_gpt_oss), "--to", str(tmp_path / "model.gguf"), "--check"]) == 0
    assert main(["export", str(packed_gpt_oss), "--to", str(tmp_path / "q.gguf"), "--dtype", "mxfp4", "--check"]) == 0
