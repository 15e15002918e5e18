"""Fill-in-the-middle (Bavarian et al., "Efficient Training of Language Models to Fill in the Middle", 2022): a decoder
learns to write the text between two others, from ordinary documents in another order.

A share of the documents in a sequence is cut at two random places and written as prefix, suffix, middle, each after a
special token that names it; the end of the sequence is cut off by as many tokens. Which documents are cut, and where,
is a pure function of the seed and the sample.

Shape legend: B rows, T tokens of a row, S = T + 1: the tokens of a row and the one after them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jingu.config.sections.data import FillInTheMiddleSettings
from jingu.data.batch import IGNORE_INDEX
from jingu.data.permutation import Int64Array, random_uint64
from jingu.errors import JinguError
from jingu.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class FillInTheMiddle:
    """The transformation of rows, and its special tokens."""

    # Share of the documents to transform.
    rate: float
    prefix_id: int
    suffix_id: int
    middle_id: int
    eos_token_id: int
    seed: int
    # Ids that a document may begin with (such as BOS). They stay in front of all three parts.
    prompt_prefix_ids: tuple[int, ...] = ()

    def transform(
        self, tokens_BT: Int64Array, labels_BT: Int64Array, documents_BS: Int64Array, samples_B: Int64Array
    ) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Return the new tokens, labels and documents of rows that are these samples of the run.

        Args:
            documents_BS: the document of each token and of the last label.
        """
        rows_BS = np.concatenate([tokens_BT, labels_BT[:, -1:].clip(min=0)], axis=1)
        documents_BS = documents_BS.copy()
        for index, sample in enumerate(samples_B.tolist()):
            rows_BS[index], documents_BS[index] = self.transform_row(rows_BS[index], documents_BS[index], sample)
        tokens_BT = rows_BS[:, :-1].copy()
        labels_BT = rows_BS[:, 1:].copy()
        # An EOS after an EOS is the rest of a dropped document, which must not be predicted.
        labels_BT[(tokens_BT == self.eos_token_id) & (labels_BT == self.eos_token_id)] = IGNORE_INDEX
        return tokens_BT, labels_BT, documents_BS

    def transform_row(self, row_S: Int64Array, documents_S: Int64Array, sample: int) -> tuple[Int64Array, Int64Array]:
        """Return the new tokens of one row and their documents, cut off at its length.

        A dropped document consists of EOS tokens, so an EOS also ends a part.
        """
        ends = (row_S[:-1] == self.eos_token_id) | (np.diff(documents_S) != 0)
        cuts = np.flatnonzero(ends) + 1
        pieces = np.split(row_S, cuts)
        parts = [self._transform_document(ids, sample, number) for number, ids in enumerate(pieces)]
        documents = np.repeat(documents_S[np.concatenate([[0], cuts])], [len(part) for part in parts])
        return np.concatenate(parts)[: len(row_S)], documents[: len(row_S)]

    def _transform_document(self, ids: Int64Array, sample: int, number: int) -> Int64Array:
        """Return the new ids of the document that is the `number`-th of its row."""
        draw, first_cut, second_cut = random_uint64("fill", 3, self.seed, sample, number).tolist()
        # Exclude the EOS and the prompt prefix. The last document of a row may have no EOS.
        end = len(ids) - 1 if ids[-1] == self.eos_token_id else len(ids)
        start = len(self.prompt_prefix_ids)
        if tuple(ids[:end][:start].tolist()) != self.prompt_prefix_ids:
            start = 0
        text = ids[start:end]
        if not len(text) or draw >= self.rate * 2**64:
            return ids
        low, high = sorted((first_cut % (len(text) + 1), second_cut % (len(text) + 1)))
        prefix = [[self.prefix_id], text[:low]]
        suffix = [[self.suffix_id], text[high:]]
        middle = [[self.middle_id], text[low:high]]
        return np.concatenate([ids[:start], *prefix, *suffix, *middle, ids[end:]])


def build_fill_in_the_middle(settings: FillInTheMiddleSettings, tokenizer: Tokenizer, seed: int) -> FillInTheMiddle:
    """Build the transformation of a run.

    Raises:
        JinguError: the tokenizer lacks the special tokens that name the parts.
    """
    special_tokens = tokenizer.special_tokens
    names = settings.prefix_token, settings.suffix_token, settings.middle_token
    missing = [name for name in names if name not in special_tokens]
    if missing:
        what = f"the tokenizer has no special token {missing[0]}, which fill-in-the-middle needs."
        fix = "Train a tokenizer with it (tokenizer.special_tokens), or name tokens that this one has."
        raise JinguError(what, where="data.objective", fix=fix)
    prefix_id, suffix_id, middle_id = (special_tokens[name] for name in names)
    return FillInTheMiddle(
        settings.rate,
        prefix_id,
        suffix_id,
        middle_id,
        tokenizer.eos_token_id,
        seed,
        tuple(tokenizer.prompt_prefix_ids),
    )
