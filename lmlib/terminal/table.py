"""Text tables."""

from collections.abc import Sequence


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Formats `rows` as lines with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )
