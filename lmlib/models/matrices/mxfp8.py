"""Products of activations and weights in MXFP8: e4m3 elements, and a scale for each block of 32.

A block is 32 neighbours along the axes that a product sums, and its scale a power of two in e8m0
(Open Compute Project 2023, Microscaling Formats v1.0). The forward product, the gradient of the
activations and the gradient of the weight each round their operands along their own summed axes.
All three use e4m3, and scales are rounded up so that no element overflows, as in NVIDIA's recipe
(Mishra et al. 2025, arXiv:2506.08027). OCP rounds them down, and clips the largest elements.

NVIDIA GPUs of compute capability 10 multiply blocks in cuDNN. Elsewhere the rounded numbers are
multiplied in float32, in which they are exact. In the backward pass, rounding counts as the
identity.

Shapes: M rows and N columns of a product, K summed elements, G blocks of them.
"""

import math

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Float8e4m3fn

from lmlib.parallel.collectives import platform, psum, psum_scatter, shard_map
from lmlib.parallel.mesh_axes import STAGE, MeshAxes, names_of, place_of

BLOCK = 32  # elements that share a scale
_LARGEST = 8  # exponent of e4m3's largest number, 1.75 · 2^8


def check_devices(mesh: Mesh) -> None:
    """Raises ValueError if the devices of `mesh` have no products of blocks, or it has stages."""
    device = mesh.devices.flat[0]
    capability = str(getattr(device, "compute_capability", ""))
    if device.platform != "cpu" and not capability.startswith("10."):
        raise unsupported(device.device_kind)
    if mesh.shape[STAGE] > 1:
        raise ValueError(
            f"compute.quantized has 'mxfp8', which pipelines do not support, and the mesh has "
            f"stage={mesh.shape['stage']}: use stage=1, or 'float8'"
        )


def unsupported(device_kind: str) -> ValueError:
    """Returns the error of devices that have no products of blocks."""
    return ValueError(
        "compute.quantized has 'mxfp8', which needs NVIDIA GPUs of compute capability 10 "
        f"(B200), and the devices are {device_kind}: use 'float8', or leave it out"
    )


def block_scaled_product(
    equation: str,
    a: Float[Array, "..."],
    b: Float[Array, "..."],
    out_sharding: PartitionSpec | None,
) -> Float[Array, "..."]:
    """`jnp.einsum` of `a` and `b`, both rounded to MXFP8; the result has a's dtype.

    Each summed axis must be in both operands, and no axis in both operands and the result. The
    blocks of a device begin with its part of the summed axes, which are taken in a's order. Zeros
    fill the last block.
    """
    operands, y_axes = equation.split("->")
    a_axes, b_axes = operands.split(",")
    summed = [axis for axis in a_axes if axis not in y_axes]
    a_kept = [axis for axis in a_axes if axis in y_axes]
    b_kept = [axis for axis in b_axes if axis in y_axes]

    def on_device(a: Array, b: Array) -> Array:
        a_MK, b_NK = _matrix(a, a_axes, a_kept, summed), _matrix(b, b_axes, b_kept, summed)
        sizes = dict(zip(a_axes, a.shape, strict=True)) | dict(zip(b_axes, b.shape, strict=True))
        made = [*a_kept, *b_kept]
        y = _product(a_MK, b_NK).reshape([sizes[axis] for axis in made])
        return jnp.transpose(y, [made.index(axis) for axis in y_axes])

    if jax.sharding.get_abstract_mesh().empty:
        return on_device(a, b)
    places = _places(b, b_axes) | _places(a, a_axes)
    given = [PartitionSpec(*(places[axis] for axis in axes)) for axes in (a_axes, b_axes)]
    wanted = out_sharding or PartitionSpec(*(places[axis] for axis in y_axes))
    partial = [name for axis in summed for name in names_of(places[axis])]
    later = frozenset(partial).intersection(wanted.unreduced)
    made = []  # layout of the result, in which some axes are split over axes of partial sums
    scattered: list[tuple[int, MeshAxes]] = []
    for axis, (name, place) in enumerate(zip(y_axes, wanted.partitions, strict=True)):
        new = tuple(each for each in names_of(place) if each in partial)
        made.append(place_of((*names_of(places[name]), *new)))
        scattered += [(axis, new)] * bool(new)
    done = later.union(*(names_of(names) for _, names in scattered))

    def with_sums(a: Array, b: Array) -> Array:
        y = on_device(a, b)
        for axis, names in scattered:
            y = psum_scatter(y, names, axis)
        return psum(y, tuple(name for name in partial if name not in done))

    layout = PartitionSpec(*made, unreduced=later) if later else PartitionSpec(*made)
    y = shard_map(with_sums, given, layout, tracked=False)(a, b)
    return jax.sharding.reshard(y, wanted)


