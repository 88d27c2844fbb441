"""Losses of a student beside float64 NumPy, on one device and on many: of a teacher's whole
distribution, and of the likeliest ids that it listed."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bigram import Bigram
from jax.sharding import NamedSharding

from lmlib.compute import Compute
from lmlib.data.synthetic import Synthetic
from lmlib.losses.distillation import Distillation, Divergence, ListedDivergence
from lmlib.losses.fused import fused_loss
from lmlib.losses.token_losses import likeliest_tokens
from lmlib.parallel.layout import STORED, partition, sharding, shardings
from lmlib.parallel.mesh import make_mesh
from lmlib.state import abstract_model

B, S, E, F, V = 4, 6, 16, 24, 32  # F: the teacher's embed
T, WEIGHT = 2.0, 0.7
NAMES = ("loss", "cross_entropy", "divergence")
FLOAT32 = Compute(dtype="float32")
BATCH = Synthetic(vocab_size=V, batch_size=B, sequence_length=16).batch(0)
assert BATCH.loss_mask.sum() > 10


def log_softmax(logits_V):
    shifted_V = logits_V - logits_V.max()
    return shifted_V - np.log(np.exp(shifted_V).sum())


def capped(logits_V, cap):
    """Returns the capped logits, and their derivative."""
    if cap is None:
        return logits_V, np.ones_like(logits_V)
    logits_V = cap * np.tanh(logits_V / cap)
    return logits_V, 1 - (logits_V / cap) ** 2


@functools.cache
def inputs(k=None):
    """Features, table, targets, mask, and the teacher's features and table or the `k` ids that it
    listed, with their log-probabilities."""
    random = np.random.default_rng(0)
    h_BSE = random.normal(size=(B, S, E))
    table_EV = random.normal(size=(E, V)) * 5 / E**0.5
    targets_BS, mask_BS = random.integers(0, V, (B, S)), random.random((B, S)) < 0.7
    if k is None:
        taught = random.normal(size=(B, S, F)), random.normal(size=(F, V)) * 5 / F**0.5
        taught = tuple(jnp.asarray(each, jnp.float32) for each in taught)
    else:
        taught_BSV = 4 * random.normal(size=(B, S, V))
        taught_BSV[0, 0, :k] += 60  # nothing is left for the others
        taught_BSV = np.apply_along_axis(log_softmax, -1, taught_BSV)
        ids_BSk = np.argsort(-taught_BSV, axis=-1)[..., :k]
        listed_BSk = np.take_along_axis(taught_BSV, ids_BSk, axis=-1)
        taught = jnp.asarray(ids_BSk, jnp.int32), jnp.asarray(listed_BSk, jnp.float16)
        h_BSE[1, 1] *= 40  # a student so sure that the others vanish in float32
        mask_BS[:2, :2] = True
    arrays = jnp.asarray(h_BSE, jnp.float32), jnp.asarray(table_EV, jnp.float32)
    return (*arrays, jnp.asarray(targets_BS, jnp.int32), jnp.asarray(mask_BS), *taught)


def whole_divergence(log_q_V, logits_V, taught_F, taught_FV, teacher_cap):
    """KL at the temperature T, and T² times its gradient with respect to the student's logits."""
    log_p_V = log_softmax(capped(taught_F @ taught_FV, teacher_cap)[0] / T)
    log_q_V = log_softmax(logits_V / T)
    divergence = (np.exp(log_p_V) * (log_p_V - log_q_V)).sum()
    return divergence, T * (np.exp(log_q_V) - np.exp(log_p_V))


def listed_divergence(log_q_V, logits_V, ids_k, log_p_k, teacher_cap):
    """KL over the listed ids and all others as one outcome, and its gradient."""
    p_k = np.exp(log_p_k)
    whole = p_k.sum() if len(p_k) == V else max(p_k.sum(), 1)
    p_k, rest = p_k / whole, 1 - p_k.sum() / whole
    divergence, gradient_V = (p_k * (np.log(p_k) - log_q_V[ids_k])).sum(), np.exp(log_q_V)
    gradient_V[ids_k] -= p_k
    others = np.setdiff1d(np.arange(V), ids_k)
    if len(others) and rest > 0:
        highest = log_q_V[others].max()
        log_q_rest = highest + np.log(np.exp(log_q_V[others] - highest).sum())
        divergence += rest * (np.log(rest) - log_q_rest)
        gradient_V[others] -= rest * np.exp(log_q_V[others] - log_q_rest)
    return divergence, gradient_V


