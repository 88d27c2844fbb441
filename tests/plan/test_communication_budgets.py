"""The arrays that a step sends, for each way to split it, against budgets computed by hand.

Programs for GPUs are compiled ahead of time. They gather and scatter in the dtypes of the model. An
array is identified by its size, because XLA transposes, flattens and combines arrays. On CPUs
gradients are summed over one of FSDP's axes whole, over both one after the other, and an exchange
sends whole buffers; GPUs scatter sums, over both axes at once, and send only rows.

b is how many sequences a device has, t into how many shares heads, mlp and vocabulary fall.
"""

import functools
import itertools
import math
from collections import Counter

import jax
import pytest
from aot import COUNTED_ON_GPUS, absent

from lmlib import train
from lmlib.compute import Compute
from lmlib.losses.next_token import NextToken
from lmlib.models.families.experts.mixtral import mixtral
from lmlib.models.families.llama import llama
from lmlib.optim.adamw import adamw
from lmlib.optim.matrices.muon import muon
from lmlib.parallel.mesh import make_mesh
from lmlib.plan.collectives import collectives
from lmlib.plan.communication_warnings import communication_warnings
from lmlib.plan.program import read_program
from lmlib.state import Training, abstract_batch, abstract_state

V, E, L, H, K, D, F = 4_096, 512, 3, 8, 4, 64, 1_024
B, S = 16, 256
BYTES = {"bf16": 2, "f32": 4, "s32": 4}
RING = {"all-gather": 1, "reduce-scatter": 1, "all-to-all": 1, "all-reduce": 2}

FORWARD, BACKWARD = "each layer, forward", "each layer, backward"  # includes recomputation
STEP = "each step"  # XLA combines what forward, backward and update send once a step


