"""LoRA of the matrices of all experts at once, as peft names it (`target_parameters`).

transformers 5 has one parameter for the gates and ups of all experts of a layer, and one for the downs. peft wraps the
module of the experts once for each. Its matrix A has the ranks of all experts among its rows, expert by expert:
[E · R, I]; and B among its columns, rank by rank: [O, R · E].

Shapes: E experts, R rank, I inputs, O outputs, F intermediate size.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from jingu.model.families import FAMILIES
from jingu.model.families.name_map import IDENTITY, TRANSFORMS, TensorMapping
from jingu.model.spec import ModelSpec

_EXPERTS = re.compile(r"(.+\.experts)((?:\.base_layer)*)")
# The parameter that holds each matrix of gated experts.
_PARAMETERS = {"gate": "gate_up_proj", "up": "gate_up_proj", "down": "down_proj"}
# Transforms of matrices whose rows are gates and ups in turns.
EXPERT_PAIRS = (TRANSFORMS["experts_pairs"], TRANSFORMS["experts_pairs_transposed"])


def take_expert_adapters(
    modules: dict[str, dict[str, Tensor]], mappings: Mapping[str, TensorMapping], spec: ModelSpec
) -> list[tuple[TensorMapping, dict[str, Tensor]]]:
    """Remove the adapters of all experts from `modules`; return them as those of single experts' matrices.

    Args:
        modules: peft's tensors by Hugging Face's module.
        mappings: the mappings of the model's tensors, by Hugging Face's name.
    """
    adapters = []
    for module in list(modules):
        match = _EXPERTS.fullmatch(module)
        if match is None or not {"lora_A", "lora_B"} <= set(modules[module]):
            continue
        names = (match[1], match[1].replace(".mlp.", ".block_sparse_moe."))
        inside = [entry for name, entry in mappings.items() if name.startswith(tuple(f"{each}." for each in names))]
        if not inside:
            continue
        leaves = modules.pop(module)
        adapters += _divide(match[1], inside, leaves["lora_A"], leaves["lora_B"], spec)
    return adapters


def _divide(
    module: str, mappings: Sequence[TensorMapping], a: Tensor, b: Tensor, spec: ModelSpec
) -> list[tuple[TensorMapping, dict[str, Tensor]]]:
    """Return the matrices of each expert, given those of all. Their names are those of peft's patterns of ranks."""
    names = {name for mapping in mappings for name in mapping.jingu_shapes}
    prefix = next(iter(names)).rpartition(".feed_forward.")[0] + ".feed_forward"
    layer = spec.layer_of(f"{prefix}.")
    number, size = spec.experts.num_experts if spec.experts else 1, layer.intermediate_size
    a_ERI = a.unflatten(0, (number, -1))
    b_EOR = b.unflatten(1, (-1, number)).permute(2, 0, 1)
    if FAMILIES[spec.family].swaps_expert_adapters:
        a_ERI, b_EOR = b_EOR.transpose(1, 2), a_ERI.transpose(1, 2)
    parts = {"down": b_EOR}
    if spec.experts is not None and not spec.experts.gated:
        # Without gates, the shapes of up and down are each other's transposes.
        parts = {"up" if b_EOR.shape[1] == size else "down": b_EOR}
    elif b_EOR.shape[1] == 2 * size and a_ERI.shape[2] == spec.hidden_size:
        is_in_pairs = any(mapping.transform in EXPERT_PAIRS for mapping in mappings)
        gate, up = (b_EOR[:, ::2], b_EOR[:, 1::2]) if is_in_pairs else b_EOR.chunk(2, 1)
        parts = {"gate": gate, "up": up}
    result = []
    for part, rows_EOR in parts.items():
        shape = torch.Size((rows_EOR.shape[1], a_ERI.shape[2]))
        parameter = f"{module}.{_PARAMETERS[part] if 'gate' in parts or part == 'down' else 'up_proj'}"
        for expert in range(number):
            name = f"{prefix}.{part}.weight"
            mapping = TensorMapping(parameter, {name: shape}, IDENTITY, spec, expert)
            result.append((mapping, {"lora_A": a_ERI[expert], "lora_B": rows_EOR[expert]}))
    return result


def join_expert_adapters(
    pairs: Sequence[tuple[Tensor, Tensor]], rank: int, *, in_pairs: bool, swaps: bool
) -> tuple[Tensor, Tensor]:
    """Return peft's A [E · R, I] and B [O, R · E] of one parameter.

    Args:
        pairs: A [E, r, I] and B [E, o, r] of each of jingu's matrices that the parameter holds.
        rank: R: at least the sum of their ranks; matrices are padded with zeros.
        in_pairs: whether the outputs of the matrices come in turns.
        swaps: see `Family.swaps_expert_adapters`.
    """
    a_ERI = torch.cat([a for a, _ in pairs], 1)
    a_ERI = torch.nn.functional.pad(a_ERI, (0, 0, 0, rank - a_ERI.shape[1]))
    blocks = []
    first = 0
    for _, b in pairs:
        blocks.append(torch.nn.functional.pad(b, (first, rank - first - b.shape[2])))
        first += b.shape[2]
    b_EOR = torch.stack(blocks, 2).flatten(1, 2) if in_pairs else torch.cat(blocks, 1)
    if swaps:
        a_ERI, b_EOR = b_EOR.transpose(1, 2), a_ERI.transpose(1, 2)
    return a_ERI.flatten(0, 1), b_EOR.permute(1, 2, 0).flatten(1, 2)
