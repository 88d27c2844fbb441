"""Memory, processor and GPU use of this process, measured between steps.

A measurement takes about 50 µs. Utilization of GPUs comes from `nvidia-smi`, a process of its own
that no step waits for.
"""

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax

SECONDS = 10.0  # the least time between two measurements, except in the first steps
_MEMORY = Path("/proc/self/statm")  # of Linux: sizes in pages, the second one resident
_QUERY = ("--query-gpu=utilization.gpu", "--format=csv,noheader,nounits")


class SystemMetrics:
    """Measures at steps that are multiples of a power of two.

    Runs that differ only in seeds therefore have measurements at the same steps. The power follows
    the speed of the steps: measurements are 10 to 40 seconds apart.
    """

    def __init__(
        self, devices: Sequence[jax.Device], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Begins to count the time of the processors; `devices` are this process's own."""
        self._devices, self._clock = devices, clock
        self._every = 1  # steps
        self._began, self._cpu_seconds = clock(), time.process_time()
        has_gpus = any(each.platform == "gpu" for each in devices)
        self._command = shutil.which("nvidia-smi") if has_gpus else None
        self._query: subprocess.Popen[str] | None = None

    def at(self, step: int) -> dict[str, float]:
        """Returns the measurements that are due at `step`; `lmlib/metrics/meanings.toml`."""
        found = dict(self._utilization())
        if step % self._every:
            return found
        now, cpu_seconds = self._clock(), time.process_time()
        seconds = now - self._began
        found["cpu_cores"] = (cpu_seconds - self._cpu_seconds) / max(seconds, 1e-9)
        self._began, self._cpu_seconds = now, cpu_seconds
        if seconds < SECONDS:
            self._every *= 2
        elif seconds > 4 * SECONDS and self._every > 1:
            self._every //= 2
        with contextlib.suppress(OSError):  # not on macOS
            pages = int(_MEMORY.read_text().split()[1])
            found["process_memory_bytes"] = pages * os.sysconf("SC_PAGE_SIZE")
        statistics = [device.memory_stats() or {} for device in self._devices]
        if used := [each["bytes_in_use"] for each in statistics if "bytes_in_use" in each]:
            found["device_memory_bytes"] = max(used)
        if self._command is not None and self._query is None:
            # The ids are numbers or UUIDs, and nvidia-smi takes both; all GPUs without them.
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            ids = [f"--id={visible}"] if visible else []
            with contextlib.suppress(OSError):
                self._query = subprocess.Popen(
                    [self._command, *_QUERY, *ids],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                )
        return found

    def _utilization(self) -> Iterator[tuple[str, float]]:
        """Yields the mean over the GPUs once the last query has ended."""
        if self._query is None or self._query.poll() is None:
            return
        percent = [int(each) for each in self._query.communicate()[0].split() if each.isdecimal()]
        self._query = None
        if percent:
            yield "gpu_utilization", sum(percent) / len(percent) / 100
