"""GGUF files with layers of multi-token prediction, under the names that the gguf package gives them."""

from __future__ import annotations

import re
from pathlib import Path

import gguf
import torch
from safetensors.torch import load_file

from jingu.formats.huggingface import open_hf
from jingu.formats.models import open_model
from jingu.formats.stored_model import load_model
from tests.parity.test_multi_token_prediction import LAYERS, written


def write_glm(file: Path, folder: Path) -> None:
    """Write a folder of GLM 4.5 as llama.cpp's converter does: layers of prediction are numbered with the others."""
    spec = open_hf(folder).spec
    attention, experts = spec.attention, spec.experts
    assert experts is not None
    number = spec.num_layers + spec.mtp_layers
    writer = gguf.GGUFWriter(file, "glm4moe")
    writer.add_block_count(number)
    writer.add_context_length(spec.max_position_embeddings)
    writer.add_embedding_length(spec.hidden_size)
    writer.add_feed_forward_length(spec.layers[0].intermediate_size)
    writer.add_head_count(attention.num_heads)
    writer.add_head_count_kv(attention.num_kv_heads)
    writer.add_key_length(attention.head_dim)
    writer.add_value_length(attention.head_dim)
    writer.add_rope_dimension_count(attention.head_dim // 2)
    writer.add_rope_freq_base(spec.position.theta)
    writer.add_layer_norm_rms_eps(spec.norm.eps)
    writer.add_expert_count(experts.num_experts)
    writer.add_expert_used_count(experts.num_experts_per_token)
    writer.add_expert_feed_forward_length(experts.intermediate_size)
    writer.add_expert_shared_count(experts.shared_intermediate_size // experts.intermediate_size)
    writer.add_leading_dense_block_count(sum(layer.feed_forward.type == "gated" for layer in spec.layers))
    writer.add_expert_weights_scale(experts.router.scaling_factor)
    writer.add_expert_weights_norm(experts.router.norm_topk_prob)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_expert_group_count(1)
    writer.add_expert_group_used_count(1)
    writer.add_nextn_predict_layers(spec.mtp_layers)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GLM4_MOE, number)
    parts_of: dict[str, list[torch.Tensor]] = {}
    tensors = load_file(folder / "model.safetensors")
    # Experts by their numbers.
    for key in sorted(tensors, key=lambda key: [int(number) for number in re.findall(r"\d+", key)]):
        tensor = tensors[key]
        parts_of.setdefault(re.sub(r"experts\.\d+\.", "experts.", key).replace("n_bias", "n.bias"), []).append(tensor)
    for key, parts in parts_of.items():
        joint = torch.stack(parts) if ".experts." in key else parts[0]
        writer.add_tensor(names.get_name(key, (".weight", ".bias")), joint.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_layers_of_multi_token_prediction_are_read(tmp_path: Path) -> None:
    written("glm4_moe", tmp_path / "folder")
    write_glm(tmp_path / "model.gguf", tmp_path / "folder")
    ours, expected = open_model(tmp_path / "model.gguf"), open_hf(tmp_path / "folder")
    assert (ours.spec.num_layers, ours.spec.mtp_layers) == (expected.spec.num_layers, LAYERS)
    models = [load_model(each, torch.float32) for each in (ours, expected)]
    parameters = [dict(model.named_parameters()) for model in models]
    assert parameters[0].keys() == parameters[1].keys()
    for name, parameter in parameters[0].items():
        assert torch.equal(parameter, parameters[1][name]), name
    assert any(name.startswith("mtp.1.") for name in parameters[0])
