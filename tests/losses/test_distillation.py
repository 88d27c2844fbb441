"""The distillation loss and its gradients against float64 NumPy, on one device and on many."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bigram import Bigram
from jax.sharding import NamedSharding

from lmlib.compute import Compute
from lmlib.data.synthetic import Synthetic
from lmlib.losses.distillation import Distillation, Divergence
from lmlib.losses.fused import LogitSettings, fused_loss
from lmlib.parallel.layout import STORED, partition
from lmlib.parallel.mesh import make_mesh

B, S, E, F, V = 4, 6, 16, 24, 32  # F: the teacher's embed
T, WEIGHT = 2.0, 0.7
NAMES = ("loss", "cross_entropy", "divergence")


@functools.cache
def inputs():
    random = np.random.default_rng(0)

    def normal(*shape, scale=1.0):
        return jnp.asarray(random.normal(size=shape) * scale, jnp.float32)

    return (
        normal(B, S, E),
        normal(E, V, scale=5 / E**0.5),
        jnp.asarray(random.integers(0, V, (B, S)), jnp.int32),
        jnp.asarray(random.random((B, S)) < 0.7),
        normal(B, S, F),
        normal(F, V, scale=5 / F**0.5),
    )


def log_softmax(logits_V):
    shifted_V = logits_V - logits_V.max()
    return shifted_V - np.log(np.exp(shifted_V).sum())


def capped(logits_V, cap):
    """The logits, and how they change with what is capped."""
    if cap is None:
        return logits_V, np.ones_like(logits_V)
    logits_V = cap * np.tanh(logits_V / cap)
    return logits_V, 1 - (logits_V / cap) ** 2


def reference(arrays, cap=None, teacher_cap=None):
    """Sums by name, and the gradients of the loss with respect to features and table."""
    h_BSE, table_EV, taught_BSF, taught_FV = (
        np.asarray(arrays[i], np.float64) for i in (0, 1, 4, 5)
    )
    targets_BS, mask_BS = np.asarray(arrays[2]), np.asarray(arrays[3])
    sums = dict.fromkeys(NAMES, 0.0)
    dh_BSE, dtable_EV = np.zeros_like(h_BSE), np.zeros_like(table_EV)
    for b, s in np.argwhere(mask_BS):
        logits_V, slope_V = capped(h_BSE[b, s] @ table_EV, cap)
        taught_V, _ = capped(taught_BSF[b, s] @ taught_FV, teacher_cap)
        log_p_V, log_q_V = log_softmax(taught_V / T), log_softmax(logits_V / T)
        cross_entropy = -log_softmax(logits_V)[targets_BS[b, s]]
        divergence = (np.exp(log_p_V) * (log_p_V - log_q_V)).sum()
        loss = (1 - WEIGHT) * cross_entropy + WEIGHT * T**2 * divergence
        for name, value in zip(NAMES, (loss, cross_entropy, divergence), strict=True):
            sums[name] += value
        of_cross_entropy_V = np.exp(log_softmax(logits_V)) - np.eye(V)[targets_BS[b, s]]
        of_divergence_V = (np.exp(log_q_V) - np.exp(log_p_V)) / T
        dlogits_V = (1 - WEIGHT) * of_cross_entropy_V + WEIGHT * T**2 * of_divergence_V
        dlogits_V *= slope_V
        dh_BSE[b, s] = table_EV @ dlogits_V
        dtable_EV += np.outer(h_BSE[b, s], dlogits_V)
    return sums, dh_BSE, dtable_EV


def check(arrays, expected, cap=None, teacher_cap=None, chunk=None):
    h_BSE, table_EV, targets_BS, mask_BS, taught_BSF, taught_FV = arrays
    divergence = Divergence(T, WEIGHT, teacher_cap, "float32")

    @jax.jit
    @functools.partial(jax.value_and_grad, argnums=(0, 1), has_aux=True)
    def found(h_BSE, table_EV):
        how = LogitSettings(cap, chunk)
        fixed = (taught_BSF,), (taught_FV,)
        sums = fused_loss(divergence, how, h_BSE, table_EV, targets_BS, mask_BS, *fixed)
        return sums.minimised, sums.reported

    (minimised, reported), gradients = found(h_BSE, table_EV)
    assert minimised == pytest.approx(expected[0]["loss"], rel=1e-5)
    assert {name: float(each) for name, each in reported.items()} == pytest.approx(
        expected[0], rel=1e-5
    )
    for gradient, right in zip(gradients, expected[1:], strict=True):
        np.testing.assert_allclose(gradient, right, rtol=1e-5, atol=1e-5 * np.abs(right).max())


@pytest.mark.parametrize(
    ("cap", "teacher_cap", "chunk"),
    [(None, None, 5), (5.0, 8.0, None), pytest.param(None, 8.0, 1, marks=pytest.mark.slow)],
)
def test_sums_and_gradients_match_float64(cap, teacher_cap, chunk):
    check(inputs(), reference(inputs(), cap, teacher_cap), cap, teacher_cap, chunk)


@pytest.mark.several_devices
@pytest.mark.parametrize(
    "features",
    ["batch seq embed", pytest.param("batch seq_parallel embed", marks=pytest.mark.slow)],
)
def test_a_mesh_changes_nothing(features):
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    layouts = [partition(features), partition("embed vocab", STORED), *[partition("batch seq")] * 2]
    layouts += [partition("batch seq embed"), partition("embed vocab", STORED)]
    placed = [
        jax.device_put(array, NamedSharding(mesh, layout))
        for array, layout in zip(inputs(), layouts, strict=True)
    ]
    with jax.set_mesh(mesh):
        check(placed, reference(inputs()), chunk=5)


FLOAT32 = Compute(dtype="float32")
student, teacher = (
    functools.partial(Bigram, V, embed, key=jax.random.key(embed)) for embed in (E, F)
)


def test_student_and_teacher_are_given_the_same_tokens():
    batch = Synthetic(vocab_size=V, batch_size=B, sequence_length=S).batch(0)
    models = student(), teacher()
    features = [model.table_VE[batch.tokens] for model in models]
    expected, _, _ = reference(
        (
            features[0],
            models[0].head_EV,
            batch.targets,
            batch.loss_mask,
            features[1],
            models[1].head_EV,
        )
    )
    objective = Distillation(teacher, temperature=T, weight=WEIGHT)
    sums = jax.jit(functools.partial(objective.sums, compute=FLOAT32))(*models, batch)
    assert {name: float(each) for name, each in sums.reported.items()} == pytest.approx(
        expected, rel=1e-5
    )
    assert objective.count(batch) == batch.loss_mask.sum()


def test_a_student_that_is_its_teacher_learns_nothing_more():
    batch = Synthetic(vocab_size=V, batch_size=B, sequence_length=S).batch(0)

    def loss(model):
        return Distillation(student, weight=1.0).sums(model, model, batch, FLOAT32).minimised

    value, gradient = jax.jit(jax.value_and_grad(loss))(student())
    assert abs(value) < 1e-4
    assert all(np.abs(each).max() < 1e-4 for each in jax.tree.leaves(gradient))


@pytest.mark.parametrize(
    "settings", [{"temperature": 0.0}, {"weight": 1.5}, {"weight": -0.1}, {"dropout": 1.0}]
)
def test_senseless_settings_are_refused(settings):
    (name,) = settings
    with pytest.raises(ValueError, match=f"{name} must be"):
        Distillation(teacher, **settings)
