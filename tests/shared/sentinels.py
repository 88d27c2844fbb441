"""Cases of a test of which some run by default and the others are slow."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def sentinels(cases: Iterable[Any], kept: Callable[[Any], bool]) -> list[Any]:
    """For `pytest.mark.parametrize`: all `cases`, marked slow but for those that are `kept`."""
    return [
        case
        if kept(case)
        else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
        for case in cases
    ]
