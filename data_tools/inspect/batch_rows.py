"""A batch as the model sees it, row by row and document by document, and where each row is from.

Shape suffixes: S sequence.
"""

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:  # they need JAX, which takes a second to import
    from lmlib.data.batch import Batch, Source
    from lmlib.data.mixture import Mixture


@dataclass(frozen=True)
class Piece:
    """Neighbouring places of a row: part of one document, or padding."""

    start: int  # of the first place in the row
    segment_id: int  # 0 is padding
    tokens: tuple[int, ...]
    targets: tuple[int, ...]
    positions: tuple[int, ...]
    loss_mask: tuple[bool, ...]

    @property
    def stop(self) -> int:
        """The place after the last."""
        return self.start + len(self.tokens)

    def stretches(self) -> list[tuple[bool, tuple[int, ...]]]:
        """The tokens, cut where those begin or end that are targets, and whether they are.

        The last target is no token of the piece, but belongs to it if it is in the loss.
        """
        tokens = self.tokens + (self.targets[-1:] if self.loss_mask[-1] else ())
        # The first token of a piece is the target of no place in it.
        is_target = (False, *self.loss_mask)
        pairs = zip(is_target, tokens, strict=False)
        return [
            (in_loss, tuple(token for _, token in group))
            for in_loss, group in itertools.groupby(pairs, key=lambda pair: pair[0])
        ]


@dataclass(frozen=True)
class Row:
    """A row of a batch, cut into its documents.

    Attributes:
      masked: whether a document has targets that are not the loss's, as conversations have.
    """

    number: int
    pieces: tuple[Piece, ...]
    masked: bool = False

    @property
    def tokens(self) -> int:
        """Places that are no padding."""
        return sum(len(piece.tokens) for piece in self.pieces if piece.segment_id)

    @property
    def targets_in_loss(self) -> int:
        """Places whose target the model is trained on."""
        return sum(sum(piece.loss_mask) for piece in self.pieces)


def batch_rows(batch: "Batch", first_row: int = 0, masked: bool = False) -> list[Row]:
    """The rows of `batch`, numbered from `first_row`.

    Of text, a target that is not the loss's belongs to another document than its token, so the cuts
    are those between documents even where they share a segment. Where the loss is `masked`, they
    are those between segments.
    """
    return [_row(batch, row, first_row + row, masked) for row in range(len(batch.tokens))]


def is_masked(source: "Source") -> bool:
    """Whether documents of the source have targets that are not the loss's."""
    from lmlib.data.flat_tokens import FlatTokens
    from lmlib.data.mixture import Mixture

    if isinstance(source, Mixture):
        return any(map(is_masked, source.sources.values()))
    return isinstance(source, FlatTokens) and source.content != "text"


def _row(batch: "Batch", row: int, number: int, masked: bool) -> Row:
    fields = ("segment_ids", "tokens", "targets", "positions", "loss_mask")
    segment_S, token_S, target_S, position_S, in_loss_S = (
        np.asarray(getattr(batch, field)[row]) for field in fields
    )
    # Padding has no target in the loss either, but is one piece.
    ends_S = np.diff(segment_S, append=-1) != 0
    if not masked:
        ends_S |= ~in_loss_S & (segment_S > 0)
    cuts = [0, *(np.flatnonzero(ends_S) + 1).tolist()]
    pieces = [
        Piece(
            start=start,
            segment_id=int(segment_S[start]),
            tokens=tuple(token_S[start:stop].tolist()),
            targets=tuple(target_S[start:stop].tolist()),
            positions=tuple(position_S[start:stop].tolist()),
            loss_mask=tuple(in_loss_S[start:stop].tolist()),
        )
        for start, stop in itertools.pairwise(cuts)
    ]
    return Row(number, tuple(pieces), masked)


def row_origins(source: "Source", step: int) -> list[str | None]:
    """For each row of the batch of `step`, the stored sequence it is; None if that is unknown.

    For a `Mixture` the name of the source comes first.
    """
    from lmlib.data.flat_tokens import FlatTokens
    from lmlib.data.mixture import Mixture
    from lmlib.data.stages import Continued

    if isinstance(source, Continued):
        parts = source.parts(step)
        return [row for own, rows in parts for row in row_origins(source.source, own)[rows]]
    if isinstance(source, FlatTokens):
        return [
            f"sequence {number:,} of {source.sequences:,}" if number >= 0 else None
            for number in source.sequence_numbers(step).tolist()
        ]
    if isinstance(source, Mixture):
        return [
            _in_mixture(source, name, number)
            for name, number in zip(*source.origins(step), strict=True)
        ]
    return [None] * source.batch_size


def _in_mixture(mixture: "Mixture", name: str, number: int) -> str:
    step, row = divmod(number, mixture.batch_size)
    origin = row_origins(mixture.sources[name], step)[row]
    return name if origin is None else f"{name}, {origin}"
