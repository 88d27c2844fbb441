"""Cases of a test. Some run by default, the others do not."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def sentinels(
    cases: Iterable[Any],
    kept: Callable[[Any], bool] = lambda case: False,
    *,
    landing: Callable[[Any], bool] = lambda case: False,
) -> list[Any]:
    """Returns `cases` for parametrize: `kept` ones unmarked, others marked landing or slow."""

    def marked(case: Any) -> Any:
        if kept(case):
            return case
        mark = pytest.mark.landing if landing(case) else pytest.mark.slow
        return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=mark)

    return [marked(case) for case in cases]
