"""Choices of experts, shares, reports and corrections, against NumPy."""

import dataclasses
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose
from refusals import refusals

from lmlib import Compute
from lmlib.models.experts.router import Router
from lmlib.models.families.experts.gpt_oss import gpt_oss
from lmlib.models.families.experts.mixtral import mixtral
from lmlib.models.forward_context import single_document_context

B, S, E, X = 2, 5, 6, 8
CONTEXT = single_document_context(jnp.zeros((B, S), jnp.int32), Compute(dtype="float32"))
X_BSE = np.random.default_rng(0).normal(size=(B, S, E)).astype(np.float32)


def routed(x=X_BSE, counts=None, **settings):
    """The router, its result, and its logits by NumPy in float64."""
    router = Router(E, X, **{"top": 3} | settings, key=jax.random.key(0))
    context = dataclasses.replace(CONTEXT, counts_BS=counts)
    return router, router(jnp.asarray(x), context), x.astype(np.float64) @ np.float64(router.logits)


def softmax(z):
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def sigmoid(z):
    return 1 / (1 + np.exp(-z))


def best(ranked, top):
    return np.argsort(-ranked, axis=-1, kind="stable")[..., :top]


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize(("scores", "function"), [("softmax", softmax), ("sigmoid", sigmoid)])
def test_the_highest_scores_are_chosen_and_are_the_shares(scores, function, normalized):
    _, routing, z = routed(scores=scores, normalized=normalized, scale=2.5)
    wanted = function(z)
    choices = best(wanted, 3)
    np.testing.assert_array_equal(routing.choices_BSK, choices)
    shares = np.take_along_axis(wanted, choices, -1)
    if normalized:
        shares /= shares.sum(-1, keepdims=True)
    assert_allclose(routing.shares_BSK, 2.5 * shares, rtol=1e-5)


def test_normalised_shares_are_the_softmax_of_the_chosen_logits():
    """Mixtral and gpt-oss have this order."""
    _, routing, z = routed()
    chosen = np.take_along_axis(z, np.asarray(routing.choices_BSK), -1)
    assert_allclose(routing.shares_BSK, softmax(chosen), rtol=1e-5)


@pytest.mark.parametrize(("scores", "function"), [("softmax", softmax), ("sigmoid", sigmoid)])
def test_the_share_of_a_single_expert_is_its_score_and_teaches_the_router(scores, function):
    """Same as Switch (arXiv:2101.03961, eq. 2) and Llama 4. A normalized share is always 1."""
    router, routing, z = routed(scores=scores, top=1, scale=2.5)
    wanted = 2.5 * function(z).max(-1, keepdims=True)
    assert_allclose(routing.shares_BSK, wanted, rtol=1e-5)
    assert router.gradient_problem is None

    def loss(router):
        return jnp.sum(jnp.square(router(jnp.asarray(X_BSE), CONTEXT).shares_BSK))

    found = jax.grad(loss)(router).logits
    direction = np.random.default_rng(1).normal(size=(E, X))
    moved = [
        np.sum((2.5 * function(z + h * (X_BSE @ direction)).max(-1)) ** 2) for h in (1e-6, -1e-6)
    ]
    assert_allclose(np.sum(found * direction), (moved[0] - moved[1]) / 2e-6, rtol=1e-4)


@pytest.mark.parametrize("family", [mixtral, gpt_oss])
def test_families_that_normalize_do_so_for_a_single_expert_as_transformers_does(family):
    sizes = {"vocab": 9, "embed": 8, "layers": 2, "heads": 2, "mlp": 8}
    make = functools.partial(family, **sizes, experts=4, top=1, key=jax.random.key(0))
    router = jax.eval_shape(make).stack.patterns[0][0].mlp.router
    assert router.normalized and "the share of a single expert is always 1" in (
        router.gradient_problem or ""
    )


