"""Declarations of weights: axes in the annotation, initial values in the default.

class SwiGLU(eqx.Module):
    gate: Float[Array, "embed mlp"] = weight(fan_in("embed"))
"""

import dataclasses
import functools
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

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
from lmlib.parallel.layout import storage_spec

# Standard deviation of twice the sum of four uniform 16-bit integers.
BELL_DEVIATION = math.sqrt(2**2 * 4 * (2**32 - 1) / 12)


class InitialValues:
    """Base class of the initial values of a weight, given the sizes of its named axes.

    `make` returns float32 values of a shape; `text` is for tables: "ones", a standard deviation.
    """

    summed: tuple[str, ...] = ()  # the axes that products with the weight sum over
    make: Callable[[PRNGKeyArray, tuple[int, ...], Mapping[str, int]], Array]
    text: Callable[[Mapping[str, int]], str]


@dataclasses.dataclass(frozen=True)
class Constant(InitialValues):
    """The same value everywhere."""

    value: float

    def make(self, key: PRNGKeyArray, shape: tuple[int, ...], sizes: Mapping[str, int]) -> Array:
        return jnp.full(shape, self.value, jnp.float32)

    def text(self, sizes: Mapping[str, int]) -> str:
        return {0.0: "zeros", 1.0: "ones"}.get(self.value, f"{self.value:.4g}")


@dataclasses.dataclass(frozen=True)
class Random(InitialValues):
    """Mean 0, standard deviation `scale` / √(product of the sizes of the axes `summed`)."""

    scale: float
    summed: tuple[str, ...] = ()

    def deviation(self, sizes: Mapping[str, int]) -> float:
        return self.scale * math.prod(sizes[axis] for axis in self.summed) ** -0.5

    def make(self, key: PRNGKeyArray, shape: tuple[int, ...], sizes: Mapping[str, int]) -> Array:
        deviation = self.deviation(sizes)
        return approx_normal(key, shape, deviation) if deviation else jnp.zeros(shape, jnp.float32)

    def text(self, sizes: Mapping[str, int]) -> str:
        return f"{self.deviation(sizes):.4g}" if self.scale else "zeros"


zeros, ones = Constant(0.0), Constant(1.0)
normal = Random  # normal(deviation)


def fan_in(*axes: str, scale: float = 1.0) -> Random:
    """Standard deviation scale · fan_in^-1/2, for a matrix whose products sum over `axes`.

    Source: LeCun et al. 1998, "Efficient BackProp", eq. 16.
    """
    return Random(scale, axes)


def residual_scale(layers: int) -> float:
    """(2 · layers)^-1/2, for the two matrices of each layer that write to the residual stream.

    The sum of all writes then starts with the variance of one write, as in GPT-2.
    """
    return (2 * layers) ** -0.5


def weight(
    initial: InitialValues | Callable[[Any], InitialValues],
    *,
    decays: bool | None = None,
    rules: Rules | None = None,
    dtype: str | Callable[[Any], str | None] | None = None,
    learning_rate: float = 1.0,
    gradient: bool = True,
    writes: bool | None = None,
) -> Any:
    """Declares a field that holds a weight.

    Args:
      initial: the initial values, or a function that makes them from the module's settings.
      decays: True if weight decay applies. `None`: True if the initial values are random.
      rules: mesh axes for names that `lmlib.parallel.layout` lacks; `None` keeps an axis whole.
      dtype: dtype for computation, regardless of `Compute.dtype`, or a function of the module.
      learning_rate: factor of the optimizer's learning rate.
      gradient: False for state that `lmlib.models.part.Part.updated` changes once a step.
      writes: True if its output is added to the residual stream. `None`: True for a matrix that
        maps other axes to "embed".
    """

    def declared(owner: Any) -> Declaration:
        values = initial(owner) if callable(initial) else initial
        if not isinstance(values, InitialValues):
            raise LayoutError(
                f"initial values must be zeros, ones, normal(deviation), fan_in(axes) or a "
                f"function of the module that gives such, got {values!r}"
            )
        decaying = isinstance(values, Random) if decays is None else decays
        own_dtype = dtype(owner) if callable(dtype) else dtype
        return Declaration(
            values, decaying, rules or {}, values.summed, own_dtype, learning_rate, gradient, writes
        )

    return eqx.field(metadata={METADATA: declared})


