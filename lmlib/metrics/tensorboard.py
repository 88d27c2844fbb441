"""A run's metrics as event files for TensorBoard."""

import contextlib
import functools
import math
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path


@contextlib.contextmanager
def _without_torch() -> Iterator[None]:
    """tensorboardX imports torch where it is installed: seconds, and nothing here needs it."""
    if "torch" in sys.modules:
        yield
        return
    sys.modules["torch"] = None  # type: ignore[assignment]  # which makes it an ImportError
    try:
        yield
    finally:
        del sys.modules["torch"]


with _without_torch():
    from tensorboardX import summary
    from tensorboardX.event_file_writer import EventsWriter
    from tensorboardX.proto.event_pb2 import Event, SessionLog
    from tensorboardX.proto.summary_pb2 import Summary

FLUSH_SECONDS = 10.0


@functools.cache
def _tag(name: str) -> str:
    """The name with the characters that TensorBoard takes."""
    tag: str = summary.scalar(name, 0.0).value[0].tag
    return tag


class TensorBoard:
    """The `lmlib.metrics.sinks.Sink` that writes into the event files of WORKDIR/tensorboard.

    What is not finite is left out. Every method raises OSError where the storage fails. (The
    `SummaryWriter` of tensorboardX would wait for ever then.)
    """

    def __init__(self, workdir: Path, first_step: int):
        """Hides what earlier event files of the run have from `first_step` on."""
        folder = workdir / "tensorboard"
        folder.mkdir(parents=True, exist_ok=True)
        # Files are named by the second: a run resumed within one would overwrite its own.
        # The absolute path: a relative one such as gs:run would be taken for a bucket.
        self._events = EventsWriter(str(folder.absolute() / "events"), f".{first_step}")
        self._flushed_at = time.monotonic()
        start = SessionLog(status=SessionLog.START)
        self._events.write_event(Event(step=first_step, session_log=start))

    def write(self, step: int, metrics: Mapping[str, float | int]) -> None:
        # One event holds all values: an event of its own for each takes seven times as long.
        values = [
            Summary.Value(tag=_tag(name), simple_value=float(value))
            for name, value in metrics.items()
            if math.isfinite(value)
        ]
        if values:
            self._add(step, Summary(value=values))
        self._flush_now_and_then()

    def write_text(self, step: int, name: str, text: str) -> None:
        """Adds a text of a step, shown as it is: indented, Markdown takes it for code."""
        shown = "\n".join(f"    {line}" for line in text.splitlines())
        self._add(step, summary.text(name, shown))
        self._flush_now_and_then()

    def close(self) -> None:
        self._events.close()

    def _add(self, step: int, shown: Summary) -> None:
        self._events.write_event(Event(wall_time=time.time(), step=step, summary=shown))

    def _flush_now_and_then(self) -> None:
        if time.monotonic() - self._flushed_at >= FLUSH_SECONDS:
            self._flushed_at = time.monotonic()
            self._events.flush()
