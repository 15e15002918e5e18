"""Which matrices of a model are rounded to 8 or 4 bits: those of attention and feed-forward, and of experts, to what
is asked for; embedding and head to 8 in any case. Norms, biases, positions and routers stay as they are, and matrices
of shapes that the kernels do not take, too.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import normalize

from jingu.model.decoder import Decoder
from jingu.model.experts import ExpertsLayer, GroupedLinear
from jingu.model.layers import Embedding, Linear
from jingu.model.packed import Bits, Packed, pack, packs


def pack_weights(
    model: Decoder, read: Callable[[str], Tensor], bits: Bits, dtype: torch.dtype, device: torch.device
) -> None:
    """Give a model on the meta device rounded matrices in the place of its own, read one at a time."""
    routers = {layer.router for layer in model.modules() if isinstance(layer, ExpertsLayer)}
    for name, module in model.named_modules():
        if module in routers or not isinstance(module, Linear | Embedding | GroupedLinear):
            continue
        ends = module is model.embedding or module is model.head
        if isinstance(module, Embedding) and (not ends or (model.head is None and model.spec.normalised_head)):
            continue
        wanted: Bits = 8 if ends else bits
        outputs, inputs = module.weight.shape[-2:]
        if not packs(outputs, inputs, wanted):
            continue
        weight = read(f"{name}.weight").to(device)
        if module is model.head and model.spec.normalised_head:
            weight = normalize(weight.float())
        grouped = isinstance(module, GroupedLinear)
        del module.weight
        module.weight = tuple(pack(each, wanted, dtype) for each in weight) if grouped else pack(weight, wanted, dtype)


def room_for(shape: tuple[int, int], bits: Bits | None, dtype: torch.dtype, device: torch.device) -> Tensor | Packed:
    """Memory for a matrix; for a rounded one where it is to be, and can be."""
    if bits is None or not packs(*shape, bits):
        return torch.empty(shape, dtype=dtype, device=device)
    return pack(torch.zeros(shape, device=device), bits, dtype)
