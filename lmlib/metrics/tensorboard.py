"""A run's metrics as event files for TensorBoard: a copy, which a run can do without."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from tensorboardX import summary
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog

FLUSH_SECONDS = 10.0


class TensorBoard:
    """Writes scalars into the event files of a folder.

    Where the storage fails, writing ends: the numbers are in `metrics.jsonl` too, and no run should
    fail for want of their copy. (The `SummaryWriter` of tensorboardX would wait for ever then.)
    """

    def __init__(self, folder: Path, first_step: int):
        """Makes the folder; hides what earlier files there have from `first_step` on."""
        self._flushed_at = time.monotonic()
        self._events: EventsWriter | None = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # Files are named by the second: a run resumed within one would overwrite its own.
            # The absolute path: a relative one such as gs:run would be taken for a bucket.
            self._events = EventsWriter(str(folder.absolute() / "events"), f".{first_step}")
        except OSError:
            return
        self._add(Event(step=first_step, session_log=SessionLog(status=SessionLog.START)))

    def write(self, step: int, scalars: Mapping[str, float | int]) -> None:
        """Adds the scalars, all finite, of a step."""
        for name, value in scalars.items():
            self._add(
                Event(wall_time=time.time(), step=step, summary=summary.scalar(name, float(value)))
            )
        self._flush_now_and_then()

    def write_text(self, step: int, name: str, text: str) -> None:
        """Adds a text of a step, shown as it is: indented, Markdown takes it for code."""
        shown = "\n".join(f"    {line}" for line in text.splitlines())
        self._add(Event(wall_time=time.time(), step=step, summary=summary.text(name, shown)))
        self._flush_now_and_then()

    def _flush_now_and_then(self) -> None:
        if time.monotonic() - self._flushed_at >= FLUSH_SECONDS:
            self._flushed_at = time.monotonic()
            self._do(lambda events: events.flush())

    def close(self) -> None:
        self._do(lambda events: events.close())
        self._events = None

    def _add(self, event: Event) -> None:
        self._do(lambda events: events.write_event(event))

    def _do(self, write: Callable[[EventsWriter], object]) -> None:
        if self._events is not None:
            try:
                write(self._events)
            except OSError:
                self._events = None