def reference(arrays, cap=None, teacher_cap=None):
    """Sums by name, and the gradients of the loss with respect to features and table."""
    listed = arrays[4].dtype == jnp.int32
    of_token, factor = (listed_divergence, 1) if listed else (whole_divergence, T**2)
    h_BSE, table_EV = (np.asarray(arrays[i], np.float64) for i in (0, 1))
    targets_BS, mask_BS, taught_BSF = (np.asarray(arrays[i]) for i in (2, 3, 4))
    more = np.asarray(arrays[5], np.float64)
    sums = dict.fromkeys(NAMES, 0.0)
    dh_BSE, dtable_EV = np.zeros_like(h_BSE), np.zeros_like(table_EV)
    for b, s in np.argwhere(mask_BS):
        logits_V, slope_V = capped(h_BSE[b, s] @ table_EV, cap)
        log_q_V = log_softmax(logits_V)
        cross_entropy = -log_q_V[targets_BS[b, s]]
        given = taught_BSF[b, s], (more[b, s] if listed else more)
        divergence, of_divergence_V = of_token(log_q_V, logits_V, *given, teacher_cap)
        loss = (1 - WEIGHT) * cross_entropy + WEIGHT * factor * divergence
        for name, value in zip(NAMES, (loss, cross_entropy, divergence), strict=True):
            sums[name] += value
        of_cross_entropy_V = np.exp(log_q_V) - np.eye(V)[targets_BS[b, s]]
        dlogits_V = ((1 - WEIGHT) * of_cross_entropy_V + WEIGHT * of_divergence_V) * slope_V
        dh_BSE[b, s] = table_EV @ dlogits_V
        dtable_EV += np.outer(h_BSE[b, s], dlogits_V)
    return sums, dh_BSE, dtable_EV


def check(arrays, expected, cap=None, teacher_cap=None, chunk=None):
    h_BSE, table_EV, *fixed = arrays
    targets_BS, mask_BS, one, other = fixed
    if one.dtype == jnp.int32:
        loss, taught = ListedDivergence(WEIGHT, V), ((one, other), ())
    else:
        loss, taught = Divergence(T, WEIGHT, teacher_cap, "float32"), ((one,), (other,))

    @jax.jit
    @functools.partial(jax.value_and_grad, argnums=(0, 1), has_aux=True)
    def found(h_BSE, table_EV):
        given = h_BSE, table_EV, targets_BS, mask_BS, *taught
        sums = fused_loss(loss, *given, cap=cap, chunk=chunk)
        return sums.loss_sum, sums.reported

    (minimised, reported), gradients = found(h_BSE, table_EV)
    assert minimised == pytest.approx(expected[0]["loss"], rel=1e-5)
    assert {name: float(each) for name, each in reported.items()} == pytest.approx(
        expected[0], rel=1e-5
    )
    for gradient, right in zip(gradients, expected[1:], strict=True):
        np.testing.assert_allclose(gradient, right, rtol=1e-5, atol=1e-5 * np.abs(right).max())


@pytest.mark.parametrize(
    ("k", "cap", "teacher_cap", "chunk"),
    [
        (None, None, None, 5),
        (None, 5.0, 8.0, None),
        pytest.param(None, None, 8.0, 1, marks=pytest.mark.slow),
        (5, None, None, 5),
        pytest.param(1, None, None, 5, marks=pytest.mark.slow),
        (V, None, None, 5),
    ],
)
def test_sums_and_gradients_match_float64(k, cap, teacher_cap, chunk):
    check(inputs(k), reference(inputs(k), cap, teacher_cap), cap, teacher_cap, chunk)


