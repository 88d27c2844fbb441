"""`saved_activations` against what JAX keeps for the backward pass."""

import functools
import itertools
import math
from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from sentinels import sentinels

from lmlib.compute import EVERYTHING, Compute
from lmlib.data.synthetic import Synthetic
from lmlib.experiment import Experiment
from lmlib.inspect.saved_activations import saved_activations
from lmlib.losses.multi_token import MultiToken
from lmlib.losses.next_token import NextToken
from lmlib.models.families.llama import llama
from lmlib.models.multi_token import multi_token
from lmlib.optim.adamw import adamw
from lmlib.parallel.mesh import make_mesh
from lmlib.state import abstract_batch, abstract_model
from lmlib.terminal.quantities import bytes_text

pytestmark = pytest.mark.several_devices


def experiment(saved, mesh, sequence_parallel=False, microbatches=1, unroll=1, depths=0):
    of = functools.partial(llama, vocab=160, embed=64, layers=3, heads=8, kv_heads=4, mlp=96)
    return Experiment(
        model=functools.partial(multi_token, of, depths),
        objective=MultiToken(weights=(0.3,) * depths) if depths else NextToken(),
        compute=Compute(saved=saved, sequence_parallel=sequence_parallel, unroll=unroll),
        data=Synthetic(vocab_size=160, batch_size=16, sequence_length=32),
        optimizer=functools.partial(adamw, peak_lr=1e-3),
        mesh=mesh,
        steps=1,
        microbatches=microbatches,
    )


def kept_by_jax(experiment):
    """Size, dtype and bytes per device of the floating arrays in the vjp of the loss that are no
    weights, larger than a number for each head and position."""
    mesh, data = experiment.mesh, experiment.data
    model = abstract_model(lambda: experiment.recipe.abstract_model, mesh)
    batch = abstract_batch(data.batch_size // experiment.microbatches, data.sequence_length, mesh)
    sums = experiment.objective.sums
    with jax.set_mesh(mesh):
        pullback = jax.eval_shape(
            lambda m, b: jax.vjp(lambda m: sums(m, None, b, experiment.compute).loss_sum, m)[1],
            model,
            batch,
        )
    weights = Counter(leaf.shape for leaf in jax.tree.leaves(model))
    layers, _, heads, _ = model.stack.patterns[0][0].attention.query.shape
    numbers = layers * heads * batch.tokens.size
    kept = Counter()
    for leaf in jax.tree.leaves(pullback):
        if weights[leaf.shape] and leaf.dtype == jnp.float32:
            weights[leaf.shape] -= 1
        elif jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.size > numbers:
            local = NamedSharding(mesh, jax.typeof(leaf).sharding.spec).shard_shape(leaf.shape)
            kept[leaf.size, leaf.dtype.name, math.prod(local) * leaf.dtype.itemsize] += 1
    return kept


ALL_NAMES = {
    *("attention_input", "query", "key", "value", "attention", "attention_residual"),
    *("mlp_input", "mlp_gate", "mlp_up", "mlp_hidden"),
}
SAVED = [(), ("query", "attention", "mlp_gate"), EVERYTHING]
SETTINGS = [
    {"mesh": {}},
    {"mesh": {"fsdp": 4, "tensor": 2}},
    {"mesh": {"data": 2, "fsdp": 2, "tensor": 2}, "sequence_parallel": True},
    {"mesh": {"fsdp": 4, "tensor": 2}, "microbatches": 2},
    {"mesh": {"fsdp": 4, "tensor": 2}, "depths": 2},
]


@pytest.mark.parametrize(
    ("saved", "settings"),
    # Sequences split over devices with all saved, microbatches with some.
    sentinels(
        itertools.product(SAVED, SETTINGS),
        lambda case: case in ((SAVED[2], SETTINGS[2]), (SAVED[1], SETTINGS[3])),
        landing=lambda case: case == (SAVED[1], SETTINGS[4]),
    ),
)
def test_the_list_equals_the_residuals_of_jax(saved, settings):
    mesh = make_mesh(**settings["mesh"])
    subject = experiment(saved, **(settings | {"mesh": mesh}))
    listed = saved_activations(subject)
    assert Counter(
        (math.prod(a.shape), a.dtype.name, a.bytes_per_device) for a in listed
    ) == kept_by_jax(subject)
    kept = ALL_NAMES if saved == EVERYTHING else saved
    assert {a.name for a in listed} == {"layer_input", "head_input", "loss_gradient", *kept}


@pytest.mark.parametrize("unroll", [1, 3])
def test_the_table_names_shapes_and_bytes(unroll):
    mesh = make_mesh(fsdp=4, tensor=2)
    text = str(saved_activations(experiment(("query",), mesh, unroll=unroll)))
    layers, rows, sequence, heads, head_dim = 3, 16, 32, 8, 8
    local = layers * (rows // 4) * sequence * (heads // 2) * head_dim * 2
    (line,) = (line for line in text.splitlines() if line.startswith("query"))
    assert "3 × 16 × 32 × 8 × 8" in line
    assert bytes_text(local) in line
    assert text.splitlines()[-1].startswith("total")
