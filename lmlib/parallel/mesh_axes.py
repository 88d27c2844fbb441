"""The axes of the mesh, and what each means. Their names stand here and in the layout tables
(`lmlib.parallel.layout`); other code asks for what it needs of them.

To all weights but experts `expert` is a second `fsdp`, to all weights `context` is a third, and to
all weights but those of layers that lie in stages `stage` is a fourth: what is said of one is true
of all.
"""

from collections.abc import Sequence
from typing import NamedTuple


class MeshAxis(NamedTuple):
    """An axis of the mesh. One with neither property splits weights in use, and all devices along
    it see the same tokens.

    Attributes:
      tokens_differ: each device along it sees other tokens, so that sums over tokens are sums over
        it too.
      weights_rest_split: weights rest split along it, and are gathered for their use (FSDP).
    """

    name: str
    tokens_differ: bool = False
    weights_rest_split: bool = False


MESH_AXES = (
    MeshAxis("data", tokens_differ=True),
    MeshAxis("stage", tokens_differ=True, weights_rest_split=True),  # each has layers of its own
    MeshAxis("fsdp", tokens_differ=True, weights_rest_split=True),
    MeshAxis("expert", tokens_differ=True, weights_rest_split=True),  # experts stay split in use
    MeshAxis("context", tokens_differ=True, weights_rest_split=True),  # splits each row
    MeshAxis("tensor"),
)

NAMES = tuple(axis.name for axis in MESH_AXES)
TOKENS = tuple(axis.name for axis in MESH_AXES if axis.tokens_differ)
STORAGE = tuple(axis.name for axis in MESH_AXES if axis.weights_rest_split)
# Along these devices see other tokens and hold copies of the same weights.
COPIES = tuple(name for name in TOKENS if name not in STORAGE)
# Along these devices multiply the same tokens by other parts of the weights.
PARTS = tuple(name for name in NAMES if name not in TOKENS)
# Named in a layout only where several devices lie along them. Else a model of a user's could not
# multiply positions by positions, which would both lie along `context`, and rules that name what
# batches lie along would have to name `stage` too.
NAMED_IF_USED = ("context", "stage")
STAGE = "stage"
OVER_SLICES = ("data", "stage", "fsdp")  # of TPUs, in this order; others stay within one

MeshAxes = str | tuple[str, ...] | None


def names_of(mesh_axes: MeshAxes) -> tuple[str, ...]:
    """The axes that an array's axis lies along, as a tuple."""
    return (mesh_axes,) if isinstance(mesh_axes, str) else mesh_axes or ()


def place_of(names: Sequence[str]) -> MeshAxes:
    """The inverse of `names_of`."""
    return tuple(names) if len(names) > 1 else names[0] if names else None
