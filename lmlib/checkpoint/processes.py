"""Synchronisation of a run's processes, so that all of them take the same decision."""

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from lmlib.checkpoint.failures import DamagedCheckpointError, RemovedCheckpointError
from lmlib.checkpoint.folders import reading

_T = TypeVar("_T")

_SOUND, _DAMAGED, _REMOVED = range(3)  # the finding of a process


def agreed(folder: Path, check: Callable[[], _T]) -> _T:
    """Returns the result of `check()`, which reads a step's `folder`; all processes agree.

    Damage or removal that one process finds is raised on all of them. Otherwise some would restore
    a step from which others fall back.

    Raises:
      DamagedCheckpointError: as `check` does.
      RemovedCheckpointError: if the folder has been removed.
    """
    result, own = None, _SOUND
    problem: DamagedCheckpointError | RemovedCheckpointError | None = None
    try:
        with reading(folder):
            result = check()
    except (DamagedCheckpointError, RemovedCheckpointError) as error:
        problem, own = error, _DAMAGED if isinstance(error, DamagedCheckpointError) else _REMOVED
    if jax.process_count() > 1:
        found = np.ravel(multihost_utils.process_allgather(np.int32(own)))
        worst = int(np.max(found))
        if worst == _REMOVED and own != _REMOVED:
            problem = RemovedCheckpointError(folder)
        elif worst == _DAMAGED and own == _SOUND:
            reason = f"was found damaged by process {int(np.argmax(found))}, which names it"
            problem = DamagedCheckpointError(folder, "a file", reason)
    if problem is not None:
        raise problem
    return result  # type: ignore[return-value]


def random_text() -> str:
    """Returns random text, the same on all processes; they wait for each other."""
    number = secrets.randbits(31)
    if jax.process_count() > 1:
        number = int(multihost_utils.broadcast_one_to_all(np.int32(number)))
    return f"{number:08x}"


def barrier(name: str) -> None:
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def wait_for_all(name: str, seconds: int) -> None:
    """Returns once every process has called it; raises TimeoutError after `seconds`."""
    if jax.process_count() == 1:
        return
    try:
        ocp.multihost.get_barrier_sync_fn()(key=name, timeout_ms=1_000 * seconds)
    except jax.errors.JaxRuntimeError as error:
        raise TimeoutError(
            f"another process has not written its part of the checkpoint in {seconds:,} s"
        ) from error
