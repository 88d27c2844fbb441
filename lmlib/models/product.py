"""Products of activations and weights, with the backward pass in sight.

Autodiff would give the weight's gradient transposed, which XLA's CPU backend answers with strided
copies of whole activations: the block of a small model then takes twice the time.
"""

import functools

import jax
import jax.numpy as jnp
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from lmlib.parallel.collectives import platform
from lmlib.parallel.matrix import Matrix
from lmlib.parallel.mesh_axes import names_of


def product(
    equation: str,
    x: Float[Array, "..."],
    w: Float[Array, "..."] | Matrix,
    precision: str | None = None,
    out_sharding: PartitionSpec | None = None,
) -> Float[Array, "..."]:
    """`jnp.einsum` of activations `x` and a weight `w` of one dtype, which the result has too.

    No axis may be summed over in one operand alone. `out_sharding` says where the result lies if
    that is not clear from `x` and `w`. Backward both gradients are computed in the same dtype, from
    x and w, and lie as these do. `precision` rounds the operands of this product and of x's
    gradient to "int8" or "float8", as `lmlib.models.matrices.quantized` says; `None` does not.

    A `lmlib.parallel.matrix.Matrix` multiplies by its own method.

    Every product of activations and a weight goes through here, but for that with the unembedding,
    which `lmlib.losses` and `lmlib.models.model` make.
    """
    if isinstance(w, Matrix):
        return w.einsum(equation, x, precision, out_sharding)
    return product_of_arrays(equation, _shared(equation, x, w), w, precision, out_sharding)


def _shared(equation: str, x: Array, w: Array) -> Array:
    """`x` as it is, if it is the same on just the devices along which `w` splits axes that x lacks.
    If `share` has made it so along others, it is the same along those of `w`: each device's part of
    x's gradient is then added up along these (a psum)."""
    if jax.sharding.get_abstract_mesh().empty or not jax.typeof(x).sharding.spec.reduced:
        return x
    layout, places = jax.typeof(x).sharding.spec, jax.typeof(w).sharding.spec.partitions
    x_axes, w_axes = equation.split("->")[0].split(",")
    lacking = [place for axis, place in zip(w_axes, places, strict=True) if axis not in x_axes]
    over = {name for place in lacking for name in names_of(place)}
    return x if over == layout.reduced else jax.sharding.reshard(x, layout.update(reduced=over))


_TRAINS = ()  # of a weight whose gradient is asked for; a tree that both passes know


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 3, 4))
def product_of_arrays(
    equation: str, x: Array, w: Array, precision: str | None, out_sharding: PartitionSpec | None
) -> Array:
    """`product` of two arrays that lie as it needs them."""
    equation = _in_order(equation)
    if precision is None:
        return jnp.einsum(equation, x, w, out_sharding=out_sharding)
    from lmlib.models.matrices.quantized import FORMATS, rounded_product  # which few runs need

    forward = FORMATS[precision].forward
    return rounded_product(equation, x, w, (forward, forward), out_sharding)


def _forward(
    equation: str,
    x: CustomVJPPrimal,
    w: CustomVJPPrimal,
    precision: str | None,
    out_sharding: PartitionSpec | None,
) -> tuple[Array, tuple[Array, Array, tuple[()] | None]]:
    y = product_of_arrays(equation, x.value, w.value, precision, out_sharding)
    return y, (x.value, w.value, _TRAINS if w.perturbed else None)


def _backward(
    equation: str,
    precision: str | None,
    out_sharding: PartitionSpec | None,
    saved: tuple[Array, Array, tuple[()] | None],
    dy: Array | SymbolicZero,
) -> tuple[Array, Array | None]:
    x, w, trains = saved
    if isinstance(dy, SymbolicZero):
        dy = jnp.zeros(dy.shape, dy.dtype, out_sharding=dy.sharding)
    operands, y_axes = equation.split("->")
    x_axes, w_axes = operands.split(",")
    dy = _along(x, x_axes, dy, y_axes)
    back, layout = f"{y_axes},{w_axes}->{x_axes}", _layout_of_gradient(x)
    if precision is None:
        dx = jnp.einsum(back, dy, w, out_sharding=layout)
    else:
        from lmlib.models.matrices.quantized import FORMATS, rounded_product

        formats = FORMATS[precision]
        dx = rounded_product(back, dy, w, (formats.arriving, formats.forward), layout)
    if trains is None:
        return dx, None
    return dx, _gradient_of_weight(x_axes, y_axes, w_axes, x, dy, w)


product_of_arrays.defvjp(_forward, _backward, symbolic_zeros=True)


def _gradient_of_weight(
    x_axes: str, y_axes: str, w_axes: str, x: Array, dy: Array, w: Array
) -> Array:
    """xᵀ dy in the order of `w_axes`, laid out as `_layout_of_gradient` says.

    XLA's CPU backend copies the first operand of such a product in transposed order. There the
    smaller operand comes first, and the gradient is transposed instead. Without the barrier XLA
    would swap the operands back.
    """
    layout = _layout_of_gradient(w)
    if platform() != "cpu" or x.size <= dy.size:
        return jnp.einsum(f"{x_axes},{y_axes}->{w_axes}", x, dy, out_sharding=layout)
    axes = sorted(w_axes, key=lambda axis: (axis not in y_axes, w_axes.index(axis)))
    order = [w_axes.index(axis) for axis in axes]
    swapped = None
    if layout is not None:
        swapped = PartitionSpec(*(layout.partitions[i] for i in order), unreduced=layout.unreduced)
    made = jnp.einsum(f"{y_axes},{x_axes}->{''.join(axes)}", dy, x, out_sharding=swapped)
    made = jax.lax.optimization_barrier(made)
    return jnp.transpose(made, [axes.index(axis) for axis in w_axes])


def _in_order(equation: str) -> str:
    """The same with other letters: a, b, c, … as they come. `jnp.einsum` sums over several axes in
    the order of their letters, and where that is not theirs both operands would be copied."""
    letters = dict.fromkeys(equation.replace(",", "").replace("->", ""))
    return equation.translate({ord(old): 97 + i for i, old in enumerate(letters)})


def _along(x: Array, x_axes: str, dy: Array, y_axes: str) -> Array:
    """`dy`, lying as `x` does along the axes that they share: a sequence-parallel one is gathered
    once for both gradients."""
    if jax.sharding.get_abstract_mesh().empty:
        return dy
    lies = dict(zip(y_axes, jax.typeof(dy).sharding.spec.partitions, strict=True))
    lies |= {
        axis: place
        for axis, place in zip(x_axes, jax.typeof(x).sharding.spec.partitions, strict=True)
        if axis in y_axes
    }
    return jax.sharding.reshard(dy, PartitionSpec(*(lies[axis] for axis in y_axes)))


def _layout_of_gradient(x: Array) -> PartitionSpec | None:
    """Where the gradient of `x` lies: as `x` does, except that each device along the mesh axes over
    which `x` was gathered or shared keeps its own contribution, to be summed later."""
    if jax.sharding.get_abstract_mesh().empty:
        return None
    layout = jax.typeof(x).sharding.spec
    return layout.update(reduced=frozenset(), unreduced=layout.reduced)
