"""SIGTERM and SIGINT: a run is asked to stop, and how long it may take over that.

The first asks it to save a checkpoint after the step it is in, and to end. A second SIGINT ends it
at once, and so does the end of the grace period.
"""

import select
import signal
import socket
import threading
import time
from collections.abc import Callable
from types import FrameType

STOPPING = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """Handles these signals from now on, in this process.

    Python's own handlers wait for the main thread, which may be compiling for minutes. Here a
    thread of its own takes each signal as it comes.
    """

    def __init__(
        self,
        grace_seconds: float,
        stop: Callable[[signal.Signals], None],
        end: Callable[[signal.Signals, str], None],
    ):
        """Takes over the signals; call it on the main thread.

        Args:
          grace_seconds: from the first signal to `end`.
          stop: called once, with the first signal.
          end: called with the signal to end for, and the reason.
        """
        self._grace_seconds = grace_seconds
        self._stop = stop
        self._end = end
        self._received, writer = socket.socketpair()
        writer.setblocking(False)
        self._writer = writer  # Python keeps only its number
        signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        for number in STOPPING:
            signal.signal(number, _nothing)
        threading.Thread(target=self._listen, name="signals", daemon=True).start()

    def _listen(self) -> None:
        first: signal.Signals | None = None
        interrupts, deadline = 0, float("inf")
        while True:
            remaining = None if first is None else max(0.0, deadline - time.monotonic())
            if not select.select([self._received], [], [], remaining)[0]:
                assert first is not None
                reason = f"its checkpoint was not whole {self._grace_seconds:g} s after the signal"
                self._end(first, f"{reason}; raise --grace_seconds if there is time")
                return
            for number in self._received.recv(4096):
                if number not in STOPPING:
                    continue
                interrupts += number == signal.SIGINT
                if first is None:
                    first = signal.Signals(number)
                    deadline = time.monotonic() + self._grace_seconds
                    self._stop(first)
                elif interrupts > 1:
                    self._end(signal.SIGINT, "it was interrupted twice")
                    return


def _nothing(number: int, frame: FrameType | None) -> None:
    """Python passes on only the numbers of signals that have a handler."""
