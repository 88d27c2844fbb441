"""The metrics of a run: `metrics.jsonl`, the same lines for sinks, and MFU.

`metrics.jsonl` holds one JSON object per line, `{"step": 10, "loss": 3.25, …}`, with each step once
and in order, even if the run was killed. Strict JSON has no NaN: numbers that are not finite are
the strings "NaN", "Infinity" and "-Infinity", which `float()` reads and `read_metrics` converts.
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
from lmlib.storage.atomic_file import make_folder
from lmlib.storage.stored_json import parse_json
from lmlib.storage.unlinked import check_no_link

FILE_NAME = "metrics.jsonl"
_NOT_FINITE = {"NaN", "Infinity", "-Infinity"}


@runtime_checkable
class Device(Protocol):
    """The only property of a `jax.Device` that is used here."""

    @property
    def device_kind(self) -> str: ...


def mfu(
    flops_per_token: float, tokens_per_second: float, devices: Sequence[Device]
) -> float | None:
    """Model FLOPs utilisation (Chowdhery et al. 2022, arXiv:2204.02311, appendix B).

    Returns the FLOP/s of all `devices` over their peak (0.4 for 40 %); `None` if a peak is unknown.
    `flops_per_token` covers the forward and backward pass, without recomputation.
    """
    peaks = [peak_flops(device.device_kind) for device in devices]
    if None in peaks:
        return None
    return flops_per_token * tokens_per_second / sum(peak for peak in peaks if peak)


class MetricsLog:
    """Appends to `workdir/metrics.jsonl`, then passes the same metrics to sinks.

    Every line has reached the operating system when `write` returns. If the storage fails, the line
    is kept and tried again with the next one. A resumed run misses no step if a step's metrics are
    passed to `flush` before its checkpoint is saved, and to `sync` before it is complete.

    Attributes:
      missing: a message about steps from `first` to `resume_step` without a line, or `None`.
      furthest: the last step that the file had; 0 if none.
      set_aside: the new path of an earlier run's file; `None` if there was none.
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
        """Opens the log, first dropping the lines of steps that will be repeated.

        Args:
          workdir: created if absent.
          resume_step: the step of the checkpoint from which the run continues. Later lines, and a
            line truncated by a kill, are dropped. `None` for a new run: an existing file with lines
            is then renamed to metrics.jsonl.1, or the next free number.
          enabled: False on all processes but one; then nothing is read or written.
          lost, check: as in `AppendedFile`.
          sinks: make the sinks that get copies; `tell` gets a line about a sink that fails.
          first: the run's own first step; a fork's first step follows another run's.
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
        """Appends a line; metrics that are `None` are left out. Their values are Python numbers."""
        if "step" in metrics:
            raise ValueError('a metric cannot be called "step": the line has the step already')
        present = {name: value for name, value in metrics.items() if value is not None}
        if self._enabled:
            self._file.append(f"{to_json({'step': step, **present})}\n".encode())
            self._sinks.write(step, present)

    def add(self, step: int, metrics: Mapping[str, float | int | None]) -> None:
        """Adds metrics that become known later to the newest line, which must be of `step`."""
        present = {name: value for name, value in metrics.items() if value is not None}
        if self._enabled and present:
            end = f", {to_json(present)[1:]}\n".encode()  # replaces the line's own "}\n"
            self._file.append(end, over=2)
            self._sinks.write(step, present)

    def flush(self) -> None:
        """Writes pending lines; raises OSError, naming the file, if some cannot be written."""
        if self._enabled:
            self._file.flush()

    def sync(self) -> None:
        """Returns once everything flushed is on the disk. May be called from another thread."""
        if self._enabled:
            self._file.sync()

    def close(self) -> None:
        """Closes everything, then raises OSError as `flush` does."""
        if self._enabled:
            self._sinks.close()
            self._file.close()

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        """Closes the log; an exception in flight takes precedence over a closing error."""
        with contextlib.suppress(*([] if kind is None else [OSError])):
            self.close()


def read_metrics(workdir: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Returns the lines of `workdir/metrics.jsonl`, also while a run writes it.

    Empty if the file is absent. An incomplete line, left by a kill or a power cut, is skipped.

    `pandas.DataFrame(read_metrics(workdir)).set_index("step")` makes a table of them.
    """
    path, found = Path(workdir, FILE_NAME), []
    check_no_link(path)
    if path.exists():
        for line in path.read_bytes().splitlines():
            with contextlib.suppress(ValueError, TypeError):  # for example, a list is not hashable
                found.append(from_json(line))
    return found


def to_json(entry: Mapping[str, Any]) -> str:
    """Returns a line of `metrics.jsonl` without its newline, as strict JSON."""

    def strict(value: float | int) -> float | int | str:
        if isinstance(value, float) and not math.isfinite(value):
            return "NaN" if math.isnan(value) else f"{'-' if value < 0 else ''}Infinity"
        return value

    return json.dumps({name: strict(value) for name, value in entry.items()})


def from_json(line: str | bytes) -> dict[str, Any]:
    """Returns the entry passed to `to_json`; raises ValueError for any other line."""
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
    """Returns a message about steps from `first` to `last` without a line in metrics.jsonl.

    `None` if all have one. Pass `entries` if the file was already read.
    """
    entries = read_metrics(workdir) if entries is None else entries
    missing = sorted(set(range(first, last + 1)) - {entry["step"] for entry in entries})
    if not missing:
        return None
    which = f"step {missing[0]:,}"
    if len(missing) > 1:
        which = f"{len(missing):,} steps from {missing[0]:,} to {missing[-1]:,}"
    file = Path(workdir, FILE_NAME)
    return f"{file} has lost the lines of {which}: sums over the run leave them out"
