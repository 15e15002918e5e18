"""The encoder-decoder: a decoder whose blocks also attend to the states of an encoder, which reads a whole source.

Shapes: B rows, T tokens, S tokens of the source, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from jingu.model.attention import Cache, cross_mask
from jingu.model.decoder import Auxiliary, Decoder, Encoded, Head, Passed, Stack
from jingu.model.spec import ModelSpec


class EncoderDecoder(Decoder):
    """An encoder beside the decoder, of the same dimensions and over the same embedding."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        layers = spec.encoder_layers
        assert layers is not None
        self.encoder = Stack(spec, layers, range(layers), embeds=False, causal=False, cross=False)

    def forward(
        self,
        tokens_BT: Tensor,
        positions_BT: Tensor | None = None,
        documents_BT: Tensor | None = None,
        cache: Cache | None = None,
        loss: Head | None = None,
        auxiliary: Auxiliary | None = None,
        passed: Passed | None = None,
        source_BS: Tensor | None = None,
        source_documents_BS: Tensor | None = None,
    ) -> Tensor | Passed:
        """As `Decoder.forward`, whose arguments are here those of the decoder's side.

        Args:
            source_BS: token ids that the encoder reads; with a cache needed with its first tokens only, since it
                keeps the keys and values of the encoder's states.
            source_documents_BS: document of each; a token of either side sees its own document. -1: padding, which
                none sees. Where a row is padded, they are needed with every token.
        """
        encoded = self.encode(source_BS, documents_BT, source_documents_BS)
        return self.decode(tokens_BT, positions_BT, documents_BT, cache, loss, auxiliary, passed, encoded)

    def encode(
        self, source_BS: Tensor | None, documents_BT: Tensor | None, source_documents_BS: Tensor | None
    ) -> Encoded:
        """What the encoder makes of a source; without one only the mask, for states in a cache."""
        mask = cross_mask(documents_BT, source_documents_BS)
        if source_BS is None:
            return Encoded(None, mask, [])
        assert self.embedding is not None
        positions_S = torch.arange(source_BS.shape[1], device=source_BS.device)
        start = Passed(self.encoder.begin(self.embedding(source_BS), positions_S), [])
        ended = self.encoder.run(start, positions_S, source_documents_BS)
        return Encoded(ended.states, mask, ended.routings)


def make_model(spec: ModelSpec) -> Decoder:
    """The model of a spec, with or without an encoder; its weights are not filled."""
    return Decoder(spec) if spec.encoder_layers is None else EncoderDecoder(spec)


def all_blocks(model: Decoder) -> Iterator[tuple[int, nn.Module]]:
    """The blocks with their numbers in their stack, in the order in which they compute."""
    for stack in (model.encoder, model) if isinstance(model, EncoderDecoder) else (model,):
        yield from zip(stack.part, stack.blocks, strict=True)
