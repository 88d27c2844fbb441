"""Checkpoints of a run: saved while it goes on, restored onto any mesh.

`<directory>/<step>/state` holds one array per leaf of the state, named by the leaf's path
(`model.layers.query`), so that a checkpoint does not depend on the Python classes that made it;
`<directory>/<step>/progress` is a small JSON object. A step is written to a temporary folder that
is renamed when it is complete: it is whole or absent.

`orbax.checkpoint.CheckpointManager` does the work, not the newer `orbax.checkpoint.v1`, whose
interface is still moving. Its OCDBT format and compression are off: a save takes a fraction of
the time without them, and trained weights hardly compress.
"""

import logging
import os
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from jaxtyping import PyTree


class Checkpoints:
    """The checkpoints in one directory, on a file system that every process reaches.

    Every process of the run makes the same calls in the same order.

        with Checkpoints(workdir / "checkpoints") as checkpoints:
            checkpoints.save(100, state, {"tokens": 1_000_000})
    """

    def __init__(self, directory: str | os.PathLike[str], *, keep: int = 3):
        """Opens `directory` (made if absent); once a save is whole, all but the newest `keep` go.

        Raises:
          ValueError: if `keep` is less than 1.
        """
        if keep < 1:
            raise ValueError(f"keep={keep} would delete every checkpoint: keep at least 1")
        self._noise = _OrbaxNoise()
        logging.getLogger("absl").addFilter(self._noise)
        self._directory = Path(directory).absolute()
        self._manager = ocp.CheckpointManager(
            self._directory,
            options=ocp.CheckpointManagerOptions(
                preservation_policy=ocp.checkpoint_managers.LatestN(keep)
            ),
            item_handlers={
                "state": ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_compression=False),
                "progress": ocp.JsonCheckpointHandler(),
            },
        )

    def save(self, step: int, state: PyTree, progress: dict[str, Any]) -> None:
        """Starts saving; returns once the arrays are copied, so `state` may be donated at once.

        An earlier save that still runs is waited for first. The saving itself may fail later: the
        next `save`, `wait` or `close` raises what went wrong.

        Args:
          step: larger than that of every checkpoint in the directory.
          state: every leaf an array of at least one element, typed PRNG keys included.
          progress: what JSON can hold, the same on every process.

        Raises:
          ValueError: if `step` is not new, or a leaf cannot be saved.
        """
        newest = self._manager.latest_step()
        if newest is not None and step <= newest:
            raise ValueError(
                f"cannot save step {step}: {self._directory} already holds step {newest}; "
                "resume from that one or use another directory"
            )
        arrays = _named_leaves(state)
        for name, array in arrays.items():
            if not isinstance(array, jax.Array) or array.size == 0:
                raise ValueError(
                    f"cannot save {name}: it is {_describe(array)}, not an array with elements; "
                    "keep it out of the state or make it a static field"
                )
        items = ocp.args.Composite(
            state=ocp.args.PyTreeSave(arrays), progress=ocp.args.JsonSave(progress)
        )
        self._manager.save(step, args=items, force=True)  # force: when to save is the caller's say

    def steps(self) -> list[int]:
        """The steps of all whole checkpoints, in order; what a killed save left is not among them.

        Read from the directory, since Orbax's own list has the step that is still being saved.
        """
        return sorted(ocp.utils.checkpoint_steps(self._directory))

    def newest(self) -> int | None:
        """The step of the newest whole checkpoint, or `None`."""
        return max(self.steps(), default=None)

    def restore(self, step: int, target: PyTree) -> tuple[PyTree, dict[str, Any]]:
        """The state saved at `step`, laid out as `target` says, and its `progress`.

        Args:
          step: one of `steps()`.
          target: the state's tree with `jax.ShapeDtypeStruct` leaves, whose shardings are on real
            devices; the mesh need not be the one that the state was saved on.

        Raises:
          ValueError: if there is no such checkpoint, or its arrays do not have the names, shapes
            and dtypes of `target` (nothing is cast).
        """
        if step not in self.steps():
            raise ValueError(
                f"{self._directory} has no whole checkpoint at step {step}; "
                f"it has {self.steps() or 'none'}"
            )
        wanted = _named_leaves(target)
        self._check(step, wanted)
        arguments = ocp.args.PyTreeRestore(
            wanted, restore_args=ocp.checkpoint_utils.construct_restore_args(wanted)
        )
        items = ocp.args.Composite(state=arguments, progress=ocp.args.JsonRestore())
        restored = self._manager.restore(step, args=items)
        for name, array in restored.state.items():
            # Orbax's metadata holds the words of a PRNG key but not its kind: seen only now.
            if array.dtype != wanted[name].dtype:
                raise ValueError(_mismatch(step, name, array, wanted[name]))
        leaves = [restored.state[name] for name in wanted]
        return jax.tree.unflatten(jax.tree.structure(target), leaves), restored.progress

    def wait(self) -> None:
        """Returns when the save that was begun last is whole; raises what went wrong, if it did."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits, then ends Orbax's threads; no other method works afterwards."""
        try:
            self._manager.close()
        finally:
            logging.getLogger("absl").removeFilter(self._noise)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _check(self, step: int, wanted: dict[str, jax.ShapeDtypeStruct]) -> None:
        """Raises ValueError where the checkpoint's metadata does not fit the wanted arrays."""
        saved = self._manager.metadata(step).item_metadata["state"].tree
        absent, unknown = wanted.keys() - saved.keys(), saved.keys() - wanted.keys()
        if absent or unknown:
            raise ValueError(
                f"checkpoint {step} holds another model or optimizer: it lacks {_few(absent)} and "
                f"has {_few(unknown)} besides; restore it with the config that it was saved with"
            )
        for name, leaf in wanted.items():
            stored = leaf
            if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                bare = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
                stored = jax.eval_shape(jax.random.key_data, bare)
            if (saved[name].shape, saved[name].dtype) != (stored.shape, stored.dtype):
                raise ValueError(_mismatch(step, name, saved[name], leaf))
            mesh = getattr(leaf.sharding, "mesh", None)
            if leaf.sharding is None or isinstance(mesh, jax.sharding.AbstractMesh):
                raise ValueError(
                    f"the target's {name} is on no devices (sharding {leaf.sharding}): "
                    "give it a NamedSharding of a mesh from jax.make_mesh"
                )


