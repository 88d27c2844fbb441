"""Measures time without pauses: SIGSTOP or Ctrl-Z may pause a process while clocks run on."""


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
