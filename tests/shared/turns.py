"""Slow cases by turns, chosen by their names."""

import zlib

import pytest


def left_for_another(items: list[pytest.Item], turn: str) -> list[pytest.Item]:
    """Returns the slow cases that are not of this turn "K/N", part K of N.

    Raises pytest.UsageError if it is not a turn.
    """
    number, slash, turns = turn.partition("/")
    if not (slash and number.isdecimal() and turns.isdecimal() and int(turns) > 0):
        raise pytest.UsageError(f"--turn={turn}: it is K/N, two whole numbers, as in 1/3")
    return [
        item
        for item in items
        if item.get_closest_marker("slow")
        and (zlib.crc32(item.nodeid.encode()) - int(number)) % int(turns)
    ]
