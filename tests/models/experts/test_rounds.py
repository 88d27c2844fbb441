"""Experts on every mesh, by both dispatches, against a plain loop over experts in float64: what
they make of tokens, and every gradient."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from laid_out import laid_out
from sentinels import sentinels

from lmlib.models.experts.mlps import GatedExperts
from lmlib.models.experts.rounds import Settings, mix_experts
from lmlib.parallel.gathering import gather
from lmlib.parallel.layout import replicate_for_tp, reshard, sharding, shardings
from lmlib.parallel.mesh import make_mesh

pytestmark = pytest.mark.several_devices

B, S, E, F, X = 8, 6, 8, 12, 8
MESHES = {
    "1": {},
    "2 expert": {"expert": 2},
    "8 expert": {"expert": 8},  # dense weights rest split over them too
    "2 fsdp, 2 expert, 2 tensor": {"fsdp": 2, "expert": 2, "tensor": 2},
    "2 data, 4 expert": {"data": 2, "expert": 4},
    "2 expert, 2 context, 2 tensor": {"expert": 2, "context": 2, "tensor": 2},
    "2 data, 2 fsdp, 2 tensor": {"data": 2, "fsdp": 2, "tensor": 2},
}
SHARED = functools.partial(jax.random.normal, dtype=jnp.float64)


def routings(top):
    """Returns choices of `top` different experts for each token, in easy and hard cases."""
    rng = np.random.default_rng(top)
    any_of = np.array([rng.permutation(X)[:top] for _ in range(B * S)])
    alike = np.tile((3 + np.arange(top)) % X, (B * S, 1))
    some = np.where(rng.random((B * S, 1)) < 0.8, alike, any_of)
    of_last = np.array([(X - 1 - rng.permutation(max(top, X // 4))[:top]) for _ in range(B * S)])
    cases = {"mixed": any_of, "all alike": alike, "most alike": some, "of the last": of_last}
    return {name: each.reshape(B, S, top).astype(np.int32) for name, each in cases.items()}


@functools.cache
def arrays(top):
    with jax.enable_x64(True):
        experts = GatedExperts(E, F, X, bias=True, key=jax.random.key(0))
        experts = jax.tree.map(
            lambda w: SHARED(jax.random.key(w.size), w.shape) / np.sqrt(w.shape[1]), experts
        )
        x, dy = SHARED(jax.random.key(1), (2, B, S, E))
        shares = jax.random.uniform(jax.random.key(2), (B, S, top), jnp.float64)
        return jax.device_get((experts, x, shares, dy))


def plain_loop(experts, x, shares, choices):
    """Each expert computes all tokens; its output counts for tokens that chose it."""
    y = jnp.zeros_like(x)
    for expert in range(X):
        gate = x @ experts.gate[expert] + experts.gate_bias[expert]
        up = x @ experts.up[expert] + experts.up_bias[expert]
        made = (gate / (1 + jnp.exp(-gate)) * up) @ experts.down[expert]
        share_of = jnp.sum(jnp.where(choices == expert, shares, 0), axis=-1, keepdims=True)
        y += share_of * (made + experts.down_bias[expert])
    return y


@jax.jit
def loop_and_gradients(dy, choices, experts, x, shares):
    y, back = jax.vjp(functools.partial(plain_loop, choices=choices), experts, x, shares)
    return y, back(dy)


@functools.cache
def expected(top, case):
    with jax.enable_x64(True):
        experts, x, shares, dy = arrays(top)
        return jax.device_get(loop_and_gradients(dy, routings(top)[case], experts, x, shares))


@functools.cache
def program(mesh_name, dispatch, room, sequence_parallel, grouped="auto", parts=1):
    """y, its gradients, and the shares of choices that were computed."""
    mesh = make_mesh(**MESHES[mesh_name])
    residual = "batch seq_parallel embed" if sequence_parallel else "batch seq embed"

    def forward(experts, x_BSE, shares_BSK, choices_BSK):
        experts, x_BSE = gather(experts, x_BSE.dtype), replicate_for_tp(x_BSE, "batch seq embed")
        settings = Settings(X, dispatch, room, residual, grouped, parts=parts)
        return mix_experts(settings, experts, x_BSE, choices_BSK, shares_BSK)

    def run(experts, x_BSE, shares_BSK, choices_BSK, dy_BSE):
        y_BSE, back, computed_BS = jax.vjp(
            lambda *parts: forward(*parts, choices_BSK), experts, x_BSE, shares_BSK, has_aux=True
        )
        return y_BSE, back(reshard(dy_BSE, residual)), computed_BS

    def call(experts, x, shares, choices, dy):
        tokens = sharding(("batch", "seq", None), mesh)
        given = jax.device_put((x, shares, choices, dy), tokens)
        placed = laid_out(experts, mesh)
        with jax.set_mesh(mesh):
            y, gradients, computed = jax.jit(run)(placed, *given)
        # Split over fsdp and expert they arrive by a reduce-scatter, not whole on each device.
        assert shardings(gradients[0]) == shardings(placed)
        return y, gradients, computed

    return call


CASES = [
    *((name, "gather", 1.5, 2, False) for name in MESHES),
    ("2 expert", "exchange", 1.5, 2, False),
    ("8 expert", "exchange", 1.0, 2, False),
    ("2 fsdp, 2 expert, 2 tensor", "gather", 1.0, 2, True),
    ("2 fsdp, 2 expert, 2 tensor", "exchange", 1.5, 2, False),
    ("8 expert", "gather", 1.0, 1, False),
    ("8 expert", "exchange", 1.0, 1, False),
    ("8 expert", "exchange", 1.5, X, False),
    ("2 fsdp, 2 expert, 2 tensor", "gather", 1.0, X, False),
    ("2 fsdp, 2 expert, 2 tensor", "exchange", 1.0, 1, True),
    ("2 data, 4 expert", "exchange", 2.0, 2, False),
]
SHOWN = "2 fsdp, 2 expert, 2 tensor", "exchange", 1.5, 2, False
AT_EACH_LANDING = "2 expert", "exchange", 1.5, 2, False


def assert_a_loop_over_experts(run, top, tolerances, dtype=np.float64):
    experts, *given, dy = jax.tree.map(lambda x: x.astype(dtype), arrays(top))
    for case, choices in routings(top).items():
        y, gradients, computed = run(experts, *given, choices, dy)
        np.testing.assert_array_equal(computed, 1, err_msg=case)
        wanted_y, wanted = expected(top, case)
        np.testing.assert_allclose(y, wanted_y, *tolerances, err_msg=case)
        paths = jax.tree.leaves_with_path(wanted)
        for (path, theirs), ours in zip(paths, jax.tree.leaves(gradients), strict=True):
            name = case + jax.tree_util.keystr(path)
            np.testing.assert_allclose(ours, theirs, *tolerances, err_msg=name)


@pytest.mark.parametrize(
    ("mesh", "dispatch", "room", "top", "sequence_parallel"),
    sentinels(CASES, SHOWN.__eq__, landing=AT_EACH_LANDING.__eq__),
)
def test_it_is_a_loop_over_experts(mesh, dispatch, room, top, sequence_parallel):
    with jax.enable_x64(True):
        run = program(mesh, dispatch, room, sequence_parallel)
        assert_a_loop_over_experts(run, top, (1e-10, 1e-12))


@pytest.mark.parametrize(
    ("mesh", "dispatch", "sequence_parallel"),
    [
        pytest.param("2 expert", "exchange", False, marks=pytest.mark.landing),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in [
                ("1", "gather", False),
                ("8 expert", "exchange", False),  # one row on each device, which stays whole
                ("2 fsdp, 2 expert, 2 tensor", "exchange", True),
                ("2 expert, 2 context, 2 tensor", "gather", False),
            ]
        ),
    ],
)
def test_it_is_a_loop_over_experts_in_parts_too(mesh, dispatch, sequence_parallel):
    with jax.enable_x64(True):
        run = program(mesh, dispatch, 1.0, sequence_parallel, parts=2)
        assert_a_loop_over_experts(run, 2, (1e-10, 1e-12))


@pytest.mark.landing
def test_triton_kernels_make_it_too():
    run = program(*SHOWN[:3], False, "triton")
    assert_a_loop_over_experts(run, 2, (1e-4, 1e-4), np.float32)
