"""Layers in stages compute the same as one device: losses, every gradient, whole runs."""

import dataclasses
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import laid_out
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import Array, Float
from outsider_runs import SIZES, SOURCE, check_outsider, compiled, experiment, trained
from sentinels import sentinels

from lmlib import Compute, NextToken
from lmlib.checkpoint import Checkpoints
from lmlib.data.batch import place
from lmlib.losses.next_token import batch_loss
from lmlib.models.experts.mixture import Mixture
from lmlib.models.experts.router import Router
from lmlib.models.families.gemma import gemma2
from lmlib.models.families.llama import llama
from lmlib.models.families.speedrun import speedrun
from lmlib.models.forward_context import TOKENS, ForwardContext, single_document_context
from lmlib.models.part import NO_AUX, Part
from lmlib.models.pipeline.schedule import Schedule, schedule_of
from lmlib.models.stack import Segment, Stack
from lmlib.models.weights import initial_values, ones, weight
from lmlib.optim.adamw import adamw
from lmlib.optim.matrices.muon import muon
from lmlib.parallel.layout import sharding, spec
from lmlib.parallel.mesh import make_mesh
from lmlib.state import abstract_batch, abstract_model

pytestmark = pytest.mark.several_devices

FLOAT32 = Compute(dtype="float32")
MESHES = {
    "2": {"stage": 2},
    "8": {"stage": 8},
    "4, 2 fsdp": {"stage": 4, "fsdp": 2},
    "2, 2 fsdp, 2 tensor": {"stage": 2, "fsdp": 2, "tensor": 2},
    "2, 2 fsdp, 2 context": {"stage": 2, "fsdp": 2, "context": 2},
    "2, 2 data, 2 expert": {"stage": 2, "data": 2, "expert": 2},
    "2, 4 expert": {"stage": 2, "expert": 4},
    "2, 2 expert, 2 context": {"stage": 2, "expert": 2, "context": 2},
    "2, 2 expert, 2 tensor": {"stage": 2, "expert": 2, "tensor": 2},
}
sizes = SIZES | {"heads": 4, "kv_heads": 2}
# The layers of a period's repetitions, which are rarely as many as stages times rounds; further
# layers are outside the stages.
MODELS = {
    "4 layers": functools.partial(llama, **sizes, mlp=16, layers=4),
    "8 layers": functools.partial(llama, **sizes, mlp=16, layers=8),
    "5 layers": functools.partial(llama, **sizes, mlp=16, layers=5, tied=True),
    "local and global": functools.partial(
        gemma2, **sizes, mlp=16, layers=9, head_dim=8, window=5, period=2
    ),
    "first residual, values": functools.partial(
        speedrun, **SIZES, heads=4, mlp=16, layers=6, window=8
    ),
    "experts": functools.partial(
        llama, **sizes, layers=4, mlp=16,
        feed_forward=functools.partial(Mixture, experts=4, top=2, shared_mlp=16),
    ),
}  # fmt: skip
CONTEXT_METHODS = {
    "": FLOAT32,
    "2 rounds": Compute(dtype="float32", pipeline_rounds=2),
    "3 rounds, unrolled": Compute(dtype="float32", pipeline_rounds=3, unroll=2),
    "2 rows, sequence-parallel": Compute(dtype="float32", pipeline_rows=2, sequence_parallel=True),
    # Room suffices for even routing only, so that uneven routing takes several rounds.
    "exchange": Compute(dtype="float32", dispatch="exchange", expert_room=1.0),
    "Triton's products": Compute(dtype="float32", dispatch="exchange", grouped="triton"),
    "exchange, 2 rounds, sequence-parallel": Compute(
        dtype="float32", dispatch="exchange", expert_room=1.0, pipeline_rounds=2,
        sequence_parallel=True,
    ),
}  # fmt: skip
CELLS = [
    ("2", "4 layers", "2 rounds"),
    ("8", "local and global", ""),  # fewer repetitions than stages
    ("8", "8 layers", ""),
    ("4, 2 fsdp", "8 layers", "2 rounds"),
    ("4, 2 fsdp", "first residual, values", "2 rounds"),
    ("2, 2 fsdp, 2 tensor", "8 layers", "3 rounds, unrolled"),
    ("2, 2 fsdp, 2 tensor", "5 layers", "2 rows, sequence-parallel"),
    ("2, 2 fsdp, 2 tensor", "experts", "2 rows, sequence-parallel"),
    ("2, 2 fsdp, 2 context", "5 layers", "2 rounds"),
    ("2, 2 fsdp, 2 context", "local and global", "3 rounds, unrolled"),
    ("2, 2 data, 2 expert", "experts", "2 rounds"),
    ("2, 2 data, 2 expert", "first residual, values", ""),
    ("2, 4 expert", "experts", "exchange"),
    ("2, 2 data, 2 expert", "experts", "exchange"),
    ("2, 2 expert, 2 context", "experts", "exchange"),
    ("2, 2 expert, 2 tensor", "experts", "exchange, 2 rounds, sequence-parallel"),
    ("2, 2 expert, 2 tensor", "experts", "Triton's products"),
]
AT_EACH_LANDING = (
    ("2", "4 layers", "2 rounds"),
    ("4, 2 fsdp", "8 layers", "2 rounds"),
    ("2, 4 expert", "experts", "exchange"),
)


