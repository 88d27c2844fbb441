"""A weight is declared once: its axes in its annotation, its initial values beside it.

    class SwiGLU(eqx.Module):
        gate: Float[Array, "embed mlp"] = weight(fan_in("embed"))

From that follow its shape, layout, initial values, whether it decays, and its line in `describe`.
"""

import dataclasses
import functools
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Float, PRNGKeyArray

from lmlib.parallel.axes import (
    METADATA,
    Declaration,
    LayoutError,
    M,
    Rules,
    Weight,
    axis_names,
    declaration,
    map_weights,
)
from lmlib.parallel.collectives import platform
from lmlib.parallel.layout import stored

# Standard deviation of twice the sum of four uniform 16-bit integers.
BELL_DEVIATION = math.sqrt(2**2 * 4 * (2**32 - 1) / 12)


@runtime_checkable
class InitialValues(Protocol):
    """What a weight starts with, given the size of each of its named axes."""

    def make(self, key: PRNGKeyArray, shape: tuple[int, ...], sizes: Mapping[str, int]) -> Array:
        """float32 values of `shape`."""

    def text(self, sizes: Mapping[str, int]) -> str:
        """In a few characters, for tables: "ones", or a standard deviation."""


@dataclasses.dataclass(frozen=True)
class Constant:
    """The same value everywhere."""

    value: float

    def make(self, key: PRNGKeyArray, shape: tuple[int, ...], sizes: Mapping[str, int]) -> Array:
        return jnp.full(shape, self.value, jnp.float32)

    def text(self, sizes: Mapping[str, int]) -> str:
        return {0.0: "zeros", 1.0: "ones"}.get(self.value, f"{self.value:.4g}")


@dataclasses.dataclass(frozen=True)
class Random:
    """Mean 0, standard deviation `scale` / √(product of the sizes of the axes `summed`)."""

    scale: float
    summed: tuple[str, ...] = ()

    def deviation(self, sizes: Mapping[str, int]) -> float:
        return self.scale * math.prod(sizes[axis] for axis in self.summed) ** -0.5

    def make(self, key: PRNGKeyArray, shape: tuple[int, ...], sizes: Mapping[str, int]) -> Array:
        deviation = self.deviation(sizes)
        return bell(key, shape, deviation) if deviation else jnp.zeros(shape, jnp.float32)

    def text(self, sizes: Mapping[str, int]) -> str:
        return f"{self.deviation(sizes):.4g}" if self.scale else "zeros"


zeros, ones = Constant(0.0), Constant(1.0)


def normal(deviation: float) -> Random:
    """Random values of this standard deviation."""
    return Random(deviation)


def fan_in(*axes: str, scale: float = 1.0) -> Random:
    """For a matrix whose products sum over `axes`: standard deviation scale · fan_in^-1/2, which
    with scale 1 keeps the variance of activations (LeCun et al. 1998, "Efficient BackProp",
    eq. 16). Axes that products do not sum over, such as "expert", do not count."""
    return Random(scale, axes)


def residual_scale(layers: int) -> float:
    """(2 · layers)^-1/2, for the matrices that write to the residual stream, two in each layer:
    what all layers add together then starts with the variance of one write (Radford et al. 2019,
    "Language Models are Unsupervised Multitask Learners", §2.3)."""
    return (2 * layers) ** -0.5


def weight(
    initial: InitialValues | Callable[[Any], InitialValues],
    *,
    multiplied: bool | None = None,
    decays: bool | None = None,
    rules: Rules | None = None,
    summed: Sequence[str] | None = None,
    dtype: str | Callable[[Any], str | None] | None = None,
    learning_rate: float = 1.0,
    gradient: bool = True,
    writes: bool | None = None,
) -> Any:
    """Declares a field that holds a weight.

    Args:
      initial: its initial values, or what makes them of the module, whose settings they depend on:
        `weight(lambda mlp: fan_in("mlp", scale=mlp.residual_scale))`.
      multiplied: whether it is an operand of `lmlib.models.product.product`. `None`: if its first
        values are `fan_in` over some axes.
      decays: whether weight decay shrinks it. `None`: if its initial values are random; scales and
        biases, which start as constants, do not decay whatever their shape.
      rules: where axis names of its own lie, if the tables in `lmlib.parallel.layout` do not have
        them: `{"position": None}` keeps the axis whole.
      summed: the axes that products sum over. `None`: those of `fan_in`.
      dtype: in which it is used, whatever `Compute.dtype` is, or what says it of the module:
        "float32" for a router or a decay rate.
      learning_rate: factor of the optimizer's.
      gradient: False for state that the module's own `updated` changes once a step, from tallies
        (`lmlib.models.part.Part.updated`). It has no moments and does not decay.
      writes: whether what it makes is added to the residual stream, as a bias of what a layer
        writes is. `None`: if it is a matrix that makes the axis "embed" of others.
    """

    def declared(owner: Any) -> Declaration:
        makes = not isinstance(initial, InitialValues)
        values = initial(owner) if makes and callable(initial) else initial
        if not isinstance(values, InitialValues):
            raise LayoutError(
                f"initial values must be zeros, ones, normal(deviation), fan_in(axes) or a "
                f"function of the module that gives such, got {values!r}"
            )
        random = isinstance(values, Random)
        of_products = values.summed if isinstance(values, Random) else ()
        return Declaration(
            initial=values,
            multiplied=bool(of_products) if multiplied is None else multiplied,
            decays=random if decays is None else decays,
            rules=rules or {},
            summed=of_products if summed is None else tuple(summed),
            dtype=dtype(owner) if callable(dtype) else dtype,
            learning_rate=learning_rate,
            gradient=gradient,
            writes=writes,
        )

    return eqx.field(metadata={METADATA: declared})