def in_blocks(x_MK: Float[Array, "m k"]) -> tuple[Float8e4m3fn[Array, "m k"], Array]:
    """Rounds rows whose length is a multiple of 32 to e4m3 elements and e8m0 scales, (M, K / 32).

    `x_MK` is about elements · scales. A scale is the least power of two, at least 2^-127, with
    which a block has no element above 448, e4m3's largest number.
    """
    x_MGB = x_MK.reshape(len(x_MK), -1, BLOCK)
    largest_MG = jnp.max(jnp.abs(x_MGB), axis=2).astype(jnp.float32)
    bits_MG = jax.lax.bitcast_convert_type(largest_MG, jnp.uint32)
    exponent_MG = (bits_MG + 0x1FFFFF) >> 23  # one more for mantissas above 1.75
    code_MG = (jnp.maximum(exponent_MG, _LARGEST) - _LARGEST).astype(jnp.uint8)
    inverse_bits_MG = (254 - code_MG.astype(jnp.uint32)) << 23
    inverse_MG = jax.lax.bitcast_convert_type(inverse_bits_MG, jnp.float32)
    elements_MGB = (x_MGB * inverse_MG[..., None]).astype(jnp.float8_e4m3fn)
    scales_MG = jax.lax.bitcast_convert_type(code_MG, jnp.float8_e8m0fnu)
    return elements_MGB.reshape(x_MK.shape), scales_MG


def _product(a_MK: Array, b_NK: Array) -> Array:
    """The product of two matrices, rounded to blocks along K."""
    blocks = *in_blocks(a_MK), *in_blocks(b_NK)
    if platform() == "cuda":
        a_BMK, a_scales_BMG, b_BNK, b_scales_BNG = (each[None] for each in blocks)
        scales = a_scales_BMG, b_scales_BNG
        return jax.nn.scaled_matmul(a_BMK, b_BNK, *scales, preferred_element_type=a_MK.dtype)[0]
    a, a_scales, b, b_scales = jax.lax.optimization_barrier(blocks)  # XLA would drop the rounding
    rounded_MK, rounded_NK = _dense(a, a_scales), _dense(b, b_scales)
    y_MN = jnp.einsum("mk,nk->mn", rounded_MK, rounded_NK, precision=jax.lax.Precision.HIGHEST)
    return y_MN.astype(a_MK.dtype)


def _dense(elements_MK: Array, scales_MG: Array) -> Array:
    scales_MK = jnp.repeat(scales_MG.astype(jnp.float32), BLOCK, axis=1)
    return elements_MK.astype(jnp.float32) * scales_MK


def _matrix(x: Array, axes: str, kept: list[str], summed: list[str]) -> Float[Array, "m k"]:
    """A device's operand with its summed axes last and in one, whose length 32 divides."""
    x = jnp.transpose(x, [axes.index(axis) for axis in (*kept, *summed)])
    x_MK = x.reshape(math.prod(x.shape[: len(kept)]), -1)
    return jnp.pad(x_MK, ((0, 0), (0, -x_MK.shape[1] % BLOCK)))


def _places(x: Array, axes: str) -> dict[str, MeshAxes]:
    return dict(zip(axes, jax.typeof(x).sharding.spec.partitions, strict=True))
