"""Rows of consecutive documents, made into a batch that keeps the documents apart.

Shape suffixes: B batch (rows), S sequence, T = S + 1 tokens of a row: inputs and last target.
"""

import numpy as np

from lmlib.data.batch import Batch


def packed_batch(
    tokens_BT: np.ndarray,
    starts_BT: np.ndarray,
    lengths_B: np.ndarray,
    *,
    targets_BT: np.ndarray | None = None,
    reset_positions: bool = True,
    attend_across_documents: bool = False,
) -> Batch:
    """The batch whose row b predicts each of tokens_BT[b, 1:] from the one before.

    `starts_BT` (bool) marks the first token of each document; a row's first token always begins a
    segment. `lengths_B` says how many inputs of each row have a target; the rest is padding.
    `targets_BT` (bool) says which tokens are targets of the loss; without it, and of those at most,
    all but the first of each document.

    Positions count from the start of a segment, or of the row if not `reset_positions`. With
    `attend_across_documents` a row is one segment; the first token of a document is no target
    even then, since nothing before it tells which document comes.
    """
    place_T = np.arange(tokens_BT.shape[1], dtype=np.int32)
    starts_BT = starts_BT | (place_T == 0)
    segment_BT = np.cumsum(starts_BT, axis=1, dtype=np.int32)
    start_BT = np.maximum.accumulate(np.where(starts_BT, place_T, 0), axis=1)
    position_BT = (
        place_T - start_BT if reset_positions else np.broadcast_to(place_T, starts_BT.shape)
    )
    if attend_across_documents:
        segment_BT = np.ones_like(segment_BT)
    used_BS = place_T[:-1] < lengths_B[:, None]
    in_loss_BS = used_BS if targets_BT is None else used_BS & targets_BT[:, 1:]

    def unless_padding(values_BS: np.ndarray) -> np.ndarray:
        return np.where(used_BS, values_BS, 0).astype(np.int32, copy=False)

    return Batch(
        tokens=unless_padding(tokens_BT[:, :-1]),
        targets=unless_padding(tokens_BT[:, 1:]),
        segment_ids=unless_padding(segment_BT[:, :-1]),
        positions=unless_padding(position_BT[:, :-1]),
        loss_mask=in_loss_BS & ~starts_BT[:, 1:],
    )
