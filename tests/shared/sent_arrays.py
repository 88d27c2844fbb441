"""What a compiled program sends, array by array."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
from aot import COUNTED_ON_GPUS, absent

from lmlib.compute import Compute
from lmlib.losses.next_token import batch_loss
from lmlib.parallel.mesh import make_mesh
from lmlib.plan.collectives import collectives
from lmlib.plan.program import read_program
from lmlib.state import abstract_batch, abstract_model

FORWARD, BACKWARD = "forward", "backward"  # with what is computed again
_BYTES = {"bf16": 2, "f32": 4, "s32": 4}


def sent(
    make: Callable[[], Any],
    compute: Compute,
    batch: tuple[int, int],
    target: str,
    **axes: int,
) -> dict[str, dict[tuple[str, ...], Counter]]:
    """How often a step sends arrays for loss and gradients of a model: by what one turn of the loop
    around them is ("step", "layer"), by the axes of the mesh, and then by (kind, `FORWARD` or
    `BACKWARD`, elements). Left out are single numbers, and what a step does not send.

    Args:
      batch: rows, and their length.
      target: "cpu:8", or what is not there, such as "h100:1x8".
      axes: sizes of the mesh.
    """
    here = target == "cpu:8"
    mesh = make_mesh(**axes, devices=None if here else absent(target)[1])

    def loss(model: Any, batch: Any) -> jax.Array:
        return batch_loss(model, batch, compute)[0].loss_sum

    with jax.set_mesh(mesh):
        arguments = abstract_model(make, mesh), abstract_batch(*batch, mesh)
        lowered = jax.jit(jax.value_and_grad(loss)).lower(*arguments)
        program = lowered.compile(None if here else COUNTED_ON_GPUS)
    found: dict[str, dict[tuple[str, ...], Counter]] = {}
    for one in collectives(read_program(program.as_text()), mesh):
        where = FORWARD if one.phase == "forward" else BACKWARD
        for array in one.arrays:
            size = array.bytes // _BYTES[array.dtype]
            if size > 1 and one.count_per_step:
                budget = found.setdefault(one.each, {}).setdefault(one.mesh_axes, Counter())
                budget[one.kind, where, size] += one.count_per_step
    return found