class _OrbaxNoise(logging.Filter):
    """Keeps Orbax's INFO lines off the terminal, and its warning that there is no OCDBT to merge.

    Under `absl.app.run` it writes some forty lines a save.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        if "orbax" not in record.pathname:
            return True
        return record.levelno >= logging.WARNING and "merge of OCDBT" not in record.getMessage()


def _named_leaves(tree: PyTree) -> dict[str, Any]:
    """Leaves by path, in tree order: `{"model.layers.query": …, "optimizer.0.count": …}`."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf
        for path, leaf in jax.tree.leaves_with_path(tree)
    }


def _mismatch(step: int, name: str, saved: Any, wanted: Any) -> str:
    return (
        f"checkpoint {step} has {name} as {_describe(saved)}, but {_describe(wanted)} is wanted; "
        "restore it with the config that it was saved with"
    )


def _describe(leaf: Any) -> str:
    """`float32[4, 8]` for what has a shape and a dtype."""
    if not hasattr(leaf, "shape"):
        return f"{leaf!r} ({type(leaf).__name__})"
    return f"{leaf.dtype}[{', '.join(map(str, leaf.shape))}]"


def _few(names: set[str]) -> str:
    """At most three names, in order, then how many more."""
    shown = sorted(names)[:3]
    rest = [f"{len(names) - 3} more"] if len(names) > 3 else []
    return ", ".join([*shown, *rest]) or "nothing"
