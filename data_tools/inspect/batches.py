"""Prints a batch as the model sees it, by row and document, with the origin of each row.

Shape suffix: S sequence.
"""

import itertools
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
    origins, masked = row_origins(source, step), is_masked(source)
    size = f"{source.batch_size:,} rows of {source.sequence_length:,} tokens"
    print(f"step {step:,}: {size}, {count:,} shown")
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
    # Padding has no target in the loss, but forms one piece.
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
        lines.append(f"{places}: segment {segment_S[start]}, positions {_runs(position_S[piece])}")
        tokens, targets, in_loss = (
            values_S[piece].tolist() for values_S in (token_S, target_S, in_loss_S)
        )
        lines += _columns(tokens, targets, in_loss)
        if decode and masked:
            # The last target is not among the piece's tokens, but belongs to it if in the loss.
            # The first token of a piece is not a target within the piece.
            text = tokens + (targets[-1:] if in_loss[-1] else [])
            pairs = zip([False, *in_loss], text, strict=False)
            for is_target, group in itertools.groupby(pairs, key=lambda pair: pair[0]):
                part = decode([token for _, token in group])
                lines.append(quoted(part, "│" if is_target else "┊"))
        elif decode:
            lines.append(quoted(decode(tokens)))
    return "\n".join(lines)


def _columns(tokens: list[int], targets: list[int], in_loss: list[bool]) -> list[str]:
    """Formats each target below its token, with as many per line as fit."""
    above = list(map(str, tokens))
    pairs = zip(targets, in_loss, strict=True)
    below = [str(target) if part else f"({target})" for target, part in pairs]
    width = 1 + max(map(len, above + below))
    in_a_line = max(1, (WIDTH - 11) // width)
    return [
        f"    {name:<7}{''.join(f'{word:>{width}}' for word in words[first : first + in_a_line])}"
        for first in range(0, len(tokens), in_a_line)
        for name, words in (("tokens", above), ("targets", below))
    ]


def _runs(number_S: np.ndarray) -> str:
    """Formats consecutive numbers as ranges: "0 to 11, 0 to 3"."""
    runs = np.split(number_S, np.flatnonzero(np.diff(number_S) != 1) + 1)
    return ", ".join(
        f"{run[0]:,}" if len(run) == 1 else f"{run[0]:,} to {run[-1]:,}" for run in runs
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
