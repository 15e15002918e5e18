"""Adapters in peft's format compute what they compute in peft, or are refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from jingu.cli import main
from jingu.config.sections.model import ModelSettings
from jingu.errors import JinguError
from jingu.formats.export import export_hf
from jingu.formats.models import load_adapters, open_model
from jingu.formats.peft import ADAPTER_CONFIG, ADAPTER_WEIGHTS, read_adapters
from jingu.formats.peft_export import write_adapters
from jingu.formats.stored_model import StoredModel, apply_adapters, load_model
from jingu.model.adapter_specs import Lora
from jingu.model.decoder import Decoder, parameter_shapes
from jingu.model.resolve import spec_from_settings
from jingu.model.weight_init import init_weights
from jingu.text.tokenizer_training import train_tokenizer

TOKENS = torch.arange(5, 31).view(2, 13)
SIZES = {"vocab_size": 41, "tie_word_embeddings": False, "initializer_range": 0.3}
LLAMA = {"hidden_size": 24, "intermediate_size": 36, "num_hidden_layers": 2, "num_attention_heads": 3}


def make_base(folder: Path, family: str, tie: bool) -> Any:
    torch.manual_seed(0)
    sizes = {**SIZES, "tie_word_embeddings": tie}
    if family == "gpt2":
        model: Any = GPT2LMHeadModel(GPT2Config(n_embd=24, n_layer=2, n_head=3, n_positions=32, **sizes))
    elif family == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(**LLAMA, num_key_value_heads=1, **sizes))
    else:
        model = LlamaForCausalLM(LlamaConfig(**LLAMA, num_key_value_heads=1, **sizes))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.normal_()
    model.save_pretrained(folder)
    return model


@torch.no_grad()
def write_adapter(place: Path, family: str = "llama", tie: bool = False, **settings: Any) -> torch.Tensor:
    """Write a base model and an adapter with random weights; return peft's logits after reading both again."""
    from peft import LoraConfig, PeftModel, get_peft_model

    base = make_base(place / "base", family, tie)
    kind = settings.pop("kind", LoraConfig)
    # Matrices that are random from the start, unless the initialization is what matters.
    settings = {"init_lora_weights": False, "r": 4, "lora_alpha": 10} | settings if kind is LoraConfig else settings
    model = get_peft_model(base, kind(**settings))
    torch.manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter += 0.2 * torch.randn_like(parameter)
    model.save_pretrained(place / "adapter")
    again = PeftModel.from_pretrained(type(base).from_pretrained(place / "base"), place / "adapter")
    result: torch.Tensor = again.eval()(TOKENS).logits
    return result


@torch.no_grad()
def logits(stored: StoredModel) -> torch.Tensor:
    model = load_model(stored, torch.float32)
    return model.logits(model(TOKENS))


def read(place: Path) -> StoredModel:
    base = open_model(place / "base")
    return apply_adapters(read_adapters(place / "adapter", base), base)


ATTENTION = ["q_proj", "v_proj"]
CASES: dict[str, dict[str, Any]] = {
    "patterns by suffix": {
        "target_modules": [*ATTENTION, "down_proj"],
        "rank_pattern": {"q_proj": 7, "1.mlp.down_proj": 2},
        "alpha_pattern": {"v_proj": 3},
    },
    "patterns by expression": {
        "target_modules": ATTENTION,
        "rank_pattern": {r"model.layers.[01].self_attn.(q|k)_proj": 2, "q_proj": 5},
        "alpha_pattern": {r".*\.1\..*": 1},
        "use_rslora": True,
    },
    "pissa": {"target_modules": ATTENTION, "init_lora_weights": "pissa"},
    "pissa with ranks": {"target_modules": ATTENTION, "init_lora_weights": "pissa", "rank_pattern": {"v_proj": 2}},
    "olora": {"target_modules": [*ATTENTION, "up_proj"], "init_lora_weights": "olora", "use_rslora": True},
    "orthogonal": {"target_modules": ATTENTION, "init_lora_weights": "orthogonal"},
    "dora and pissa": {"target_modules": ATTENTION, "init_lora_weights": "pissa", "use_dora": True},
    "embedding": {"target_modules": ["embed_tokens", "q_proj"], "rank_pattern": {"embed_tokens": 6}},
    "head": {"target_modules": ["lm_head", "q_proj"]},
    "only the head": {"target_modules": ["lm_head"]},
    "saved modules": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head", "norm"]},
    "saved head": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "saved embedding": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    "tokens": {"target_modules": ["q_proj"], "trainable_token_indices": [30, 7]},
    "tokens by name": {"target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokens": [3], "lm_head": [9]}},
    "biases of adapters": {"target_modules": ["q_proj", "o_proj", "up_proj"], "lora_bias": True},
}


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_adapters_compute_what_they_compute_in_peft(case: str, tie: bool, tmp_path: Path) -> None:
    expected = write_adapter(tmp_path, tie=tie, **CASES[case])
    assert (expected - logits(open_model(tmp_path / "base"))).abs().max() > 0.1
    torch.testing.assert_close(logits(read(tmp_path)), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bias", ["all", "lora_only"])
def test_trained_biases(bias: str, tmp_path: Path) -> None:
    expected = write_adapter(tmp_path, "qwen2", target_modules=["q_proj", "down_proj"], bias=bias, lora_bias=False)
    torch.testing.assert_close(logits(read(tmp_path)), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ["c_attn", "c_fc"], "rank_pattern": {"c_attn": 9}, "lora_bias": True},
        {"target_modules": ["c_attn", "c_proj"], "init_lora_weights": "pissa"},
        {"target_modules": ["wte", "c_attn"]},
    ],
)
def test_fused_and_transposed_matrices(settings: dict[str, Any], tmp_path: Path) -> None:
    expected = write_adapter(tmp_path, "gpt2", tie=True, fan_in_fan_out=True, **settings)
    torch.testing.assert_close(logits(read(tmp_path)), expected, rtol=1e-4, atol=1e-4)


