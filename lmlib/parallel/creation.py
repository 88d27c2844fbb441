"""New weights, made where they are stored: no device ever holds more than its part."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from lmlib.parallel.axes import M, map_weights
from lmlib.parallel.layout import stored


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
