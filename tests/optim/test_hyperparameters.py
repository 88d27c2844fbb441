"""Which numbers of a run are arguments of its compiled step, and which make another program."""

import dataclasses
import functools

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from outsider_runs import experiment
from small_experiment import small

from lmlib.models.families.llama import llama
from lmlib.optim.adamw import adamw
from lmlib.optim.optimizer import Optimizer, arrays_of, as_declared
from lmlib.optim.schedules import warmup_linear
from lmlib.parallel.mesh import make_mesh


def program(*overrides):
    return fdl.build(small(*overrides)).trace_step().lower().as_text()


@functools.cache
def shipped():
    return program()


@pytest.mark.parametrize(
    "overrides",
    [
        ("optimizer.peak_lr=1.0", "optimizer.weight_decay=0.0", "steps=1_000_000"),
        ("optimizer.schedule.warmup=0.5", "optimizer.schedule.end=0.3", "seed=3"),
    ],
)
def test_a_sweep_and_a_longer_run_need_no_other_program(overrides):
    assert program(*overrides) == shipped()


def test_another_optimizer_is_another_program():
    assert program("optimizer.b1=0.8") != shipped()


def rate_of(optimizer, of=None):
    """The learning rate in the metrics of a first step of `optimizer`, by a program for `of`."""
    model = functools.partial(llama, vocab=64, embed=16, layers=1, heads=2, mlp=16)
    run = experiment(model, {"devices": jax.devices()[:1]}, optimizer=optimizer)
    for_program = run if of is None else dataclasses.replace(run, optimizer=of)
    step = for_program.trace_step().lower().compile()
    batch = jax.tree.map(jnp.asarray, run.data.batch(0))
    _, metrics = step(run.initial_state(), batch, run.training.hyperparameters)
    return float(metrics["learning_rate"])


@pytest.mark.slow
def test_a_step_computes_with_the_numbers_that_it_is_given():
    warm = functools.partial(warmup_linear, warmup=0.5)
    optimizer = functools.partial(adamw, peak_lr=0.4, schedule=warm)
    of = functools.partial(adamw, peak_lr=7.0, weight_decay=0.0)
    with pytest.raises(TypeError, match="pytree"):
        rate_of(optimizer, of)  # whose fall has another shape
    assert rate_of(optimizer, functools.partial(of, schedule=warm)) == pytest.approx(0.1)


@pytest.mark.slow
def test_a_schedule_that_is_a_function_stays_in_the_program():
    def halved(peak_lr, steps):
        return lambda step: peak_lr / 2 if steps else 0.0

    assert rate_of(functools.partial(adamw, peak_lr=0.4, schedule=halved)) == pytest.approx(0.2)


@pytest.mark.slow
def test_an_optimizer_of_ones_own_is_given_its_numbers_by_name():
    def descent(steps, rate):
        def update(gradients, state, model=None, *, rate):
            return jax.tree.map(lambda g: -rate * g, gradients), state

        return Optimizer(
            optax.GradientTransformationExtraArgs(lambda model: optax.EmptyState(), update),
            lambda step, rate: rate,
            as_declared,
            hyperparameters={"rate": rate},
        )

    make = functools.partial(functools.partial, descent)
    assert rate_of(make(rate=0.5), make(rate=0.1)) == pytest.approx(0.5)


def test_numbers_are_of_one_dtype_each_and_everything_else_is_left_out():
    arrays = arrays_of({"rate": 1e-3, "steps": 3, "name": "x", "schedule": abs}, make_mesh(fsdp=1))
    assert arrays["name"] is None and arrays["schedule"] is None
    assert (arrays["rate"].dtype, arrays["steps"].dtype) == (np.float32, np.int32)
    with pytest.raises(OverflowError):
        arrays_of({"steps": 2**31}, make_mesh(fsdp=1))
