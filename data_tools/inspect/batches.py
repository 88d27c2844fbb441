"""Prints a batch as the model sees it, by row and document, with the origin of each row.

For `--batch` of the inspect commands. Shape suffix: S sequence.
"""

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from data_tools.inspect.description import Decode
from lmlib.terminal.text import shown

if TYPE_CHECKING:  # they need JAX, which takes a second to import
    from lmlib.data.batch import Batch, Source

WIDTH = 100


def show_batch(source: "Source", decode: Decode | None, step: int, rows: int) -> None:
    """Prints the first rows of the batch of a step; raises ValueError if there is none."""
    if source.batches is not None and step >= source.batches:
        raise ValueError(
            f"there is no step {step:,}: the data ends after {source.batches:,} batches"
        )
    count = min(rows, source.batch_size)
    batch = source.batch(step, slice(0, count))
    origins = row_origins(source, step)
    print(
        f"step {step:,}: {source.batch_size:,} rows of {source.sequence_length:,} tokens, "
        f"{count:,} shown"
    )
    masked = is_masked(source)
    if masked and decode:
        print("text behind a dotted bar (┊) is no target in the loss")
    for row in range(count):
        print(f"\n{row_text(batch, row, decode, origins[row], masked)}")


def row_text(
    batch: "Batch", row: int, decode: Decode | None, origin: str | None = None, masked: bool = False
) -> str:
    """Formats a row as the model sees it, split into documents.

    Targets outside the loss are in parentheses. If the loss is not `masked`, a token outside it
    begins a document; otherwise text outside the targets has a dotted bar.
    """
    fields = ("segment_ids", "tokens", "targets", "positions", "loss_mask")
    segment_S, token_S, target_S, position_S, in_loss_S = (
        np.asarray(getattr(batch, field)[row]) for field in fields
    )
    lines = [
        f"row {row}{f' ({printable(origin)})' if origin else ''}: "
        f"{np.count_nonzero(segment_S):,} tokens, {np.count_nonzero(in_loss_S):,} targets in the "
        "loss"
    ]
    # Padding has no target in the loss either, but forms one piece.
    ends_S = np.diff(segment_S, append=-1) != 0
    if not masked:
        ends_S |= ~in_loss_S & (segment_S > 0)
    for start, stop in itertools.pairwise([0, *(np.flatnonzero(ends_S) + 1).tolist()]):
        places, piece = f"  places {start:,} to {stop - 1:,}", slice(start, stop)
        if not segment_S[start]:
            lines.append(f"{places}: padding")
            continue
        if start:
            lines.append("  ── another document; its first token is no target in the loss ──")
        positions = _runs(position_S[piece].tolist())
        lines.append(f"{places}: segment {segment_S[start]}, positions {positions}")
        tokens, targets, in_loss = (
            values_S[piece].tolist() for values_S in (token_S, target_S, in_loss_S)
        )
        lines += _columns(tokens, targets, in_loss)
        if decode and masked:
            lines += _marked_text(tokens, targets, in_loss, decode)
        elif decode:
            lines.append(quoted(decode(tokens)))
    return "\n".join(lines)


def _marked_text(
    tokens: list[int], targets: list[int], in_loss: list[bool], decode: Decode
) -> list[str]:
    """Returns the text of a piece, split at the beginnings and ends of targets.

    The last target is not among the piece's tokens, but belongs to it if it is in the loss.
    """
    # The first token of a piece is not a target within the piece.
    pairs = zip([False, *in_loss], tokens + (targets[-1:] if in_loss[-1] else []), strict=False)
    lines = []
    for is_target, group in itertools.groupby(pairs, key=lambda pair: pair[0]):
        lines.append(quoted(decode([token for _, token in group]), "│" if is_target else "┊"))
    return lines


def _columns(tokens: list[int], targets: list[int], in_loss: list[bool]) -> list[str]:
    """Formats each target below its token, with as many per line as fit."""
    below = [
        str(target) if part else f"({target})"
        for target, part in zip(targets, in_loss, strict=True)
    ]
    above = list(map(str, tokens))
    width = 1 + max(map(len, itertools.chain(above, below)))
    in_a_line = max(1, (WIDTH - 11) // width)
    return [
        f"    {name:<7}{''.join(f'{word:>{width}}' for word in words[first : first + in_a_line])}"
        for first in range(0, len(tokens), in_a_line)
        for name, words in (("tokens", above), ("targets", below))
    ]


def _runs(numbers: Sequence[int]) -> str:
    """Formats consecutive numbers as ranges: "0 to 11, 0 to 3"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(
        f"{first:,}" if first == last else f"{first:,} to {last:,}" for first, last in runs
    )


def quoted(text: str, bar: str = "│") -> str:
    """Puts a bar before each line of `text`, to distinguish it from the command's own output."""
    return "\n".join(f"    {bar} {printable(line)}" for line in text.split("\n"))


def printable(line: str) -> str:
    """Returns the text on one line, with control characters escaped, in files too."""
    return shown(line).replace("\n", r"\n")


def is_masked(source: "Source") -> bool:
    """True if documents of the source have targets outside the loss."""
    from lmlib.data.flat_tokens import FlatTokens
    from lmlib.data.mixture import Mixture

    if isinstance(source, Mixture):
        return any(map(is_masked, source.sources.values()))
    return isinstance(source, FlatTokens) and source.content != "text"


def row_origins(source: "Source", step: int) -> list[str | None]:
    """Returns the stored sequence of each row of the batch of `step`; None if unknown.

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
        origins: list[Any] = []
        for name, number in zip(*source.origins(step), strict=True):
            own_step, row = divmod(number, source.batch_size)
            origin = row_origins(source.sources[name], own_step)[row]
            origins.append(name if origin is None else f"{name}, {origin}")
        return origins
    return [None] * source.batch_size
