"""The stack of layer inputs that the backward pass needs exists once on TPUs.

L layers, B rows and S tokens of a device, E embed.
"""

import functools

import jax
import pytest
from aot import absent

from lmlib.compute import Compute
from lmlib.data.synthetic import Synthetic
from lmlib.experiment import Experiment
from lmlib.models.families.llama import llama
from lmlib.optim.adamw import adamw
from lmlib.parallel.mesh import make_mesh
from lmlib.plan.memory import largest_arrays
from lmlib.plan.program import read_program

L, S, E = 64, 256, 128
STACK = 2**27  # bytes; more than a chip holds beside its memory


def compiled_step(topology, tensor):
    """A step whose layer inputs, in bfloat16, take most of its memory."""
    B = tensor * STACK // (L * S * E * 2)
    _, devices = absent(topology)
    experiment = Experiment(
        model=functools.partial(llama, vocab=512, embed=E, layers=L, heads=2, head_dim=128, mlp=E),
        compute=Compute(sequence_parallel=tensor > 1),
        data=Synthetic(512, B * len(devices) // tensor, S),
        optimizer=functools.partial(adamw, peak_lr=1e-3),
        mesh=make_mesh(fsdp=-1, tensor=tensor, devices=devices),
        steps=10,
    )
    with jax.set_mesh(experiment.mesh):
        return experiment.trace_step().lower().compile()


@pytest.mark.slow
@pytest.mark.parametrize(("topology", "tensor"), [("v5e:2x2", 2), ("v5p:2x2x1", 1), ("v6e:2x2", 2)])
def test_the_stack_of_layer_inputs_exists_once(topology, tensor):
    compiled = compiled_step(topology, tensor)
    made = largest_arrays(read_program(compiled.as_text()), count=100)
    (stack,) = (one for one in made if one.bytes == STACK)
    assert stack.shape[0] == L
    counted = compiled.memory_analysis()
    most = counted.peak_memory_in_bytes - counted.argument_size_in_bytes
    assert STACK < most < 2 * STACK