def test_ia3_of_any_inputs(tmp_path: Path) -> None:
    from peft import IA3Config

    settings = {"target_modules": ["k_proj", "up_proj"], "feedforward_modules": ["up_proj"]}
    expected = write_adapter(tmp_path, kind=IA3Config, modules_to_save=["lm_head"], **settings)
    torch.testing.assert_close(logits(read(tmp_path)), expected, rtol=1e-4, atol=1e-4)


REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "pattern": ({"rank_pattern": {"k_proj": 4}}, "rank_pattern has k_proj, which matches no module with an adapter"),
    "expression": ({"alpha_pattern": {"(q": 4}}, "alpha_pattern has a pattern that is no regular expression"),
    "rank": ({"r": 5}, r"have the shapes \[4, 24\] and \[24, 4\], but .* would be \[5, 24\] and \[24, 5\]"),
    "corda": ({"init_lora_weights": "corda"}, "sets init_lora_weights to 'corda', .*path_initial_model"),
    "loftq": ({"init_lora_weights": "loftq"}, "sets init_lora_weights to 'loftq'"),
    "random": ({"init_lora_weights": "pissa_niter_4"}, "sets init_lora_weights to 'pissa_niter_4'"),
    "tied": ({"ensure_weight_tying": True}, "sets ensure_weight_tying to True"),
    "parameters": ({"target_parameters": ["mlp.gate"]}, r"it adapts the parameters mlp\.gate"),
    "no rank": ({"r": None}, r"adapter_config\.json: r is None, and should be a whole number above 0"),
    "half a rank": ({"r": 0.5}, "r is 0.5, and should be a whole number above 0"),
    "no alpha": ({"lora_alpha": 0}, "lora_alpha is 0, and should be a number above 0"),
    "list": ({"rank_pattern": ["a"]}, r"rank_pattern is \['a'\], and should be an object with a number for each"),
    "word": ({"alpha_pattern": {"q_proj": "4"}}, "alpha_pattern.q_proj is '4', and should be a number above 0"),
    "tomorrow": ({"new_method": {"depth": 3}}, "sets new_method to {'depth': 3}, which is not supported"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_unsupported_adapters_are_refused(case: str, tmp_path: Path) -> None:
    changes, words = REFUSALS[case]
    write_adapter(tmp_path, target_modules=["q_proj"])
    file = tmp_path / "adapter" / ADAPTER_CONFIG
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(JinguError, match=words):
        read(tmp_path)
    assert main(["tune", "merge", str(tmp_path / "adapter"), "--base", str(tmp_path / "base"), "--to", "x"]) == 2


def test_adapters_whose_base_model_is_themselves_are_refused(tmp_path: Path) -> None:
    write_adapter(tmp_path, target_modules=["q_proj"])
    shutil.copytree(tmp_path / "adapter", tmp_path / "other")
    for adapter, other in (("adapter", "other"), ("other", "adapter")):
        file = tmp_path / adapter / ADAPTER_CONFIG
        base = tmp_path / "base" / ".." / other
        file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": str(base)}))
    for adapter, other in (("adapter", "other"), ("other", "adapter")):
        with pytest.raises(JinguError, match=f"{adapter}/{ADAPTER_CONFIG}: the base model of .*{other}, consists of"):
            open_model(tmp_path / adapter)
    file = tmp_path / "adapter" / ADAPTER_CONFIG
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": str(tmp_path / "adapter")}))
    with pytest.raises(JinguError, match="consists of the adapters themselves"):
        open_model(tmp_path / "adapter")
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": str(tmp_path / "base")}))
    assert open_model(tmp_path / "other").spec.num_layers == 2


def test_unknown_tensors_are_refused(tmp_path: Path) -> None:
    write_adapter(tmp_path, target_modules=["q_proj"])
    file = tmp_path / "adapter" / ADAPTER_WEIGHTS
    tensors = load_file(file)
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    for key, words in (
        (f"{name}.lora_magnitude_vector", "q_proj has the tensors lora_A, lora_B, lora_magnitude_vector, which"),
        (f"{name}.lora_C.weight", "the model has no module model.layers.0.self_attn.q_proj.lora_C"),
        ("base_model.model.model.norm.weight", r"replaces model.norm.weight by one of shape \[7\]; the model has"),
        ("base_model.model.something", "has a tensor base_model.model.something, which is not supported"),
    ):
        save_file({**tensors, key: torch.ones(7)}, file)
        with pytest.raises(JinguError, match=words):
            read(tmp_path)


def test_incomplete_prompts_are_refused(tmp_path: Path) -> None:
    from peft import PromptTuningConfig

    settings = {"kind": PromptTuningConfig, "num_virtual_tokens": 3, "task_type": "CAUSAL_LM"}
    write_adapter(tmp_path, **settings)
    read(tmp_path)
    file = tmp_path / "adapter" / ADAPTER_CONFIG
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "num_virtual_tokens": None}))
    with pytest.raises(JinguError, match=f"incomplete: num_virtual_tokens in {ADAPTER_CONFIG} is missing"):
        read(tmp_path)
    file.write_text(json.dumps(config))
    save_file({"other": torch.zeros(3, 24)}, tmp_path / "adapter" / ADAPTER_WEIGHTS)
    with pytest.raises(JinguError, match="incomplete: the tensor prompt_embeddings is missing"):
        read(tmp_path)


