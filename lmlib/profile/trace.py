"""What the devices executed while JAX's profiler watched: the trace that it writes, read.

The format is that of XLA's profiler. On CPUs and GPUs the events of instructions name them in their
statistics; on TPUs they are the events of a line of their own. Of those no trace was seen so far:
what is said of them here is read off the profiler's code.

A GPU's events are kernels, of which a library's call has several. Those that were launched together
as a graph name that (`GRAPH`) in place of their instruction.
"""

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jax.profiler import ProfileData

# How the names of planes and lines begin that have what ran on a platform. Other lines of these
# planes sum it up, and the host's plane has the launches of accelerators' kernels.
_PLACES = {
    "cpu": ("/host:CPU", ""),
    "gpu": ("/device:GPU:", "Stream #"),
    "tpu": ("/device:TPU:", "XLA Ops"),
}


GRAPH = "command_buffer"  # what XLA calls kernels that it launches together, with a number


class TraceError(ValueError):
    """A folder without a trace, or a file that is none."""


@dataclasses.dataclass(frozen=True)
class Execution:
    """One instruction of a compiled program, executed once by one device, or one of its kernels.

    Args:
      device: as the trace calls it.
      program: "jit_step", or "" where the trace does not say.
      instruction: its name in the program's text; on GPUs of kernels in a graph, `GRAPH` and a
        number.
      kernel: of a GPU, its name; else "".
      start: seconds since some moment that all executions of a trace share.
      seconds: from its beginning to its end.
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
    """The file of the last trace that `jax.profiler.trace(folder)` wrote.

    Raises:
      TraceError: if there is none.
    """
    files = sorted(folder.rglob("*.xplane.pb"), key=lambda file: file.stat().st_mtime_ns)
    if not files:
        raise TraceError(f"{folder} holds no trace: there is no *.xplane.pb in it")
    return files[-1]


def read_trace(file: Path, platform: str) -> list[Execution]:
    """Every instruction that the devices of `platform` executed, in no order.

    Args:
      file: as `newest_trace` finds it.
      platform: as `jax.default_backend()` and `jax.Device.platform` name it.

    Raises:
      TraceError: if it is no trace, or nothing is known of those of `platform`.
    """
    if platform not in _PLACES:
        raise TraceError(f"traces of {platform!r} cannot be read, only of {', '.join(_PLACES)}")
    try:
        return list(_executions(ProfileData.from_file(str(file)), platform))
    except RuntimeError as error:  # what the parser raises is one
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
                    # The devices that a CPU simulates share a plane.
                    device=f"{plane.name} {stats.get('device_ordinal', '')}".strip(),
                    program=str(stats.get("hlo_module", "")),
                    instruction=name,
                    start=event.start_ns / 1e9,
                    seconds=event.duration_ns / 1e9,
                    kernel=event.name if platform == "gpu" else "",
                )


def _instruction(stats: dict[str, Any], printed: str | None) -> str | None:
    """The name of an instruction; `None` for an event that is none.

    Args:
      printed: what a TPU calls the event: the instruction as the program's text has it.
    """
    if "hlo_op" in stats:
        return str(stats["hlo_op"])
    found = re.match(r"%?([\w.\-]+)", printed or "")
    return found.group(1) if found else None
