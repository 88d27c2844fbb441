"""Trains the points of a sweep, one by one in this process or in parallel processes."""

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TextIO

import fiddle as fdl

from lmlib.storage.atomic_file import make_folder
from lmlib.storage.unlinked import check_no_link, open_regular
from lmlib.terminal.quantities import duration_text
from lmlib.terminal.table import wrapped
from runner.command_line.command import exit_code, tell
from runner.command_line.exit_status import FINISHED, MISTAKE, SIGNALLED, STOPPED
from runner.errors import StoppedEarly, error_text
from runner.monitoring.phases import Limits
from runner.monitoring.progress import REDRAW_SECONDS
from runner.monitoring.progress_line import LiveLine, bar
from runner.processes.parent import Parent
from runner.processes.stopping import StopSignals
from runner.sweep.folder import OUTPUT, Point, Settings
from runner.sweep.tables import result_text, status
from runner.training.fit import fit
from runner.training.options import Options

_TAIL_BYTES = 1 << 14


class Total:
    """Shows one line for each point that ended and, on a terminal, a bar of all points below."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic):
        self._line, self._clock = LiveLine(stream), clock
        self.message = self._line.message
        self._count = self._ended = 0
        self._began = self._drawn = 0.0

    @contextlib.contextmanager
    def of(self, points: Sequence[Point]) -> Iterator[None]:
        """Counts `points`, which are trained in this context."""
        self._count, self._ended, self._began = len(points), 0, self._clock()
        try:
            self._draw(0.0, "")
            yield
        finally:
            self.pause()

    def step(self, point: Point, step: int, steps: int) -> None:
        """Shows that `point` has done `step` of `steps`."""
        if step == 0 or self._clock() - self._drawn >= REDRAW_SECONDS:
            self._draw(step / steps, f"  {point.name}  step {step:,}/{steps:,}")

    def ended(self, point: Point, failures: Mapping[str, str], began: float) -> None:
        """Writes the result of a point whose training began at the time `began`."""
        self._ended += 1
        found = failures.get(point.name) or (result_text(point) if point.finished else "")
        state, took = status(point, failures), duration_text(self._clock() - began)
        result = f"{point.name} {state} after {took}{found and f': {found}'}"
        self.message(wrapped(f"{self._ended}/{self._count}  {result}"))
        self._draw(0.0, "")

    def pause(self) -> None:
        """Erases the bar."""
        self._line.close(keep=False)

    def _draw(self, part: float, text: str) -> None:
        self._drawn = self._clock()
        done = (self._ended + part) / max(self._count, 1)
        left = ""
        if self._ended:  # before that, compilation dominates
            left = f"  {duration_text((self._drawn - self._began) * (1 / done - 1))} left"
        self._line.line = f"{bar(done)} {self._ended}/{self._count} points{text}{left}"
        self._line.draw()


class _Training:
    """Trains points until a signal asks it to stop.

    Attributes:
      failures: the reason of each failed point in one line, by name.
    """

    ending = "ending after this step, with a checkpoint"

    def __init__(self, grace_seconds: float):
        """Installs the signal handlers; call it on the main thread."""
        self.failures: dict[str, str] = {}
        self._total = Total(sys.stderr)
        self._asked = threading.Event()
        StopSignals(grace_seconds, self._stop, self._end)

    def _stop(self, number: signal.Signals) -> None:
        self._total.message(f"{number.name}: {self.ending}")
        self._asked.set()

    def _end(self, number: signal.Signals, reason: str) -> None:
        self._total.message(f"error: ended by {number.name}: {reason}")
        os._exit(SIGNALLED + number)


class InTurn(_Training):
    """Trains points one by one, as `python -m runner` would; each logs into its own run.log."""

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
        with self._total.of(waiting):
            for point in waiting:
                if self._asked.is_set():
                    break
                self._train(point, until(point))
        return not self._asked.is_set()

    def _train(self, point: Point, last: int | None) -> None:
        def stop(step: int) -> bool:
            self._total.step(point, step, steps)
            return self._asked.is_set() or (last is not None and step >= last)

        options = Options(
            limits=Limits(), stop=stop, experiment_file=self._experiment_file, reports=False
        )
        began = time.monotonic()
        try:
            config = self._config_of(point.settings)
            steps = last or config.steps
            self._total.step(point, 0, steps)
            fit(config, point.workdir, options)
        except StoppedEarly:
            pass
        except Exception as error:  # the other points continue
            reason = " ".join(error_text(error).split())
            self.failures[point.name] = reason or type(error).__name__
            if self._debug or exit_code(error) != MISTAKE:
                self._total.pause()
                tell(error, self._debug)
        self._total.ended(point, self.failures, began)


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

        with self._total.of(waiting), ThreadPoolExecutor(self._max_parallel) as threads:
            list(threads.map(train, waiting))
        return not self._asked.is_set()

    def _train(self, point: Point, slot: int) -> None:
        output = point.workdir.parent / OUTPUT / f"{point.name}.txt"
        began = time.monotonic()
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
            self._total.ended(point, self.failures, began)
            return
        self._running.add(process)
        if self._asked.is_set():  # set in the meantime
            self._signal(signal.SIGTERM)
        code = process.wait()
        self._running.remove(process)
        if code not in (FINISHED, STOPPED):
            self.failures[point.name] = last_line(output) or f"exit status {code}"
        self._total.ended(point, self.failures, began)

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