@pytest.mark.several_devices
@pytest.mark.parametrize(
    ("k", "features"),
    [
        (None, "batch seq embed"),
        pytest.param(None, "batch seq_parallel embed", marks=pytest.mark.slow),
        (5, "batch seq embed"),
        pytest.param(V, "batch seq embed", marks=pytest.mark.slow),
    ],
)
def test_a_mesh_changes_nothing(k, features):
    mesh, tokens = make_mesh(data=2, fsdp=2, tensor=2), partition("batch seq")
    taught = [partition("batch seq embed"), partition("embed vocab", STORED)]
    layouts = [partition(features), partition("embed vocab", STORED), tokens, tokens]
    layouts += taught if k is None else [tokens, tokens]
    placed = [
        jax.device_put(array, NamedSharding(mesh, layout))
        for array, layout in zip(inputs(k), layouts, strict=True)
    ]
    with jax.set_mesh(mesh):
        check(placed, reference(inputs(k)), chunk=5)


class Capped(Bigram):
    logit_cap = 3.0


student, teacher = (
    functools.partial(kind, V, embed, key=jax.random.key(embed))
    for kind, embed in ((Bigram, E), (Capped, F))
)


def test_student_and_teacher_are_given_the_same_tokens_and_each_has_its_cap():
    models = student(), teacher()
    (h_BSE, head_EV), (h_BSF, head_FV) = (
        (model.table_VE[BATCH.tokens], model.head_EV) for model in models
    )
    arrays = h_BSE, head_EV, BATCH.targets, BATCH.loss_mask, h_BSF, head_FV
    expected, _, _ = reference(arrays, teacher_cap=Capped.logit_cap)
    objective = Distillation(teacher, temperature=T, weight=WEIGHT)
    sums = jax.jit(functools.partial(objective.sums, compute=FLOAT32))(*models, BATCH)
    assert {name: float(each) for name, each in sums.reported.items()} == pytest.approx(
        expected, rel=1e-5
    )
    assert objective.count(BATCH) == BATCH.loss_mask.sum()


def test_a_student_that_is_its_teacher_learns_nothing_more():
    def loss(model):
        return Distillation(student, weight=1.0).sums(model, model, BATCH, FLOAT32).loss_sum

    value, gradient = jax.jit(jax.value_and_grad(loss))(student())
    assert abs(value) < 1e-4
    assert all(np.abs(each).max() < 1e-4 for each in jax.tree.leaves(gradient))


@pytest.mark.slow
@pytest.mark.parametrize("k", [5, V])
def test_the_likeliest_tokens_are_found_over_a_split_vocabulary(k):
    mesh, model = make_mesh(data=2, fsdp=2, tensor=2), student()
    with jax.set_mesh(mesh):
        found = jax.jit(functools.partial(likeliest_tokens, compute=FLOAT32, k=k))
        placed = jax.device_put(BATCH, sharding("batch seq", mesh))
        layout = shardings(abstract_model(lambda: model, mesh))
        ids_BSk, log_p_BSk = found(jax.device_put(model, layout), placed)
    logits_BSV = np.asarray(model.table_VE, np.float64)[BATCH.tokens] @ np.asarray(model.head_EV)
    log_p_BSV = np.apply_along_axis(log_softmax, -1, logits_BSV)
    expected_BSk = np.argsort(-log_p_BSV, axis=-1, kind="stable")[..., :k]
    np.testing.assert_array_equal(ids_BSk, expected_BSk)
    right_BSk = np.take_along_axis(log_p_BSV, expected_BSk, axis=-1)
    np.testing.assert_allclose(log_p_BSk, right_BSk, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("make", "name", "value"),
    [
        (teacher, "temperature", 0.0),
        (teacher, "weight", 1.5),
        (teacher, "weight", -0.1),
        (teacher, "dropout", 1.0),
        (None, "temperature", 2.0),
        (None, "teacher_from", "RUN"),
    ],
)
def test_senseless_settings_are_refused(make, name, value):
    with pytest.raises(ValueError, match=f"{name} (must be|is)"):
        Distillation(make, **{name: value})
