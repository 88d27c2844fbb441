"""What the processes of a run must agree on, so that all of them go the same way."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from lmlib.checkpoint.manifest import DamagedCheckpointError

_T = TypeVar("_T")


def agreed(folder: Path, check: Callable[[], _T]) -> _T:
    """`check()`, whose DamagedCheckpointError on one process is one on all of them.

    Otherwise some would go on to restore what others fall back from.
    """
    result, damage = None, None
    try:
        result = check()
    except DamagedCheckpointError as error:
        damage = error
    if jax.process_count() > 1:
        found = np.ravel(multihost_utils.process_allgather(np.int32(damage is not None)))
        if damage is None and found.any():
            reason = f"was found damaged by process {int(np.argmax(found))}, which names it"
            damage = DamagedCheckpointError(folder, "a file", reason)
    if damage is not None:
        raise damage
    return result  # type: ignore[return-value]


def barrier(name: str) -> None:
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def orbax_barrier() -> Callable[..., None]:
    """The barrier of Orbax's threads for those of other processes; after an error it raises that.

    Orbax's own waits even then, and so hides the error for as long as a save may take.
    """
    wait = ocp.multihost.get_barrier_sync_fn()

    def barrier(*, key: str, timeout_ms: int) -> None:
        if (error := sys.exception()) is not None:
            raise error
        wait(key=key, timeout_ms=timeout_ms)

    return barrier
