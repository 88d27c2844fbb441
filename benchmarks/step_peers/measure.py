"""Contenders take turns, so that a busy machine slows all of them alike."""

import dataclasses
import statistics
import time
from collections.abc import Mapping

from step_peers.contender import Contender
from step_peers.matmul import Matmul

TURN = 5  # steps; the first turn warms up and is not counted


@dataclasses.dataclass
class Measurement:
    """What one contender did: a loss for each step, seconds for each turn after the first."""

    losses: list[float] = dataclasses.field(default_factory=list)
    wall_seconds: list[float] = dataclasses.field(default_factory=list)
    cpu_seconds: list[float] = dataclasses.field(default_factory=list)
    peak_bytes: int | None = None
    same_data: bool = True  # else its losses say nothing about the others'


def in_turns(
    contenders: Mapping[str, Contender], steps: int, matmul: Matmul | None = None
) -> dict[str, Measurement]:
    """`steps` steps of each, `TURN` at a time, and a turn of `matmul` before each row of turns. CPU
    seconds are of all threads of this process."""
    measurements = {name: Measurement() for name in contenders}
    for start in range(0, steps, TURN):
        if matmul is not None:
            matmul.turn()
        for name, contender in contenders.items():
            found = measurements[name]
            wall, cpu = time.perf_counter(), time.process_time()
            found.losses += contender.run(range(start, start + TURN))
            if start > 0:
                found.cpu_seconds.append(time.process_time() - cpu)
                found.wall_seconds.append(time.perf_counter() - wall)
    for name, contender in contenders.items():
        measurements[name].peak_bytes = contender.peak_bytes()
    return measurements


@dataclasses.dataclass(frozen=True)
class Rate:
    """Tokens per second: the median over turns, the slowest turn and the fastest."""

    median: float
    slowest: float
    fastest: float


def rate(tokens_per_step: int, seconds: list[float]) -> Rate:
    """Of turns that took so many `seconds` each."""
    rates = [tokens_per_step * TURN / each for each in seconds]
    return Rate(statistics.median(rates), min(rates), max(rates))
