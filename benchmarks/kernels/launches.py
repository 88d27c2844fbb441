"""Compiles a kernel with several launches, for a GPU of this machine or for an absent one."""

import concurrent.futures
import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from lmlib.parallel.mesh import make_mesh
from lmlib.plan import targets

L = TypeVar("L")  # a kernel's tiles, warps and stages


def prepare(target: str) -> None:
    """Lets JAX compile for an absent target; exits if there is no such target."""
    try:
        targets.prepare(targets.parse(target))
    except targets.TargetError as error:
        sys.exit(f"--compile_only: {error}")


def device_of(target: str | None) -> jax.Device:
    """Returns the first device of an absent target like h200:1x1, or of this machine."""
    return jax.devices()[0] if target is None else targets.parse(target).devices()[0]


def shapes_on(device: jax.Device, arrays: Any) -> Any:
    """Returns the shapes of a tree of arrays, placed on a device that may be absent."""
    here = NamedSharding(make_mesh(devices=[device]), P())
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), arrays)


def programs(
    kernel: Callable[..., Any], launches: Iterable[L], arrays: tuple[Any, ...], device: jax.Device
) -> dict[L, Any]:
    """Compiles `kernel(launch, *arrays)` with each launch that fits into the shared memory."""
    mesh = make_mesh(devices=[device])

    def compiled(launch: L) -> Any:
        with jax.set_mesh(mesh):  # kernels ask the mesh where they will run
            whole = jax.shard_map(
                functools.partial(kernel, launch),
                in_specs=(P(),) * len(arrays),
                out_specs=P(),
                check_vma=False,
            )
            try:
                return jax.jit(whole).lower(*arrays).compile()
            except jax.errors.JaxRuntimeError:  # more shared memory than the GPU has
                return None

    launches = list(launches)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        found = zip(launches, pool.map(compiled, launches), strict=True)
        return {launch: program for launch, program in found if program is not None}
