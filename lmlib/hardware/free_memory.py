"""Whether arrays fit into memory, asked before they are made.

Too many of them end in an error of JAX's on accelerators, and on CPUs in the kernel's SIGKILL.
"""

import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from lmlib.terminal.quantities import bytes_text


def check_fits(what: str, arrays: Any, devices: Sequence[Any]) -> None:
    """Raises MemoryError, which says how many bytes, if `arrays` take more memory than is free.

    Args:
      what: "a cache of 8 × 2,048 tokens", say.
      arrays: a tree of `ShapeDtypeStruct`s.
      devices: of JAX, on which they lie; those of other processes are not asked.
    """
    ours = [device for device in devices if device.process_index == jax.process_index()]
    needed = bytes_per_device(arrays)
    if ours and ours[0].platform == "cpu":  # they share one memory
        check_fits_host(what, needed * len(ours))
    elif ours and (stats := ours[0].memory_stats()) and "bytes_limit" in stats:
        free = stats["bytes_limit"] - stats["bytes_in_use"]
        _check(what, needed, free, f"each {ours[0].device_kind} has {bytes_text(free)} free")


def check_fits_host(what: str, needed: int) -> None:
    """As `check_fits`, of so many bytes of the machine's own memory."""
    if (free := host_bytes()) is not None:
        _check(what, needed, free, f"this machine has {bytes_text(free)} free")


def _check(what: str, needed: int, free: int, has: str) -> None:
    if needed > free:
        raise MemoryError(f"{what} would take {bytes_text(needed)} of memory, and {has}")


def bytes_per_device(tree: Any) -> int:
    """Of arrays, or of shapes, which lie whole on a device if they have no sharding."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape) if leaf.sharding else leaf.shape)
        * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def host_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """How much more of the machine's memory this process can have, at most; `None` where Linux's
    files `proc` and `cgroups` do not say."""
    known = []
    if (available := _kilobytes(proc / "meminfo", "MemAvailable")) is not None:
        known.append(available + (_kilobytes(proc / "meminfo", "SwapFree") or 0))
    if limits := list(_cgroup_limits(proc / "self/cgroup", cgroups)):
        known.append(max(0, min(limits) - (_kilobytes(proc / "self/status", "VmRSS") or 0)))
    return min(known, default=None)


def _kilobytes(file: Path, name: str) -> int | None:
    """In bytes, what `file` has in kB under a name."""
    found = re.search(rf"^{name}:\s*(\d+) kB$", _text(file), re.MULTILINE)
    return 1024 * int(found[1]) if found else None


def _cgroup_limits(own: Path, cgroups: Path) -> Iterator[int]:
    """Of this process's group and those that it is part of, in versions 2 and 1; in bytes."""
    for number, controllers, group in re.findall(r"^(\d+):(.*?):/(.*)$", _text(own), re.MULTILINE):
        if number == "0" or "memory" in controllers.split(","):
            folder = (cgroups if number == "0" else cgroups / "memory") / group
            for each in (folder, *folder.parents):
                for name in ("memory.max", "memory.limit_in_bytes"):
                    if (limit := _text(each / name).strip()).isdecimal():  # or "max"
                        yield int(limit)


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
