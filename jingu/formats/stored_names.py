"""Other ways in which transformers stores a decoder: inside a model of images and text, and with experts in one tensor.

- Composite models (`LlavaForConditionalGeneration`, `Mistral3ForConditionalGeneration`, ...) have the decoder's config
  under `text_config`. Its tensors are below `model.language_model.`, or below `language_model.model.` in older files.
- Tools that quantize linear modules store a matrix per expert, also where transformers has one tensor.
- Of convolutions of queries, keys and values, which are one tensor in memory, transformers stores three thirds,
  whatever their sizes are.
- `save_pretrained(save_original_format=False)` of transformers 5 stores the matrices of all experts of a layer as they
  are in memory: `experts.gate_up_proj` [E, 2·I, D] and `experts.down_proj` [E, D, I].
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jingu.formats.packed_matrices import PackedMatrix, Place, Stored
from jingu.formats.unread import unread_architecture
from jingu.model.families import FAMILIES
from jingu.model.families.name_map import IDENTITY, TensorMapping

# Prefixes of the decoder's tensors in a composite model, and what stands in their place in a model of text.
_DECODER_PREFIXES = {
    "language_model.lm_head.": "lm_head.",
    "language_model.model.": "model.",
    "model.language_model.lm_head.": "lm_head.",
    "model.language_model.model.": "model.",
    "model.language_model.": "model.",
    "language_model.": "model.",
    "lm_head.": "lm_head.",
    "mtp.": "mtp.",
}
_FUSED = re.compile(r"(?P<layer>.+)\.mlp\.experts\.(?P<part>gate_up_proj|down_proj)")
_CONVOLUTION = re.compile(r"(?P<layer>.+\.)[qkv]_conv1d\.weight")
# Names of an expert's matrices in the files of each family: module, gate, up, down.
_EXPERT_NAMES = (("mlp", "gate_proj", "up_proj", "down_proj"), ("block_sparse_moe", "w1", "w3", "w2"))


def is_composite(config: Mapping[str, Any]) -> bool:
    """Return whether a config is that of a composite model, with the decoder's config in it."""
    return isinstance(config.get("text_config"), Mapping)


def decoder_config(config: dict[str, Any], where: Path) -> dict[str, Any]:
    """Return the config of the decoder in a composite model, as if it were a separate model; other configs as they are.

    Raises:
        JinguError: jingu does not read the decoder's architecture.
    """
    if not is_composite(config):
        return config
    text_config = config["text_config"]
    kind = str(text_config.get("model_type")).removesuffix("_text")
    families = {family.model_type or family.name: family for family in FAMILIES.values()}
    family = families.get(str(text_config.get("model_type")), families.get(kind))
    if family is None:
        name = (config.get("architectures") or [config.get("model_type")])[0]
        model_type = str(text_config.get("model_type"))
        what = f"jingu does not read the decoder of {name}, whose model_type is {model_type!r}"
        raise unread_architecture(what, [model_type, kind], where, FAMILIES)
    common: dict[str, Any] = {
        key: config[key] for key in ("quantization_config", "dtype", "torch_dtype") if key in config
    }
    result = {**common, **text_config, "architectures": [family.architectures[0]]}
    # transformers ties the head if one of the configs says so.
    if config.get("tie_word_embeddings"):
        result["tie_word_embeddings"] = True
    return result


def decoder_tensors(tensors: Mapping[str, Place]) -> tuple[dict[str, Place], list[str]]:
    """Return the decoder's tensors of a composite model under their names in a model of text, and the omitted names."""
    decoder = {}
    left_out = []
    for key, tensor in tensors.items():
        prefix = next((prefix for prefix in _DECODER_PREFIXES if key.startswith(prefix)), None)
        if prefix is None:
            left_out.append(key)
        else:
            name = _DECODER_PREFIXES[prefix] + key.removeprefix(prefix)
            decoder[name] = (tensor[0], name, tensor[2])
    return decoder, left_out


