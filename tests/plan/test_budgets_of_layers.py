"""What a step with experts, or in stages, sends, array by array: budgets computed by hand.

On CPUs gradients are summed over one of FSDP's axes whole, over both one after the other, and an
exchange sends whole buffers; GPUs scatter sums, over both axes at once, and send rows alone.
"""

import functools
from collections import Counter

import jax
import pytest
from aot import COUNTED_ON_GPUS, absent

from lmlib.compute import Compute
from lmlib.losses.next_token import batch_loss
from lmlib.models.families.experts.mixtral import mixtral
from lmlib.models.families.llama import llama
from lmlib.parallel.mesh import make_mesh
from lmlib.plan.collectives import collectives
from lmlib.plan.program import read_program
from lmlib.state import abstract_batch, abstract_model

pytestmark = pytest.mark.several_devices

V, E, L, H, K, D, F = 512, 64, 3, 4, 2, 16, 96
X, TOP = 8, 2
B, S = 16, 128
FSDP, EXPERT = 2, 4
STAGE, STAGED = 4, 8  # stages, and the layers in all of them
n = B * S // (FSDP * EXPERT)  # tokens of a device
N = n * EXPERT  # of all along `expert`

FORWARD, BACKWARD = "forward", "backward"  # with what is computed again
BYTES = {"bf16": 2, "f32": 4, "s32": 4}


def sent(make, compute, target, **axes):
    """How often loss and gradients send arrays: by what a turn of the loop around them is ("step",
    "layer"), by the axes of the mesh, and by (kind, phase, elements), without single numbers."""
    here = target == "cpu:8"
    mesh = make_mesh(**axes, devices=None if here else absent(target)[1])

    def loss(model, batch):
        return batch_loss(model, batch, compute)[0].loss_sum

    with jax.set_mesh(mesh):
        arguments = abstract_model(make, mesh), abstract_batch(B, S, mesh)
        lowered = jax.jit(jax.value_and_grad(loss)).lower(*arguments)
        program = lowered.compile(None if here else COUNTED_ON_GPUS)
    found = {}
    for one in collectives(read_program(program.as_text()), mesh):
        where = FORWARD if one.phase == "forward" else BACKWARD
        for array in one.arrays:
            size = array.bytes // BYTES[array.dtype]
            if size > 1 and one.count_per_step:
                budget = found.setdefault(one.each, {}).setdefault(one.mesh_axes, Counter())
                budget[one.kind, where, size] += one.count_per_step
    return found


def each_layer(kind, where, sizes):
    return Counter({(kind, where, size): L * sizes.count(size) for size in sizes})


def sends_by_gathering():
    """Each device along `expert` gets tokens, their choices and shares of all, and scatters what
    its experts make of them; in the backward pass also the outputs' gradients."""
    return (
        each_layer("all-gather", FORWARD, [N * E, N * TOP, N * TOP])
        + each_layer("reduce-scatter", FORWARD, [N * E])
        # Tokens again, and gradients with choices and shares.
        + each_layer("all-gather", BACKWARD, [N * E, N * E, N * TOP, N * TOP])
        + each_layer("reduce-scatter", BACKWARD, [N * E, N * TOP])
    )


def sends_by_exchange():
    """Each device has room for 1.25 times the rows that even routing sends to each other one. A row
    goes there with its share, and comes back."""
    Q = n * TOP * 5 // (4 * EXPERT)
    to_all = functools.partial(each_layer, "all-to-all")
    return (
        to_all(FORWARD, EXPERT * [Q * E, Q * E, Q])
        # Rows again; their gradients there and back, with shares and their gradients.
        + to_all(BACKWARD, EXPERT * [Q * E, Q * E, Q * E, Q, Q])
        # How many rows each device has for each expert, once more for the backward pass.
        + each_layer("all-gather", FORWARD, [EXPERT * X])
        + each_layer("all-gather", BACKWARD, [EXPERT * X])
    )


SENDS = {"gather": sends_by_gathering, "exchange": sends_by_exchange}


