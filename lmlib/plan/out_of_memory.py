"""What XLA says when a program has no room in a TPU's memory."""

import re

from lmlib.plan.largest_arrays import LargeArray

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = r"([\d.]+)([KMGT]?)"
_ALLOCATION = re.compile(
    rf"Size: {_SIZE}(?:\s+Operator: op_name=\"(?P<operator>[^\"]*)\"[^\n]*)?"
    r"\s+Shape: (?P<shape>\S+)"
)


class OutOfMemory(Exception):
    """The compiler found no room.

    Args:
      needed: bytes.
      temporaries_only: whether state and batch come on top of them.
      largest: what takes most of it, as far as the compiler says.
    """

    def __init__(
        self, needed: int, temporaries_only: bool, largest: tuple[LargeArray, ...]
    ) -> None:
        super().__init__(f"needs {needed:,} bytes")
        self.needed = needed
        self.temporaries_only = temporaries_only
        self.largest = largest


def out_of_memory(message: str) -> OutOfMemory | None:
    """Reads the message of an error of XLA; `None` if it is about something else."""
    if "RESOURCE_EXHAUSTED" not in message:
        return None
    temporaries = re.search(rf"HLO temporaries \({_SIZE}\) exceeds", message)
    used = temporaries or re.search(rf"Used {_SIZE} of", message)
    if used is None:
        return None
    largest = tuple(
        LargeArray(
            f"{found['shape']} {(found['operator'] or '')}".strip(), _bytes(found[1], found[2])
        )
        for found in _ALLOCATION.finditer(message)
    )
    return OutOfMemory(_bytes(used[1], used[2]), temporaries is not None, largest[:5])


def _bytes(number: str, unit: str) -> int:
    return round(float(number) * _UNITS[unit])
