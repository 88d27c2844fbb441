"""Collectives that experts, split rows and stages need.

Shapes: C rows, P devices.
"""

import jax
import jax.numpy as jnp

from lmlib.parallel.collectives import all_to_all, axis_index, devices_along, is_mapped, platform
from lmlib.parallel.mesh_axes import MeshAxes


def exchange_rows(
    x_C: jax.Array, given_P: jax.Array, taken_P: jax.Array, mesh_axes: MeshAxes
) -> jax.Array:
    """Sends piece i of P to device i along `mesh_axes`, with different numbers of rows.

    Each piece has up to C / P rows, and the first `given_P[i]` count. The first `taken_P[i]` rows
    that arrive from device i count; the others are undefined.
    """
    if devices_along(mesh_axes) == 1:
        return x_C
    if platform() == "cpu":  # XLA has no ragged all-to-all there
        return all_to_all(x_C, mesh_axes, 0, 0)
    rows = len(x_C) // len(given_P)
    begins_P = rows * jnp.arange(len(given_P), dtype=jnp.int32)
    # Each receiver stores the rows of this device in the piece with this device's index.
    to_P = jnp.full(len(given_P), rows * axis_index(mesh_axes), jnp.int32)
    nothing_C = jnp.zeros_like(x_C)
    return jax.lax.ragged_all_to_all(
        x_C, nothing_C, begins_P, given_P, to_P, taken_P, axis_name=mesh_axes
    )


def ring_shift(x: jax.Array, mesh_axes: MeshAxes, devices: int) -> jax.Array:
    """Sends `x` by `devices` places in a ring along `mesh_axes` (ppermute)."""
    around = devices_along(mesh_axes)
    if devices % around == 0:
        return x
    pairs = [(i, (i + devices) % around) for i in range(around)]
    return jax.lax.ppermute(x, mesh_axes, pairs)


def pmax_everywhere(x: jax.Array) -> jax.Array:
    """The maximum over all devices, on each of them."""
    # JAX traces a function of one stage twice. The first trace, for shapes, does not map `stage`.
    mesh = jax.sharding.get_abstract_mesh()
    mapped = tuple(name for name in mesh.axis_names if is_mapped(name))
    return x if mesh.empty else jax.lax.pmax(x, mapped)
