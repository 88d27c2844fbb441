"""A mixer that is a recurrence, with its state as cache: h ← a · h + (1 - a) · x W, where each
channel has a decay rate of its own in float32 (Orvieto et al. 2023, arXiv:2303.06349, without its
complex numbers); and an optimizer that reports the norm of its momentum. Nothing of lmlib is
edited."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jaxtyping import Array, Float
from outsider_runs import EIGHT, FLOAT32, SIZES, SOURCE, check_outsider, experiment

from lmlib import NextToken, batch_loss, make_mesh, single_document_context
from lmlib.generate import GREEDY, generate
from lmlib.losses.distillation import Distillation
from lmlib.models.block import Block
from lmlib.models.decoder import Decoder
from lmlib.models.families.llama import llama
from lmlib.models.matmul import matmul
from lmlib.models.part import Part
from lmlib.models.parts.mlp import GatedMLP
from lmlib.models.parts.norms import RMSNorm
from lmlib.models.stack import Segment
from lmlib.models.weights import fan_in, fill, fold_in_name, ones, weight
from lmlib.optim.optimizer import Optimizer, as_declared
from lmlib.parallel.layout import reshard, spec
from lmlib.state import abstract_batch, abstract_model

pytestmark = pytest.mark.several_devices


class Recurrence(Part):
    decay: Float[Array, "channel"] = weight(
        ones, rules={"channel": None}, dtype="float32", learning_rate=0.1
    )
    read: Float[Array, "embed mlp"] = weight(fan_in("embed"))
    write: Float[Array, "mlp embed"] = weight(fan_in("mlp"))

    def __init__(self, embed, channels, *, key):
        fill(self, key, embed=embed, mlp=channels, channel=channels)

    def __call__(self, x_BSE, context, cache=None):
        a_C = jax.nn.sigmoid(self.decay)
        h_BSC = reshard(matmul("bse,ec->bsc", x_BSE, self.read), "batch seq whole_vocab")
        # A document begins anew, and padding at a row's end changes nothing.
        goes_on_BS1 = (context.positions_BS != 0)[..., None]
        counts_BS1 = (context.positions_BS >= 0)[..., None]
        gate_BSC = jnp.where(counts_BS1, a_C * goes_on_BS1, 1.0)
        h_BSC = jnp.where(counts_BS1, (1 - a_C) * h_BSC, 0.0)
        if cache is not None:
            h_BSC = h_BSC.at[:, 0].add(gate_BSC[:, 0] * cache)

        def after(first, second):
            return first[0] * second[0], second[0] * first[1] + second[1]

        _, h_BSC = jax.lax.associative_scan(after, (gate_BSC, h_BSC), axis=1)
        out = spec(context.compute.residual)
        y_BSE = matmul("bsc,ce->bse", reshard(h_BSC, "batch seq mlp"), self.write, out_sharding=out)
        return y_BSE, None if cache is None else h_BSC[:, -1]

    def empty_cache(self, rows, length, dtype):
        return jnp.zeros((rows, *self.decay.shape), dtype)


def recurrent(key):
    def layer(key):
        norm = functools.partial(RMSNorm, embed=embed, key=key)
        mlp = GatedMLP(embed, 16, key=fold_in_name(key, "mlp"))
        return Block(Recurrence(embed, 24, key=fold_in_name(key, "mixer")), mlp, norm(), norm())

    embed = SIZES["embed"]
    return Decoder(**SIZES, segments=[Segment([layer], 2)], key=key)


RATE = 1e-3


class Momentum(NamedTuple):
    average: Any
    norm: jax.Array


def signs(steps):
    """Updates by sign of the momentum (Lion: Chen et al. 2023, arXiv:2302.06675), with a metric."""

    def init(model):
        return Momentum(jax.tree.map(jnp.zeros_like, model), jnp.zeros((), jnp.float32))

    def update(gradients, state, model=None):
        average = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state.average, gradients)
        # A soft sign, so that rounding on another mesh does not decide where a gradient is zero.
        updates = jax.tree.map(lambda m: -RATE * jnp.tanh(100 * m), average)
        return updates, Momentum(average, optax.global_norm(average))

    return Optimizer(
        optax.GradientTransformation(init, update),
        optax.constant_schedule(RATE),
        as_declared,
        metrics=lambda state: {"momentum_norm": state.norm},
    )


@pytest.mark.slow
def test_both_train_as_on_one_device_and_resume_bit_for_bit(tmp_path):
    run, alone = (experiment(recurrent, mesh, optimizer=signs) for mesh in (EIGHT, {}))
    metrics, _ = check_outsider(run, alone, tmp_path, rtol=2e-4)
    assert all(each["momentum_norm"] > 0 for each in metrics)


class Running(GatedMLP):
    """A mean along the row. It inherits from a part that declares that rows may be split."""

    def __call__(self, x_BSE, context):
        return super().__call__(jnp.cumsum(x_BSE, axis=1), context)


class OneAhead(NextToken):
    """Compares each token with the one before it in the row."""

    def sums(self, model, reference_model, batch, compute, key=None):
        targets = jnp.roll(batch.targets, 1, axis=1)
        return super().sums(
            model, reference_model, dataclasses.replace(batch, targets=targets), compute, key
        )


dense = functools.partial(llama, **SIZES, layers=1, heads=4, mlp=16)
running = functools.partial(dense, feed_forward=Running)
TEACHER = Distillation(teacher=recurrent, teacher_from=None)


@pytest.mark.parametrize("module", [__name__, "lmlib.models.parts.recurrence"])
@pytest.mark.parametrize(
    ("model", "objective", "named"),
    [
        (recurrent, NextToken(), "Recurrence"),
        (running, NextToken(), "Running"),
        (dense, OneAhead(), "OneAhead"),
        (dense, TEACHER, "Recurrence"),
    ],
    ids=["mixer", "subclass", "objective", "teacher"],
)
def test_rows_that_a_part_goes_along_are_not_split(model, objective, named, module, monkeypatch):
    for kind in (Recurrence, Running, OneAhead):
        monkeypatch.setattr(kind, "__module__", module)
    run = experiment(model, {"fsdp": 4, "context": 2}, objective=objective)
    with pytest.raises(ValueError, match=rf"context=2 splits rows.*{module}.{named} must say that"):
        run.check()


def test_a_loss_of_split_rows_refuses_it_without_an_experiment():
    mesh = make_mesh(fsdp=4, context=2)
    batch = abstract_batch(SOURCE.batch_size, SOURCE.sequence_length, mesh)
    model = abstract_model(functools.partial(recurrent, key=jax.random.key(0)), mesh)
    loss = functools.partial(batch_loss, compute=FLOAT32)
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=r"context=2 .*Recurrence must say"):
        jax.eval_shape(loss, model, batch)


@pytest.mark.slow
def test_generation_with_a_cache_equals_the_full_pass():
    model = jax.jit(recurrent)(jax.random.key(0))
    prompts = [[5, 9, 11, 2, 7], [3, 1]]
    found = generate(model, prompts, 6, GREEDY, compute=FLOAT32)
    for prompt, (row,) in zip(prompts, found, strict=True):
        text = [*prompt, *row.tokens]
        tokens_BS = jnp.array([text])
        logits_SV = model(tokens_BS, single_document_context(tokens_BS, FLOAT32))[0]
        expected = np.argmax(logits_SV[len(prompt) - 1 : -1], axis=-1)
        np.testing.assert_array_equal(row.tokens, expected)
