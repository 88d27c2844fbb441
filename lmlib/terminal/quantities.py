"""Counts, bytes and durations as human-readable text."""

import math


def count_text(count: int | float) -> str:
    """Formats a count with three digits and its magnitude: 950, 4.21 M, 1.00 B."""
    return _scaled(count, ["", "k", "M", "B", "T"])


def bytes_text(size: int | float) -> str:
    """Formats bytes with three digits in decimal units: 512 B, 16.4 MB, 1.25 GB (10⁹ bytes)."""
    return _scaled(size, ["B", "KB", "MB", "GB", "TB", "PB", "EB"])


def mean_text(value: float, unit: str) -> str:
    """Formats a mean before its unit: 2.5000 (nats per token), and fractions 71.0% (of pairs)."""
    return f"{value:.1%}" if unit.startswith("of ") else f"{value:.4f}"


def flops_unit(most: float) -> tuple[str, float]:
    """Returns the unit of a table and its FLOPs: TFLOP, or PFLOP from 10,000 TFLOP on."""
    return ("PFLOP", 1e15) if most >= 1e16 else ("TFLOP", 1e12)


def duration_text(seconds: int | float) -> str:
    """Formats a duration in its two largest units: 0.41 s, 3 min 12 s, 2 h 0 min, 4 d 6 h."""
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
    """Formats `value` with three digits in the largest unit in which it is at least 1, rounded."""
    if not math.isfinite(value):
        return str(value)
    if value < 1000 and value == int(value):
        return f"{value:.0f} {units[0]}".strip()
    place = 0
    while float(_three_digits(value)) >= 1000 and place < len(units) - 1:
        value, place = value / 1000, place + 1
    return f"{_three_digits(value)} {units[place]}".strip()


def _three_digits(value: int | float) -> str:
    decimals = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{decimals}f}"
