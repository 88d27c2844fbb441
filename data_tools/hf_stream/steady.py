"""Records that keep coming: a stream that fails or stalls is opened again where it was."""

import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from data_tools.hf_stream.records import Records
from lmlib.data.prefetch import ReadAhead

RECORDS_AHEAD = 256
LONGEST_PAUSE_SECONDS = 60.0


class Patience(NamedTuple):
    """How long a stream may give nothing, and how often it is opened again."""

    stall_seconds: float  # without a record
    retries: int  # in a row, without a record between them
    backoff_seconds: float  # before the first retry; twice as long before each further one


class StreamFailure(Exception):
    """A stream failed and went on failing."""


class SteadyRecords:
    """Records, each with the state after it, whatever happens on the way.

    They are read by a thread of their own, which is abandoned if it hangs. A failure, or no
    record for too long, is told in a line on stderr; the stream is then opened once more, at the
    state after the last record that came.
    """

    def __init__(self, open_records: Callable[[], Records], patience: Patience, what: str) -> None:
        """`open_records` gives the stream at its beginning; `what` names it in messages."""
        self._open_records = open_records
        self._patience = patience
        self._what = what
        self._closed = threading.Event()
        self._reader: ReadAhead[tuple[Any, dict[str, Any]]] | None = None

    def read(self, state: dict[str, Any] | None) -> Iterator[tuple[Any, dict[str, Any]]]:
        """The records to the end of the stream, from `state` on or, if `None`, its beginning.

        Raises `StreamFailure`, with the last cause, once the retries are used up.
        """
        failures = 0  # in a row
        reader = self._open(state)
        while not self._closed.is_set():
            try:
                record, state = reader.next(self._patience.stall_seconds)
            except StopIteration:
                return
            except Exception as error:
                reader.close()
                failures += 1
                self._pause(failures, error)
                reader = self._open(state)
            else:
                failures = 0
                yield record, state

    def close(self, seconds: float = 0.0) -> None:
        """Ends `read`, which may go on in another thread, and the reading thread.

        That one is waited for so long at most, and then abandoned.
        """
        self._closed.set()
        if self._reader is not None:
            self._reader.close(seconds)

    def _open(self, state: dict[str, Any] | None) -> ReadAhead[tuple[Any, dict[str, Any]]]:
        reading = _reading(self._open_records, state)
        self._reader = ReadAhead(reading, RECORDS_AHEAD, name=f"records of {self._what}")
        if self._closed.is_set():  # by another thread, which may not have seen this reader
            self._reader.close()
        return self._reader

    def _pause(self, failures: int, error: Exception) -> None:
        """Tells of the failure and waits; raises `StreamFailure` if it was one too many."""
        cause = " ".join(f"{type(error).__name__}: {error}".split())
        if failures > self._patience.retries:
            raise StreamFailure(
                f"{self._what} failed {failures} times in a row, at last with {cause}"
            ) from error
        pause = self._patience.backoff_seconds * 2 ** (failures - 1)
        pause = min(pause, LONGEST_PAUSE_SECONDS)
        print(
            f"{self._what}: {cause}; retry {failures} of {self._patience.retries} in {pause:g} s",
            file=sys.stderr,
            flush=True,
        )
        self._closed.wait(pause)


def _reading(
    open_records: Callable[[], Records], state: dict[str, Any] | None
) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Opened anew each time: a hanging thread may still hold, and move, what was open before."""
    records = open_records()
    if state is not None:
        records.load_state_dict(state)
    for record in records:
        yield record, records.state_dict()
