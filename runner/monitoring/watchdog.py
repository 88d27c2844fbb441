"""Ends a process that hangs, and records the stack traces of its threads.

The stacks of all threads are written to `workdir/stacks/process_00000.txt`: when a phase exceeds
its limit, when the process crashes or is aborted, and on `kill -USR1`.
"""

import contextlib
import faulthandler
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import jax

from runner.command_line.exit_status import FAILED
from runner.monitoring.phases import Limits, Phase, Phases


class Awake:
    """Counts the seconds in which this process was not paused.

    It must be asked every `period` seconds. A call that comes late means that the process was
    paused.
    """

    def __init__(self, period: float, now: float):
        """Starts counting.

        Args:
          period: seconds between two calls of `seconds_since`.
          now: the current time in seconds by a monotonic clock, here and below.
        """
        self._period = period
        self._asked_at = now
        self._moment, self._held = now, 0.0

    def seconds_since(self, moment: float, now: float) -> float:
        """Returns the seconds from `moment` to `now`, without pauses; call it every `period`."""
        if moment != self._moment:
            self._moment, self._held = moment, 0.0
        late = now - self._asked_at - self._period
        self._held += max(0.0, min(late, now - moment))
        self._asked_at = now
        return now - moment - self._held


LONGEST_WAIT = 1.0  # maximum seconds between two checks
LAST_WORDS_SECONDS = 10.0  # time limit for a process to report why it ends
_DOING = {
    Phase.COMPILE: "compiling",
    Phase.DATA: "waiting for its data source",
    Phase.STEP: "in one step",
    Phase.REPEATED: "in one step",
    Phase.EVALUATION: "in an evaluation",
    Phase.CHECKPOINT: "saving its checkpoint",
}


def stacks_file(workdir: Path, process: int) -> Path:
    return workdir / "stacks" / f"process_{process:05}.txt"


class Watchdog:
    """Watches this process during the block.

    with Watchdog(phases, limits, workdir):
        ...
    """

    def __init__(self, phases: Phases, limits: Limits | None, workdir: Path):
        """Prepares the watchdog; `limits=None` disables it and leaves signal handlers unchanged."""
        self._phases = phases
        self._limits = limits
        self._path = stacks_file(workdir, jax.process_index())
        self._closed = threading.Event()

    def __enter__(self) -> "Watchdog":
        if self._limits is None:
            return self
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("a")
        self._null = open(os.devnull, "w")
        now = time.strftime("%Y-%m-%d %H:%M:%S %z")
        pid = os.getpid()
        self._say(
            f"=== process {jax.process_index()} of {jax.process_count()} on "
            f"{socket.gethostname()}, {now}: `kill -USR1 {pid}` adds its stacks"
        )
        # Both write in the C signal handler, so they work even if all Python threads hang.
        faulthandler.register(signal.SIGUSR1, self._file, all_threads=True)
        faulthandler.enable(self._file, all_threads=True)
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._closed.set()
        # The file stays open, to record an abort during shutdown too.

    def _watch(self) -> None:
        assert self._limits is not None
        longest = min(LONGEST_WAIT, *(self._limits.of(phase) / 2 for phase in Phase))
        awake = Awake(longest, time.monotonic())
        while not self._closed.wait(longest):
            phase, entered = self._phases.current
            if awake.seconds_since(entered, time.monotonic()) > self._limits.of(phase):
                self._end(phase, self._limits.of(phase))

    def _end(self, phase: Phase, limit: float) -> None:
        # Armed before anything is written, so that a slow disk or terminal cannot delay the end.
        faulthandler.dump_traceback_later(LAST_WORDS_SECONDS, exit=True, file=self._null)
        message = f"process {jax.process_index()} has been {_DOING[phase]} for {limit:g} s"
        try:
            with contextlib.suppress(OSError):
                self._say(f"--- {time.strftime('%H:%M:%S')}: {message}, its limit")
            faulthandler.dump_traceback(self._file, all_threads=True)
            print(
                f"error: {message}, its limit; {self._path} shows what its threads were doing",
                file=sys.stderr,
                flush=True,
            )
        finally:
            os._exit(FAILED)

    def _say(self, line: str) -> None:
        self._file.write(f"{line}\n")
        self._file.flush()