@functools.cache
def weights(model):
    return MODELS[model](key=jax.random.key(3))


@functools.cache
def loss_and_gradients(mesh, model, way):
    sizes = {} if mesh is None else MESHES[mesh]
    assert SOURCE.batch(0).segment_ids.max() > 1
    return laid_out.loss_and_gradients(weights(model), sizes, CONTEXT_METHODS[way], SOURCE)


@pytest.mark.parametrize(
    ("mesh", "model", "way"), sentinels(CELLS, landing=lambda cell: cell in AT_EACH_LANDING)
)
def test_losses_and_gradients_equal_those_of_one_device(mesh, model, way):
    loss, gradients = loss_and_gradients(mesh, model, way)
    expected_loss, expected = loss_and_gradients(None, model, "")
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    laid_out.assert_near(gradients, expected, 2e-5, 1e-8)


class Dropping(Part):
    """Adds ones, and drops some of them."""

    scale: Float[Array, "embed"] = weight(ones)

    def __init__(self, key):
        self.scale = initial_values(self, "scale", key, embed=8)

    def __call__(self, x_BSE, context, cache=None):
        return x_BSE + context.dropped(jnp.ones_like(x_BSE), "own"), NO_AUX, cache


def test_every_microbatch_of_a_pipeline_drops_others():
    mesh, rows = make_mesh(stage=2), 4
    with jax.set_mesh(mesh):
        stack = Stack([Segment([Dropping], 2)], jax.random.key(0))
        tokens_BS = jax.device_put(np.zeros((rows, 4), np.int32), sharding("batch seq", mesh))
        x_BSE = jnp.zeros((rows, 4, 8), out_sharding=spec("batch seq embed"))
        context = dataclasses.replace(
            single_document_context(tokens_BS, FLOAT32), key=jax.random.key(1), dropout=0.5
        )
        assert schedule_of(rows, FLOAT32, mesh).microbatches == rows
        found = jax.jit(lambda x_BSE: stack(x_BSE, context).x_BSE)(x_BSE)
    assert len(np.unique(np.asarray(found).reshape(rows, -1), axis=0)) == rows


class TokenIds(Dropping):
    """Adds each token's id and the number of its document."""

    reads = (TOKENS,)

    def __call__(self, x_BSE, context, cache=None):
        of_token_BS = context.shared[TOKENS] + 100 * context.segment_ids_BS
        return x_BSE + of_token_BS[..., None], NO_AUX, cache


