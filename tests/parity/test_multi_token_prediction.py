"""Layers of multi-token prediction: read, kept, and equal to those of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.modeling_layers import MtpModel

from jingu.errors import JinguError
from jingu.formats.description import build_config
from jingu.formats.export import export_hf
from jingu.formats.gguf import open_gguf
from jingu.formats.gguf_export import export_gguf
from jingu.formats.huggingface import open_hf
from jingu.formats.stored_model import load_model
from jingu.model.families import FAMILIES
from jingu.model.inputs import Inputs
from jingu.model.spec import replace_fields
from jingu.text.tokenizer_training import train_tokenizer
from tests.parity import test_components as components
from tests.parity.expert_configs import EXPERT_CONFIGS
from tests.parity.fp64 import randomize

CLASSES = {
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "mimo_v2_flash": "MiMoV2FlashForCausalLM",
    "exaone_moe": "ExaoneMoeForCausalLM",
    "exaone_moe-full": "ExaoneMoeForCausalLM",
}
# transformers drops these layers of the last families. The names are those that vLLM and SGLang read.
LOCAL = {"mimo_v2_flash": 3, "exaone_moe": 1}
NAMES = {
    "mimo_v2_flash": {
        "post_norm": "final_layernorm",
        "post_attention_layernorm": "pre_mlp_layernorm",
        "self_attn.sinks": "self_attn.attention_sink_bias",
    },
    "exaone_moe": {"post_norm": "norm", "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden"},
}
LAYERS = 2


def number_of(name: str) -> int:
    return LOCAL.get(name.partition("-")[0], LAYERS)


def kind_of(name: str) -> str:
    return "full_attention" if name.endswith("-full") else "sliding_attention"


def written(name: str, folder: Path) -> tuple[Any, Any]:
    """Write a model with layers of multi-token prediction; return transformers' model and these layers."""
    torch.manual_seed(4)
    family, layers = name.partition("-")[0], number_of(name)
    config = EXPERT_CONFIGS[family]()
    config.num_mtp_layers = layers
    if family in LOCAL:
        config.mtp_layer_types = [kind_of(name)] * layers
        config.mtp_mlp_layer_types = ["dense"] * layers
    model = getattr(transformers, CLASSES[name])._from_config(config, attn_implementation="eager", dtype=torch.float32)
    model = randomize(model, torch.float32, 0.1)
    further = MtpModel(model, layers)
    for parameter in further.layers.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    further = randomize(further, torch.float32, 0.1)
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for key, tensor in further.state_dict().items():
        _, number, part = key.split(".", 2) if key.startswith("layers.") else ("", "", "")
        if number and family in LOCAL:
            tensors[local_name(family, number, part)] = tensor.contiguous()
        elif number:
            tensors |= stored(f"model.layers.{config.num_hidden_layers + int(number)}.", part, tensor)
    if family not in LOCAL:
        # Published files repeat the embedding and the head.
        tensors[f"model.layers.{config.num_hidden_layers}.embed_tokens.weight"] = tensors[
            "model.embed_tokens.weight"
        ].clone()
        change(folder, num_nextn_predict_layers=layers)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return model, further


def local_name(family: str, number: str, part: str) -> str:
    """Return the name of a tensor in files of MiMo-V2 and EXAONE-MoE."""
    in_block = part.startswith("mtp_block.")
    part = part.removeprefix("mtp_block.")
    for usual, own in NAMES[family].items():
        part = part.replace(usual, own)
    if family == "mimo_v2_flash":
        return f"model.mtp.layers.{number}.{part}"
    return f"mtp.layers.{number}.{part}" if in_block else f"mtp.{part.replace('eh_proj', 'fc')}"


