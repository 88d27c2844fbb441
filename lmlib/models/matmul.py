"""Products of activations and weights, with a custom backward pass.

Autodiff would compute the weight's gradient transposed. XLA's CPU backend then makes strided copies
of whole activations, which doubles the time of a small model's block.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from lmlib.parallel.collectives import platform
from lmlib.parallel.matrix import Matrix
from lmlib.parallel.mesh_axes import names_of


def matmul(
    equation: str,
    x: Float[Array, "..."],
    w: Float[Array, "..."] | Matrix,
    precision: str | None = None,
    out_sharding: PartitionSpec | None = None,
) -> Float[Array, "..."]:
    """`jnp.einsum` of activations `x` and a weight `w`; both and the result have one dtype.

    Every product of activations and a weight uses this function, except for the unembedding. Each
    summed axis must be in both operands. Gradients have the layouts of x and w. With a `precision`,
    such as "float8", operands are rounded (`lmlib.models.matrices.quantized`).
    """
    if isinstance(w, Matrix):
        return w.einsum(equation, x, precision, out_sharding)
    return matmul_of_arrays(equation, _shared(equation, x, w), w, precision, out_sharding)


def _shared(equation: str, x: Array, w: Array) -> Array:
    """Replicates `x` over just the mesh axes that split the axes of `w` that x lacks.

    Each device's part of x's gradient is then summed over them (a psum).
    """
    if jax.sharding.get_abstract_mesh().empty or not jax.typeof(x).sharding.spec.reduced:
        return x
    layout, places = jax.typeof(x).sharding.spec, jax.typeof(w).sharding.spec.partitions
    x_axes, w_axes = equation.split("->")[0].split(",")
    lacking = [place for axis, place in zip(w_axes, places, strict=True) if axis not in x_axes]
    over = {name for place in lacking for name in names_of(place)}
    return x if over == layout.reduced else jax.sharding.reshard(x, layout.update(reduced=over))


_TRAINS = ()  # an empty tree that marks a weight as trained


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 3, 4))
def matmul_of_arrays(
    equation: str, x: Array, w: Array, precision: str | None, out_sharding: PartitionSpec | None
) -> Array:
    """`matmul` for two arrays that already have matching layouts."""
    return _einsum(_in_order(equation), x, w, precision, out_sharding)


def _einsum(
    equation: str, x: Array, w: Array, precision: str | None, layout: Any, result: str = "y"
) -> Array:
    if precision is None:
        return jnp.einsum(equation, x, w, out_sharding=layout)
    from lmlib.models.matrices.quantized import quantized_product  # rarely needed

    return quantized_product(equation, x, w, precision, layout, result)


def _forward(
    equation: str, x: CustomVJPPrimal, w: CustomVJPPrimal, precision: str | None, layout: Any
) -> tuple[Array, tuple[Array, Array, tuple[()] | None]]:
    y = matmul_of_arrays(equation, x.value, w.value, precision, layout)
    return y, (x.value, w.value, _TRAINS if w.perturbed else None)


def _backward(
    equation: str,
    precision: str | None,
    out_sharding: Any,
    saved: tuple[Array, Array, tuple[()] | None],
    dy: Array | SymbolicZero,
) -> tuple[Array, Array | None]:
    x, w, trains = saved
    if isinstance(dy, SymbolicZero):
        dy = jnp.zeros(dy.shape, dy.dtype, out_sharding=dy.sharding)
    operands, y_axes = equation.split("->")
    x_axes, w_axes = operands.split(",")
    dy = _along(x, x_axes, dy, y_axes)
    back = f"{y_axes},{w_axes}->{x_axes}"
    dx = _einsum(back, dy, w, precision, _layout_of_gradient(x), "dx")
    if trains is None:
        return dx, None
    return dx, _gradient_of_weight(x_axes, y_axes, w_axes, x, dy, w, precision)


matmul_of_arrays.defvjp(_forward, _backward, symbolic_zeros=True)


def _gradient_of_weight(
    x_axes: str, y_axes: str, w_axes: str, x: Array, dy: Array, w: Array, precision: str | None
) -> Array:
    """xᵀ dy with its axes in the order of `w_axes`, in the layout of `_layout_of_gradient`."""
    layout = _layout_of_gradient(w)
    if platform() != "cpu" or x.size <= dy.size or precision == "mxfp8":
        return _einsum(f"{x_axes},{y_axes}->{w_axes}", x, dy, precision, layout, "dw")
    axes = sorted(w_axes, key=lambda axis: (axis not in y_axes, w_axes.index(axis)))
    if layout is not None:
        order = (layout.partitions[w_axes.index(axis)] for axis in axes)
        layout = PartitionSpec(*order, unreduced=layout.unreduced)
    made = jnp.einsum(f"{y_axes},{x_axes}->{''.join(axes)}", dy, x, out_sharding=layout)
    made = jax.lax.optimization_barrier(made)
    return jnp.transpose(made, [axes.index(axis) for axis in w_axes])


def _in_order(equation: str) -> str:
    """Renames the axes to a, b, c, … in their order, in which `jnp.einsum` sums without copies."""
    letters = dict.fromkeys(equation.replace(",", "").replace("->", ""))
    return equation.translate({ord(old): 97 + i for i, old in enumerate(letters)})


def _along(x: Array, x_axes: str, dy: Array, y_axes: str) -> Array:
    """Moves `dy` to the layout of `x` along their common axes, so that it is gathered only once."""
    if jax.sharding.get_abstract_mesh().empty:
        return dy
    places = dict(zip(y_axes, jax.typeof(dy).sharding.spec.partitions, strict=True))
    places |= dict(zip(x_axes, jax.typeof(x).sharding.spec.partitions, strict=True))
    return jax.sharding.reshard(dy, PartitionSpec(*(places[axis] for axis in y_axes)))


def _layout_of_gradient(x: Array) -> PartitionSpec | None:
    """The layout of x, with partial sums, to sum later, along the axes over which it is reduced."""
    if jax.sharding.get_abstract_mesh().empty:
        return None
    layout = jax.typeof(x).sharding.spec
    return layout.update(reduced=frozenset(), unreduced=layout.reduced)