def test_every_microbatch_of_a_pipeline_reads_its_own_tokens_and_documents():
    with jax.set_mesh(make_mesh(stage=2)):
        stack = Stack([Segment([TokenIds], 2)], jax.random.key(0))
        batch = place(SOURCE, 0, sharding("batch seq", jax.sharding.get_mesh()))
        context = ForwardContext(batch.positions, batch.segment_ids, FLOAT32)
        context = context.sharing({TOKENS: batch.tokens})
        x_BSE = jnp.zeros((*batch.tokens.shape, 8), out_sharding=spec("batch seq embed"))
        found = jax.jit(lambda x_BSE: stack(x_BSE, context).x_BSE)(x_BSE)
    of_token_BS = np.asarray(batch.tokens) + 100 * np.asarray(batch.segment_ids)
    np.testing.assert_array_equal(found, np.repeat(2 * of_token_BS[..., None], 8, axis=-1))


def router_is_corrected(layers=4):
    router = functools.partial(Router, scores="sigmoid", correction_rate=0.01, balance="batch")
    mixture = functools.partial(Mixture, experts=4, top=2, router=router)
    return functools.partial(llama, **sizes, layers=layers, mlp=16, feed_forward=mixture)


@pytest.mark.parametrize(
    ("sizes", "way"),
    sentinels(
        [
            ({"stage": 2}, "2 rounds"),
            ({"stage": 2, "data": 2, "expert": 2}, "2 rounds"),
            ({"stage": 2, "expert": 4}, "exchange"),
            ({"stage": 2, "expert": 2, "context": 2}, "exchange"),
            ({"stage": 2, "expert": 2, "tensor": 2}, "exchange, 2 rounds, sequence-parallel"),
        ],
        lambda case: len(case[0]) == 1,
    ),
    ids=str,
)
def test_statistics_of_layers_equal_those_of_one_device(sizes, way):
    """Results of a stage before its first rows and after its last are dropped."""

    def reported(mesh, way):
        def aux(model, batch):
            return batch_loss(model, batch, CONTEXT_METHODS[way])[0].model

        model = laid_out.laid_out(weights("experts"), mesh)
        with jax.set_mesh(mesh):
            rows = place(SOURCE, 0, sharding("batch seq", mesh))
            return jax.tree.leaves(jax.device_get(jax.jit(aux)(model, rows)))

    found = reported(make_mesh(**sizes), way)
    expected = reported(make_mesh(), "")
    assert (
        sum(bool(np.any(each)) for each in expected) >= 4
    )  # none is dropped, and that is one more
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "microbatches", "way"),
    [
        ({"stage": 2, "fsdp": 2, "expert": 2}, 2, "2 rounds"),
        ({"stage": 2, "context": 2, "expert": 2}, 2, "exchange"),
        ({"stage": 4, "fsdp": 2}, 1, ""),
    ],
)
def test_a_run_with_state_without_gradient_trains_and_resumes(mesh, microbatches, way, tmp_path):
    run_of = functools.partial(
        experiment, router_is_corrected(),
        objective=NextToken(model_losses={"router_z": 1e-2, "router_balance": 1e-1}),
    )  # fmt: skip
    run = run_of(mesh, CONTEXT_METHODS[way], microbatches=microbatches)
    _, state = check_outsider(run, run_of({}), tmp_path, rtol=1e-4)
    assert all(np.any(each) for each in jax.tree.leaves(jax.device_get(state.buffers)))


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [adamw, muon])
def test_a_run_goes_on_with_other_stages(optimizer, tmp_path):
    settings = {"optimizer": functools.partial(optimizer, peak_lr=1e-2)}
    first = experiment(MODELS["8 layers"], {"stage": 4, "fsdp": 2}, **settings)
    with Checkpoints(tmp_path, keep=1) as checkpoints:

        def save(step, state):
            if step == 3:
                checkpoints.save(step, state.changing, {})

        metrics, _ = trained(first, compiled(first), first.initial_state(), save=save)
    others = {"stage": 2, "tensor": 4}, {"fsdp": 8}, {"stage": 8}
    saved = None
    for mesh in others:
        other = experiment(MODELS["8 layers"], mesh, **settings)
        with Checkpoints(tmp_path, read_only=True) as checkpoints:
            state = checkpoints.restore_newest(other.abstract_state().changing).state
        here = jax.device_get(jax.tree.map(lambda x: x, state.model))
        saved = saved or here
        jax.tree.map(np.testing.assert_array_equal, here, saved)
        for ours, theirs in zip(
            trained(other, compiled(other), state, 3)[0], metrics[3:], strict=True
        ):
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
            assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)


