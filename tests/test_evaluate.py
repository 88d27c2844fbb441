"""Evaluation weighs every token once; sampling follows the model."""

import functools
import math
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sentinels import sentinels

import lmlib
from lmlib.compute import Compute
from lmlib.data.synthetic import Synthetic
from lmlib.evaluate.mean_loss import Evaluation, Evaluator
from lmlib.generate import sample
from lmlib.models.families.llama import llama
from lmlib.models.protocol import Context, whole_rows
from lmlib.parallel.layout import creator
from lmlib.parallel.mesh import make_mesh

V = 32
make = functools.partial(llama, vocab=V, embed=32, layers=2, heads=4, mlp=48, key=jax.random.key(0))
FLOAT32 = Compute(dtype="float32")
source = Synthetic(vocab_size=V, batch_size=8, sequence_length=16)


def on(mesh):
    with jax.set_mesh(mesh):
        return creator(make, mesh)()


@pytest.mark.parametrize("mesh", sentinels([{}, {"data": 2, "fsdp": 2, "tensor": 2}], bool))
def test_the_loss_is_the_mean_over_all_valid_tokens(mesh):
    mesh = make_mesh(**mesh)
    evaluation = Evaluator(source, mesh, FLOAT32)(on(mesh), 3)
    model, total, count = jax.jit(make)(), 0.0, 0
    logits = jax.jit(lambda model, *batch: model(batch[0], Context(*batch[1:], FLOAT32)))
    for step in range(3):
        batch = source.batch(step)
        logits_BSV = logits(model, batch.tokens, batch.positions, batch.segment_ids)
        log_p = np.asarray(jax.nn.log_softmax(logits_BSV), np.float64)
        for b, s in np.argwhere(batch.loss_mask):
            total -= log_p[b, s, batch.targets[b, s]]
            count += 1
    assert evaluation.tokens == count
    assert evaluation.loss == pytest.approx(total / count, rel=1e-6)


MANY_BATCHES = """
import functools, jax
from lmlib.compute import Compute
from lmlib.data.synthetic import Synthetic
from lmlib.evaluate.mean_loss import Evaluator
from lmlib.models.families.llama import llama
from lmlib.parallel.layout import creator
from lmlib.parallel.mesh import make_mesh

mesh = make_mesh(fsdp=2, tensor=2)
make = functools.partial(
    llama, vocab=512, embed=64, layers=2, heads=4, mlp=128, key=jax.random.key(0)
)
with jax.set_mesh(mesh):
    model = creator(make, mesh)()
evaluator = Evaluator(Synthetic(512, 4, 64), mesh, Compute())
for _ in range(5):
    print(evaluator(model, 200))
"""


@pytest.mark.slow
def test_simulated_devices_evaluate_more_batches_than_xla_lets_wait():
    """In a process of its own, which XLA would abort."""
    flags = os.environ["XLA_FLAGS"].replace("device_count=8", "device_count=4")
    done = subprocess.run(
        [sys.executable, "-c", MANY_BATCHES],
        env={**os.environ, "XLA_FLAGS": flags, "PYTHONPATH": str(Path(lmlib.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert len(set(done.stdout.splitlines())) == 1


def test_bits_per_byte():
    assert Evaluation(loss=math.log(2) * 6, tokens=1).bits_per_byte(3.0) == pytest.approx(2.0)


def test_nothing_to_evaluate_is_an_error():
    class Padding(Synthetic):
        def batch(self, step, rows=slice(None)):
            batch = super().batch(step, rows)
            return jax.tree.map(lambda x: x & False if x.dtype == bool else x, batch)

    mesh = make_mesh()
    with pytest.raises(ValueError, match="every position is masked"):
        Evaluator(Padding(V, 8, 16), mesh, FLOAT32)(on(mesh), 1)


def last_logits(model, tokens):
    tokens_BS = jnp.array([tokens])
    return model(tokens_BS, whole_rows(tokens_BS, FLOAT32))[0, -1]


@pytest.mark.slow
@pytest.mark.parametrize("mesh", sentinels([{}, {"fsdp": 4, "tensor": 2}], bool))
def test_greedy_sampling_takes_the_likeliest_token_each_time(mesh):
    mesh = make_mesh(**mesh)
    prompts = [[3, 1, 4], [1], [5, 9]]
    found = sample(on(mesh), prompts, 6, jax.random.key(0), mesh, FLOAT32, temperature=0.0)
    model = make()
    for prompt, tokens in zip(prompts, found, strict=True):
        expected = [*prompt]
        for _ in range(6):
            expected.append(int(jnp.argmax(last_logits(model, expected))))
        assert tokens == expected


def test_sampling_follows_the_distribution():
    mesh = make_mesh()
    draws = sample(on(mesh), [[7]] * 4096, 1, jax.random.key(1), mesh, FLOAT32, temperature=1.0)
    counts = np.bincount([tokens[1] for tokens in draws], minlength=V)
    p = np.asarray(jax.nn.softmax(last_logits(make(), [7])))
    assert (np.abs(counts - 4096 * p) <= 5 * np.sqrt(4096 * p * (1 - p)) + 1).all()


def test_an_empty_prompt_is_refused():
    with pytest.raises(ValueError, match="at least one token"):
        sample(make(), [[]], 1, jax.random.key(0), make_mesh(), FLOAT32)
