"""Validation weighs every token, or every pair, once."""

import dataclasses
import functools
import math
import os

import jax
import numpy as np
import pytest
from forked_processes import run_forked
from laid_out import drawn, laid_out
from sentinels import sentinels

from lmlib.compute import Compute
from lmlib.data.synthetic import Synthetic
from lmlib.evaluate.validation import Evaluator, bits_per_byte
from lmlib.losses.distillation import Distillation
from lmlib.losses.dpo import DPO
from lmlib.models.families.llama import llama
from lmlib.models.forward_context import ForwardContext
from lmlib.parallel.mesh import make_mesh

V = 32
make = functools.partial(llama, vocab=V, embed=32, layers=2, heads=4, mlp=48, key=jax.random.key(0))
FLOAT32 = Compute(dtype="float32")
weights = functools.cache(lambda: drawn(jax.eval_shape(make)))
source = Synthetic(vocab_size=V, batch_size=8, sequence_length=16)


@pytest.mark.parametrize(
    "mesh", sentinels([{}, {"data": 2, "fsdp": 2, "tensor": 2}], lambda mesh: not mesh)
)
def test_the_loss_is_the_mean_over_all_valid_tokens(mesh):
    mesh = make_mesh(**mesh)
    evaluation = Evaluator(mesh, FLOAT32)(laid_out(weights(), mesh), source, 3)
    model, total, count = weights(), 0.0, 0
    logits = jax.jit(lambda model, *batch: model(batch[0], ForwardContext(*batch[1:], FLOAT32)))
    for step in range(3):
        batch = source.batch(step)
        logits_BSV = logits(model, batch.tokens, batch.positions, batch.segment_ids)
        log_p = np.asarray(jax.nn.log_softmax(logits_BSV), np.float64)
        for b, s in np.argwhere(batch.loss_mask):
            total -= log_p[b, s, batch.targets[b, s]]
            count += 1
    assert evaluation.count == count
    assert evaluation.loss == pytest.approx(total / count, rel=1e-6)


class Uneven(Synthetic):
    """Rows without a target, more of them from batch to batch."""

    def batch(self, step, rows=slice(None)):
        batch = super().batch(step, rows)
        kept_B1 = (np.arange(self.batch_size)[rows] >= 3 * step)[:, None]
        return dataclasses.replace(batch, loss_mask=batch.loss_mask & kept_B1)


class OneTargetLess(Synthetic):
    """The same tokens; only a single place is not a target."""

    def batch(self, step, rows=slice(None)):
        batch = super().batch(step, rows)
        mask_BS = batch.loss_mask.copy()
        if step == 1 and rows.start in (None, 0):
            mask_BS[0, 3] = False
        return dataclasses.replace(batch, loss_mask=mask_BS)


@pytest.mark.slow
def test_batches_are_told_apart_by_all_that_they_hold_on_any_mesh():
    less, found = OneTargetLess(V, 8, 16), []
    parted = [{"data": 2, "fsdp": 2, "tensor": 2}] if jax.device_count() == 8 else []
    for sizes in ({"data": 1}, *parted):
        mesh = make_mesh(**sizes)
        evaluate, model = Evaluator(mesh, FLOAT32), laid_out(weights(), mesh)
        digests = [evaluate(model, each, 2).digest for each in (source, less)]
        found.append([*digests, evaluate(model, source, 1).digest])
    assert len(set(found[0])) == 3
    assert all(each == found[0] for each in found)


@pytest.mark.slow
@pytest.mark.parametrize(
    "objective",
    [
        DPO(reference_from="another"),
        Distillation(make, "another", temperature=2.0),
    ],
    ids=lambda objective: objective.loss_name,
)
def test_an_objective_is_validated_by_its_own_metrics(objective):
    """Three batches are as one of all their rows, with dropout off, beside the reference model."""
    data, mesh, reference = (
        Uneven(V, 8, 16, seed=1),
        make_mesh(),
        drawn(jax.eval_shape(make), seed=1),
    )
    evaluate = Evaluator(mesh, FLOAT32, objective)
    found = evaluate(laid_out(weights(), mesh), data, 3, laid_out(reference, mesh))
    whole = jax.tree.map(lambda *parts: np.concatenate(parts), *map(data.batch, range(3)))
    sums = jax.jit(functools.partial(objective.sums, compute=FLOAT32))(weights(), reference, whole)
    assert found.count == int(objective.count(whole))
    assert set(found.metrics) == set(sums.reported)
    for name, total in sums.reported.items():
        assert found.metrics[name] == pytest.approx(float(total) / found.count, rel=1e-5), name


MANY_BATCHES = """
import functools, jax
from lmlib.compute import Compute
from lmlib.data.synthetic import Synthetic
from lmlib.evaluate.validation import Evaluator
from lmlib.models.families.llama import llama
from lmlib.models.weights import creator
from lmlib.parallel.mesh import make_mesh

mesh = make_mesh(fsdp=2, tensor=2)
make = functools.partial(
    llama, vocab=512, embed=64, layers=2, heads=4, mlp=128, key=jax.random.key(0)
)
with jax.set_mesh(mesh):
    model = creator(make, mesh)()
evaluator, source = Evaluator(mesh, Compute()), Synthetic(512, 4, 64)
for _ in range(5):
    found = evaluator(model, source, 200)
    print(found.metrics, found.count, found.digest)
"""


@pytest.mark.slow
def test_simulated_devices_evaluate_more_batches_than_xla_lets_wait():
    """Runs in a process of its own, which XLA would abort."""
    flags = os.environ["XLA_FLAGS"].replace("device_count=8", "device_count=4")
    done = run_forked("-c", MANY_BATCHES, environment={"XLA_FLAGS": flags})
    assert done.returncode == 0, done.stderr
    assert len(set(done.stdout.splitlines())) == 1


def test_bits_per_byte():
    assert bits_per_byte(math.log(2) * 6, 3.0) == pytest.approx(2.0)


def test_nothing_to_evaluate_is_an_error():
    class Padding(Synthetic):
        def batch(self, step, rows=slice(None)):
            batch = super().batch(step, rows)
            return jax.tree.map(lambda x: x & False if x.dtype == bool else x, batch)

    mesh = make_mesh()
    with pytest.raises(ValueError, match="every position is masked"):
        Evaluator(mesh, FLOAT32)(laid_out(weights(), mesh), Padding(V, 8, 16), 1)
