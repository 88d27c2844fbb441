"""What to change where memory is short: for each part the setting that makes it smaller."""

import math
from collections.abc import Sequence

from lmlib.experiment import Experiment
from lmlib.models.rematerialization import ACTIVATIONS
from lmlib.plan.largest_arrays import LargeArray
from lmlib.plan.parts import Part


def advice(part: Part, experiment: Experiment, arrays: Sequence[LargeArray]) -> str:
    """A setting of `experiment`, as the command line takes it, that makes `part` smaller.

    Args:
      part: by its name in `lmlib.plan.memory`: "parameters", "saved mlp_gate", "other temporaries".
      arrays: the largest of the step.
    """
    if part.name in ("parameters", "optimizer state", "gradients"):
        return _more_shards(experiment)
    name = part.name.removeprefix("saved ")
    model = experiment.abstract_model()
    if name in ACTIVATIONS:
        others = tuple(saved for saved in model.saved if saved != name)
        return f'compute it again: --fdl.model.saved="{others}"'
    if name == "other temporaries":
        logits = model.vocab // experiment.mesh.shape["tensor"]
        for array in arrays:
            if array.shape[1:] == (logits,) and array.bytes > part.bytes / 4:
                return f"fewer logits at a time: --fdl.model.loss_chunk={array.shape[0] // 2}"
    return fewer_rows(experiment)


def fewer_rows(experiment: Experiment) -> str:
    """How to have fewer sequences, or less of each, on a device at a time."""
    mesh = experiment.mesh.shape
    counts = microbatch_counts(experiment)
    if more := [count for count in counts if count > experiment.microbatches]:
        return f"fewer sequences at a time: --fdl.microbatches={more[0]}"
    if mesh["tensor"] > 1 and not experiment.abstract_model().sequence_parallel:
        return "split the sequence between layers: --fdl.model.sequence_parallel=True"
    return f"split each sequence's work: --fdl.mesh.tensor={2 * mesh['tensor']}"


def microbatch_counts(experiment: Experiment) -> list[int]:
    """Into how many microbatches the rows of each device can be split, ascending."""
    mesh = experiment.mesh.shape
    rows = experiment.data.batch_size // (mesh["data"] * mesh["fsdp"])
    return [count for count in range(1, rows + 1) if rows % count == 0]


def _more_shards(experiment: Experiment) -> str:
    mesh = experiment.mesh.shape
    if mesh["data"] > 1:
        return f"shard over more: --fdl.mesh.data=1 --fdl.mesh.fsdp={mesh['data'] * mesh['fsdp']}"
    return f"over all {math.prod(mesh.values())} devices already: use more, or a smaller model"
