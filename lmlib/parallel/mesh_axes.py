"""The axes of the mesh and their meaning.

Only this file and the tables of `lmlib.parallel.layout` contain their names; other code uses their
properties. `expert` (except for experts), `context` and `stage` (except for layers that it splits)
also store weights like `fsdp`: statements about `fsdp` apply to them too.
"""

from collections.abc import Sequence
from typing import NamedTuple


class MeshAxis(NamedTuple):
    """An axis of the mesh. One with neither property splits weights in use."""

    name: str
    tokens_differ: bool = False  # devices see different tokens: sums over tokens include it
    weights_rest_split: bool = False  # stored weights are split, and gathered for use (FSDP)


MESH_AXES = (
    MeshAxis("data", tokens_differ=True),
    MeshAxis("stage", tokens_differ=True, weights_rest_split=True),  # each has its own layers
    MeshAxis("fsdp", tokens_differ=True, weights_rest_split=True),
    MeshAxis("expert", tokens_differ=True, weights_rest_split=True),  # experts stay split in use
    MeshAxis("context", tokens_differ=True, weights_rest_split=True),  # splits each row
    MeshAxis("tensor"),
)

NAMES = tuple(axis.name for axis in MESH_AXES)
TOKENS = tuple(axis.name for axis in MESH_AXES if axis.tokens_differ)
STORAGE = tuple(axis.name for axis in MESH_AXES if axis.weights_rest_split)
# Devices along these axes see different tokens and hold copies of the same weights.
REPLICA_AXES = tuple(name for name in TOKENS if name not in STORAGE)
# Devices along these axes multiply the same tokens by different parts of the weights.
TENSOR_AXES = tuple(name for name in NAMES if name not in TOKENS)
# Layouts name these only if they have several devices. Otherwise a user's model could not multiply
# positions by positions, since `context` would split both, and rules that name the axes of batches
# would have to name `stage` too.
NAMED_IF_USED = ("context", "stage")
STAGE = "stage"
OVER_SLICES = ("data", "stage", "fsdp")  # may span slices of TPUs, in this order

MeshAxes = str | tuple[str, ...] | None


def names_of(mesh_axes: MeshAxes) -> tuple[str, ...]:
    """The mesh axes that split an array's axis, as a tuple."""
    return (mesh_axes,) if isinstance(mesh_axes, str) else mesh_axes or ()


def place_of(names: Sequence[str]) -> MeshAxes:
    """The inverse of `names_of`."""
    return tuple(names) if len(names) > 1 else names[0] if names else None
