"""The metrics of a run: `metrics.jsonl`, whose lines sinks get too, and MFU.

`metrics.jsonl` holds one JSON object a line, `{"step": 10, "loss": 3.25, …}`, each step once and in
order however often the run was killed. Strict JSON has no NaN: what is not finite is the string
"NaN", "Infinity" or "-Infinity", which `float()` reads and `read_metrics` turns back.
"""

import contextlib
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from lmlib.hardware.specifications import peak_flops
from lmlib.metrics.sinks import MakeSink, Sinks
from lmlib.storage.appended_file import AppendedFile, set_aside
from lmlib.storage.stored_json import parse_json
from lmlib.storage.unlinked import check_no_link
from lmlib.storage.whole_file import make_folder

FILE_NAME = "metrics.jsonl"
_NOT_FINITE = {"NaN", "Infinity", "-Infinity"}


@runtime_checkable
class Device(Protocol):
    """All that is asked of a `jax.Device` here."""

    @property
    def device_kind(self) -> str: ...


def mfu(
    flops_per_token: float, tokens_per_second: float, devices: Sequence[Device]
) -> float | None:
    """Model FLOPs utilisation (Chowdhery et al. 2022, arXiv:2204.02311, appendix B).

    Args:
      flops_per_token: what the model needs, forward and backward, recomputation not counted.
      tokens_per_second: of all `devices` together.
      devices: at least one.

    Returns:
      FLOP/s used over the devices' peak (0.4 for 40 %); `None` where a peak is not known.
    """
    peaks = [peak_flops(device.device_kind) for device in devices]
    if None in peaks:
        return None
    return flops_per_token * tokens_per_second / sum(peak for peak in peaks if peak)


class MetricsLog:
    """Appends to `workdir/metrics.jsonl`, and then gives sinks the same.

    Every line is with the operating system when `write` returns, unless the storage fails: then it
    is kept, and tried again with the next line. For a resumed run to miss no step, `flush` a step's
    metrics before its checkpoint is saved, and `sync` them before that is whole.

        with MetricsLog(workdir, resume_step=None) as log:
            log.write(1, {"loss": 3.25})

    Attributes:
      missing: a sentence about steps from `first` to `resume_step` without a line, or `None`.
      furthest: the last step that the file had; 0 if none.
      set_aside: the file of a run before, where it is now; `None` if there was none.
    """

    def __init__(
        self,
        workdir: str | os.PathLike[str],
        resume_step: int | None,
        enabled: bool = True,
        lost: Callable[[str], None] | None = None,
        sinks: Sequence[MakeSink] = (),
        tell: Callable[[str], None] = print,
        first: int = 1,
        check: Callable[[], None] = lambda: None,
    ):
        """Opens the log, first dropping lines of steps that will be made again.

        Args:
          workdir: made if absent.
          resume_step: the step of the checkpoint that the run goes on from: later lines, and a line
            that a kill cut short, are dropped. `None` for a run from the beginning: a file with
            lines is then renamed to metrics.jsonl.1, or the next number that is free.
          enabled: False on all processes but one; then nothing is read or written.
          lost, check: as in `AppendedFile`.
          sinks: make the sinks that get copies; `tell` gets a line about one that fails.
          first: the run's own first step; those of a fork follow another run's.
        """
        self._enabled = enabled
        self.missing: str | None = None
        self.set_aside: Path | None = None
        self.furthest = 0
        if not enabled:
            return
        last = -1 if resume_step is None else resume_step
        folder = Path(workdir)
        make_folder(folder)
        found = read_metrics(folder)
        self.furthest = found[-1]["step"] if found else 0
        entries = [entry for entry in found if entry["step"] <= last]
        self.missing = missing_lines(folder, last, first, entries)
        if found and resume_step is None:
            self.set_aside = set_aside(folder / FILE_NAME)
        lines = "".join(f"{to_json(entry)}\n" for entry in entries)
        self._file = AppendedFile(folder / FILE_NAME, lines, lost, check)
        self._sinks = Sinks(sinks, folder, last + 1, tell, check)

    def write(self, step: int, metrics: Mapping[str, float | int | None]) -> None:
        """Appends a line; metrics that are `None` are left out of it.

        Raises:
          ValueError: if a metric is called "step".
          TypeError: if a value is no Python number.
        """
        if "step" in metrics:
            raise ValueError('a metric cannot be called "step": the line has the step already')
        present = {name: value for name, value in metrics.items() if value is not None}
        if self._enabled:
            self._file.append(f"{to_json({'step': step, **present})}\n".encode())
            self._sinks.write(step, present)

    def add(self, step: int, metrics: Mapping[str, float | int | None]) -> None:
        """Adds metrics that are known only later to the newest line, which is of `step`."""
        present = {name: value for name, value in metrics.items() if value is not None}
        if self._enabled and present:
            end = f", {to_json(present)[1:]}\n".encode()  # in the place of the line's own "}\n"
            self._file.append(end, over=2)
            self._sinks.write(step, present)

    def flush(self) -> None:
        """Raises OSError, naming the file, if there are lines that it still does not take."""
        if self._enabled:
            self._file.flush()

    def sync(self) -> None:
        """Returns once all that was flushed is on the disk; for another thread, too.

        Raises OSError, naming the file.
        """
        if self._enabled:
            self._file.sync()

    def close(self) -> None:
        """Raises OSError, as `flush` does, once all is closed."""
        if self._enabled:
            self._sinks.close()
            self._file.close()

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        """Closes; an error that is on its way is not replaced."""
        with contextlib.suppress(*([] if kind is None else [OSError])):
            self.close()


