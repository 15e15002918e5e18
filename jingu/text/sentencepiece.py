"""Sentencepiece models (Kudo and Richardson, 2018): pieces with scores, as a tokenizer of the `tokenizers` library.

The file is one protobuf message; only the fields that decide about ids are declared here, with the numbers of
https://github.com/google/sentencepiece/blob/master/src/sentencepiece_model.proto.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import tokenizers
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_UNIGRAM, _BPE = 1, 2
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
class Pieces:
    """What decides about the ids of a text.

    Attributes:
        types: of each piece: 1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 a byte.
        unigram: whether the likeliest pieces are taken together, instead of merging the best pair again and again.
        charsmap: the compiled map that normalises characters; empty where there is none.
        prefix: whether a space is put before the text.
        collapse: whether spaces at the ends go, and several become one.
    """

    pieces: list[str]
    scores: list[float]
    types: list[int]
    unigram: bool = False
    byte_fallback: bool = True
    charsmap: bytes = b""
    prefix: bool = True
    collapse: bool = False


def read_sentencepiece(data: bytes, *, begins: bool = True) -> tuple[str, dict[str, str]]:
    """The text of a tokenizer.json, and the names of the special tokens, out of a sentencepiece `.model`.

    Args:
        begins: whether a prompt begins with the model's first token, where it is BPE (as Llama has it).

    Raises ValueError, or the protobuf library's own exception, for content that is not one or is of a kind that
    has no counterpart.
    """
    model = _message("Model")()
    model.ParseFromString(data)
    if not model.pieces:
        raise ValueError("it holds no pieces")
    trainer, normalizer = model.trainer, model.normalizer
    if trainer.model_type not in (_UNIGRAM, _BPE):
        raise ValueError("its pieces are words or characters, and not of BPE or Unigram")
    if trainer.treat_whitespace_as_suffix or not normalizer.escape_whitespaces:
        raise ValueError("its pieces do not begin with their space")
    found = Pieces(
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
    ids["unk_token"] = found.types.index(_UNKNOWN) if _UNKNOWN in found.types else -1
    named = {name: found.pieces[id_] for name, id_ in ids.items() if 0 <= id_ < len(found.pieces)}
    inner = build(found)
    if begins and not found.unigram and "bos_token" in named:
        begin_with(inner, named["bos_token"])
    return inner.to_str(), named


@cache
def _message(name: str) -> Any:
    """The class of one of the messages."""
    file = descriptor_pb2.FileDescriptorProto(name="sentencepiece.proto", package="pieces", syntax="proto2")
    for message, fields in _FIELDS.items():
        described = file.message_type.add(name=message)
        for field, (number, kind, default) in fields.items():
            proto = descriptor_pb2.FieldDescriptorProto
            added = described.field.add(name=field, number=number, label=proto.LABEL_OPTIONAL)
            if kind in _FIELDS:
                added.type, added.type_name = proto.TYPE_MESSAGE, f".pieces.{kind}"
                added.label = proto.LABEL_REPEATED if field == "pieces" else proto.LABEL_OPTIONAL
            else:
                added.type, added.default_value = proto.Type.Value(f"TYPE_{kind}"), default
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"pieces.{name}"))


def build(found: Pieces) -> Any:
    """The tokenizer of the library that gives a text the same ids."""
    id_ = found.types.index(_UNKNOWN) if _UNKNOWN in found.types else None
    if found.unigram:
        # Control pieces and bytes (<0x0A>) would be found in text like any other: so nothing makes them the likeliest,
        # unless one of their letters is unknown.
        never = 100 * min(found.scores, default=0.0)
        scores = [
            never if t in (_CONTROL, _BYTE) else score for score, t in zip(found.scores, found.types, strict=True)
        ]
        vocabulary = list(zip(found.pieces, scores, strict=True))
        model: Any = models.Unigram(vocabulary, id_, found.byte_fallback)
    else:
        ids = {piece: number for number, piece in enumerate(found.pieces)}
        unknown = None if id_ is None else found.pieces[id_]
        model = models.BPE(ids, _merges(found), unk_token=unknown, fuse_unk=True, byte_fallback=found.byte_fallback)
    inner: Any = tokenizers.Tokenizer(model)
    inner.normalizer = _normalizer(found)
    if not any("▁" in piece.lstrip("▁") for piece in found.pieces):
        # The same ids, much sooner: no piece reaches over the space between two words.
        inner.pre_tokenizer = pre_tokenizers.Split(Regex("▁*[^▁]+|▁+"), "isolated")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    inner.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if found.prefix else steps)
    for piece, type_ in zip(found.pieces, found.types, strict=True):
        if type_ in (_UNKNOWN, _CONTROL, _USER):
            inner.add_tokens([AddedToken(piece, special=type_ != _USER, normalized=False)])
    return inner


def begin_with(inner: Any, token: str) -> None:
    """Let a prompt begin with a special token; what went on around the text still does."""
    template = processors.TemplateProcessing(
        single=f"{token} $A",
        pair=f"{token} $A {token}:1 $B:1",
        special_tokens=[(token, inner.token_to_id(token))],
    )
    before = inner.post_processor
    inner.post_processor = template if before is None else processors.Sequence([before, template])


def _normalizer(found: Pieces) -> Any:
    steps: list[Any] = [normalizers.Precompiled(found.charsmap)] if found.charsmap else []
    if found.collapse:
        steps += [normalizers.Replace(Regex("^ +| +$"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if found.prefix:
        steps.append(normalizers.Prepend("▁"))
    return normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])


def _merges(found: Pieces) -> list[tuple[str, str]]:
    """Every way in which a piece is made of two others; those of the piece with the best score first."""
    ranks = {
        piece: (-score, id_)
        for id_, (piece, score, type_) in enumerate(zip(found.pieces, found.scores, found.types, strict=True))
        if type_ in (_NORMAL, _UNUSED)
    }
    pairs = [
        (rank, (piece[:cut], piece[cut:]))
        for piece, rank in ranks.items()
        for cut in range(1, len(piece))
        if piece[:cut] in ranks and piece[cut:] in ranks
    ]
    return [pair for _, pair in sorted(pairs)]
