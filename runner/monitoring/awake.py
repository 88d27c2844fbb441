"""The time in which a process runs: SIGSTOP and Ctrl-Z may hold it for hours, and clocks go on."""


class Awake:
    """Counts seconds without those for which this process was held.

    Whoever asks every `period` seconds, and comes late, was held meanwhile.
    """

    def __init__(self, period: float, now: float):
        """`now`, here and below, is by a clock that nobody can set."""
        self._period = period
        self._asked_at = now
        self._moment, self._held = now, 0.0

    def seconds_since(self, moment: float, now: float) -> float:
        """Those from `moment` to `now`; to be asked for every `period` seconds."""
        if moment != self._moment:
            self._moment, self._held = moment, 0.0
        late = now - self._asked_at - self._period
        self._held += max(0.0, min(late, now - moment))
        self._asked_at = now
        return now - moment - self._held
