"""Trains points in processes of their own, some at a time."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from lmlib.storage.whole_file import make_folder
from lmlib.terminal.quantities import duration_text
from runner.command_line.exit_status import FINISHED, SIGNALLED, STOPPED
from runner.processes.parent import Parent
from runner.processes.stopping import StopSignals
from runner.sweep.folder import OUTPUT, Point
from runner.sweep.last_line import last_line
from runner.sweep.tables import result_text

_LOOK_SECONDS = 0.2
_ENDINGS = {FINISHED: "finished", STOPPED: "stopped"}


class SideBySide:
    """Trains points in processes, until a signal asks it to stop; it then reaches all of them.

    Attributes:
      failures: the last line that the process of each point that failed wrote, by name.
    """

    def __init__(
        self, at_once: int, command_of: Callable[[Point, int], list[str]], grace_seconds: float
    ):
        """Takes over the signals; call it on the main thread.

        Args:
          at_once: how many processes.
          command_of: the words of a point's command, in the slot that it has.
        """
        self.failures: dict[str, str] = {}
        self._at_once = at_once
        self._command_of = command_of
        self._parent = Parent()
        self._asked = threading.Event()
        self._running: dict[int, tuple[Point, subprocess.Popen[bytes], float]] = {}

        def stop(number: signal.Signals) -> None:
            print(f"{number.name}: ending all runs, each with a checkpoint", file=sys.stderr)
            self._asked.set()
            self._signal(signal.SIGTERM)

        def end(number: signal.Signals, reason: str) -> None:
            print(f"error: ended by {number.name}: {reason}", file=sys.stderr, flush=True)
            self._signal(signal.SIGKILL)
            os._exit(SIGNALLED + number)

        StopSignals(grace_seconds, stop, end)

    def train(self, points: Sequence[Point]) -> bool:
        """Trains each of `points` that has not finished. Returns whether it did, and was not asked
        to stop."""
        waiting = [each for each in points if not each.finished]
        done, whole = 0, len(waiting)
        while (waiting and not self._asked.is_set()) or self._running:
            while waiting and len(self._running) < self._at_once and not self._asked.is_set():
                self._begin(waiting.pop(0))
            for slot, (point, process, began) in list(self._running.items()):
                if (code := process.poll()) is not None:
                    del self._running[slot]
                    done += code == FINISHED
                    self._ended(point, code, time.monotonic() - began)
                    self._tell(f"{done} of {whole} finished, {len(self._running)} running")
            time.sleep(_LOOK_SECONDS)
        return not self._asked.is_set()

    def _begin(self, point: Point) -> None:
        slot = min(set(range(self._at_once)) - self._running.keys())
        output = self._output(point)
        make_folder(output.parent)
        with output.open("ab") as file:
            try:
                process = subprocess.Popen(
                    self._command_of(point, slot),
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=file,
                    env=self._parent.environment,
                    pass_fds=self._parent.pass_fds,
                    start_new_session=True,  # a terminal's Ctrl-C reaches it once, from here
                )
            except OSError as error:
                self.failures[point.name] = str(error)
                self._tell(f"failed: {point.name}: {error}")
                return
        self._running[slot] = (point, process, time.monotonic())
        self._tell(f"began {point.name}; its output: {output}")
        if self._asked.is_set():  # meanwhile
            self._signal(signal.SIGTERM)

    def _ended(self, point: Point, code: int, seconds: float) -> None:
        found = f": {result_text(point)}" if code == FINISHED else ""
        if code not in _ENDINGS:
            reason = last_line(self._output(point)) or f"exit status {code}"
            self.failures[point.name], found = reason, f": {reason}"
        ending = _ENDINGS.get(code, "failed")
        self._tell(f"{point.name} {ending} after {duration_text(seconds)}{found}")

    def _signal(self, number: signal.Signals) -> None:
        for _, process, _ in list(self._running.values()):
            try:
                os.killpg(process.pid, number)
            except ProcessLookupError:
                continue

    @staticmethod
    def _output(point: Point) -> Path:
        return point.workdir.parent / OUTPUT / f"{point.name}.txt"

    @staticmethod
    def _tell(line: str) -> None:
        print(line, file=sys.stderr, flush=True)
