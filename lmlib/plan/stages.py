"""What a run of several stages takes in all, by the plans of their steps."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from lmlib.plan.planner import Report
from lmlib.terminal.quantities import bytes_text, count_text, duration_text
from lmlib.terminal.table import columns

_UNKNOWN = "unknown"


@dataclasses.dataclass(frozen=True)
class WholeRun:
    """The plan of each stage, by its steps, counted from 0; `str()` is a table."""

    stages: Mapping[range, Report]

    @property
    def tokens(self) -> int:
        """Of all steps, padding included."""
        return sum(len(steps) * _tokens(each) for steps, each in self.stages.items())

    @property
    def seconds(self) -> float | None:
        """Of all steps at best; `None` where that of a stage is unknown."""
        seconds = [_seconds(steps, each) for steps, each in self.stages.items()]
        known = [each for each in seconds if each is not None]
        return math.fsum(known) if len(known) == len(seconds) else None

    @property
    def memory(self) -> int:
        """Bytes that each device needs, of the stage that needs most."""
        return max(each.memory.needed for each in self.stages.values())

    def __str__(self) -> str:
        rows = [("steps", "sequences", "of tokens", "tokens", "on each device", "at best")]
        for steps, each in self.stages.items():
            rows.append(
                (
                    f"{steps.start + 1:,} to {steps.stop:,}",
                    f"{each.batch_size:,}",
                    f"{each.sequence_length:,}",
                    count_text(len(steps) * _tokens(each)),
                    bytes_text(each.memory.needed),
                    _time_text(_seconds(steps, each)),
                )
            )
        whole = count_text(self.tokens), bytes_text(self.memory), _time_text(self.seconds)
        return columns([*rows, ("all", "", "", *whole)])

    def as_json(self) -> dict[str, Any]:
        """What JSON can hold; bytes and seconds."""
        return {"tokens": self.tokens, "needed": self.memory, "seconds": self.seconds}


def _tokens(report: Report) -> int:
    return report.batch_size * report.sequence_length


def _seconds(steps: range, report: Report) -> float | None:
    return None if report.estimate is None else len(steps) * report.estimate.step_seconds


def _time_text(seconds: float | None) -> str:
    return _UNKNOWN if seconds is None else duration_text(seconds)
