"""Convert sentencepiece models (Kudo and Richardson, 2018) to tokenizers of the `tokenizers` library.

The file is one protobuf message. Only the fields that determine token ids are declared here, with the field numbers of
https://github.com/google/sentencepiece/blob/master/src/sentencepiece_model.proto.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import tokenizers
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

# Types of pieces, and types of models.
_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_UNIGRAM, _BPE = 1, 2
# The messages and their fields: number, type and default of each field.
_FIELDS: dict[str, dict[str, tuple[int, str, str]]] = {
    "Piece": {"piece": (1, "STRING", ""), "score": (2, "FLOAT", "0"), "type": (3, "INT32", "1")},
    "Trainer": {
        "model_type": (3, "INT32", "1"),
        "treat_whitespace_as_suffix": (24, "BOOL", "false"),
        "byte_fallback": (35, "BOOL", "false"),
        "bos_id": (41, "INT32", "1"),
        "eos_id": (42, "INT32", "2"),
        "pad_id": (43, "INT32", "-1"),
    },
    "Normalizer": {
        "precompiled_charsmap": (2, "BYTES", ""),
        "add_dummy_prefix": (3, "BOOL", "true"),
        "remove_extra_whitespaces": (4, "BOOL", "true"),
        "escape_whitespaces": (5, "BOOL", "true"),
    },
    "Model": {"pieces": (1, "Piece", ""), "trainer": (2, "Trainer", ""), "normalizer": (3, "Normalizer", "")},
}


@dataclass(frozen=True)
class SentencePieceModel:
    """The parts of a model that determine the ids of a text: pieces with scores, and the normalization of text.

    Attributes:
        pieces: the vocabulary, in the order of ids.
        scores: score of each piece; log-probability for Unigram, order of merges for BPE.
        types: type of each piece: 1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte.
        unigram: whether the model is Unigram, which chooses the most likely sequence of pieces; otherwise it is BPE.
        byte_fallback: whether characters without a piece are encoded as bytes.
        charsmap: the compiled map that normalizes characters (`precompiled_charsmap`); empty if there is none.
        prefix: whether a space is added before the text.
        collapse: whether spaces at the ends are removed, and repeated spaces become one.
    """

    pieces: list[str]
    scores: list[float]
    types: list[int]
    unigram: bool = False
    byte_fallback: bool = True
    charsmap: bytes = b""
    prefix: bool = True
    collapse: bool = False


def read_sentencepiece(data: bytes, *, add_bos_token: bool = True) -> tuple[str, dict[str, str]]:
    """Convert the contents of a sentencepiece `.model` file.

    Args:
        add_bos_token: whether prompts begin with the BOS token if the model is BPE, as for Llama.

    Returns:
        The text of a tokenizer.json; and the special tokens by their configuration key, such as `bos_token`.

    Raises:
        Exception: the content is not a model (the protobuf library's own exception), or the model is of an unsupported
            kind (ValueError).
    """
    model = _message("Model")()
    model.ParseFromString(data)
    if not model.pieces:
        raise ValueError("it contains no pieces")
    trainer, normalizer = model.trainer, model.normalizer
    if trainer.model_type not in (_UNIGRAM, _BPE):
        raise ValueError("its pieces are words or characters, not those of BPE or Unigram")
    if trainer.treat_whitespace_as_suffix or not normalizer.escape_whitespaces:
        raise ValueError("its pieces do not begin with their space")
    pieces = SentencePieceModel(
        [piece.piece for piece in model.pieces],
        [piece.score for piece in model.pieces],
        [piece.type for piece in model.pieces],
        trainer.model_type == _UNIGRAM,
        trainer.byte_fallback,
        normalizer.precompiled_charsmap,
        normalizer.add_dummy_prefix,
        normalizer.remove_extra_whitespaces,
    )
    ids = {"bos_token": trainer.bos_id, "eos_token": trainer.eos_id, "pad_token": trainer.pad_id}
    ids["unk_token"] = pieces.types.index(_UNKNOWN) if _UNKNOWN in pieces.types else -1
    special_tokens = {name: pieces.pieces[id_] for name, id_ in ids.items() if 0 <= id_ < len(pieces.pieces)}
    inner = build_sentencepiece(pieces)
    if add_bos_token and not pieces.unigram and "bos_token" in special_tokens:
        prepend_token(inner, special_tokens["bos_token"])
    return inner.to_str(), special_tokens


@cache
def _message(name: str) -> Any:
    """Return the protobuf class of a message in `_FIELDS`."""
    file = descriptor_pb2.FileDescriptorProto(name="sentencepiece.proto", package="pieces", syntax="proto2")
    for message, fields in _FIELDS.items():
        descriptor = file.message_type.add(name=message)
        for field, (number, kind, default) in fields.items():
            proto = descriptor_pb2.FieldDescriptorProto
            item = descriptor.field.add(name=field, number=number, label=proto.LABEL_OPTIONAL)
            if kind in _FIELDS:
                item.type = proto.TYPE_MESSAGE
                item.type_name = f".pieces.{kind}"
                item.label = proto.LABEL_REPEATED if field == "pieces" else proto.LABEL_OPTIONAL
            else:
                item.type = proto.Type.Value(f"TYPE_{kind}")
                item.default_value = default
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"pieces.{name}"))


def build_sentencepiece(pieces: SentencePieceModel) -> Any:
    """Build a tokenizer (of the `tokenizers` library) that gives every text the same ids as sentencepiece."""
    id_ = pieces.types.index(_UNKNOWN) if _UNKNOWN in pieces.types else None
    if pieces.unigram:
        # The library would match control pieces and byte pieces (<0x0A>) in text like any other piece. A very low score
        # prevents this, unless one of their characters has no piece.
        unlikely = 100 * min(pieces.scores, default=0.0)
        scores = [
            unlikely if t in (_CONTROL, _BYTE) else score for score, t in zip(pieces.scores, pieces.types, strict=True)
        ]
        vocab = list(zip(pieces.pieces, scores, strict=True))
        model: Any = models.Unigram(vocab, id_, pieces.byte_fallback)
    else:
        ids = {piece: number for number, piece in enumerate(pieces.pieces)}
        unknown = None if id_ is None else pieces.pieces[id_]
        model = models.BPE(ids, _merges(pieces), unk_token=unknown, fuse_unk=True, byte_fallback=pieces.byte_fallback)
    inner: Any = tokenizers.Tokenizer(model)
    inner.normalizer = _normalizer(pieces)
    if not any("▁" in piece.lstrip("▁") for piece in pieces.pieces):
        # No piece extends across the space between two words, so splitting there keeps the ids, and is much faster.
        inner.pre_tokenizer = pre_tokenizers.Split(Regex("▁*[^▁]+|▁+"), "isolated")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    inner.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if pieces.prefix else steps)
    for piece, type_ in zip(pieces.pieces, pieces.types, strict=True):
        if type_ in (_UNKNOWN, _CONTROL, _USER):
            inner.add_tokens([AddedToken(piece, special=type_ != _USER, normalized=False)])
    return inner


def prepend_token(inner: Any, token: str) -> None:
    """Let a tokenizer of the library add a special token before prompts, in addition to its own post-processing."""
    template = processors.TemplateProcessing(
        single=f"{token} $A",
        pair=f"{token} $A {token}:1 $B:1",
        special_tokens=[(token, inner.token_to_id(token))],
    )
    existing = inner.post_processor
    inner.post_processor = template if existing is None else processors.Sequence([existing, template])


def _normalizer(pieces: SentencePieceModel) -> Any:
    """Return a normalizer (of the `tokenizers` library) with the effect of sentencepiece's."""
    steps: list[Any] = [normalizers.Precompiled(pieces.charsmap)] if pieces.charsmap else []
    if pieces.collapse:
        steps += [normalizers.Replace(Regex("^ +| +$"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if pieces.prefix:
        steps.append(normalizers.Prepend("▁"))
    return normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])


def _merges(pieces: SentencePieceModel) -> list[tuple[str, str]]:
    """Return the merges of a BPE model in their order.

    sentencepiece stores no merges. Every split of a piece into two other pieces is a merge; merges are ordered by the
    score of the merged piece, best first.
    """
    ranks = {
        piece: (-score, id_)
        for id_, (piece, score, type_) in enumerate(zip(pieces.pieces, pieces.scores, pieces.types, strict=True))
        if type_ in (_NORMAL, _UNUSED)
    }
    pairs = [
        (rank, (piece[:cut], piece[cut:]))
        for piece, rank in ranks.items()
        for cut in range(1, len(piece))
        if piece[:cut] in ranks and piece[cut:] in ranks
    ]
    return [pair for _, pair in sorted(pairs)]