def stored(prefix: str, part: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the tensors of the files: transformers has one for the gates of all experts."""
    part = part.replace("mtp_block.", "").replace("post_norm", "shared_head.norm")
    if part == "mlp.experts.gate_up_proj":
        gates = [expert.chunk(2) for expert in tensor]
        return {
            f"{prefix}mlp.experts.{number}.{name}_proj.weight": half.contiguous()
            for number, halves in enumerate(gates)
            for name, half in zip(("gate", "up"), halves, strict=True)
        }
    if part == "mlp.experts.down_proj":
        return {f"{prefix}mlp.experts.{n}.down_proj.weight": expert.clone() for n, expert in enumerate(tensor)}
    return {prefix + part: tensor.contiguous()}


def change(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize("name", CLASSES)
def test_they_predict_what_they_predict_in_transformers_and_are_exported(name: str, tmp_path: Path) -> None:
    theirs, further = written(name, tmp_path / "theirs")
    stored_model = open_hf(tmp_path / "theirs")
    assert stored_model.spec.mtp_layers == number_of(name)
    ours = load_model(stored_model, torch.float32).eval()
    ids = components.sample()
    with torch.no_grad():
        states = theirs(ids, output_hidden_states=True).hidden_states[-1][:, :-1]
        position = torch.arange(1, ids.shape[1]).unsqueeze(0)
        x = ours(Inputs(ids[:, :-1]))
        components.close(x, states)
        tokens = ids[:, 1:]
        for number, layer in enumerate(ours.mtp):
            states = further.forward_layer(number, states, position, None, input_ids=tokens)
            assert ours.embedding is not None
            x = layer(x, ours.embedding(tokens), ours.prediction_context(Inputs(ids[:, :-1]), x))
            components.close(ours.logits(x), further.shared_head(states))
            tokens = torch.nn.functional.pad(tokens[:, 1:], (0, 1))
    # Nothing is lost on the way out.
    tokenizer = tmp_path / "tokenizer"
    train_tokenizer(iter(["some text"]), 290, ["<|endoftext|>"]).save(tokenizer)
    export_hf(stored_model.spec, stored_model.read, tokenizer, tmp_path / "ours")
    before, after = (
        load_file(tmp_path / "theirs" / "model.safetensors"),
        load_file(tmp_path / "ours" / "model.safetensors"),
    )
    copies = {key for key in before if "layers.5.embed_tokens" in key}
    assert before.keys() - copies == after.keys()
    assert all(torch.equal(after[key], before[key]) for key in after)


def test_files_without_them_or_with_unknown_ones(tmp_path: Path) -> None:
    """transformers writes no such layers, whatever the config says; tensors of another layout are not dropped."""
    written("glm4_moe", tmp_path)
    assert open_hf(tmp_path).spec.mtp_layers == LAYERS
    tensors = load_file(tmp_path / "model.safetensors")
    plain = {
        key: tensor for key, tensor in tensors.items() if not key.startswith(("model.layers.5.", "model.layers.6."))
    }
    save_file(plain, tmp_path / "model.safetensors")
    assert open_hf(tmp_path).spec.mtp_layers == 0
    save_file({**plain, "mtp.layers.0.norm.weight": torch.ones(48)}, tmp_path / "model.safetensors")
    with pytest.raises(JinguError, match=r"mtp\.layers\.0\.norm\.weight"):
        open_hf(tmp_path)


@pytest.mark.parametrize("name", ["glm4_moe", "mimo_v2_flash", "exaone_moe"])
def test_a_config_of_layers_that_files_lack(name: str, tmp_path: Path) -> None:
    """The model has none of them, nor their loss, and its config says so."""
    written(name, tmp_path)
    change(tmp_path, mtp_loss_weight=0.3)
    assert open_hf(tmp_path).spec.mtp_loss_weight == 0.3
    tensors = load_file(tmp_path / "model.safetensors")
    body = {key: tensor for key, tensor in tensors.items() if "mtp." not in key}
    body = {key: tensor for key, tensor in body.items() if not key.startswith(("model.layers.5.", "model.layers.6."))}
    save_file(body, tmp_path / "model.safetensors")
    model = open_hf(tmp_path)
    assert model.spec.mtp_layers == 0
    config = build_config(model.spec, model.config, torch.float32)
    assert model.config.keys() <= config.keys()
    family = FAMILIES[model.spec.family]
    assert family.spec_from_hf(family.complete(config, is_part=False)) == model.spec


def test_gguf_files_leave_out_the_layers_and_their_loss(tmp_path: Path) -> None:
    written("glm4_moe", tmp_path)
    change(tmp_path, mtp_loss_weight=0.3)
    train_tokenizer(iter(["some text"]), 290, ["<|endoftext|>"]).save(tmp_path)
    model = open_hf(tmp_path)
    export_gguf(model, tmp_path / "model.gguf", "fp32")
    spec = open_gguf(tmp_path / "model.gguf").spec
    assert (spec.mtp_layers, spec.mtp_loss_weight, spec.layers) == (0, 0.0, model.spec.layers)


@pytest.mark.parametrize(("name", "field"), [("mimo_v2_flash", "mtp_kind"), ("exaone_moe", "mtp_layers")])
def test_layers_like_the_last_that_files_of_a_family_cannot_have(name: str, field: str) -> None:
    family = FAMILIES[name]
    family.hf_config(family.template)
    with pytest.raises(JinguError, match=f"cannot express this model's {field}"):
        family.hf_config(replace_fields(family.template, mtp_layers=1))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mtp_layer_types": None}, r"unexpected: mtp\.fc\.weight"),
        ({"mtp_layer_types": ["full_attention"] * 2}, "mtp_layer_types"),
        ({"mtp_layer_types": ["linear_attention"]}, "mtp_layer_types"),
        ({"mtp_sliding_windows": [9]}, r"mtp_sliding_windows to \[9\].*\[7\]"),
    ],
    ids=str,
)
def test_layers_of_exaone_that_its_config_does_not_describe(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    written("exaone_moe", tmp_path)
    change(tmp_path, mtp_sliding_windows=[7])
    assert open_hf(tmp_path).spec.mtp_layers == 1
    change(tmp_path, **changes)
    with pytest.raises(JinguError, match=words):
        open_hf(tmp_path)
