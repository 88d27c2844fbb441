"""Trains the points of a sweep one after the other in this process; equal programs compile once."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import fiddle as fdl

from runner.command_line.command import tell
from runner.command_line.exit_status import SIGNALLED
from runner.errors import StoppedEarly, in_words
from runner.monitoring.limits import Limits
from runner.processes.stopping import StopSignals
from runner.sweep.folder import Point
from runner.sweep.names import Settings
from runner.sweep.programs import Programs
from runner.training.fit import fit
from runner.training.options import Options


class InTurn:
    """Trains points, each as `python -m runner` would, until a signal asks it to stop.

    Attributes:
      failures: the reason of each point that failed, in a line, by name.
    """

    def __init__(
        self,
        config_of: Callable[[Settings], fdl.Config],
        experiment_file: Path | None,
        grace_seconds: float,
        debug: bool,
    ):
        """Takes over the signals; call it on the main thread."""
        self.failures: dict[str, str] = {}
        self._config_of = config_of
        self._experiment_file = experiment_file
        self._debug = debug
        self._programs = Programs()
        self._asked = threading.Event()

        def stop(number: signal.Signals) -> None:
            print(f"{number.name}: ending after this step, with a checkpoint", file=sys.stderr)
            self._asked.set()

        def end(number: signal.Signals, reason: str) -> None:
            print(f"error: ended by {number.name}: {reason}", file=sys.stderr, flush=True)
            os._exit(SIGNALLED + number)

        StopSignals(grace_seconds, stop, end)

    def train(
        self, points: Iterable[Point], until: Callable[[Point], int | None] = lambda point: None
    ) -> bool:
        """Trains each of `points` that has not finished or failed `until` its step or, of `None`,
        its end. Returns whether it did, and was not asked to stop."""
        waiting = [each for each in points if not each.finished and each.name not in self.failures]
        for number, point in enumerate(waiting, 1):
            if self._asked.is_set():
                break
            print(f"\npoint {number} of {len(waiting)}: {point.name}", file=sys.stderr, flush=True)
            self._train(point, until(point))
        return not self._asked.is_set()

    def _train(self, point: Point, last: int | None) -> None:
        def stop(step: int) -> bool:
            return self._asked.is_set() or (last is not None and step >= last)

        options = Options(
            limits=Limits(),
            programs=self._programs,
            stop=stop,
            experiment_file=self._experiment_file,
        )
        try:
            fit(self._config_of(point.settings), point.workdir, options)
        except StoppedEarly:
            pass
        except Exception as error:  # the others go on
            tell(error, self._debug)
            self.failures[point.name] = _one_line(error)


def _one_line(error: Any) -> str:
    return " ".join(in_words(error).split()) or type(error).__name__
