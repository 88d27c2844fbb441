"""Text of at most `WIDTH` characters a line."""

import textwrap
from collections.abc import Sequence

WIDTH = 100
_NARROW = 24  # a last column with longer words still leaves its room to the others
_NARROWEST = 8


def columns(rows: Sequence[Sequence[str]], width: int = WIDTH) -> str:
    """Formats `rows` as lines of at most `width` characters with aligned columns.

    Titles, in the first row, are wrapped if needed, then other cells. The last column keeps whole
    words, so its paths can be copied. Other words are broken only if nothing else helps.
    """
    turned = list(zip(*rows, strict=True))
    widths = [max(map(len, column)) for column in turned]
    words = [max((len(x) for x in " ".join(column).split()), default=0) for column in turned]
    words[-1:] = [min(word, _NARROW) for word in words[-1:]]
    room = width - 2 * (len(widths) - 1)
    cells = [max(map(len, column[1:]), default=0) for column in turned]
    titles = [max(pair) for pair in zip(cells, words, strict=True)]
    for least in (titles, words, [_NARROWEST] * len(widths)):
        while sum(widths) > room and any(own > low for own, low in zip(widths, least, strict=True)):
            wider = [i for i, own in enumerate(widths) if own > least[i]]
            widths[max(wider, key=widths.__getitem__)] -= 1
    lines = []
    for row in rows:
        parts = [
            _wrapped(cell, own, i < len(row) - 1)
            for i, (cell, own) in enumerate(zip(row, widths, strict=True))
        ]
        for at in range(max(map(len, parts), default=0)):
            line = (part[at] if at < len(part) else "" for part in parts)
            padded = (part.ljust(own) for part, own in zip(line, widths, strict=True))
            lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def wrapped(text: str) -> str:
    """Wraps the longer lines of `text` at spaces; the rest of an item "- …" is indented."""
    lines = []
    for line in text.split("\n"):
        indent = line[: len(line) - len(line.lstrip(" -"))]
        lines += _wrapped(line, WIDTH, breaks=False, indent=" " * len(indent))
    return "\n".join(lines)


def _wrapped(text: str, width: int, breaks: bool, indent: str = "") -> list[str]:
    if len(text) <= width:
        return [text]
    return textwrap.wrap(
        text,
        width,
        subsequent_indent=indent,
        break_long_words=breaks,
        break_on_hyphens=False,
    )
