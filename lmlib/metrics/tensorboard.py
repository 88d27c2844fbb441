"""A run's metrics as event files for TensorBoard."""

import contextlib
import math
import socket
import struct
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from lmlib.metrics.log import read_metrics
from lmlib.storage.stored_json import read_text
from lmlib.storage.unlinked import unlinked


@contextlib.contextmanager
def _without_torch() -> Iterator[None]:
    """Keeps tensorboardX from importing torch, which takes seconds and is not needed."""
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
    from tensorboardX.proto.event_pb2 import Event, SessionLog
    from tensorboardX.proto.summary_pb2 import Summary
    from tensorboardX.record_writer import masked_crc32c


class TensorBoard:
    """The `lmlib.metrics.sinks.Sink` that writes the event files in WORKDIR/tensorboard.

    A step has its metrics and the texts in WORKDIR/samples. Values that are not finite are left
    out. Every method raises OSError if the storage fails. (tensorboardX's `SummaryWriter` would
    then wait forever, and its `EventsWriter` buffers events, which a kill loses.)
    """

    def __init__(self, workdir: Path, first_step: int):
        """Rewrites the step before `first_step` and hides the steps from it on in earlier files.

        A kill may have left only a part of that step.
        """
        folder, self._samples = workdir / "tensorboard", workdir / "samples"
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{first_step}"
        self._file = (folder / name).open("wb")
        self._step = max(0, first_step - 1)
        self._add(Event(file_version="brain.Event:2"))
        self._add(Event(step=self._step, session_log=SessionLog(status=SessionLog.START)))
        for line in read_metrics(workdir)[-1:]:
            self.write(line.pop("step"), line)

    def write(self, step: int, metrics: Mapping[str, float | int]) -> None:
        if step != self._step:
            self._add_text()
        self._step = step
        # One event holds all values: separate events would take seven times as long.
        values = [
            Summary.Value(tag=name, simple_value=float(value))
            for name, value in metrics.items()
            if math.isfinite(value)
        ]
        if values:
            self._add(Event(step=step, summary=Summary(value=values)))

    def close(self) -> None:
        self._add_text()
        self._file.close()

    def _add_text(self) -> None:
        """Adds the step's text verbatim, indented so that Markdown shows it as code."""
        with contextlib.suppress(FileNotFoundError, ValueError):
            text = read_text(unlinked(self._samples, f"{self._step:08d}.txt"))
            shown = "\n".join(f"    {line}" for line in text.splitlines())
            self._add(Event(step=self._step, summary=summary.text("samples", shown)))

    def _add(self, event: Event) -> None:
        """Writes one record: length, checksum of the length, event, checksum of the event."""
        event.wall_time = time.time()
        data = event.SerializeToString()
        length = struct.pack("<Q", len(data))
        for part in (length, data):
            self._file.write(part + struct.pack("<I", masked_crc32c(part)))
        self._file.flush()
