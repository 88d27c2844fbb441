"""Times functions in turns, so that a busy machine slows all alike."""

import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax

TURNS, CALLS = 7, 8  # turns of each contender, and calls in each


def seconds(
    calls: dict[str, Callable[[], Any]], wait: Callable[[Any], Any] = jax.block_until_ready
) -> dict[str, float]:
    """Returns the seconds of one call of each function, as the median over turns."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for turn, (name, call) in itertools.product(range(TURNS + 1), calls.items()):
        began = time.perf_counter()
        for _ in range(CALLS):
            result = call()
        wait(result)
        if turn:  # the first compiles
            found[name].append((time.perf_counter() - began) / CALLS)
    return {name: statistics.median(each) for name, each in found.items()}
