"""The layers that each stage computes, in each of its rounds.

Shapes: R repetitions of a pattern, P stages, V rounds, K repetitions of a chunk.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array

from lmlib.models.pipeline.schedule import Schedule
from lmlib.models.scan import Repeated, reshaped
from lmlib.parallel.axes import Weight, map_weights
from lmlib.parallel.layout import partition, stored


def in_chunks(repeated: Repeated, repeats: int, schedule: Schedule) -> Repeated:
    """The chunks of each stage, (P, K, V, …), in place of (R, …).

    Layers rest in their order, those of a stage next to each other. Where each stage has one chunk,
    and all have as many layers, nothing moves; else weights travel to their stages, and their
    gradients back (two all-to-alls each way). A chunk that lacks layers has copies of the last one,
    which do not count.
    """
    mesh = jax.sharding.get_abstract_mesh()
    stages, rounds = schedule.stages, schedule.rounds
    each = -(-repeats // (stages * rounds))

    def chunk(weight: Weight, w_R: Array) -> Array:
        of_stages = stored(weight, (stages, *w_R.shape[1:]), mesh).partitions
        layout = PartitionSpec(of_stages[0], None, None, *of_stages[1:])
        if (rounds, repeats) == (1, stages * each):
            return jnp.reshape(w_R, (stages, each, 1, *w_R.shape[1:]), out_sharding=layout)
        whole_R = jax.sharding.reshard(w_R, stored(weight.unstaged, w_R.shape, mesh))
        return jax.sharding.reshard(cut(whole_R), layout)

    def cut(x_R: Array) -> Array:
        lacking = stages * rounds * each - repeats
        x_R = jnp.concatenate([x_R, *[x_R[-1:]] * lacking])
        return jnp.moveaxis(reshaped(x_R, 1, (rounds, stages, each)), 0, 2)

    def chunk_alike(x_R: Array) -> Array:
        return jax.sharding.reshard(cut(x_R), partition("stage"))

    counts = None
    if repeats < stages * rounds * each:
        numbers_VPK = np.arange(stages * rounds * each).reshape(rounds, stages, each)
        counts = jax.sharding.reshard(
            jnp.asarray(np.moveaxis(numbers_VPK < repeats, 0, 2)), partition("stage")
        )
    return Repeated(
        map_weights(chunk, repeated.layers),
        jax.tree.map(chunk_alike, repeated.keys),
        repeated.caches,
        counts,
    )
