"""What a step sends between devices, read off the program before and after XLA optimises it.

The expected collectives are counted by hand from the shapes. XLA's CPU backend widens bf16
collectives to float32, so dtypes are read off the lowered program.
"""

import functools
import re
from collections import Counter

import jax
import jax.numpy as jnp
import pytest

from lmlib.compute import Compute
from lmlib.losses.next_token import NextToken, batch_loss
from lmlib.models.families.llama import llama
from lmlib.parallel.axes import map_weights
from lmlib.parallel.layout import reshard
from lmlib.parallel.mesh import make_mesh
from lmlib.plan.collectives import collectives
from lmlib.plan.program import read_program
from lmlib.state import abstract_batch, abstract_model

pytestmark = pytest.mark.several_devices

L, V, E, F, H, K, D = 3, 160, 64, 96, 8, 4, 8
B, S = 16, 32
DATA = 4  # devices that share the batch, and each weight's `embed` axis
TENSOR = 2
make = functools.partial(
    llama, vocab=V, embed=E, layers=L, heads=H, kv_heads=K, mlp=F, key=jax.random.key(0)
)
# One layer's weights as each device gathers them: whole along embed, split over tensor.
GATHERED_LAYER = Counter(
    {
        (E,): 2,
        (E, H // TENSOR, D): 1,
        (E, K // TENSOR, D): 2,
        (H // TENSOR, D, E): 1,
        (E, F // TENSOR): 2,
        (F // TENSOR, E): 1,
    }
)


@functools.cache
def lowered(loss=batch_loss, mesh=None, **settings):
    mesh = mesh or make_mesh(fsdp=DATA, tensor=TENSOR)
    model, compute = abstract_model(make, mesh), Compute(**settings)

    def scalar(model, batch):
        sums, _ = loss(model, batch, compute)
        return sums.loss_sum

    with jax.set_mesh(mesh):
        return jax.jit(jax.value_and_grad(scalar)).lower(model, abstract_batch(B, S, mesh))


@functools.cache
def compiled_text(program):
    return program.compile().as_text()


def compiled_collectives(program, kind):
    """(computation, result shape) of each collective of `kind`, whole tuples taken apart."""
    found, computation = [], ""
    for line in compiled_text(program).splitlines():
        if line.startswith(("%", "ENTRY")):
            computation = "entry" if line.startswith("ENTRY") else line.split()[0]
        match = re.search(rf" = (.*?) {kind}(?:-start)?\(", line)
        if match:
            for shape in re.findall(r"\w+\[([\d,]*)\]", match.group(1)):
                found.append((computation, tuple(int(n) for n in shape.split(",") if n)))
    return found


def moves(program):
    """(shape, dtype, layout) of every layout that the lowered program asks for."""
    pattern = r"sdy\.sharding_constraint \S+ <@mesh, \[(.*?)\]> : tensor<((?:\d+x)*)(\w+)>"
    for layout, shape, dtype in re.findall(pattern, program.as_text()):
        yield tuple(int(n) for n in shape.split("x") if n), dtype, layout


def gathered_stacks(program):
    """Moves of whole layer stacks to a layout without fsdp."""
    model = jax.eval_shape(make)
    stacks = {leaf.shape for leaf in jax.tree.leaves(model.stack)}
    return [
        (shape, dtype)
        for shape, dtype, layout in moves(program)
        if shape in stacks and '"fsdp"' not in layout
    ]


def test_each_layer_is_gathered_in_bfloat16_inside_the_scan():
    program = lowered()
    per_layer = Counter({leaf.shape[1:]: 0 for leaf in jax.tree.leaves(jax.eval_shape(make).stack)})
    for shape, dtype, layout in moves(program):
        if shape in per_layer and '"fsdp"' not in layout and dtype == "bf16":
            per_layer[shape] += 1
    # Once in the forward scan, once where the backward scan computes the layer again; the
    # cotangents are constrained to the same layout before they are reduced.
    for shape, count in per_layer.items():
        assert count >= 2, shape
    assert not gathered_stacks(program)


@pytest.mark.slow
def test_compiled_scans_gather_one_layer_at_a_time():
    by_computation = {}
    for computation, shape in compiled_collectives(lowered(), "all-gather"):
        by_computation.setdefault(computation, Counter())[shape] += 1
    entry = by_computation.pop("entry")
    assert list(by_computation.values()) == [GATHERED_LAYER, GATHERED_LAYER]
    # Outside the scans: the tokens to embed; the last norm, again in the backward pass; the
    # unembedding.
    assert entry == Counter({(B, S): 1, (E,): 2, (E, V // TENSOR): 1})


@pytest.mark.slow
def test_compiled_scans_reduce_one_layer_at_a_time():
    by_computation = {}
    for computation, shape in compiled_collectives(lowered(), "all-reduce"):
        # XLA may transpose a gradient before it sums it.
        by_computation.setdefault(computation, Counter())[tuple(sorted(shape))] += 1
    by_computation.pop("entry")
    activation = tuple(sorted((B // DATA, S, E)))
    forward, backward = by_computation.values()
    # Over tensor: the outputs of attention and mlp.
    assert forward == Counter({activation: 2})
    # Over tensor: attention's output again, and the gradients of the inputs of attention and mlp.
    # Over fsdp: the gradient of each weight of the layer.
    weights = Counter()
    for shape, count in GATHERED_LAYER.items():
        weights[tuple(sorted(shape))] += count
    assert backward == weights + Counter({activation: 3})


@pytest.mark.slow
def test_tensor_parallelism_alone_gathers_no_weight():
    mesh = make_mesh(tensor=4)
    assert compiled_collectives(lowered(mesh=mesh), "all-gather") == []


@pytest.mark.slow
def test_sequence_parallelism_gathers_activations_and_never_the_table():
    program = lowered(sequence_parallel=True)
    shapes = Counter(shape for _, shape in compiled_collectives(program, "all-gather"))
    assert shapes[(B // DATA, S, E)] >= 4
    assert shapes[(V, E)] == 0
    assert not gathered_stacks(program)


@pytest.mark.slow
def test_a_gathered_stack_would_be_seen():
    def gathers_everything_first(model, batch, compute):
        def gathered(weight, array):
            return jnp.sum(reshard(array.astype(jnp.bfloat16), weight.axes))

        sums, observed = batch_loss(model, batch, compute)
        whole = jax.tree.leaves(map_weights(gathered, model.stack))
        return sums._replace(loss_sum=sums.loss_sum + sum(whole)), observed

    assert len(gathered_stacks(lowered(gathers_everything_first))) >= 9


@pytest.mark.slow
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_dropout_sends_nothing_and_draws_where_the_activations_lie(sequence_parallel):
    def with_dropout(model, batch, compute):
        return batch_loss(model, batch, compute, NextToken(dropout=0.1), jax.random.key(0))

    plain = lowered(sequence_parallel=sequence_parallel)
    program = lowered(with_dropout, sequence_parallel=sequence_parallel)
    any_kind = "(?:all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)"
    sent, expected = (
        Counter(tuple(sorted(shape)) for _, shape in compiled_collectives(each, any_kind))
        for each in (program, plain)
    )
    assert sent == expected
    text = compiled_text(program)
    assert f"pred[{B // DATA},{S // TENSOR if sequence_parallel else S},{E}]" in text
    assert f"[{B},{S},{E}]" not in text


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"fsdp": 8}, {"data": 2, "fsdp": 4}, {"data": 8}])
def test_gathers_follow_fsdp_alone(mesh):
    gathered = compiled_collectives(lowered(mesh=make_mesh(**mesh)), "all-gather")
    stacks = {leaf.shape for leaf in jax.tree.leaves(jax.eval_shape(make).stack)}
    assert not stacks & {shape for _, shape in gathered}
    assert bool(gathered) == (mesh.get("fsdp", 1) > 1)


@pytest.mark.slow
def test_dense_weights_lie_and_travel_over_expert_as_over_fsdp():
    program = lowered(mesh=make_mesh(expert=4, tensor=TENSOR))
    for kind in ("all-gather", "all-reduce", "all-to-all", "reduce-scatter", "collective-permute"):
        found, expected = (
            Counter(shape for _, shape in compiled_collectives(each, kind))
            for each in (program, lowered())
        )
        assert found == expected


@pytest.mark.slow
def test_over_two_axes_weights_travel_along_one_after_the_other_and_send_no_more():
    def sent(mesh):
        """Bytes of each device by kind and axes, but for what goes over tensor."""
        found = Counter()
        for one in collectives(read_program(compiled_text(lowered(mesh=mesh))), mesh):
            if "tensor" not in one.mesh_axes:
                found[one.kind, one.mesh_axes] += one.bytes_sent_per_step
        return found

    alone = sent(make_mesh(fsdp=DATA, tensor=TENSOR))
    both = sent(make_mesh(fsdp=2, expert=2, tensor=TENSOR))
    gathered = both["all-gather", ("fsdp",)] + both["all-gather", ("expert",)]
    assert gathered == alone["all-gather", ("fsdp",)]
    scattered = both["reduce-scatter", ("fsdp",)] + both["reduce-scatter", ("expert",)]
    summed = both["all-reduce", ("fsdp", "expert")]  # norms, and what is no weight
    assert summed < scattered / 20
    # Over one axis JAX scatters all but the table's gradient, for which XLA for CPUs sends twice.
    twice = 2 * (scattered - alone["reduce-scatter", ("fsdp",)])
    assert twice + summed == alone["all-reduce", ("fsdp",)]


@pytest.mark.slow
def test_embedding_sends_activations_and_never_the_table():
    program = lowered()
    exchanged = Counter(shape for _, shape in compiled_collectives(program, "all-to-all"))
    # A piece for each device, forward and backward.
    assert exchanged == Counter({(B // DATA, S, E // DATA): 2 * DATA})
    for kind in ("all-gather", "all-reduce"):
        shapes = {shape for _, shape in compiled_collectives(program, kind)}
        assert not shapes & {(V, E), (V // TENSOR, E)}
