"""Changes of an experiment's settings that may make its step need less memory."""

import dataclasses
from collections.abc import Iterator, Sequence

from jax.sharding import Mesh

from lmlib.experiment import Experiment
from lmlib.parallel.layout import along, pieces
from lmlib.parallel.other_meshes import with_fewer_copies, with_smaller_parts
from lmlib.plan.memory import LargeArray, Memory


@dataclasses.dataclass(frozen=True)
class Change:
    """Some settings of an experiment changed.

    Args:
      flags: the settings, as `python -m runner` takes them.
      experiment: with them.
      spared: bytes of each device that it should spare, besides those of state, gradients and kept
        activations.
    """

    flags: tuple[str, ...]
    experiment: Experiment
    spared: int = 0


def changes(experiment: Experiment, memory: Memory) -> Iterator[Change]:
    """Those that make sense, one setting each, or several that belong together.

    Args:
      memory: what the step of `experiment` takes.
    """
    for made in (
        _fewer_sequences(experiment),
        _less_kept(experiment, memory),
        _split_wider(experiment),
        _split_sequences(experiment),
        _split_layers(experiment),
        _in_8_bits(experiment),
        _fewer_logits(experiment, memory.largest_arrays),
    ):
        if made is not None and _makes_sense(made.experiment):
            yield made


def keeping(experiment: Experiment, saved: tuple[str, ...]) -> Experiment:
    """`experiment` with `saved` as what is kept."""
    compute = dataclasses.replace(experiment.compute, saved=saved)
    return dataclasses.replace(experiment, compute=compute)


def microbatch_counts(experiment: Experiment) -> list[int]:
    """The numbers of microbatches that each device's rows can be split into, ascending."""
    rows = experiment.data.batch_size // pieces(along("batch"), experiment.mesh)
    return [count for count in range(1, rows + 1) if rows % count == 0]


def microbatches_flag(count: int) -> str:
    return f"--fdl.microbatches={count}"


def saved_flag(saved: tuple[str, ...]) -> str:
    return f'--fdl.compute.saved="{saved}"'


def _makes_sense(experiment: Experiment) -> bool:
    try:
        experiment.check()
    except ValueError:  # the mesh does not divide the heads, say
        return False
    return True


def _fewer_sequences(experiment: Experiment) -> Change | None:
    more = [count for count in microbatch_counts(experiment) if count > experiment.microbatches]
    if not more:
        return None
    changed = dataclasses.replace(experiment, microbatches=more[0])
    return Change((microbatches_flag(more[0]),), changed)


def _less_kept(experiment: Experiment, memory: Memory) -> Change | None:
    """Without the largest of what is kept by choice."""
    names = experiment.compute.kept(experiment.recipe.made.names.saved)
    kept = {each.name: each.bytes_per_device for each in memory.saved if each.name in names}
    if not kept:
        return None
    largest = max(kept, key=lambda name: kept[name])
    others = tuple(name for name in names if name != largest)
    return Change((saved_flag(others),), keeping(experiment, others))


def _split_wider(experiment: Experiment) -> Change | None:
    """Weights and moments split over what held copies of them, but not over slices."""
    mesh = with_fewer_copies(experiment.mesh)
    if mesh is None:
        return None
    return Change(_mesh_flags(experiment, mesh), dataclasses.replace(experiment, mesh=mesh))


def _split_sequences(experiment: Experiment) -> Change | None:
    """Sequence parallelism where there is tensor parallelism without it."""
    parts = pieces(along("mlp"), experiment.mesh)
    if parts == 1 or experiment.compute.sequence_parallel:
        return None
    compute = dataclasses.replace(experiment.compute, sequence_parallel=True)
    flag = "--fdl.compute.sequence_parallel=True"
    return Change((flag,), dataclasses.replace(experiment, compute=compute))


def _split_layers(experiment: Experiment) -> Change | None:
    """Twice as much tensor parallelism, sequence-parallel, with as many sequences of a device at a
    time as before: fewer devices share the batch, so it takes twice the microbatches."""
    mesh = with_smaller_parts(experiment.mesh)
    if mesh is None:
        return None
    count = 2 * experiment.microbatches
    changed = dataclasses.replace(
        experiment,
        mesh=mesh,
        microbatches=count,
        compute=dataclasses.replace(experiment.compute, sequence_parallel=True),
    )
    own = ("--fdl.compute.sequence_parallel=True", microbatches_flag(count))
    return Change((*_mesh_flags(experiment, mesh), *own), changed)


def _in_8_bits(experiment: Experiment) -> Change | None:
    if experiment.trainable is None or experiment.frozen_dtype == "int8":
        return None
    changed = dataclasses.replace(experiment, frozen_dtype="int8")
    return Change(("--fdl.frozen_dtype=int8",), changed)


def _fewer_logits(experiment: Experiment, arrays: Sequence[LargeArray]) -> Change | None:
    """Half as many at a time, where they are among the largest arrays."""
    vocab = experiment.recipe.made.vocab // pieces(along("vocab"), experiment.mesh)
    logits = [array for array in arrays if array.shape[1:] == (vocab,) and array.shape[0] > 1]
    if not logits:
        return None
    chunk = logits[0].shape[0] // 2
    compute = dataclasses.replace(experiment.compute, loss_chunk=chunk)
    changed = dataclasses.replace(experiment, compute=compute)
    return Change((f"--fdl.compute.loss_chunk={chunk}",), changed, spared=logits[0].bytes // 2)


def _mesh_flags(experiment: Experiment, mesh: Mesh) -> tuple[str, ...]:
    before = experiment.mesh.shape
    return tuple(
        f"--fdl.mesh.{axis}={size}" for axis, size in mesh.shape.items() if size != before[axis]
    )