def divide_experts(tensors: Mapping[str, Stored], names: Collection[str]) -> dict[str, Stored]:
    """Return the tensors with a matrix per expert in place of those of all experts, where the model expects them so.

    Args:
        names: names of the model's tensors.
    """
    result: dict[str, Stored] = {}
    for name, tensor in tensors.items():
        match = _FUSED.fullmatch(name)
        router = re.fullmatch(r"(.+)\.mlp\.gate\.weight", name)
        if match is not None and name not in names:
            result |= _expert_matrices(match["layer"], match["part"], tensor, names) or {name: tensor}
        elif router is not None and name not in names and f"{router[1]}.block_sparse_moe.gate.weight" in names:
            result[f"{router[1]}.block_sparse_moe.gate.weight"] = tensor
        else:
            result[name] = tensor
    return result


def _expert_matrices(layer: str, part: str, tensor: Stored, model_names: Collection[str]) -> dict[str, Stored]:
    """Return the matrices of all experts by name; empty if the model expects none of these names."""
    path, key, location = tensor
    names = next(
        (names for names in _EXPERT_NAMES if f"{layer}.{names[0]}.experts.0.{names[1]}.weight" in model_names), None
    )
    if names is None or len(location.shape) != 3 or (isinstance(location, PackedMatrix) and location.is_transposed):
        return {}
    module, gate, up, down = names
    matrices: dict[str, Stored] = {}
    parts = [gate, up] if part == "gate_up_proj" else [down]
    for expert in range(location.shape[0]):
        for number, matrix in enumerate(parts):
            name = f"{layer}.{module}.experts.{expert}.{matrix}.weight"
            matrices[name] = (path, key, location.part(expert, number, len(parts)))
    return matrices


def separate_experts(mapping: TensorMapping, names: Collection[str]) -> list[TensorMapping]:
    """Return a mapping per expert in place of that of all experts, where the files have a tensor per expert.

    Tools that quantize linear modules write experts so: `experts.0.gate_proj`, also if transformers has one tensor.

    Args:
        names: names of the stored tensors.
    """
    if mapping.hf_name in names or not mapping.transform.of_experts:
        return [mapping]
    stem = mapping.hf_name.rpartition(".")[0]
    separate = []
    for name, shape in mapping.jingu_shapes.items():
        _, part, kind = name.rsplit(".", 2)
        for expert in range(shape[0]):
            hf_name = f"{stem}.{expert}.{part}_proj.{kind}"
            separate.append(TensorMapping(hf_name, {name: shape[1:]}, IDENTITY, mapping.spec, expert))
    return separate if all(each.hf_name in names for each in separate) else [mapping]


def divide_convolutions(
    model_shapes: Mapping[str, torch.Size], shapes: Mapping[str, torch.Size], read: Callable[..., Tensor]
) -> tuple[dict[str, torch.Size], Callable[..., Tensor]]:
    """Return the shapes of weights and their reader, with the convolutions that the model expects in place of thirds.

    Args:
        model_shapes: shapes of the model's tensors.
        shapes: shapes of the stored tensors.
        read: reads a stored tensor by its name.
    """
    layers = {match["layer"] for name in model_shapes if (match := _CONVOLUTION.fullmatch(name))}
    groups: dict[str, list[str]] = {}
    for layer in layers:
        names = [f"{layer}{part}_conv1d.weight" for part in "qkv"]
        if all(name in shapes for name in names) and _rows(names, shapes) == _rows(names, model_shapes):
            groups |= dict.fromkeys(names, names)

    def read_divided(name: str, expert: int | None = None) -> Tensor:
        if name not in groups:
            return read(name, expert)
        rows = torch.cat([read(each) for each in groups[name]])
        parts = rows.split([model_shapes[each][0] for each in groups[name]])
        return parts[groups[name].index(name)]

    return {**shapes, **{name: model_shapes[name] for name in groups}}, read_divided


def _rows(names: Collection[str], shapes: Mapping[str, torch.Size]) -> int:
    return sum(shapes[name][0] for name in names)
