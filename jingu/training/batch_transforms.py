"""Transforms of a batch before the model receives it: seeds of dropout, embedding noise, virtual tokens.

Shapes: B rows, T tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from jingu.data.batch import IGNORE_INDEX, Batch, map_tensors
from jingu.model.dropout import token_seeds
from jingu.model.inputs import Inputs
from jingu.model.spec import ModelSpec

# Document id of the virtual tokens before a row. All documents of the row have it as their parent, and so attend to it.
_PROMPT_DOCUMENT = -2


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Return the batch on the device; on CPU this is the same batch."""
    if device.type == "cpu":
        return batch
    return map_tensors(batch, lambda tensor: tensor.to(device, non_blocking=True))


def add_dropout_seeds(batch: Batch, seed: int, first_row: int) -> Batch:
    """Return the batch with a seed of adapter dropout for every token, of decoder and encoder.

    Args:
        seed: seed of the run.
        first_row: number of the batch's first row, counted over the whole run.
    """
    source = batch.source
    if source is not None:
        source = replace(source, dropout_seeds=token_seeds(seed + 1, first_row, *source.tokens.shape))
    return replace(batch, dropout_seeds=token_seeds(seed, first_row, *batch.tokens.shape), source=source)


def add_embedding_noise(batch: Batch, seed: int, first_row: int, alpha: float) -> Batch:
    """Return the batch with the seed and scale of each token's embedding noise, as `noise` [2, B, T].

    NEFTune: Jain et al., 2023, arXiv:2310.05914. The scale is alpha / √length, where length is the number of tokens in
    the token's document.

    Args:
        first_row: number of the batch's first row, counted over the whole run.
    """
    seed_BT = token_seeds(seed, first_row, *batch.tokens.shape)
    length_BT = torch.full_like(seed_BT, seed_BT.shape[1])
    if batch.documents is not None:
        # Document ids start at 0, and padding has -1. Add one, so that padding is counted at index 0.
        documents_BT = batch.documents + 1
        counts = seed_BT.new_zeros(seed_BT.shape[0], seed_BT.shape[1] + 1)
        counts.scatter_add_(1, documents_BT, torch.ones_like(documents_BT))
        length_BT = counts.gather(1, documents_BT)
    return replace(batch, noise=torch.stack([seed_BT.double(), alpha * length_BT.double().rsqrt()]))


def prepend_virtual_tokens(batch: Batch, spec: ModelSpec) -> Batch:
    """Return the batch with the virtual tokens of a model with a trained prompt or prefix, which have no labels.

    Those of the decoder are prepended once per row, and all documents that are packed into the row attend to them.
    Those of the encoder stand before or after its input (`ModelSpec.prompted`).
    """
    decoder_tokens, encoder_tokens = spec.prompts
    if decoder_tokens:
        # Values of the virtual tokens in each field of the batch.
        prefixes = {
            "tokens": [*spec.prompted(())],
            "labels": [IGNORE_INDEX] * decoder_tokens,
            "positions": list(range(decoder_tokens)),
            "documents": [_PROMPT_DOCUMENT] * decoder_tokens,
            **dict.fromkeys(("prefix_lengths", "weights", "noise"), [0] * decoder_tokens),
        }
        fields: dict[str, Any] = {}
        for name, prefix in prefixes.items():
            values_BT = getattr(batch, name)
            if values_BT is None:
                continue
            if name in ("positions", "prefix_lengths"):
                # Both count tokens from the start of the row, which the virtual tokens move to the left.
                values_BT = values_BT + decoder_tokens
            fields[name] = _prepend(values_BT, prefix)
        if batch.documents is not None:
            fields["parents"] = torch.full_like(fields["documents"], _PROMPT_DOCUMENT)
        batch = replace(batch, **fields)
    if encoder_tokens and batch.source is not None:
        tokens_BS = torch.tensor([spec.prompted(row, encoder=True) for row in batch.source.tokens.tolist()])
        batch = replace(batch, source=replace(batch.source, tokens=tokens_BS))
    return batch


def _prepend(values_BT: Tensor, prefix: list[int]) -> Tensor:
    """Return values [..., B, T] with the same prefix before each row."""
    prefix_BT = torch.tensor(prefix, dtype=values_BT.dtype).expand(*values_BT.shape[:-1], -1)
    return torch.cat([prefix_BT, values_BT], -1)


def model_inputs(batch: Batch) -> Inputs:
    """Return the inputs of the model for a batch: all fields but labels and weights."""
    source = None
    noise = batch.noise
    if batch.source is not None:
        # Encoder-decoders train without embedding noise.
        noise = None
        source = Inputs(batch.source.tokens, documents=batch.source.documents, dropout_seeds=batch.source.dropout_seeds)
    return Inputs(
        batch.tokens,
        batch.positions,
        batch.documents,
        batch.parents,
        prefix_lengths=batch.prefix_lengths,
        dropout_seeds=batch.dropout_seeds,
        embedding_noise=noise,
        source=source,
    )
