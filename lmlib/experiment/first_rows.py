"""Whether a source is what it promises, judged by the first rows that it gives.

Shapes: B batch (rows), S sequence, K ids that a teacher listed.
"""

from collections.abc import Iterator

import numpy as np

from lmlib.data.batch import Batch, Source, holds_pairs, teacher_k
from lmlib.data.resumable import Resumable

ROWS = 8  # that are read at most

_FIELDS: dict[str, type[np.generic]] = {
    "tokens": np.int32,
    "targets": np.int32,
    "segment_ids": np.int32,
    "positions": np.int32,
    "loss_mask": np.bool_,
}
_TEACHER_FIELDS: dict[str, type[np.generic]] = {
    "teacher_ids": np.int32,
    "teacher_log_probabilities": np.float16,
}


def check_first_rows(name: str, source: Source, vocab: int, needs_pairs: bool) -> None:
    """Checks the first rows of `source`, unless it is `Resumable`: reading would begin its stream.

    Args:
      name: of the source in errors.
      vocab: ids that the model knows.
      needs_pairs: whether the objective compares pairs of answers.

    Raises:
      ValueError: saying what is wrong, with the value, and what is expected.
    """
    if isinstance(source, Resumable):
        return
    # Fewer than there are, so that a source that ignores `rows` is noticed.
    rows = min(ROWS, max(1, source.batch_size - 1))
    what = f"{name}.batch(0, slice(0, {rows}))"
    batch = source.batch(0, slice(0, rows))
    if not isinstance(batch, Batch):
        raise ValueError(f"{what} must be a lmlib.data.batch.Batch, got {type(batch).__name__}")
    _check_fields(what, batch, (rows, source.sequence_length), teacher_k(source))
    for field, ids in _ids(batch):
        if ids.size and not 0 <= (wrong := ids[np.argmax((ids < 0) | (ids >= vocab))]) < vocab:
            raise ValueError(
                f"{what}.{field} has the id {wrong}, but the model's vocabulary is 0 to "
                f"{vocab - 1}, and {name}.max_token_id is {source.max_token_id}"
            )
    for field in ("segment_ids", "positions"):
        if (lowest := getattr(batch, field).min()) < 0:
            raise ValueError(f"{what}.{field} has {lowest}: it must be at least 0")
    if (
        needs_pairs
        and holds_pairs(source) is None
        and batch.loss_mask.any()
        and not _has_pair(batch)
    ):
        raise ValueError(
            f"{what} holds no pair of answers: a pair is two segments of a row, an odd one and the "
            "next, with targets marked in both"
        )


def _check_fields(what: str, batch: Batch, shape: tuple[int, int], k: int | None) -> None:
    expected: dict[str, tuple[tuple[int, ...], type[np.generic]]] = {
        field: (shape, dtype) for field, dtype in _FIELDS.items()
    }
    if k is not None:
        expected |= {field: ((*shape, k), dtype) for field, dtype in _TEACHER_FIELDS.items()}
    for field, (size, dtype) in expected.items():
        found = getattr(batch, field)
        dtype_found = getattr(found, "dtype", None)
        if np.shape(found) != size or dtype_found != dtype:
            raise ValueError(
                f"{what}.{field} must be {np.dtype(dtype).name} of shape {size}, got "
                f"{dtype_found or type(found).__name__} of shape {np.shape(found)}"
            )
    if k is None and batch.teacher_ids is not None:
        raise ValueError(
            f"{what} has what a teacher said, but teacher_k does not say how many ids it lists"
        )


def _ids(batch: Batch) -> Iterator[tuple[str, np.ndarray]]:
    """The ids of a batch that must be in the vocabulary, by the field that has them."""
    yield "tokens", np.ravel(batch.tokens)
    yield "targets", np.asarray(batch.targets)[np.asarray(batch.loss_mask)]
    if batch.teacher_ids is not None:
        yield "teacher_ids", np.ravel(batch.teacher_ids)


def _has_pair(batch: Batch) -> bool:
    """Whether a row has targets in an odd segment and in the one after it."""
    rows, _ = np.nonzero(batch.loss_mask)
    segments = np.asarray(batch.segment_ids)[np.asarray(batch.loss_mask)]
    marked = set(zip(rows.tolist(), segments.tolist(), strict=True))
    return any(segment % 2 == 1 and (row, segment + 1) in marked for row, segment in marked)
