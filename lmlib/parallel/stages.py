"""Computations of all pipeline stages at once, each with its own layers.

Arrays of stages have a leading axis, which `stage` splits. `each_stage` maps a function over it
(`jax.vmap`); the function gets the part of one stage. Layouts inside do not name `stage`, and
functions of one device (`lmlib.parallel.collectives`) get the part of their stage.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from lmlib.parallel.collectives import IN_STAGES, in_a_stage, shard_map_outside_stages
from lmlib.parallel.mesh_axes import STAGE


def each_stage(function: Callable[..., Any]) -> Callable[..., Any]:
    """Maps `function` over the stages; `stage` splits the leading axes of its arguments."""
    return jax.vmap(function, axis_name=IN_STAGES)


def retraced_in_stage(in_a_stage_before: bool, function: Callable[..., Any]) -> Callable[..., Any]:
    """Traces `function` as the computation of one stage, if it was traced so before.

    JAX loses this information when it calls the rules of `jax.custom_vjp`.
    """
    if not in_a_stage_before or in_a_stage():
        return function
    return jax.vmap(function, in_axes=None, out_axes=None, axis_size=1, axis_name=IN_STAGES)


def in_each_stage(
    function: Callable[..., Any], inputs: Sequence[Any], outputs: Any, tracked: bool
) -> Callable[..., Any]:
    """`shard_map` inside `each_stage`: `function` gets each device's parts of its stage.

    JAX itself would leave `stage` to its partitioner, which cannot split kernels.
    """

    def of_stages(layouts: Any) -> Any:
        return jax.tree.map(
            lambda spec: PartitionSpec(
                STAGE, *spec.partitions, reduced=spec.reduced, unreduced=spec.unreduced
            ),
            layouts,
        )

    def of_own(*arguments: Any) -> Any:
        results = function(*jax.tree.map(lambda x: jnp.squeeze(x, 0), arguments))
        return jax.tree.map(lambda y: jnp.expand_dims(y, 0), results)

    call = jax.custom_batching.custom_vmap(
        shard_map_outside_stages(function, inputs, outputs, tracked)
    )

    @call.def_vmap
    def mapped(stages: int, has_stages: Any, *arguments: Any) -> tuple[Any, Any]:
        def with_stages(x: jax.Array, has_them: bool) -> jax.Array:
            return x if has_them else jnp.stack([x] * stages)

        arguments = jax.tree.map(with_stages, arguments, tuple(has_stages))
        call = shard_map_outside_stages(
            of_own, tuple(of_stages([*inputs])), of_stages(outputs), tracked
        )
        results = call(*arguments)
        return results, jax.tree.map(lambda _: True, results)

    return call
