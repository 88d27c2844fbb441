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
        self._phases, self._limits = phases, limits
        self._path = stacks_file(workdir, jax.process_index())
        self._closed = threading.Event()

    def __enter__(self) -> "Watchdog":
        if self._limits is None:
            return self
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file, self._null = self._path.open("a"), open(os.devnull, "w")
        now, pid = time.strftime("%Y-%m-%d %H:%M:%S %z"), os.getpid()
        self._write(
            f"=== process {jax.process_index()} of {jax.process_count()} on "
            f"{socket.gethostname()}, {now}: `kill -USR1 {pid}` adds its stacks"
        )
        # Both write in the C signal handler, so they work even if all Python threads hang.
        faulthandler.register(signal.SIGUSR1, self._file, all_threads=True)
        faulthandler.enable(self._file, all_threads=True)
        threading.Thread(
            target=self._watch, args=(self._limits,), name="watchdog", daemon=True
        ).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._closed.set()
        # The file stays open, to record an abort during shutdown too.

    def _watch(self, limits: Limits) -> None:
        period = min(LONGEST_WAIT, *(limits.of(phase) / 2 for phase in Phase))
        watched, seconds = self._phases.current, 0.0
        # Waits are counted instead of reading a clock, so time in which this process was paused
        # counts as one wait.
        while not self._closed.wait(period):
            if watched == self._phases.current:
                seconds += period
            else:
                watched, seconds = self._phases.current, 0.0
            if seconds > limits.of(watched[0]):
                self._end(watched[0], limits.of(watched[0]))

    def _end(self, phase: Phase, limit: float) -> None:
        # Armed before anything is written, so that a slow disk or terminal cannot delay the end.
        faulthandler.dump_traceback_later(LAST_WORDS_SECONDS, exit=True, file=self._null)
        message = (
            f"process {jax.process_index()} has been {_DOING[phase]} for {limit:g} s, its limit"
        )
        try:
            with contextlib.suppress(OSError):
                self._write(f"--- {time.strftime('%H:%M:%S')}: {message}")
            faulthandler.dump_traceback(self._file, all_threads=True)
            told = f"error: {message}; {self._path} has the stacks of its threads"
            print(told, file=sys.stderr, flush=True)
        finally:
            os._exit(FAILED)

    def _write(self, line: str) -> None:
        self._file.write(f"{line}\n")
        self._file.flush()
