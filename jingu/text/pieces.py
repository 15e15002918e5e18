"""What the pieces of one tokenizer are in another."""

from __future__ import annotations

from jingu.text.tokenizer import Tokenizer


def sources(new: Tokenizer, old: Tokenizer) -> list[list[int]]:
    """For each id of `new`, the ids of `old` that say the same: one where the piece is known there, those of its parts
    where it is not, none where there are none.

    The token that ends documents is that of the other one, whatever its name.
    """
    known, names = old.pieces(), {id_: piece for piece, id_ in new.pieces().items()}
    found = []
    for id_ in range(new.vocabulary):
        piece = names.get(id_)
        if piece in known and (new.kind == old.kind or piece.isascii()):
            found.append([known[piece]])
        elif id_ == new.end_id:
            found.append([old.end_id])
        elif piece is None or id_ in new.special_tokens.values():
            found.append([])
        else:
            found.append(
                old.parts_of(piece) if new.kind == old.kind else old.encode(new.spelled(piece).decode(errors="ignore"))
            )
    return found