def test_only_experts_of_the_best_groups_are_chosen():
    _, routing, z = routed(scores="sigmoid", groups=4, top_groups=2, top=3)
    scores = sigmoid(z).reshape(B, S, 4, 2)
    kept = best(scores.sum(-1), 2)  # both of a group are its two best
    mask = np.any(kept[..., None] == np.arange(4), axis=-2)
    ranked = np.where(mask[..., None], scores, -np.inf).reshape(B, S, X)
    np.testing.assert_array_equal(routing.choices_BSK, best(ranked, 3))
    wanted = set(map(tuple, np.stack(np.nonzero(mask), -1).tolist()))
    for b, s, k in np.ndindex(B, S, 3):
        assert (b, s, int(routing.choices_BSK[b, s, k]) // 2) in wanted


def test_a_correction_counts_in_choices_and_not_in_shares():
    router, before, z = routed(scores="sigmoid", correction_rate=0.1)
    router = eqx.tree_at(lambda r: r.correction, router, jnp.zeros(X).at[5].set(10.0))
    after = router(jnp.asarray(X_BSE), CONTEXT)
    assert (np.asarray(after.choices_BSK)[..., 0] == 5).all()
    scores = np.take_along_axis(sigmoid(z), np.asarray(after.choices_BSK), -1)
    assert_allclose(after.shares_BSK, scores / scores.sum(-1, keepdims=True), rtol=1e-5)
    assert not np.array_equal(before.choices_BSK, after.choices_BSK)


def test_negative_corrections_choose_no_expert_outside_the_best_groups():
    router, _, z = routed(scores="sigmoid", groups=4, top_groups=2, correction_rate=0.1)
    router = eqx.tree_at(lambda r: r.correction, router, jnp.full(X, -3.0))
    ranked = sigmoid(z) - 3
    kept = best(ranked.reshape(B, S, 4, 2).sum(-1), 2)
    mask = np.repeat(np.any(kept[..., None] == np.arange(4), axis=-2), 2, axis=-1)
    expected = best(np.where(mask, ranked, -np.inf), 3)
    np.testing.assert_array_equal(router(jnp.asarray(X_BSE), CONTEXT).choices_BSK, expected)


def test_corrections_grow_for_experts_that_had_few():
    router, _, _ = routed(correction_rate=0.1, balance="batch")
    tallies = jnp.array([0, 1, 2, 3, 4, 5, 6, 3.0])  # 3 on average
    moved = router.updated(tallies)
    assert_allclose(moved.correction, [0.1, 0.1, 0.1, 0, -0.1, -0.1, -0.1, 0], atol=1e-7)
    assert_allclose(moved.load, np.asarray(tallies) / 24, rtol=1e-6)


def test_statistics_count_only_positions_that_count():
    counts = np.array([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]], bool)
    _, routing, z = routed(counts=jnp.asarray(counts))
    p, aux = softmax(z), routing.aux
    chosen = np.any(np.asarray(routing.choices_BSK)[..., None] == np.arange(X), axis=-2)
    balance = 0.0
    for row in range(B):
        load = chosen[row][counts[row]].mean(0) / 3
        balance += (X * load * p[row][counts[row]]).sum()
    log_sum = np.log(np.exp(z).sum(-1))
    entropy = -(p * np.log(p)).sum(-1)
    assert_allclose(aux.losses["router_balance"], balance, rtol=1e-5)
    assert_allclose(aux.losses["router_z"], (log_sum[counts] ** 2).sum(), rtol=1e-5)
    assert_allclose(aux.statistics["router_entropy"], entropy[counts].sum(), rtol=1e-5)
    np.testing.assert_array_equal(aux.tallies, chosen[counts].sum(0))


def test_the_balance_of_the_batch_before_is_one_where_all_get_the_same():
    router, routing, z = routed(balance="batch")
    assert_allclose(routing.aux.losses["router_balance"], B * S, rtol=1e-5)
    router = eqx.tree_at(lambda r: r.load, router, jnp.zeros(X).at[2].set(1.0))
    found = router(jnp.asarray(X_BSE), CONTEXT).aux.losses["router_balance"]
    assert_allclose(found, (X * softmax(z)[..., 2]).sum(), rtol=1e-5)


@pytest.mark.parametrize(("settings", "message"), refusals(__file__, "router"))
def test_settings_that_do_not_fit_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        routed(**settings)
