"""The encoder-decoder: a decoder whose blocks also attend to the states of an encoder, which reads a whole source.

Shapes: B rows, T tokens, S tokens of the source, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from jingu.model.adapters import prepare_training
from jingu.model.attention import Cache, cross_mask, skipped_states
from jingu.model.decoder import Auxiliary, Decoder, Encoded, Head, Passed, Stack
from jingu.model.spec import ModelSpec


class EncoderDecoder(Decoder):
    """An encoder beside the decoder, of the same dimensions and over the same embedding; or a part of the two.

    A part is a range of the blocks of both, those of the encoder first.
    """

    def __init__(self, spec: ModelSpec, part: range | None = None) -> None:
        layers = spec.encoder_layers
        assert layers is not None
        part = range(layers + spec.layers) if part is None else part
        reads = range(min(part.start, layers), min(part.stop, layers))
        writes = range(max(part.start - layers, 0), max(part.stop - layers, 0))
        super().__init__(spec, writes, embeds=part.start == 0)
        self.encoder = Stack(spec, layers, reads, embeds=False, causal=False, cross=False)

    def forward(  # type: ignore[override]
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
        keys_BT: Tensor | None = None,
        source_keys_BS: Tensor | None = None,
    ) -> Tensor | Passed | None:
        """As `Decoder.forward`, whose arguments are here those of the decoder's side.

        Args:
            source_BS: token ids that the encoder reads; with a cache needed with its first tokens only, since it
                keeps the keys and values of the encoder's states.
            source_documents_BS: document of each; a token of either side sees its own document. -1: padding, which
                none sees. Where a row is padded, they are needed with every token.
            source_keys_BS: as `keys_BT`, of what the encoder reads.

        Returns:
            None where this is a part of the encoder, and there is no source to read.
        """
        if self.encoder.part and source_BS is not None:
            passed = self.encode(source_BS, source_documents_BS, passed, source_keys_BS)
        if not self.part:
            return passed
        if source_documents_BS is not None:
            source_documents_BS = source_documents_BS[:, skipped_states(self.spec) :]
        encoded = Encoded(None, cross_mask(documents_BT, source_documents_BS), [], source_keys_BS)
        if passed is not None and self.part.start == 0:
            encoded, passed = encoded._replace(states=passed.states, routings=passed.routings), None
        elif passed is not None:
            encoded = encoded._replace(states=passed.encoded)
        given = tokens_BT, positions_BT, documents_BT, cache, loss, auxiliary, passed, encoded
        made = self.decode(*given, keys_BT=keys_BT)
        return made._replace(encoded=encoded.states) if isinstance(made, Passed) else made

    def encode(
        self, source_BS: Tensor, documents_BS: Tensor | None, passed: Passed | None, keys_BS: Tensor | None = None
    ) -> Passed:
        """Through the blocks of the encoder that are here."""
        positions_S = torch.arange(source_BS.shape[1], device=source_BS.device)
        if passed is None:
            passed = Passed(self.encoder.begin(self.embedding, source_BS, positions_S), [])
        return self.encoder.run(passed, source_BS, positions_S, documents_BS, keys_BT=keys_BS)


def make_model(spec: ModelSpec, part: range | None = None) -> Decoder:
    """The model of a spec, with or without an encoder, or a part of its blocks; its weights are not filled."""
    model = Decoder(spec, part) if spec.encoder_layers is None else EncoderDecoder(spec, part)
    prepare_training(model, spec)
    return model


def all_blocks(model: Decoder) -> Iterator[tuple[int, nn.Module]]:
    """The blocks with their numbers in their stack, in the order in which they compute."""
    for stack in (model.encoder, model) if isinstance(model, EncoderDecoder) else (model,):
        yield from zip(stack.part, stack.blocks, strict=True)
