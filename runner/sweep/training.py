"""Trains the points of a sweep, one by one in this process or in parallel processes."""

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fiddle as fdl

from lmlib.storage.atomic_file import make_folder
from lmlib.storage.unlinked import check_no_link, open_regular
from lmlib.terminal.quantities import duration_text
from runner.command_line.command import tell
from runner.command_line.exit_status import FINISHED, SIGNALLED, STOPPED
from runner.errors import StoppedEarly, error_text
from runner.monitoring.phases import Limits
from runner.processes.parent import Parent
from runner.processes.stopping import StopSignals
from runner.sweep.folder import OUTPUT, Point, Settings
from runner.sweep.tables import result_text, status
from runner.training.fit import fit
from runner.training.options import Options

_TAIL_BYTES = 1 << 14


class _Training:
    """Trains points until a signal asks it to stop.

    Attributes:
      failures: the reason of each failed point in one line, by name.
    """

    ending = "ending after this step, with a checkpoint"

    def __init__(self, grace_seconds: float):
        """Installs the signal handlers; call it on the main thread."""
        self.failures: dict[str, str] = {}
        self._asked = threading.Event()
        StopSignals(grace_seconds, self._stop, self._end)

    def _stop(self, number: signal.Signals) -> None:
        _tell(f"{number.name}: {self.ending}")
        self._asked.set()

    def _end(self, number: signal.Signals, reason: str) -> None:
        _tell(f"error: ended by {number.name}: {reason}")
        os._exit(SIGNALLED + number)


class InTurn(_Training):
    """Trains points one by one, as `python -m runner` would."""

    def __init__(
        self,
        config_of: Callable[[Settings], fdl.Config],
        experiment_file: Path | None,
        grace_seconds: float,
        debug: bool,
    ):
        super().__init__(grace_seconds)
        self._config_of, self._experiment_file, self._debug = config_of, experiment_file, debug

    def train(
        self, points: Iterable[Point], until: Callable[[Point], int | None] = lambda point: None
    ) -> bool:
        """Trains each point that has not finished or failed.

        `until` gives a point's last step; `None` trains to the end. Returns True unless a signal
        stopped the training.
        """
        waiting = [each for each in points if not each.finished and each.name not in self.failures]
        for number, point in enumerate(waiting, 1):
            if self._asked.is_set():
                break
            _tell(f"\npoint {number} of {len(waiting)}: {point.name}")
            self._train(point, until(point))
        return not self._asked.is_set()

    def _train(self, point: Point, last: int | None) -> None:
        def stop(step: int) -> bool:
            return self._asked.is_set() or (last is not None and step >= last)

        options = Options(limits=Limits(), stop=stop, experiment_file=self._experiment_file)
        try:
            fit(self._config_of(point.settings), point.workdir, options)
        except StoppedEarly:
            pass
        except Exception as error:  # the other points continue
            tell(error, self._debug)
            reason = " ".join(error_text(error).split())
            self.failures[point.name] = reason or type(error).__name__


class SideBySide(_Training):
    """Trains points in parallel processes. A signal is forwarded to all of them."""

    ending = "ending all runs, each with a checkpoint"

    def __init__(
        self, max_parallel: int, command_of: Callable[[Point, int], list[str]], grace_seconds: float
    ):
        """Sets up the processes; `command_of` returns the words of a point's command for a slot."""
        self._max_parallel, self._command_of = max_parallel, command_of
        self._parent, self._running = Parent(), set[subprocess.Popen[bytes]]()
        super().__init__(grace_seconds)

    def train(self, points: Sequence[Point]) -> bool:
        """Trains each point that has not finished; returns True unless a signal stopped it."""
        waiting = [each for each in points if not each.finished]
        slots = queue.SimpleQueue[int]()
        for slot in range(self._max_parallel):
            slots.put(slot)

        def train(point: Point) -> None:
            slot = slots.get()
            if not self._asked.is_set():
                self._train(point, slot)
            slots.put(slot)

        with ThreadPoolExecutor(self._max_parallel) as threads:
            list(threads.map(train, waiting))
        return not self._asked.is_set()

    def _train(self, point: Point, slot: int) -> None:
        output, began = _output(point), time.monotonic()
        make_folder(output.parent)
        try:
            with output.open("ab") as file:
                process = subprocess.Popen(
                    self._command_of(point, slot),
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=file,
                    env=self._parent.environment,
                    pass_fds=self._parent.pass_fds,
                    # so that Ctrl-C reaches it only once, from this process
                    start_new_session=True,
                )
        except OSError as error:
            self.failures[point.name] = str(error)
            _tell(f"failed: {point.name}: {error}")
            return
        self._running.add(process)
        _tell(f"began {point.name}; its output: {output}")
        if self._asked.is_set():  # set in the meantime
            self._signal(signal.SIGTERM)
        code = process.wait()
        self._running.remove(process)
        found = ""
        if code == FINISHED:
            found = f": {result_text(point)}"
        elif code != STOPPED:
            reason = last_line(output) or f"exit status {code}"
            self.failures[point.name], found = reason, f": {reason}"
        took = duration_text(time.monotonic() - began)
        _tell(f"{point.name} {status(point, self.failures)} after {took}{found}")

    def _stop(self, number: signal.Signals) -> None:
        super()._stop(number)
        self._signal(signal.SIGTERM)

    def _end(self, number: signal.Signals, reason: str) -> None:
        self._signal(signal.SIGKILL)
        super()._end(number, reason)

    def _signal(self, number: signal.Signals) -> None:
        for process in list(self._running):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)


def last_line(file: Path) -> str:
    """Returns the last non-empty line of a text file; "" if it has none, or is a symbolic link."""
    try:
        check_no_link(file)
        with open_regular(file) as opened:
            opened.seek(max(0, opened.seek(0, os.SEEK_END) - _TAIL_BYTES))
            text = opened.read(_TAIL_BYTES).decode("utf-8", "replace")
    except (OSError, ValueError):
        return ""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def _output(point: Point) -> Path:
    return point.workdir.parent / OUTPUT / f"{point.name}.txt"


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
