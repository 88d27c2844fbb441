"""Slow cases by turns: each has one day of several, by its name, whatever other tests there are."""

import zlib

import pytest


def left_for_another(items: list[pytest.Item], turn: str) -> list[pytest.Item]:
    """The slow cases that are not of this turn; all others are of each.

    Args:
      turn: "K/N": of N parts of the slow cases that with number K modulo N.

    Raises:
      pytest.UsageError: if that is no turn.
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
