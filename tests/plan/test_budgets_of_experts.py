"""What a step with mixtures of experts sends, array by array: budgets computed by hand.

On CPUs gradients are summed over one of FSDP's axes whole, over both one after the other, and an
exchange sends whole buffers; GPUs scatter sums, over both axes at once, and send rows alone.
"""

import functools
from collections import Counter

import jax
import pytest
from sent_arrays import BACKWARD, FORWARD, sent

from lmlib.compute import Compute
from lmlib.models.families.experts.mixtral import mixtral

pytestmark = pytest.mark.several_devices

V, E, L, H, K, D, F = 512, 64, 3, 4, 2, 16, 96
X, TOP = 8, 2
B, S = 16, 128
FSDP, EXPERT = 2, 4
n = B * S // (FSDP * EXPERT)  # tokens of a device
N = n * EXPERT  # of all along `expert`


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
    assert sent(make, compute, (B, S), target, fsdp=FSDP, expert=EXPERT)["layer"] == expected