def test_tensors_of_dtypes_that_torch_lacks_are_refused(tmp_path: Path) -> None:
    write_adapter(tmp_path, target_modules=ATTENTION)
    path = tmp_path / "adapter" / ADAPTER_WEIGHTS
    header = json.dumps({"scales": {"dtype": "F8_E8M0", "shape": [4], "data_offsets": [0, 4]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(JinguError, match="the tensor scales has the dtype F8_E8M0, which is not supported"):
        read(tmp_path)


def test_adapters_that_change_more_cannot_stand_beside_a_model(tmp_path: Path) -> None:
    write_adapter(tmp_path, target_modules=["q_proj"], modules_to_save=["norm"])
    with pytest.raises(JinguError, match=r"also change .*norm.weight, which only a merged model can have.*tune merge"):
        load_adapters(tmp_path / "adapter", open_model(tmp_path / "base"))


@pytest.mark.parametrize("family", ["chatglm3", "baichuan2"])
def test_adapters_of_models_that_are_exported_as_another_family(family: str, tmp_path: Path) -> None:
    """Their names are those of the exported model, and jingu reads them for both."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    tokenizer_path = tmp_path / "tokenizer"
    train_tokenizer(iter(["some text"]), 257, ["<|endoftext|>"]).save(tokenizer_path)
    sizes = {"hidden_size": 24, "num_heads": 3, "num_layers": 2, "intermediate_size": 36, "initializer_range": 0.3}
    heads = {"head_dim": 8, "num_kv_heads": 1} if family == "chatglm3" else {}
    spec = spec_from_settings(ModelSettings(family=family, **sizes, **heads), 300, 32)
    model = Decoder(spec)
    init_weights(model, spec, 1)
    state = model.state_dict()
    base = StoredModel(spec, lambda name, _=None: state[name], tokenizer_path, tmp_path)
    adapter = Lora(rank=2, alpha=6.0, target_modules=("*.attention.v", "*.feed_forward.gate"))
    adapted = spec.model_copy(update={"adapter": adapter})
    weights = {name: torch.randn(shape) for name, shape in parameter_shapes(adapted).items() if "lora" in name}
    adapters = StoredModel(adapted, lambda name, _=None: weights[name], None, tmp_path)

    export_hf(spec, base.read, tokenizer_path, tmp_path / "base")
    write_adapters(adapters, base, tmp_path / "base", tmp_path / "out")
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    with torch.no_grad():
        expected = PeftModel.from_pretrained(reference, tmp_path / "out").eval()(TOKENS).logits
    for under in (base, open_model(tmp_path / "base")):
        result = apply_adapters(read_adapters(tmp_path / "out", under), under)
        torch.testing.assert_close(logits(result), expected, rtol=1e-4, atol=1e-4)
