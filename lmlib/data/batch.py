"""Batches of training sequences, their sources, and their placement on the devices.

Shape suffixes: B batch (rows), S sequence, T = S + 1 tokens of a row, K ids that a teacher found
most likely.
"""

import dataclasses
from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import equinox as eqx
import jax
import numpy as np
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Bool, Float16, Int32

from lmlib.data.stored.metadata import TokenizerIdentity
from lmlib.row_order import places

TOKEN_BYTES = 17  # per token of a `Batch` without a teacher: four integers and a bool
_WHOLE = (slice(None), slice(None))  # JAX may write None for it


class Batch(eqx.Module):
    """Rows of tokens with everything that a loss needs.

    Fields are NumPy arrays when they come from a `Source`, `jax.Array`s once placed.
    """

    tokens: Int32[Array | np.ndarray, "batch seq"]  # inputs
    targets: Int32[Array | np.ndarray, "batch seq"]  # the token after each input
    segment_ids: Int32[Array | np.ndarray, "batch seq"]  # 1, 2, … along a row; 0 is padding
    positions: Int32[Array | np.ndarray, "batch seq"]  # 0 at the start of each segment
    loss_mask: Bool[Array | np.ndarray, "batch seq"]  # targets of the loss; see docs/flat-tokens.md
    # A teacher's most likely ids after each token, in descending order, and their log-probabilities
    # in nats; None without a teacher. See docs/objectives.md.
    teacher_ids: Int32[Array | np.ndarray, "batch seq k"] | None = None
    teacher_log_probabilities: Float16[Array | np.ndarray, "batch seq k"] | None = None
    # True at the first token of a desirable response's segment; None without labels.
    labels: Bool[Array | np.ndarray, "batch seq"] | None = None
    # The order of the tokens, see `lmlib.row_order`; "plain" in a `Source`.
    order: str = eqx.field(static=True, default="plain")
    # True if each row is known to be one segment and then padding, so that attention needs no mask.
    whole_rows: bool = eqx.field(static=True, default=False)


@runtime_checkable
class Source(Protocol):
    """Batches as a pure function of the step: resuming needs no iterator state.

    Optional attributes:
      teacher_k: ids listed by a teacher for each token; None, the default, without a teacher.
      pairs: True if documents are pairs of a chosen and a rejected answer, each pair in one row, as
        an odd segment and the next one. None, the default, for unknown.
      labelled: True if documents are pairs of a labelled answer and another row's answer to the
        same prompt, in the same way; batches then have `labels`. None for unknown.
      whole_rows: True if each row of every batch is one segment followed by padding.
    """

    @property
    def batch_size(self) -> int:
        """Rows of the global batch, over all processes."""

    @property
    def sequence_length(self) -> int:
        """Tokens in a row."""

    @property
    def max_token_id(self) -> int:
        """The largest id that can occur; a model's vocabulary must be larger."""

    @property
    def tokenizer(self) -> TokenizerIdentity | None:
        """The tokenizer that made the ids; None if unknown."""

    @property
    def batches(self) -> int | None:
        """Batches in one pass over the data; None for an infinite source."""

    @property
    def bytes_per_target(self) -> float | None:
        """Mean bytes of text per target; None without text."""

    def batch(self, step: int, rows: slice = slice(None)) -> Batch:
        """Returns the given rows of the global batch of `step`, as NumPy arrays.

        Any split into rows gives the same values as the whole batch.
        """


@runtime_checkable
class Stored(Protocol):
    """A source that reads files. The processes of a run compare its contents."""

    def contents(self) -> Mapping[str, str]:
        """Returns absolute paths or URLs of the data, with digests of their content."""


@runtime_checkable
class Staged(Protocol):
    """A source whose batch sizes change at some steps."""

    def at(self, step: int) -> Source:
        """Returns the source of the batch of `step`, with its sizes."""


def source_at(source: Source, step: int) -> Source:
    """Returns `Staged.at` of a staged source, and any other source itself."""
    return source.at(step) if isinstance(source, Staged) else source


def teacher_k(source: Source) -> int | None:
    """Returns `teacher_k` of a source; None if it lacks the attribute."""
    return getattr(source, "teacher_k", None)


def holds_pairs(source: Source) -> bool | None:
    """Returns `pairs` of a source; None if it lacks the attribute."""
    return getattr(source, "pairs", None)


def is_labelled(source: Source) -> bool | None:
    """Returns `labelled` of a source; None if it lacks the attribute."""
    return getattr(source, "labelled", None)