def expert_matrices(summed):
    """Gate, up and down of a device's experts, over `fsdp`: gathered twice, gradients once."""
    matrices = 3 * [X // EXPERT * E * F]
    return (
        each_layer("all-gather", FORWARD, matrices)
        + each_layer("all-gather", BACKWARD, matrices)
        + each_layer(summed, BACKWARD, matrices)
    )


# Of a layer, over both axes: attention and the router, as with dense models, and norms.
MATRICES = [E * H * D, E * K * D, E * K * D, H * D * E, E * X]
NORMS = [E, E]


def gathered(sizes):
    return each_layer("all-gather", FORWARD, sizes) + each_layer("all-gather", BACKWARD, sizes)


def at_once():
    sizes = MATRICES + NORMS
    return {("fsdp", "expert"): gathered(sizes) + each_layer("reduce-scatter", BACKWARD, sizes)}


def one_after_the_other():
    """Over `expert` each device gathers, and scatters, what it has of a half along `fsdp`."""

    def halves(sizes):
        return [size // FSDP for size in sizes]

    return {
        ("expert",): gathered(halves(MATRICES + NORMS))
        + each_layer("reduce-scatter", BACKWARD, halves(MATRICES)),
        ("fsdp",): gathered(MATRICES + NORMS) + each_layer("reduce-scatter", BACKWARD, MATRICES),
        ("fsdp", "expert"): each_layer("all-reduce", BACKWARD, NORMS),
    }


CASES = [("cpu:8", "gather"), ("cpu:8", "exchange"), ("h100:1x8", "gather")]


@pytest.mark.slow
@pytest.mark.parametrize(("target", "dispatch"), CASES)
def test_a_layer_sends_what_its_experts_need_and_nothing_else(target, dispatch):
    make = functools.partial(
        mixtral, vocab=V, embed=E, layers=L, heads=H, kv_heads=K, head_dim=D, mlp=F, experts=X,
        top=TOP, key=jax.random.key(0),
    )  # fmt: skip
    compute = Compute(dtype="float32", attention="plain", dispatch=dispatch)
    on_cpu = target == "cpu:8"
    expected = {
        ("expert",): SENDS[dispatch](),
        ("fsdp",): expert_matrices("all-reduce" if on_cpu else "reduce-scatter"),
    }
    for axes, arrays in (one_after_the_other() if on_cpu else at_once()).items():
        expected[axes] = expected.get(axes, Counter()) + arrays
    assert sent(make, compute, target, fsdp=FSDP, expert=EXPERT)["layer"] == expected


@pytest.mark.slow
@pytest.mark.parametrize("target", ("cpu:8", "h100:1x8"))
def test_a_slot_passes_rows_on_and_gathers_its_own_layers_alone(target):
    """With one round a stage has L / STAGE layers, and all microbatches go through them."""
    make = functools.partial(
        llama, vocab=V, embed=E, layers=STAGED, heads=H, kv_heads=K, head_dim=D, mlp=F,
        key=jax.random.key(0),
    )  # fmt: skip
    compute = Compute(dtype="float32", attention="plain", pipeline_rows=1)
    found = sent(make, compute, target, stage=STAGE, fsdp=FSDP)
    microbatches = B // FSDP
    slots = microbatches + STAGE - 1
    # Rows to the next stage, and those that wait, or have ended, one stage up.
    rows = 3 * slots
    assert found["slot"] == {
        ("stage",): Counter(
            {("collective-permute", where, S * E): rows for where in (FORWARD, BACKWARD)}
        )
    }
    matrices = [E * H * D, E * K * D, E * K * D, H * D * E, *3 * [E * F]]
    summed = "all-reduce" if target == "cpu:8" else "reduce-scatter"
    weights = Counter()
    for size in (E, E, *matrices):
        for sending in (("all-gather", FORWARD), ("all-gather", BACKWARD), (summed, BACKWARD)):
            weights[*sending, size] += STAGED // STAGE * slots
    assert found["layer"] == {("fsdp",): weights}