def read_metrics(workdir: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The lines of `workdir/metrics.jsonl`, also while a run writes it; none if it is absent. Half
    a line, which a kill or a power cut may leave, is skipped.

    `pandas.DataFrame(read_metrics(workdir)).set_index("step")` makes a table of them.
    """
    path, found = Path(workdir, FILE_NAME), []
    check_no_link(path)
    if path.exists():
        for line in path.read_bytes().splitlines():
            with contextlib.suppress(ValueError, TypeError):  # a list, say, is not hashable
                found.append(from_json(line))
    return found


def to_json(entry: Mapping[str, Any]) -> str:
    """A line of `metrics.jsonl`, without its end: strict JSON."""

    def strict(value: float | int) -> float | int | str:
        if isinstance(value, float) and not math.isfinite(value):
            return "NaN" if math.isnan(value) else f"{'-' if value < 0 else ''}Infinity"
        return value

    return json.dumps({name: strict(value) for name, value in entry.items()})


def from_json(line: str | bytes) -> dict[str, Any]:
    """The entry that `to_json` was given; raises ValueError for any other line."""
    entry = parse_json(line)
    if not isinstance(entry, dict) or type(entry.get("step")) is not int:
        raise ValueError("no line of metrics")
    found = {name: float(x) if x in _NOT_FINITE else x for name, x in entry.items()}
    for name, value in found.items():
        if not (type(value) is float or (isinstance(value, int) and abs(value) < 1 << 63)):
            raise ValueError(f"{name} is {value!r:.40}, no number")
    return found


def missing_lines(
    workdir: str | os.PathLike[str],
    last: int,
    first: int = 1,
    entries: Sequence[Mapping[str, Any]] | None = None,
) -> str | None:
    """A sentence about steps from `first` to `last` without a line in metrics.jsonl; `None` if all
    have one. `entries` of the file may be given."""
    entries = read_metrics(workdir) if entries is None else entries
    missing = sorted(set(range(first, last + 1)) - {entry["step"] for entry in entries})
    if not missing:
        return None
    which = f"step {missing[0]:,}"
    if len(missing) > 1:
        which = f"{len(missing):,} steps from {missing[0]:,} to {missing[-1]:,}"
    file = Path(workdir, FILE_NAME)
    return f"{file} has lost the lines of {which}: what is summed over the run leaves them out"
