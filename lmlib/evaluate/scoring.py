"""Token losses of batches on the host, returned to every process as NumPy arrays."""

import functools

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lmlib.compute import Compute
from lmlib.data.batch import Batch
from lmlib.losses.token_losses import token_losses
from lmlib.models.model import Model
from lmlib.parallel.layout import COMPUTE, pieces, sharding
from lmlib.parallel.mesh import mesh_of
from lmlib.parallel.other_meshes import undivided, undivided_model


class Scorer:
    """Computes `token_losses` on a mesh; compiles once for each shape of batch. Rows may have any
    length: they are whole on each device."""

    def __init__(self, mesh: Mesh, compute: Compute):
        self._mesh = mesh = undivided(mesh)
        self._rows = sharding("batch seq", mesh)
        everywhere = NamedSharding(mesh, PartitionSpec())
        losses = functools.partial(token_losses, compute=compute)
        self._losses = jax.jit(losses, out_shardings=(everywhere, everywhere))

    @property
    def divisor(self) -> int:
        """What must divide the rows of a batch."""
        return pieces(COMPUTE["batch"], self._mesh)

    def __call__(self, model: Model, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        """`token_losses` of a NumPy batch that is the same on every process, which all must call
        this: nats, float32 at least, and bool, both [batch, seq]."""
        nats_BS, likeliest_BS = self.begin(model, batch)
        return np.asarray(nats_BS), np.asarray(likeliest_BS)

    def begin(self, model: Model, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """As a call, but the devices may still be at it."""
        on_own, _ = undivided_model(model, mesh_of(model) or self._mesh)
        with jax.set_mesh(self._mesh):
            return self._losses(on_own, jax.tree.map(self._placed, batch))

    def _placed(self, values: np.ndarray) -> jax.Array:
        return jax.make_array_from_callback(values.shape, self._rows, lambda part: values[part])
