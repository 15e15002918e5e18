"""Map the vocabulary of one tokenizer to that of another, so that a model can change its tokenizer."""

from __future__ import annotations

from jingu.text.tokenizer import Tokenizer


def map_vocab(new: Tokenizer, old: Tokenizer) -> list[list[int]]:
    """Return for each id of `new` the ids of `old` that represent the same text.

    The list has one id if `old` has the same piece, else the ids of its parts; it is empty for unknown special tokens,
    unused ids and text that `old` cannot encode. The EOS token is mapped to the EOS token, whatever their names.
    """
    old_vocab = old.vocab()
    new_pieces = {id_: piece for piece, id_ in new.vocab().items()}
    special_ids = set(new.special_tokens.values())
    # Pieces that are not ASCII can be compared only if both vocabularies spell bytes and spaces in the same way.
    same_spelling = new.spelling == old.spelling
    mapping: list[list[int]] = []
    for id_ in range(new.vocab_size):
        piece = new_pieces.get(id_)
        if piece in old_vocab and (same_spelling or piece.isascii()):
            mapping.append([old_vocab[piece]])
        elif id_ == new.eos_token_id:
            mapping.append([old.eos_token_id])
        elif piece is None or id_ in special_ids:
            mapping.append([])
        elif same_spelling:
            mapping.append(old.split_piece(piece))
        else:
            mapping.append(old.encode(new.piece_bytes(piece).decode(errors="ignore")))
    return mapping
