"""FLOPs and communication of a layer of experts whose busiest device has more rows than others."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

from lmlib.models.experts.mlps import GatedExperts
from lmlib.models.experts.rounds import Settings, mix_experts
from lmlib.parallel.layout import sharding
from lmlib.parallel.mesh import make_mesh
from lmlib.plan.collectives import collectives
from lmlib.plan.flops import count_flops
from lmlib.plan.program import read_program
from lmlib.plan.scopes import EVEN, Routing

pytestmark = pytest.mark.several_devices

DEVICES, B, S, E, F, X, K, ROOM = 4, 4, 32, 16, 32, 8, 2, 1.25
ROWS = B * S * K // DEVICES  # of a device in even routing


def traced(dispatch, grouped):
    """The forward and the backward pass."""
    mesh = make_mesh(fsdp=1, expert=DEVICES, devices=jax.devices()[:DEVICES])

    def given(size, dtype=jnp.float32):
        layout = sharding(("batch", "seq", None), mesh)
        return jax.ShapeDtypeStruct((B, S, size), dtype, sharding=layout)

    def passes(experts, x_BSE, choices_BSK, shares_BSK, dy_BSE):
        settings = Settings(X, dispatch, ROOM, "batch seq embed", grouped)
        y_BSE, back, _ = jax.vjp(
            lambda *parts: mix_experts(settings, *parts[:2], choices_BSK, parts[2]),
            experts, x_BSE, shares_BSK, has_aux=True,
        )  # fmt: skip
        return y_BSE, back(dy_BSE)

    experts = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding("experts", mesh)),
        eqx.filter_eval_shape(functools.partial(GatedExperts, E, F, X, key=jax.random.key(0))),
    )
    with jax.set_mesh(mesh):
        step = jax.jit(passes).trace(
            experts, given(E), given(K, jnp.int32), given(K), given(E)
        )  # fmt: skip
        return mesh, step


@pytest.mark.parametrize("grouped", ["triton", "ragged_dot", "blocks"])
@pytest.mark.parametrize("dispatch", ["gather", "exchange"])
def test_products_count_the_rows_of_the_busiest_device(dispatch, grouped):
    """A row needs 3 products forward and 6 backward. Further rounds repeat 2 of them."""
    _, step = traced(dispatch, grouped)
    for imbalance, rounds in ((1.0, 1), (1.2, 1), (1.3, 2), (2.6, 3)):
        routing = Routing(imbalance, ROOM)
        assert routing.further_rounds == rounds - 1
        products = 9 * imbalance + 2 * max(imbalance - ROOM, 0)
        found = count_flops(step.jaxpr, (), routing).matmuls
        assert sum(one.device_flops for one in found) == pytest.approx(products * 2 * ROWS * E * F)
        assert sum(one.flops for one in found) == pytest.approx(
            products * 2 * ROWS * E * F * DEVICES
        )
    assert count_flops(step.jaxpr).total == pytest.approx(9 * ROOM * 2 * ROWS * E * F * DEVICES)


@pytest.mark.landing
def test_each_further_round_sends_what_the_first_sends():
    mesh, step = traced("exchange", "blocks")
    text = step.lower().compile().as_text()

    def exchanges(routing, of_further):
        sent = collectives(read_program(text, routing), mesh)
        return sum(
            one.count_per_step
            for one in sent
            if one.kind == "all-to-all" and ("further" in one.each) == of_further
        )

    first = exchanges(EVEN, False)
    assert first > 0 and exchanges(EVEN, True) == 0
    assert exchanges(Routing(2.6, ROOM), False) == first
    assert exchanges(Routing(2.6, ROOM), True) == 2 * exchanges(Routing(1.3, ROOM), True) > 0