@pytest.mark.landing
def test_no_copy_of_the_weights_is_kept_for_each_microbatch():
    mesh, rounds = make_mesh(stage=2, fsdp=4), 2
    mlp = 24  # which nothing else is
    make = functools.partial(llama, **sizes, layers=4, mlp=mlp, key=jax.random.key(0))
    compute = Compute(dtype="float32", pipeline_rounds=rounds)
    slots = schedule_of(SOURCE.batch_size, compute, mesh).slots

    def loss(model, batch):
        return batch_loss(model, batch, compute)[0].loss_sum

    model = abstract_model(make, mesh)
    batch = abstract_batch(SOURCE.batch_size, SOURCE.sequence_length, mesh)
    with jax.set_mesh(mesh):
        program = str(jax.jit(jax.grad(loss)).trace(model, batch).jaxpr)
    shapes = [re.findall(r"\d+", shape) for shape in re.findall(r"f32\[([^\]]*)\]", program)]
    assert any(shape[:1] == [str(slots)] for shape in shapes)  # the layers' inputs are kept
    assert not [shape for shape in shapes if shape[:1] == [str(slots)] and str(mlp) in shape]


schedules = st.builds(Schedule, st.integers(2, 6), st.integers(1, 4), st.integers(1, 4))


@given(schedules)
def test_each_microbatch_goes_through_all_chunks_in_order(schedule):
    work = schedule.work()
    for microbatch in range(schedule.microbatches):
        slots, stages = np.nonzero(work.counts & (work.microbatch == microbatch))
        visits = sorted(
            zip(slots, work.round[slots, stages], stages, strict=True), key=lambda visit: visit[0]
        )
        # One chunk after the other, each at the next stage in the very next slot.
        expected = itertools.product(range(schedule.rounds), range(schedule.stages))
        assert [visit[1:] for visit in visits] == list(expected)
        assert np.all(np.diff([visit[0] for visit in visits]) == 1)


@given(schedules)
def test_the_bubble_follows_the_formula(schedule):
    stages, rounds = schedule.stages, schedule.rounds
    idle = 1 - schedule.work().counts.mean()
    # Narayanan et al. 2021, §2.2: (p - 1) / (m v) of the time that is used.
    of_used = (stages - 1) / (schedule.microbatches * rounds)
    assert schedule.bubble == pytest.approx(idle)
    assert schedule.bubble / (1 - schedule.bubble) == pytest.approx(of_used)


@given(schedules)
def test_microbatches_are_back_at_the_stage_where_they_waited(schedule):
    """Those of a group move up by one stage when the first takes one, and when the last puts one
    back."""
    waiting = np.arange(schedule.microbatches).reshape(schedule.groups, schedule.stages)
    place = waiting.copy()
    work, begins, ends = schedule.work(), schedule.begins(), schedule.ends()
    for slot in range(schedule.slots):
        if (group := begins[slot]) >= 0:
            assert place[group, 0] == work.microbatch[slot, 0]
            place[group] = np.roll(place[group], -1)
        if (group := ends[slot]) >= 0:
            place[group] = np.roll(place[group], -1)
            place[group, -1] = work.microbatch[slot, -1]
    np.testing.assert_array_equal(place, waiting)
