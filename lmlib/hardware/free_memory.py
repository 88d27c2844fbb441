"""Checks that arrays fit into memory before they are allocated.

Otherwise an allocation that is too large ends in a JAX error on accelerators, and on CPUs in a
SIGKILL from the kernel.
"""

import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from lmlib.terminal.quantities import bytes_text


def check_fits(what: str, arrays: Any, devices: Sequence[Any]) -> None:
    """Raises MemoryError, with the number of bytes, if `arrays` need more memory than is free.

    Args:
      what: description for the message, such as "a cache of 8 × 2,048 tokens".
      arrays: a tree of `ShapeDtypeStruct`s.
      devices: the JAX devices of the arrays; only this process's own are checked.
    """
    ours = [device for device in devices if device.process_index == jax.process_index()]
    needed = bytes_per_device(arrays)
    if ours and ours[0].platform == "cpu":  # CPU devices share one memory
        check_fits_host(what, needed * len(ours))
    elif ours and (stats := ours[0].memory_stats()) and "bytes_limit" in stats:
        free = stats["bytes_limit"] - stats["bytes_in_use"]
        _check(what, needed, free, f"each {ours[0].device_kind} has {bytes_text(free)} free")


def check_fits_host(what: str, needed: int) -> None:
    """Like `check_fits`, for `needed` bytes of host memory."""
    if (free := host_bytes()) is not None:
        _check(what, needed, free, f"this machine has {bytes_text(free)} free")


def _check(what: str, needed: int, free: int, has: str) -> None:
    if needed > free:
        raise MemoryError(f"{what} would take {bytes_text(needed)} of memory, and {has}")


def bytes_per_device(tree: Any) -> int:
    """Returns the bytes per device of arrays or shapes; without a sharding they are not split."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape) if leaf.sharding else leaf.shape)
        * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def host_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Returns the host memory that this process can still allocate, at most, in bytes.

    `None` if Linux's files `proc` and `cgroups` don't say.
    """
    known = []
    if (available := _kilobytes(proc / "meminfo", "MemAvailable")) is not None:
        known.append(available + (_kilobytes(proc / "meminfo", "SwapFree") or 0))
    if limits := list(_cgroup_limits(proc / "self/cgroup", cgroups)):
        known.append(max(0, min(limits) - (_kilobytes(proc / "self/status", "VmRSS") or 0)))
    return min(known, default=None)


def _kilobytes(file: Path, name: str) -> int | None:
    """Returns in bytes a value that `file` lists in kB under `name`."""
    found = re.search(rf"^{name}:\s*(\d+) kB$", _text(file), re.MULTILINE)
    return 1024 * int(found[1]) if found else None


def _cgroup_limits(own: Path, cgroups: Path) -> Iterator[int]:
    """Yields the limits of this process's cgroup and its ancestors, versions 2 and 1, in bytes."""
    for number, controllers, group in re.findall(r"^(\d+):(.*?):/(.*)$", _text(own), re.MULTILINE):
        if number == "0" or "memory" in controllers.split(","):
            folder = (cgroups if number == "0" else cgroups / "memory") / group
            for each in (folder, *folder.parents):
                for name in ("memory.max", "memory.limit_in_bytes"):
                    if (limit := _text(each / name).strip()).isdecimal():  # otherwise "max"
                        yield int(limit)


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
