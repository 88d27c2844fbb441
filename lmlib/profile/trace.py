"""Reads traces of JAX's profiler: the instructions that the devices executed.

The format is that of XLA's profiler. On CPUs and GPUs, the events of instructions name them in
their statistics; on TPUs, the events are on a line of their own. The TPU format is taken from the
profiler's source and has not been tested on a real trace.

A GPU's events are kernels; a library call has several of them. Kernels that were launched together
as a graph carry the graph's name (`GRAPH`) in place of their instruction's.
"""

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jax.profiler import ProfileData

# Prefixes of the planes and lines with a platform's executions. Other lines of these planes are
# summaries, and the host's plane has the launches of accelerator kernels.
_PLACES = {
    "cpu": ("/host:CPU", ""),
    "gpu": ("/device:GPU:", "Stream #"),
    "tpu": ("/device:TPU:", "XLA Ops"),
}


GRAPH = "command_buffer"  # XLA's name, with a number, for kernels launched together


class TraceError(ValueError):
    """A folder without a trace, or a file that is not one."""


@dataclasses.dataclass(frozen=True)
class Execution:
    """One execution of a compiled program's instruction on one device, or of one of its kernels.

    Args:
      device: the device's name in the trace.
      program: "jit_step", or "" if the trace does not say.
      instruction: its name in the program's text; for GPU kernels in a graph, `GRAPH` and a number.
      kernel: the GPU kernel's name, otherwise "".
      start: in seconds, from an origin shared by all executions of a trace.
      seconds: duration.
    """

    device: str
    program: str
    instruction: str
    start: float
    seconds: float
    kernel: str = ""

    @property
    def end(self) -> float:
        return self.start + self.seconds


def newest_trace(folder: Path) -> Path:
    """Returns the file of the last trace that `jax.profiler.trace(folder)` wrote.

    Raises:
      TraceError: if there is none.
    """
    files = sorted(folder.rglob("*.xplane.pb"), key=lambda file: file.stat().st_mtime_ns)
    if not files:
        raise TraceError(f"{folder} has no trace: it contains no *.xplane.pb file")
    return files[-1]


def read_trace(file: Path, platform: str) -> list[Execution]:
    """Returns every instruction executed by the devices of `platform`, unordered.

    Args:
      file: as returned by `newest_trace`.
      platform: as named by `jax.default_backend()` and `jax.Device.platform`.

    Raises:
      TraceError: if the file is not a trace, or the platform is not supported.
    """
    if platform not in _PLACES:
        raise TraceError(f"traces of {platform!r} cannot be read, only of {', '.join(_PLACES)}")
    try:
        return list(_executions(ProfileData.from_file(str(file)), platform))
    except RuntimeError as error:  # the parser's errors
        raise TraceError(f"{file} cannot be read as a trace: {error}") from error


def _executions(trace: ProfileData, platform: str) -> Iterator[Execution]:
    of_plane, of_line = _PLACES[platform]
    for plane in trace.planes:
        if not plane.name.startswith(of_plane):
            continue
        for line in plane.lines:
            if not line.name.startswith(of_line):
                continue
            for event in line.events:
                stats: dict[str, Any] = dict(event.stats)
                printed = event.name if platform == "tpu" else None
                if (name := _instruction(stats, printed)) is None:
                    continue
                yield Execution(
                    # Simulated CPU devices share a plane.
                    device=f"{plane.name} {stats.get('device_ordinal', '')}".strip(),
                    program=str(stats.get("hlo_module", "")),
                    instruction=name,
                    start=event.start_ns / 1e9,
                    seconds=event.duration_ns / 1e9,
                    kernel=event.name if platform == "gpu" else "",
                )


def _instruction(stats: dict[str, Any], printed: str | None) -> str | None:
    """Returns the name of an instruction; `None` for other events.

    Args:
      printed: a TPU event's name: the instruction as printed in the program's text.
    """
    if "hlo_op" in stats:
        return str(stats["hlo_op"])
    found = re.match(r"%?([\w.\-]+)", printed or "")
    return found.group(1) if found else None