def has_whole_rows(source: Source) -> bool:
    """Returns `whole_rows` of a source; False if it lacks the attribute."""
    return getattr(source, "whole_rows", False)


def packed_batch(
    tokens_BT: np.ndarray,
    starts_BT: np.ndarray,
    lengths_B: np.ndarray,
    *,
    targets_BT: np.ndarray | None = None,
    reset_positions: bool = True,
    attend_across_documents: bool = False,
) -> Batch:
    """Returns the batch in which row b predicts each of tokens_BT[b, 1:] from the one before.

    Args:
      starts_BT: bool, the first token of each document. It is never a target. A row's first token
        always begins a segment.
      lengths_B: number of inputs of each row that have a target; the rest is padding.
      targets_BT: bool, the targets of the loss; by default all tokens.
      reset_positions, attend_across_documents: as in `FlatTokens`.
    """
    place_T = np.arange(tokens_BT.shape[1], dtype=np.int32)
    starts_BT = starts_BT | (place_T == 0)
    segment_BT = np.cumsum(starts_BT, axis=1, dtype=np.int32)
    start_BT = np.maximum.accumulate(np.where(starts_BT, place_T, 0), axis=1)
    position_BT = place_T - start_BT if reset_positions else place_T + np.zeros_like(start_BT)
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


def place(source: Source, step: int, sharding: NamedSharding, order: str = "zigzag") -> Batch:
    """Returns the global batch of `step` as `jax.Array`s laid out by `sharding` over (batch, seq).

    The tokens of each row are in an order of `lmlib.row_order`. Each process reads only the rows
    that its own devices hold, each row once.

    Raises ValueError if the mesh or the order does not divide the batch, or if rows that the source
    declares whole are not.
    """
    source = source_at(source, step)
    shape = (source.batch_size, source.sequence_length)
    try:
        devices = shape[1] // sharding.shard_shape(shape)[1]
    except ValueError as error:
        raise ValueError(
            f"a batch of {shape[0]} sequences of {shape[1]} tokens cannot be split by "
            f"{sharding.spec} over the mesh {dict(sharding.mesh.shape)}: "
            "choose a batch_size and sequence_length that those axes divide"
        ) from error
    if devices == 1:
        order = "plain"
        if None not in sharding.spec[1:]:  # the spec does not name axes with one device
            sharding = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[:1]))
    order_S = places(shape[1], devices, order)
    held_B = np.zeros(source.batch_size, bool)
    for index in sharding.addressable_devices_indices_map(shape).values():
        held_B[(index or _WHOLE)[0]] = True
    edges = np.flatnonzero(np.diff(held_B, prepend=False, append=False))
    runs = [slice(int(start), int(stop)) for start, stop in edges.reshape(-1, 2)]
    local = jax.tree.map(
        lambda *parts: np.concatenate(parts), *(source.batch(step, run) for run in runs)
    )
    for field, values in vars(local).items():
        if isinstance(values, np.ndarray) and values.shape[:2] != (held_B.sum(), shape[1]):
            raise ValueError(
                f"{type(source).__name__}.batch({step}) must give {field} of {held_B.sum()} rows "
                f"of {shape[1]} tokens, as many as were asked for, got shape {values.shape}"
            )
    local_row_B = np.cumsum(held_B) - 1  # index of a global row among the local ones

    def assemble(values: np.ndarray) -> Array:
        def part(index: tuple[slice, ...] | None) -> np.ndarray:
            rows, columns = (index or _WHOLE)[:2]
            return values[local_row_B[rows]][:, order_S[columns]]

        whole = (*shape, *values.shape[2:])
        return jax.make_array_from_callback(whole, sharding, part)

    whole_rows = has_whole_rows(source)
    if whole_rows:
        _check_whole_rows(local.segment_ids, f"{type(source).__name__}, step {step}")
    placed = jax.tree.map(assemble, local)
    return dataclasses.replace(placed, order=order, whole_rows=whole_rows)


def _check_whole_rows(segment_ids_BS: np.ndarray, source: str) -> None:
    follows_BS = segment_ids_BS[:, 1:]
    another_BS = (follows_BS != segment_ids_BS[:, :-1]) & (follows_BS > 0)
    if another_BS.any():
        row = int(np.flatnonzero(another_BS.any(axis=1))[0])
        raise ValueError(
            f"{source}: whole_rows is True, but a row holds the segments "
            f"{', '.join(map(str, np.unique(segment_ids_BS[row])))}, which would see each other"
        )
