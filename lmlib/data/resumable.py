"""Sources with a state, such as streams, which checkpoints store so that a run can resume."""

import json
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from jax.experimental import multihost_utils


@runtime_checkable
class Resumable(Protocol):
    """A `Source` whose batches depend on more than the step, such as a stream.

    Batches must be requested in the order of their steps, all rows that a process needs of one step
    before the next. Requesting the first batch again restarts the source, as each evaluation does.
    """

    def state(self, step: int) -> dict[str, Any]:
        """Returns JSON values from which `restore` reproduces this process's batches from `step`.

        Called right after the batch of `step - 1`.
        """

    def restore(self, step: int, states: list[dict[str, Any]]) -> None:
        """Makes `step` the next batch; called before any batch.

        `states` come from all processes at that step, in order; the number of processes may have
        changed. Raises ValueError for states that do not fit.
        """


def gather_states(state: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the states of all processes, the same list on each; every process must call it.

    Raises TypeError if a state is not JSON-serialisable.
    """
    text = json.dumps(state)
    if jax.process_count() == 1:
        return [json.loads(text)]
    with jax.disable_jit(False):  # with jit disabled JAX gathers nothing, and hangs
        content = np.frombuffer(text.encode(), np.uint8)
        lengths = np.ravel(multihost_utils.process_allgather(np.int32(content.size)))
        padded = np.zeros(lengths.max(), np.uint8)
        padded[: content.size] = content
        gathered = np.asarray(multihost_utils.process_allgather(padded))
    rows = zip(gathered, lengths, strict=True)
    return [json.loads(row[:length].tobytes()) for row, length in rows]
