"""Computes token losses of batches, and returns them to every process as NumPy arrays."""

import functools

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lmlib.compute import Compute
from lmlib.data.batch import Batch
from lmlib.losses.token_losses import token_losses
from lmlib.models.model import Model
from lmlib.parallel.layout import COMPUTE, num_shards, sharding
from lmlib.parallel.mesh import mesh_of
from lmlib.parallel.other_meshes import undivided, undivided_model


class Scorer:
    """Computes `token_losses` on a mesh; compiles once for each shape of batch.

    Rows may have any length, because they are not split over devices.
    """

    def __init__(self, mesh: Mesh, compute: Compute):
        self._mesh = mesh = undivided(mesh)
        self._rows = sharding("batch seq", mesh)
        everywhere = NamedSharding(mesh, PartitionSpec())
        losses = functools.partial(token_losses, compute=compute)
        self._losses = jax.jit(losses, out_shardings=(everywhere, everywhere))

    @property
    def divisor(self) -> int:
        """A batch's number of rows must be a multiple of this."""
        return num_shards(COMPUTE["batch"], self._mesh)

    def __call__(self, model: Model, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        """Returns `token_losses` of a NumPy batch, as nats (at least float32) and bool.

        Both have the shape [batch, seq]. All processes must call this with the same batch.
        """
        nats_BS, likeliest_BS = self.begin(model, batch)
        return np.asarray(nats_BS), np.asarray(likeliest_BS)

    def begin(self, model: Model, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """Like a call, but returns before the devices have finished."""
        on_own, _ = undivided_model(model, mesh_of(model) or self._mesh)
        with jax.set_mesh(self._mesh):
            return self._losses(on_own, jax.tree.map(self._placed, batch))

    def _placed(self, values: np.ndarray) -> jax.Array:
        return jax.make_array_from_callback(values.shape, self._rows, lambda part: values[part])