def initial_values(owner: Any, field: str, key: PRNGKeyArray, **sizes: int) -> Float[Array, "..."]:
    """Returns the initial values of `owner.field`, float32, as declared.

    `owner` is a module's class, or a module in its `__init__`, once its settings are set. `key` is
    the owner's; the field's name is folded in. Raises LayoutError if `sizes` lacks an axis.
    """
    axes = axis_names(owner, field)
    where = f"{(owner if isinstance(owner, type) else type(owner)).__name__}.{field}"
    for axis in axes:
        if (size := sizes.get(axis, 0)) < 1:
            raise LayoutError(f"{where} needs a positive size for axis {axis!r}, got {size}")
    initial = declaration(owner, field).initial
    for axis in initial.summed:
        if axis not in sizes:
            raise LayoutError(
                f"{where} begins with fan_in({axis!r}), but its axes are {' '.join(axes)}: name "
                "the ones that its products sum over"
            )
    return initial.make(fold_in_name(key, field), tuple(sizes[axis] for axis in axes), sizes)


def fill(module: Any, key: PRNGKeyArray, without: Sequence[str] = (), **sizes: int) -> None:
    """Sets each declared weight of `module`, in its `__init__`; `None` for names in `without`."""
    for field in dataclasses.fields(module):
        if METADATA in field.metadata:
            absent = field.name in without
            made = None if absent else initial_values(module, field.name, key, **sizes)
            setattr(module, field.name, made)


def creator(make: Callable[..., M], mesh: Mesh, made: M | None = None) -> Callable[..., M]:
    """Compiles `make` to create its weights on `mesh`, as stored, with the bits of any mesh.

    Call it under `jax.set_mesh(mesh)`. `made` are the result's shapes, if `make` takes arguments.
    """
    model = jax.eval_shape(make) if made is None else made
    specs = map_weights(lambda weight, array: storage_spec(weight, array.shape, mesh), model)
    layout = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    return jax.jit(
        jax.sharding.auto_axes(make, out_sharding=specs),
        out_shardings=layout,
        compiler_options=quick_to_compile(model, mesh.devices.flat[0].platform),
    )


def quick_to_compile(model: Any, platform: str) -> dict[str, int]:
    """Returns `compiler_options` for the program that makes `model`, which runs only once.

    LLVM takes long to compile random numbers for CPUs; for few numbers even level 1 is too slow.
    """
    if platform != "cpu":
        return {}
    few = sum(leaf.size for leaf in jax.tree.leaves(model)) < 2**22
    return {"xla_backend_optimization_level": 0 if few else 1}


def jit_init(make: Callable[[PRNGKeyArray], M]) -> Callable[[PRNGKeyArray], M]:
    """Compiles `make` as one program, instead of one for each operation."""

    def call(key: PRNGKeyArray) -> M:
        if isinstance(jnp.zeros(()), jax.core.Tracer):  # already inside a program
            return make(key)
        options = quick_to_compile(jax.eval_shape(make, key), platform())
        return jax.jit(make, compiler_options=options)(key)

    return call


def fold_in_name(key: PRNGKeyArray, name: str) -> PRNGKeyArray:
    """Derives the key of `name` from `key`; a weight then depends only on the seed and its path."""
    return jax.random.fold_in(key, zlib.crc32(name.encode()))


# Jitted only so that weights of one shape share the traced function.
@functools.partial(jax.jit, static_argnames=("shape", "deviation"), inline=True)
def approx_normal(key: PRNGKeyArray, shape: tuple[int, ...], deviation: float) -> jax.Array:
    """Random float32 values of mean 0 and the given standard deviation, within ±3.46 of it.

    Sums of four uniform 16-bit integers (Irwin-Hall). Integers are exact and one multiplication
    rounds once, so the bits do not depend on how XLA splits or fuses.
    """

    def add(total: jax.Array, key: PRNGKeyArray) -> tuple[jax.Array, None]:
        words = jax.random.bits(key, shape, jnp.uint32)
        return total + (words & 0xFFFF) + (words >> 16), None

    # A loop, since XLA takes long to compile random numbers.
    total, _ = jax.lax.scan(add, jnp.zeros(shape, jnp.uint32), jax.random.split(key))
    doubled = 2 * total.astype(jnp.int32) - 4 * (2**16 - 1)
    return doubled.astype(jnp.float32) * jnp.float32(deviation / BELL_DEVIATION)


def product_flops(module: Any) -> float:
    """FLOPs for one token, forward and backward, of the products with all weights of `module`.

    They are six for each parameter. Leading axes, of stacked layers, do not count.
    """

    def count(weight: Weight, array: Any) -> int:
        return math.prod(array.shape[weight.stacked :]) if weight.declaration.multiplied else 0

    return 6.0 * sum(jax.tree.leaves(map_weights(count, module)))
