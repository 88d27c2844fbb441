"""The axes of the mesh and their meaning.

Only this file and the layout tables (`lmlib.parallel.layout`) contain their names; other code uses
their properties.

For all weights except experts, `expert` is a second `fsdp`. For all weights, `context` is a third.
For all weights except layers that are split into stages, `stage` is a fourth. Statements about
`fsdp` apply to all of them.
"""

from collections.abc import Sequence
from typing import NamedTuple


class MeshAxis(NamedTuple):
    """An axis of the mesh.

    An axis with neither property splits weights in use, and all devices along it see the same
    tokens.

    Attributes:
      tokens_differ: True if devices along it see different tokens, so that sums over tokens include
        it.
      weights_rest_split: True if stored weights are split along it, and gathered for use (FSDP).
    """

    name: str
    tokens_differ: bool = False
    weights_rest_split: bool = False


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
