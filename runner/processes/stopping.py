"""Stops a run gracefully on SIGTERM or SIGINT.

The first signal asks the run to save a checkpoint after the current step, and to end. A second
SIGINT ends the run at once, as does the end of the grace period.
"""

import select
import signal
import socket
import threading
import time
from collections.abc import Callable

STOPPING = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """Handles SIGTERM and SIGINT in this process.

    Python runs its signal handlers in the main thread, which may be compiling for minutes. This
    class uses a separate thread, so that it can react at once.
    """

    def __init__(
        self,
        grace_seconds: float,
        stop: Callable[[signal.Signals], None],
        end: Callable[[signal.Signals, str], None],
    ):
        """Installs the handlers; call it on the main thread.

        Args:
          grace_seconds: the time between the first signal and `end`.
          stop: called once, with the first signal.
          end: called with the signal and the reason when the run must end at once.
        """
        self._grace_seconds, self._stop, self._end = grace_seconds, stop, end
        # `self._writer` keeps the socket open: Python stores only its number.
        self._received, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in STOPPING:  # Python reports only signals that have a handler
            signal.signal(number, lambda number, frame: None)
        threading.Thread(target=self._listen, name="signals", daemon=True).start()

    def _listen(self) -> None:
        first: signal.Signals | None = None
        interrupts, deadline = 0, 0.0
        while True:
            remaining = None if first is None else max(0.0, deadline - time.monotonic())
            if not select.select([self._received], [], [], remaining)[0]:
                assert first is not None
                self._end(
                    first,
                    f"its checkpoint was not complete {self._grace_seconds:g} s after the signal; "
                    "raise --grace_seconds if there is time",
                )
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