def layer_matrices(t):
    """Elements of each matrix of a layer, whole along embed: q, k, v, output and mlp's three."""
    return [E * H * D // t, *[E * K * D // t] * 2, H * D * E // t, *[E * F // t] * 3]


def sends(kind, axes, where, dtype, sizes, count=1):
    """A budget of arrays with these numbers of elements, each sent `count` times in a step."""
    budget = Counter()
    for size in sizes:
        budget[kind, axes, where, dtype, size] += count
    return budget


def fully_sharded(fsdp, data=1, t=1, axes=("fsdp",)):
    """Weights are stored split over `axes`, and gathered for each use. Gradients of matrices are
    scattered; `norms` has the gradients of norms."""
    b = B // (data * fsdp)
    once = functools.partial(sends, axes=axes, where=STEP)
    in_layers = functools.partial(sends, axes=axes, dtype="bf16", count=L)
    return (
        in_layers("all-gather", where=FORWARD, sizes=[E, E, *layer_matrices(t)])
        + in_layers("all-gather", where=BACKWARD, sizes=[E, E, *layer_matrices(t)])
        + in_layers("reduce-scatter", where=BACKWARD, sizes=layer_matrices(t))
        # The table stays in place: tokens go to it, and the embedded tokens come back.
        + once("all-gather", dtype="s32", sizes=[B // data * S])
        + once("all-to-all", dtype="bf16", sizes=[b * S * E], count=2)
        # The last norm, again for its backward pass, and the table of the loss.
        + once("all-gather", dtype="bf16", sizes=[E, E, E * V // t])
        + once("reduce-scatter", dtype="bf16", sizes=[E * V // t])
    )


def norms(kind, axes):
    """Gradients of the scales of norms: two in each layer, and the last."""
    return sends(kind, axes, BACKWARD, "bf16", [E, E], count=L) + sends(
        kind, axes, STEP, "bf16", [E]
    )


def tensor_parallel(b):
    """Sums over `tensor` of the outputs of its shares of heads, mlp and vocabulary."""
    activation = b * S * E
    summed = functools.partial(sends, "all-reduce", ("tensor",), dtype="bf16")
    return (
        # Outputs of attention and mlp.
        summed(FORWARD, sizes=[activation] * 2, count=L)
        # Attention's again, which the backward pass needs, and the gradients of their inputs.
        + summed(BACKWARD, sizes=[activation] * 3, count=L)
        # The embedded tokens, and the gradient of the input of the loss.
        + summed(STEP, sizes=[activation] * 2)
        + of_each_token(b)
    )


def of_each_token(b):
    """The loss sums highest logit, normaliser and target's logit over shares of the vocabulary."""
    return sends("all-reduce", ("tensor",), STEP, "f32", [b * S] * 3)


def sequence_parallel(b):
    """Between blocks each device has a part of the sequence: instead of sums there are scattered
    sums, and gathers of the next block's input; the backward pass has the reverse."""
    activation = b * S * E
    gathered, scattered = (
        functools.partial(sends, kind, ("tensor",), dtype="bf16")
        for kind in ("all-gather", "reduce-scatter")
    )
    return (
        gathered(FORWARD, sizes=[activation] * 2, count=L)
        + scattered(FORWARD, sizes=[activation] * 2, count=L)
        # The inputs of attention and mlp again, and the gradients of their outputs.
        + gathered(BACKWARD, sizes=[activation] * 4, count=L)
        # Attention's output again, and the gradients of the inputs of both.
        + scattered(BACKWARD, sizes=[activation] * 3, count=L)
        # Gathered: the input of the loss, the embedded tokens' gradient. Scattered: the reverse.
        + gathered(STEP, sizes=[activation] * 2)
        + scattered(STEP, sizes=[activation] * 2)
        + of_each_token(b)
    )


def shares_of_norms(fsdp):
    """The rest of their sum if each device along `tensor` has another part of the sequence: XLA
    sums the shares of all layers at once."""
    return sends("all-reduce", ("tensor",), STEP, "bf16", [L * E // fsdp] * 2 + [E // fsdp])


def keys_gathered(rows):
    """Keys and values of whole rows, for attention and again for its backward pass; and the
    gradients of both, in float32. Segments are gathered once before the layers, and then again."""
    keys = 2 * [rows * S * K * D]
    gathered = functools.partial(sends, "all-gather", ("context",), count=L)
    return (
        gathered(FORWARD, "bf16", keys)
        + sends("all-gather", ("context",), STEP, "s32", [rows * S])
        + gathered(BACKWARD, "bf16", keys)
        + gathered(BACKWARD, "s32", [rows * S])
        + sends("reduce-scatter", ("context",), BACKWARD, "f32", keys, count=L)
    )


def keys_in_a_ring(rows, devices):
    """Each device's keys and values once round, for attention and again for its backward pass;
    there their gradients go with them, in float32, and home. Segments as in `keys_gathered`."""
    keys = 2 * [rows * S // devices * K * D]
    passed = functools.partial(sends, "collective-permute", ("context",))
    away = (devices - 1) * L
    return (
        passed(FORWARD, "bf16", keys, count=away)
        + passed(STEP, "s32", [rows * S // devices], count=devices - 1)
        + passed(BACKWARD, "bf16", keys, count=away)
        + passed(BACKWARD, "s32", [rows * S // devices], count=away)
        + passed(BACKWARD, "f32", keys, count=away)
        + passed(BACKWARD, "bf16", keys, count=L)  # home
    )


def replicated_over_data(fsdp):
    """Each device's share of the gradients, summed over `data`."""
    summed = functools.partial(sends, "all-reduce", ("data",))
    return (
        summed(BACKWARD, "bf16", [size // fsdp for size in layer_matrices(1)], count=L)
        # XLA sums the norms' of all layers at once; the embedding's gradient is float32.
        + summed(STEP, "bf16", [L * E // fsdp] * 2 + [E // fsdp, E * V // fsdp])
        + summed(STEP, "f32", [V * E // fsdp])
    )


def whole_matrices(fsdp, t):
    """Muon's: each group of matrices of one shape is as many as the devices divide, and travels
    along both axes there and back. The groups: queries and outputs, keys and values, mlp's."""
    devices = fsdp * t
    groups = {E * H * D: 2 * L, E * K * D: 2 * L, E * F: 3 * L}
    sizes = [-(-count // devices) * size for size, count in groups.items()]
    return sum(
        (sends("all-to-all", (axis,), STEP, "bf16", sizes, count=2) for axis in ("fsdp", "tensor")),
        Counter(),
    )


def sharded(fsdp, data=1, t=1, axes=("fsdp",)):
    """`fully_sharded`, with the gradients of norms scattered too."""
    return fully_sharded(fsdp, data, t, axes) + norms("reduce-scatter", axes)


CONTEXT = ("fsdp", "context")
# Sizes of the mesh, settings of the model, and the accepted budgets: XLA's versions differ. These
# include the budgets of only FSDP and of only TP.
LAYOUTS = {
    "FSDP × TP": (
        {"fsdp": 4, "tensor": 2},
        {},
        [sharded(4, t=2) + tensor_parallel(B // 4)],
    ),
    "FSDP over two axes × TP": (
        {"fsdp": 2, "expert": 2, "tensor": 2},
        {},
        [sharded(4, t=2, axes=("fsdp", "expert")) + tensor_parallel(B // 4)],
    ),
    "FSDP × TP with Muon": (
        {"fsdp": 4, "tensor": 2},
        {},
        [sharded(4, t=2) + tensor_parallel(B // 4) + whole_matrices(4, t=2)],
    ),
    "HSDP": (
        {"data": 2, "fsdp": 4},
        {},
        [sharded(4, data=2) + replicated_over_data(4)],
    ),
    "FSDP × context, gathered": (
        {"fsdp": 4, "context": 2},
        {"context_method": "gather", "attention": "blockwise"},
        [sharded(8, axes=CONTEXT) + keys_gathered(B // 4)],
    ),
    "FSDP × context, a fused kernel": (
        {"fsdp": 4, "context": 2},
        {"context_method": "gather", "attention": "triton"},
        [sharded(8, axes=CONTEXT) + keys_gathered(B // 4)],
    ),
    "FSDP × context, in a ring": (
        {"fsdp": 2, "context": 4},
        {"context_method": "ring", "attention": "blockwise"},
        [sharded(8, axes=CONTEXT) + keys_in_a_ring(B // 2, devices=4)],
    ),
    "FSDP × SP": (
        {"fsdp": 4, "tensor": 2},
        {"sequence_parallel": True},
        [
            fully_sharded(4, t=2) + sequence_parallel(B // 4) + of_norms
            for of_norms in (
                norms("all-reduce", ("fsdp", "tensor")),
                norms("reduce-scatter", ("fsdp",)) + shares_of_norms(4),
            )
        ],
    ),
}


dense = functools.partial(llama, V, E, L, H, F, K, D, key=jax.random.key(0))


@functools.cache
def compiled(target, layout, make=dense):
    """The collectives of a step in `layout`, what plan warns of, and its mesh."""
    sizes, settings, _ = (LAYOUTS | OF_LAYERS)[layout]
    devices = None if target == "cpu:8" else absent(target)[1]
    mesh = make_mesh(**sizes, devices=devices)
    compute = Compute(**{"attention": "plain"} | settings)
    optimizer = muon if layout.endswith("Muon") else adamw
    # Dropout draws its masks where the activations are, and sends nothing.
    training = Training(optimizer(100, 1e-3), mesh, compute, NextToken(dropout=0.1))
    state = abstract_state(make, training)
    batch = abstract_batch(B, S, mesh)
    step = train.trace_step(state, batch, training).lower()
    program = step.compile(COUNTED_ON_GPUS if target.startswith("h100") else {})
    sent = collectives(read_program(program.as_text()), mesh)
    return sent, communication_warnings(sent, state.model, mesh), mesh


def budget(sent):
    """The arrays that are sent, without single numbers, which are metrics."""
    found = Counter()
    for one in sent:
        phase = "forward" if one.phase == "forward" else "backward"
        where = STEP if one.each == "step" else f"each {one.each}, {phase}"
        for array in one.arrays:
            size = array.bytes // BYTES[array.dtype]
            if size > 1:
                found[one.kind, one.mesh_axes, where, array.dtype, size] += one.count_per_step
    return found


def bytes_of(budget, mesh):
    """Bytes that each device sends for a budget, by the ring algorithm; a permutation sends all."""
    total = 0
    for (kind, axes, _, dtype, size), count in budget.items():
        n = math.prod(mesh.shape[axis] for axis in axes)
        sent = n if kind == "collective-permute" else RING[kind] * (n - 1)
        total += size * BYTES[dtype] * sent // n * count
    return total


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_sends_what_its_layout_needs_and_nothing_else(layout):
    sent, warnings, mesh = compiled("h100:1x8", layout)
    budgets = LAYOUTS[layout][2]
    found = budget(sent)
    assert found in budgets, [
        {"besides": found - expected, "missing": expected - found} for expected in budgets
    ]
    # The metrics' single numbers are all that is left.
    assert 0 <= sent.bytes_sent_per_step - bytes_of(found, mesh) < 1_000
    assert warnings == ()


# Layers with experts, and stages: in float32, and only arrays that are sent more than once a step.
X, TOP, FSDP, EXPERT = 8, 2, 2, 4
STAGE, STAGED = 4, 8  # stages, and the layers in all of them
N = B * S // FSDP  # tokens of all devices along `expert`
each_layer = functools.partial(sends, dtype="any", count=L)
experts = functools.partial(
    mixtral, vocab=V, embed=E, layers=L, heads=H, kv_heads=K, head_dim=D, mlp=F, experts=X,
    top=TOP, key=jax.random.key(0),
)  # fmt: skip
staged = functools.partial(llama, V, E, STAGED, H, F, K, D, key=jax.random.key(0))


def gathered_twice(axes, sizes):
    return each_layer("all-gather", axes, FORWARD, sizes=sizes) + each_layer(
        "all-gather", axes, BACKWARD, sizes=sizes
    )


def by_gathering():
    """Each device along `expert` gets tokens, their choices and shares of all, and scatters what
    its experts make of them, with the share of choices computed; in the backward pass also the
    outputs' gradients."""
    gathered, scattered = (
        functools.partial(each_layer, kind, ("expert",))
        for kind in ("all-gather", "reduce-scatter")
    )
    return (
        gathered(FORWARD, sizes=[N * E, N * TOP, N * TOP])
        + scattered(FORWARD, sizes=[N * E, N])
        # Tokens again, and gradients with choices and shares.
        + gathered(BACKWARD, sizes=[N * E, N * E, N * TOP, N * TOP])
        + scattered(BACKWARD, sizes=[N * E, N * TOP])
    )


def by_exchange():
    """Each device has room for 1.25 times the rows that even routing sends to each other device. A
    row is sent with its share, and returns."""
    Q = N // EXPERT * TOP * 5 // (4 * EXPERT)
    to_all = functools.partial(each_layer, "all-to-all", ("expert",))
    return (
        to_all(FORWARD, sizes=EXPERT * [Q * E, Q * E, Q])
        # Rows again; their gradients there and back, with shares and their gradients.
        + to_all(BACKWARD, sizes=EXPERT * [Q * E, Q * E, Q * E, Q, Q])
        # The number of rows that each device has for each expert, again for the backward pass.
        + gathered_twice(("expert",), [EXPERT * X])
    )


def weights_beside_experts(on_cpu):
    """Over `fsdp` gate, up and down of a device's experts; over both axes, as in dense models,
    attention, router and norms. CPUs send over `expert` a device's share of a half along `fsdp`."""
    summed, own = "all-reduce" if on_cpu else "reduce-scatter", 3 * [X // EXPERT * E * F]
    found = gathered_twice(("fsdp",), own) + each_layer(summed, ("fsdp",), BACKWARD, sizes=own)
    matrices, scales, both = [*layer_matrices(1)[:4], E * X], [E, E], ("fsdp", "expert")
    whole = matrices + scales
    if not on_cpu:
        found += gathered_twice(both, whole)
        return found + each_layer("reduce-scatter", both, BACKWARD, sizes=whole)
    for axis, parts in (("expert", FSDP), ("fsdp", 1)):
        sizes = [size // parts for size in whole]
        found += gathered_twice((axis,), sizes)
        found += each_layer("reduce-scatter", (axis,), BACKWARD, sizes=sizes[: len(matrices)])
    # Also counts of each expert's tokens, which GPUs sum once a step.
    found += each_layer("all-reduce", both, FORWARD, sizes=[X])
    return found + each_layer("all-reduce", both, BACKWARD, sizes=scales)


def in_slots(on_cpu):
    """A stage has STAGED / STAGE layers in one round, and all microbatches go through them. A slot
    passes rows to the next stage, and waiting and finished rows one stage up."""
    slots = B // FSDP + STAGE - 1
    rows = functools.partial(sends, "collective-permute", ("stage",), dtype="any", count=3 * slots)
    weights = functools.partial(
        sends, axes=("fsdp",), dtype="any", sizes=[E, E, *layer_matrices(1)],
        count=STAGED // STAGE * slots,
    )  # fmt: skip
    return (
        rows(where="each slot, forward", sizes=[S * E])
        + rows(where="each slot, backward", sizes=[S * E])
        + weights("all-gather", where=FORWARD)
        + weights("all-gather", where=BACKWARD)
        + weights("all-reduce" if on_cpu else "reduce-scatter", where=BACKWARD)
    )


OVER_EXPERT, PLAIN = {"fsdp": FSDP, "expert": EXPERT}, {"dtype": "float32"}
OF_LAYERS = {
    "experts, gathered": (
        OVER_EXPERT,
        PLAIN | {"dispatch": "gather"},
        lambda on_cpu: by_gathering() + weights_beside_experts(on_cpu),
    ),
    "experts, exchanged": (
        OVER_EXPERT,
        PLAIN | {"dispatch": "exchange"},
        lambda on_cpu: by_exchange() + weights_beside_experts(on_cpu),
    ),
    "stages": ({"stage": STAGE, "fsdp": FSDP}, PLAIN | {"pipeline_rows": 1}, in_slots),
}


@pytest.mark.slow
@pytest.mark.several_devices
@pytest.mark.parametrize(
    ("target", "layout"),
    [
        *itertools.product(["cpu:8"], OF_LAYERS),
        *itertools.product(["h100:1x8"], ["experts, gathered", "stages"]),
    ],
)
def test_layers_and_slots_send_what_they_need_and_nothing_else(target, layout):
    sent, _, _ = compiled(target, layout, staged if layout == "stages" else experts)
    found = Counter()
    for (kind, axes, where, _, size), count in budget(sent).items():
        if where != STEP and count:
            found[kind, axes, where, "any", size] += count
    expected = OF_LAYERS[layout][2](target == "cpu:8")
    assert found == expected, {"besides": found - expected, "missing": expected - found}


@pytest.mark.slow
def test_a_tpu_sends_the_same_but_for_how_it_sums_gradients():
    """libtpu scatters only sums whose shards fill its tiles, and reduces the others whole."""
    sent, _, _ = compiled("v5e:4x2", "FSDP × TP")

    def without_the_kind_of_sums(budget):
        sums = ("all-reduce", "reduce-scatter")
        merged = Counter()
        for (kind, *rest), count in budget.items():
            merged["sum" if kind in sums else kind, *rest] += count
        return merged

    found, expected = map(without_the_kind_of_sums, (budget(sent), LAYOUTS["FSDP × TP"][2][0]))
    assert found == expected, {"besides": found - expected, "missing": expected - found}
    assert any(one.kind == "all-gather" and one.overlaps for one in sent)
