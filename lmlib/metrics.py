"""The metrics of a run on disk: metrics.jsonl, one object a line, and TensorBoard events."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from tensorboardX import SummaryWriter

FILE_NAME = "metrics.jsonl"
Value = float | int | None


class MetricsLog:
    """Appends a line for each step; a context manager.

    Begun again after `resume_step`, it first drops the lines of later steps and a line that a kill
    cut short: those steps are made again, so that the file has each step once.
    """

    def __init__(
        self, workdir: str | os.PathLike[str], resume_step: int | None, enabled: bool = True
    ):
        """`enabled=False`, for all processes but one, writes nothing."""
        self._enabled = enabled
        if not enabled:
            return
        folder = Path(workdir)
        folder.mkdir(parents=True, exist_ok=True)
        kept = [line for line in read_metrics(folder) if line["step"] <= (resume_step or 0)]
        unfinished = folder / f".{FILE_NAME}.unfinished"
        with open(unfinished, "w") as file:
            file.writelines(_text(line) for line in kept)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(folder / FILE_NAME)
        self._file = open(folder / FILE_NAME, "a")  # noqa: SIM115 (closed by `close`)
        # TensorBoard hides events from `purge_step` on that an earlier start wrote.
        self._events = SummaryWriter(str(folder / "tensorboard"), purge_step=(resume_step or 0) + 1)

    def write(self, step: int, metrics: Mapping[str, Value]) -> None:
        """Appends {"step": step, **metrics}. `None` is left out; NaN and infinities, which JSON
        does not have, are the strings "NaN", "Infinity" and "-Infinity"."""
        if not self._enabled:
            return
        values = {name: value for name, value in metrics.items() if value is not None}
        self._file.write(_text({"step": step, **values}))
        self._file.flush()
        for name, value in values.items():
            self._events.add_scalar(name, value, step)

    def close(self) -> None:
        if self._enabled:
            self._file.close()
            self._events.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def read_metrics(workdir: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The lines of `workdir`/metrics.jsonl; empty if there is none. A last line without its end,
    which only a killed run leaves, is not read."""
    file = Path(workdir) / FILE_NAME
    if not file.exists():
        return []
    whole, _, _ = file.read_text().rpartition("\n")
    return [_numbers(json.loads(line)) for line in whole.splitlines()]


_NAMES = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def _numbers(line: dict[str, Any]) -> dict[str, Any]:
    return {name: _NAMES.get(value, value) for name, value in line.items()}


def _text(line: Mapping[str, Any]) -> str:
    def strict(value: Any) -> Any:
        if isinstance(value, float) and not math.isfinite(value):
            return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
        return value

    return json.dumps({name: strict(value) for name, value in line.items()}) + "\n"