def initial_values(owner: Any, field: str, key: PRNGKeyArray, **sizes: int) -> Float[Array, "..."]:
    """The initial values of `owner.field`, float32, as it is declared.

    Args:
      owner: a module's class, or a module in its `__init__`, once the settings are there on which
        its axes and initial values depend.
      key: of the owner; the field's name is folded in.
      sizes: of the axes, by name; others may be among them.

    Raises:
      LayoutError: if `sizes` lacks an axis, or one is not positive.
    """
    axes = axis_names(owner, field)
    for axis in axes:
        if sizes.get(axis, 0) < 1:
            raise LayoutError(
                f"{_class_name(owner)}.{field} needs a positive size for axis {axis!r}, "
                f"got {sizes.get(axis)}"
            )
    shape = tuple(sizes[axis] for axis in axes)
    initial = declaration(owner, field).initial
    for axis in initial.summed if isinstance(initial, Random) else ():
        if axis not in sizes:
            raise LayoutError(
                f"{_class_name(owner)}.{field} begins with fan_in({axis!r}), but its axes are "
                f"{' '.join(axes)}: name those that its products sum over"
            )
    return initial.make(fold(key, field), shape, sizes)


def _class_name(owner: Any) -> str:
    return (owner if isinstance(owner, type) else type(owner)).__name__


def creator(make: Callable[..., M], mesh: Mesh, made: M | None = None) -> Callable[..., M]:
    """`make` compiled to build its weights on `mesh` in the stored layout, none ever whole.

    Call it under `jax.set_mesh(mesh)`. Random numbers do not depend on the layout: the values are
    the same bits on every mesh. `made`: the shapes of what `make` makes, where they are known, as
    they must be if it takes arguments. These are arguments of the program.
    """
    model = jax.eval_shape(make) if made is None else made
    specs = map_weights(lambda weight, array: stored(weight, array.shape, mesh), model)
    layout = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    return jax.jit(
        jax.sharding.auto_axes(make, out_sharding=specs),
        out_shardings=layout,
        compiler_options=quick_to_compile(model, mesh.devices.flat[0].platform),
    )


def quick_to_compile(model: Any, platform: str) -> dict[str, int]:
    """For `compiler_options` of the program that makes `model`, which runs once.

    On CPUs LLVM takes long to compile random numbers. Its level 1 makes them as fast as its highest
    one does; for few numbers not even that is worth its time.
    """
    if platform != "cpu":
        return {}
    few = sum(leaf.size for leaf in jax.tree.leaves(model)) < 2**22
    return {"xla_backend_optimization_level": 0 if few else 1}


def compiled(make: Callable[[PRNGKeyArray], M]) -> Callable[[PRNGKeyArray], M]:
    """`make` as one program, where each operation would otherwise be compiled by itself."""

    def call(key: PRNGKeyArray) -> M:
        if isinstance(jnp.zeros(()), jax.core.Tracer):  # part of a program already
            return make(key)
        options = quick_to_compile(jax.eval_shape(make, key), platform())
        return jax.jit(make, compiler_options=options)(key)

    return call


def fold(key: PRNGKeyArray, name: str) -> PRNGKeyArray:
    """The key of `name` under `key`, so that a weight depends on the seed and its path only."""
    return jax.random.fold_in(key, zlib.crc32(name.encode()))


# A program of its own only so that weights of one shape share what JAX traced of it.
@functools.partial(jax.jit, static_argnames=("shape", "deviation"), inline=True)
def bell(key: PRNGKeyArray, shape: tuple[int, ...], deviation: float) -> jax.Array:
    """Random float32 values of mean 0 and the given standard deviation, within ±3.46 of it.

    They are sums of four uniform 16-bit integers (the Irwin-Hall distribution, close to normal).
    Integers are exact and one multiplication rounds once, so the bits are the same however XLA
    splits, fuses or vectorises, where those of a normal's logarithm and root are not.
    """

    def add(total: jax.Array, key: PRNGKeyArray) -> tuple[jax.Array, None]:
        words = jax.random.bits(key, shape, jnp.uint32)
        return total + (words & 0xFFFF) + (words >> 16), None

    # A loop, since XLA takes long to compile what draws random numbers.
    total, _ = jax.lax.scan(add, jnp.zeros(shape, jnp.uint32), jax.random.split(key))
    doubled = 2 * total.astype(jnp.int32) - 4 * (2**16 - 1)
    return doubled.astype(jnp.float32) * jnp.float32(deviation / BELL_DEVIATION)


def product_flops(module: Any) -> float:
    """FLOPs for one token, forward and backward, of the products with all weights of `module`: six
    for each parameter. Leading axes, of stacked layers, do not count."""
    total = 0

    def count(weight: Weight, array: Any) -> None:
        nonlocal total
        if weight.declaration.multiplied:
            total += math.prod(array.shape[weight.stacked :])

    map_weights(count, module)
    return 6.0 * total
