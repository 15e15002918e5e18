"""The validation split as batches that predict each of its tokens exactly once."""

from __future__ import annotations

import numpy as np

from jingu.data.batch import IGNORE_INDEX, Batch
from jingu.data.dataset import TokenDataset
from jingu.data.packing import RowArrays, document_ids


def count_validation_windows(dataset: TokenDataset, sequence_length: int) -> int:
    """Return the number of windows that cover the split."""
    return -(-dataset.tokens // sequence_length)


def validation_batch(
    dataset: TokenDataset, sequence_length: int, first: int, count: int, *, document_mask: bool = False
) -> Batch:
    """Return windows [first, first + count) of the split in its own order.

    Together all windows predict each token once; the very first token is predicted from the EOS token. Positions past
    the end of the split, whole windows too, hold the EOS token and IGNORE_INDEX as label. With `document_mask`,
    attention stays inside documents.
    """
    start = first * sequence_length
    # The token before the first one is the last of the split, an EOS token.
    ids = dataset.gather(np.array([(start - 1) % dataset.tokens]), count * sequence_length + 1)[0]
    is_past_end = np.arange(start, start + count * sequence_length) >= dataset.tokens
    tokens_BT = np.where(is_past_end, dataset.eos_token_id, ids[:-1]).reshape(count, sequence_length)
    labels_BT = np.where(is_past_end, IGNORE_INDEX, ids[1:]).reshape(count, sequence_length)
    documents_BT = document_ids(tokens_BT, dataset.eos_token_id) if document_mask else None
    return RowArrays(tokens_BT, labels_BT, documents_BT).to_batch()
