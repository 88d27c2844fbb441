"""Counts, bytes and durations as text for people to read."""

import math


def count_text(count: int | float) -> str:
    """Three digits and thousands, millions, billions or trillions: 950, 4.21 M, 1.00 B."""
    return _scaled(count, ["", "k", "M", "B", "T"])


def bytes_text(size: int | float) -> str:
    """Three digits and a unit of 1000s: 512 B, 16.4 MB, 1.25 GB; 1 GB is 10⁹ bytes."""
    return _scaled(size, ["B", "KB", "MB", "GB", "TB", "PB", "EB"])


def duration_text(seconds: int | float) -> str:
    """The two largest units: 3 min 12 s, 2 h 0 min, 4 d 6 h; 0.41 s and 8.2 s below a minute."""
    if seconds < 59.95:
        return f"{seconds:.2f} s" if seconds < 0.995 else f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    minutes = round(seconds / 60)
    if minutes < 24 * 60:
        return f"{minutes // 60} h {minutes % 60} min"
    hours = round(seconds / 3600)
    return f"{hours // 24} d {hours % 24} h"


def _scaled(value: int | float, units: list[str]) -> str:
    """Three digits of `value` in the largest unit that leaves 1 or more of it, rounded."""
    if not math.isfinite(value):
        return str(value)
    if value < 1000 and value == int(value):
        return f"{value:.0f} {units[0]}".strip()
    for unit in units[:-1]:
        if float(_three_digits(value)) < 1000:
            return f"{_three_digits(value)} {unit}".strip()
        value /= 1000
    return f"{_three_digits(value)} {units[-1]}"


def _three_digits(value: int | float) -> str:
    decimals = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{decimals}f}"
