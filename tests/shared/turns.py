"""Slow cases by turns: of a test that asks the same of many arguments, each day some."""

import collections

import pytest


def left_for_another(items: list[pytest.Item], turn: str) -> list[pytest.Item]:
    """The slow cases that are not of this turn.

    Every case that runs by default stays, and each slow test has at least one.

    Args:
      turn: "K/N": of each test's slow cases every Nth, from the Kth on.

    Raises:
      pytest.UsageError: if that is no turn.
    """
    first, slash, turns = turn.partition("/")
    if not (slash and first.isdecimal() and turns.isdecimal() and int(turns) > 0):
        raise pytest.UsageError(f"--turn={turn}: it is K/N, two whole numbers, as in 1/3")
    cases = collections.defaultdict(list)
    for item in items:
        if item.get_closest_marker("slow"):
            cases[item.nodeid.partition("[")[0]].append(item)
    return [
        case
        for each in cases.values()
        for i, case in enumerate(each)
        if (i - int(first)) % min(int(turns), len(each))
    ]
