"""Importance of the columns of matrices: the mean square of their inputs on a text.

An error in a column changes the output by the error times the input. llama.cpp calls these numbers an importance
matrix (imatrix).

Shapes: B rows of text, T tokens, I columns of a matrix, M rows sorted by expert, E experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from jingu.errors import JinguError
from jingu.formats.stored_model import StoredModel, load_model
from jingu.model.experts import GroupedLinear
from jingu.model.layers import Linear
from jingu.runtime.files import read_text
from jingu.text.tokenizer import Tokenizer

# The text is divided into pieces of this many tokens, and these many pieces are used.
PIECE_TOKENS, MAX_PIECES = 512, 128
_BATCH = 8
# Fewer tokens say too little about which inputs are large.
MIN_TOKENS = 1024

Importance = dict[str, Tensor]
"""[I], or [E, I] for matrices of experts, in fp32, by the names of jingu's parameters."""


def measure_importance(model: StoredModel, text: Path) -> Importance:
    """Return the importance of the columns of all matrices in the blocks.

    Args:
        text: a file of plain text, like what the model will read and write.

    Raises:
        JinguError: the text is too short, or the model is an encoder-decoder.
    """
    if model.spec.num_encoder_layers is not None:
        raise JinguError("calibration needs a decoder.", where="--calibrate", fix="Leave it out.")
    pieces_BT = _read_pieces(Tokenizer.load(model.tokenizer()), text, model.spec.max_position_embeddings)
    decoder = load_model(model, torch.float32)
    sums: dict[str, tuple[Tensor, Tensor]] = {}
    for name, module in decoder.named_modules():
        if "blocks." in name and isinstance(module, Linear):
            module.register_forward_pre_hook(partial(_add_inputs, sums, f"{name}.weight"))
        elif "blocks." in name and isinstance(module, GroupedLinear):
            module.register_forward_pre_hook(partial(_add_expert_inputs, sums, f"{name}.weight"), with_kwargs=True)
    with torch.no_grad():
        for batch_BT in pieces_BT.split(_BATCH):
            decoder(batch_BT)
    return {name: _mean(total, count) for name, (total, count) in sums.items()}


def _read_pieces(tokenizer: Tokenizer, text: Path, max_tokens: int | None) -> Tensor:
    """Return the token ids of the text, in pieces [B, T]."""
    ids = torch.tensor(tokenizer.encode(read_text(text)))
    if len(ids) < MIN_TOKENS:
        what = f"the text has {len(ids)} tokens, and a calibration needs at least {MIN_TOKENS:,}."
        raise JinguError(what, where=text, fix="Give a longer text, like those that the model will read.")
    size = min(PIECE_TOKENS, max_tokens or PIECE_TOKENS)
    return ids[: len(ids) // size * size].view(-1, size)[:MAX_PIECES]


def _add_inputs(sums: dict[str, tuple[Tensor, Tensor]], name: str, _module: nn.Module, inputs: tuple[Any, ...]) -> None:
    x_MI = inputs[0].float().flatten(0, -2)
    total_I, count = sums.get(name, (torch.zeros(x_MI.shape[1]), torch.zeros(())))
    sums[name] = total_I + x_MI.square().sum(0), count + len(x_MI)


def _add_expert_inputs(
    sums: dict[str, tuple[Tensor, Tensor]],
    name: str,
    _module: nn.Module,
    inputs: tuple[Any, ...],
    keywords: Mapping[str, Tensor],
) -> None:
    x_MI, ends_E = inputs[0], keywords["ends_E"]
    sizes = ends_E.diff(prepend=ends_E.new_zeros(1)).tolist()
    parts = torch.stack([part.float().square().sum(0) for part in x_MI[: sum(sizes)].split(sizes)])
    total_EI, count_E1 = sums.get(name, (torch.zeros_like(parts), torch.zeros(len(sizes), 1)))
    sums[name] = total_EI + parts, count_E1 + torch.tensor(sizes, dtype=torch.float32).unsqueeze(1)


def _mean(total: Tensor, count: Tensor) -> Tensor:
    """Return means; for an expert without tokens, those of all experts."""
    if total.dim() == 1:
        return total / count
    return torch.where(count > 0, total / count.clamp_min(1), total.sum(0) / count.sum())
