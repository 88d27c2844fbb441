"""The loss on a teacher's likeliest ids and its gradients against float64 NumPy, on one device and
on many; and which ids are the likeliest."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bigram import Bigram
from jax.sharding import NamedSharding

from lmlib.compute import Compute
from lmlib.data.synthetic import Synthetic
from lmlib.losses.distillation import Distillation
from lmlib.losses.fused import LogitSettings, fused_loss
from lmlib.losses.likeliest import likeliest_tokens
from lmlib.losses.listed_divergence import ListedDivergence
from lmlib.parallel.layout import STORED, partition, sharding, shardings
from lmlib.parallel.mesh import make_mesh
from lmlib.state import abstract_model

B, S, E, V = 4, 6, 16, 32
WEIGHT = 0.7
NAMES = ("loss", "cross_entropy", "divergence")
FLOAT32 = Compute(dtype="float32")


def log_softmax(logits_V):
    shifted_V = logits_V - logits_V.max()
    return shifted_V - np.log(np.exp(shifted_V).sum())


@functools.cache
def inputs(k):
    """Features, table, targets, mask, and what a teacher of random logits lists."""
    random = np.random.default_rng(0)
    taught_BSV = 4 * random.normal(size=(B, S, V))
    taught_BSV[0, 0, :k] += 60  # nothing is left for the others
    taught_BSV = np.apply_along_axis(log_softmax, -1, taught_BSV)
    ids_BSk = np.argsort(-taught_BSV, axis=-1)[..., :k]
    listed_BSk = np.take_along_axis(taught_BSV, ids_BSk, axis=-1)
    h_BSE = random.normal(size=(B, S, E))
    h_BSE[1, 1] *= 40  # a student so sure that the others vanish in float32
    return (
        jnp.asarray(h_BSE, jnp.float32),
        jnp.asarray(random.normal(size=(E, V)) * 5 / E**0.5, jnp.float32),
        jnp.asarray(random.integers(0, V, (B, S)), jnp.int32),
        jnp.asarray((random.random((B, S)) < 0.7).tolist(), bool).at[:2, :2].set(True),
        jnp.asarray(ids_BSk, jnp.int32),
        jnp.asarray(listed_BSk, jnp.float16),
    )


def outcomes(log_p_k):
    """The probabilities of the listed ids and of all others."""
    p_k = np.exp(log_p_k)
    whole = p_k.sum() if len(p_k) == V else max(p_k.sum(), 1)
    return p_k / whole, 1 - p_k.sum() / whole


def reference(arrays):
    """Sums by name, and the gradients of the loss with respect to features and table."""
    h_BSE, table_EV, listed_BSk = (np.asarray(arrays[i], np.float64) for i in (0, 1, 5))
    targets_BS, mask_BS, ids_BSk = (np.asarray(arrays[i]) for i in (2, 3, 4))
    sums = dict.fromkeys(NAMES, 0.0)
    dh_BSE, dtable_EV = np.zeros_like(h_BSE), np.zeros_like(table_EV)
    for b, s in np.argwhere(mask_BS):
        log_q_V = log_softmax(h_BSE[b, s] @ table_EV)
        cross_entropy = -log_q_V[targets_BS[b, s]]
        ids, (p_k, rest) = ids_BSk[b, s], outcomes(listed_BSk[b, s])
        divergence = (p_k * (np.log(p_k) - log_q_V[ids])).sum()
        of_divergence_V = np.exp(log_q_V)
        of_divergence_V[ids] -= p_k
        others = np.setdiff1d(np.arange(V), ids)
        if len(others) and rest > 0:
            highest = log_q_V[others].max()
            log_q_rest = highest + np.log(np.exp(log_q_V[others] - highest).sum())
            divergence += rest * (np.log(rest) - log_q_rest)
            of_divergence_V[others] -= rest * np.exp(log_q_V[others] - log_q_rest)
        loss = (1 - WEIGHT) * cross_entropy + WEIGHT * divergence
        for name, value in zip(NAMES, (loss, cross_entropy, divergence), strict=True):
            sums[name] += value
        of_cross_entropy_V = np.exp(log_q_V) - np.eye(V)[targets_BS[b, s]]
        dlogits_V = (1 - WEIGHT) * of_cross_entropy_V + WEIGHT * of_divergence_V
        dh_BSE[b, s] = table_EV @ dlogits_V
        dtable_EV += np.outer(h_BSE[b, s], dlogits_V)
    return sums, dh_BSE, dtable_EV


def check(arrays, expected, chunk=None):
    h_BSE, table_EV, targets_BS, mask_BS, ids_BSk, listed_BSk = arrays

    @jax.jit
    @functools.partial(jax.value_and_grad, argnums=(0, 1), has_aux=True)
    def found(h_BSE, table_EV):
        loss, how = ListedDivergence(WEIGHT, V), LogitSettings(chunk=chunk)
        listed = ids_BSk, listed_BSk
        sums = fused_loss(loss, how, h_BSE, table_EV, targets_BS, mask_BS, listed)
        return sums.minimised, sums.reported

    (minimised, reported), gradients = found(h_BSE, table_EV)
    assert minimised == pytest.approx(expected[0]["loss"], rel=1e-5)
    assert {name: float(each) for name, each in reported.items()} == pytest.approx(
        expected[0], rel=1e-5
    )
    for gradient, right in zip(gradients, expected[1:], strict=True):
        np.testing.assert_allclose(gradient, right, rtol=1e-5, atol=1e-5 * np.abs(right).max())


@pytest.mark.parametrize("k", [5, pytest.param(1, marks=pytest.mark.slow), V])
def test_sums_and_gradients_match_float64(k):
    check(inputs(k), reference(inputs(k)), chunk=5)


@pytest.mark.several_devices
@pytest.mark.parametrize("k", [5, pytest.param(V, marks=pytest.mark.slow)])
def test_a_mesh_changes_nothing(k):
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    layouts = partition("batch seq embed"), partition("embed vocab", STORED)
    layouts += (partition("batch seq"),) * 4
    placed = [
        jax.device_put(array, NamedSharding(mesh, layout))
        for array, layout in zip(inputs(k), layouts, strict=True)
    ]
    with jax.set_mesh(mesh):
        check(placed, reference(inputs(k)), chunk=5)


def test_all_ids_give_the_whole_divergence():
    """In float64 the last outcome has nothing left, and the sum is that over the vocabulary."""
    arrays = inputs(V)
    sums, _, _ = reference(arrays)
    whole = 0.0
    for b, s in np.argwhere(np.asarray(arrays[3])):
        log_p_V = np.empty(V)
        log_p_V[arrays[4][b, s]] = np.asarray(arrays[5][b, s], np.float64)
        log_p_V = log_softmax(log_p_V)
        h_E, table_EV = np.asarray(arrays[0][b, s], np.float64), np.asarray(arrays[1], np.float64)
        whole += (np.exp(log_p_V) * (log_p_V - log_softmax(h_E @ table_EV))).sum()
    assert sums["divergence"] == pytest.approx(whole)


def listed_by(model, batch, k):
    """In float64."""
    logits_BSV = np.asarray(model.table_VE, np.float64)[batch.tokens] @ np.asarray(model.head_EV)
    log_p_BSV = np.apply_along_axis(log_softmax, -1, logits_BSV)
    ids_BSk = np.argsort(-log_p_BSV, axis=-1, kind="stable")[..., :k]
    return ids_BSk, np.take_along_axis(log_p_BSV, ids_BSk, axis=-1)


@pytest.mark.slow
@pytest.mark.parametrize("k", [5, V])
def test_the_likeliest_tokens_are_found_over_a_split_vocabulary(k):
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    batch = Synthetic(vocab_size=V, batch_size=B, sequence_length=S).batch(0)
    model = Bigram(V, E, key=jax.random.key(0))
    with jax.set_mesh(mesh):
        rows = sharding("batch seq", mesh)
        found = jax.jit(functools.partial(likeliest_tokens, compute=FLOAT32, k=k))
        placed = jax.tree.map(lambda x: jax.device_put(x, rows), batch)
        layout = shardings(abstract_model(lambda: model, mesh))
        ids_BSk, log_p_BSk = found(jax.device_put(model, layout), placed)
    right_ids_BSk, right_BSk = listed_by(model, batch, k)
    np.testing.assert_array_equal(ids_BSk, right_ids_BSk)
    np.testing.assert_allclose(log_p_BSk, right_BSk, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "settings", [{"temperature": 2.0}, {"teacher_from": "RUN"}, {"weight": 1.5}]
)
def test_senseless_settings_are_refused(settings):
    (name,) = settings
    with pytest.raises(ValueError, match=f"{name} (must be|is)"):
        Distillation(**settings)
