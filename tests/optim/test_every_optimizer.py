"""Every optimizer with every feature of a run: it works, or a sentence says why it does not."""

import dataclasses
import functools
import importlib
import inspect
import pkgutil
import types
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from laid_out import drawn
from outsider_runs import SIZES, experiment
from sentinels import sentinels

import lmlib.optim
from lmlib.adapters.lora import lora
from lmlib.checkpoint import Checkpoints
from lmlib.models.families.llama import llama
from lmlib.models.measured_block import measured_block
from lmlib.optim.adamw import adamw
from lmlib.optim.ademamix import ademamix
from lmlib.optim.average import Averaging, WeightAverage
from lmlib.optim.eight_bit import eight_bit
from lmlib.optim.from_optax import from_optax
from lmlib.optim.matrices.dion import dion
from lmlib.optim.matrices.muon import POLAR_EXPRESS, muon
from lmlib.optim.matrices.shampoo import shampoo
from lmlib.optim.matrices.soap import soap
from lmlib.optim.matrices.soap_muon import soap_muon
from lmlib.optim.optimizer import Optimizer
from lmlib.optim.qk_clip import qk_clip
from lmlib.optim.schedule_free import ScheduleFree
from lmlib.optim.schedules import warmup_constant
from lmlib.optim.trainable import Group, adapters
from lmlib.optim.transfer import CompleteP
from lmlib.parallel.selection import named_weights
from lmlib.plan.flops import count_flops
from lmlib.plan.memory import bytes_per_device

LAYERS, E, F = 2, 32, 128
MODEL = functools.partial(llama, **SIZES, layers=LAYERS, heads=4, mlp=F)
# Rows and columns of each matrix of a layer: four of attention and three of the mlp.
MATRICES = [(E, E)] * 4 + [(E, F)] * 3
OTHERS = 2 * 64 * E + (2 * LAYERS + 1) * E  # elements of tables and norms
ONE, TWO = ({"devices": jax.devices()[:n], "fsdp": n} for n in (1, 2))
RATE = {
    "peak_lr": 1e-2,
    "schedule": functools.partial(warmup_constant, warmup=0),
    "clip_norm": None,
}


def of_polynomials(R, C):
    return len(POLAR_EXPRESS) * (4 * R * R * C + 2 * R**3)


def both_sides(R, C):
    """FLOPs of products with a square on each side."""
    return 2 * (R * R * C + R * C * C)


def cubes(R, C):
    return 2 * (R**3 + C**3)


@dataclasses.dataclass(frozen=True)
class Case:
    """An optimizer; its state's float32 numbers for a matrix and for another element; the FLOPs of
    an update's products for a matrix."""

    make: Callable[..., Any]
    numbers: Callable[[int, int], float] = lambda R, C: 2 * R * C
    of_others: int = 2
    flops: Callable[[int, int], float] = lambda R, C: 0
    orthogonal: bool = False  # matrices of another size have Muon's rate, else Adam's
    around: Callable[..., Any] | None = None
    average: Averaging | None = None
    model: Callable[..., Any] = MODEL


def two_of_each(R, C):
    return 2 * R * C + 2 * (R * R + C * C)


CASES = {
    "adamw": Case(adamw),
    "cautious_adamw": Case(functools.partial(adamw, cautious=True)),
    "ademamix": Case(ademamix, lambda R, C: 3 * R * C, 3),
    "muon": Case(muon, lambda R, C: R * C, 2, of_polynomials, orthogonal=True),
    # One number more for each output: of gate and up they are columns, of down rows.
    "normuon": Case(
        functools.partial(muon, neuron_decay=0.95),
        lambda R, C: R * C + (C if R == C else (2 * C + R) / 3), 2, of_polynomials, orthogonal=True,
    ),
    "soap": Case(soap, two_of_each, 2, lambda R, C: 4 * both_sides(R, C) + cubes(R, C)),
    "shampoo": Case(shampoo, two_of_each, 2, lambda R, C: 2 * both_sides(R, C) + cubes(R, C)),
    "soap_muon": Case(
        soap_muon, two_of_each, 2,
        lambda R, C: 3 * both_sides(R, C) + cubes(R, C) + of_polynomials(R, C), orthogonal=True,
    ),
    "dion": Case(
        dion, lambda R, C: R * C + C * R / 4, 2, lambda R, C: 8 * R * C * R / 4, orthogonal=True
    ),
    "schedule_free": Case(functools.partial(adamw, b1=0.0), average=ScheduleFree()),
    "tail_average": Case(
        adamw, lambda R, C: 3 * R * C, 3, average=WeightAverage(0.9, start=2, evaluated=True)
    ),
    # Arrays below 4,096 elements stay float32: matrices of attention, tables and norms.
    "eight_bit": Case(
        adamw, lambda R, C: 2 * R * C * (1 if R == C else 1 / 4 + 1 / 256), around=eight_bit
    ),
    "muon_clip": Case(
        muon, lambda R, C: R * C, 2, of_polynomials, orthogonal=True, around=qk_clip,
        model=functools.partial(MODEL, layer=measured_block),
    ),
    "optax": Case(from_optax, lambda R, C: R * C, 1),
}  # fmt: skip
# All other pairs work.
REFUSED = {
    ("optax", "sizes"): "takes as `scaled`, and this one does not",
    ("muon_clip", "adapters"): "frozen or have adapters",
}


def of_case(name, mesh=ONE, model=None, weight_decay=0.0, **settings):
    case = CASES[name]
    decay = {"weight_decay": weight_decay}
    if name == "optax":
        decay = {"make": functools.partial(optax.lion, **decay)}
    optimizer = functools.partial(case.make, **RATE, **decay)
    if case.around is not None:
        optimizer = functools.partial(case.around, optimizer=optimizer)
    made = experiment(
        model or case.model, mesh, optimizer=optimizer, average=case.average, **settings
    )
    made.check()
    return made


def refused(name, feature, make):
    """True if a sentence refuses the feature."""
    if (name, feature) not in REFUSED:
        return False
    with pytest.raises(ValueError, match=REFUSED[name, feature]):
        make().abstract_state()
    return True


def given(run, seed):
    """Numbers in place of all weights that train, the same whether others train too."""
    trained, whole = run.abstract_state().model, drawn(run.recipe.shapes, seed)

    def placed(like, x):
        return None if like is None else jax.device_put(x, like.sharding)

    return jax.tree.map(placed, trained, whole, is_leaf=lambda x: x is None)


def no_large_logits(name):
    """An argument of QK-clip."""
    attention = None, types.SimpleNamespace(value=jnp.zeros((LAYERS, 4)))
    return {"tallies": ((attention,),)} if name == "muon_clip" else {}


def second_updates(name, run):
    """The second updates by path. The first one of SOAP only makes its bases."""
    update, more = run.training.optimizer.transformation, no_large_logits(name)

    def twice(model, first, second):
        _, state = update.update(first, update.init(model), model, **more)
        return update.update(second, state, model, **more)[0]

    options = {"xla_backend_optimization_level": 0}
    with jax.set_mesh(run.mesh):
        made = jax.jit(twice, compiler_options=options)(*(given(run, seed) for seed in range(3)))
    return dict(zip(named_weights(made), jax.device_get(jax.tree.leaves(made)), strict=True))


def test_no_optimizer_is_left_out():
    def is_ours(name, each, module):
        if inspect.isclass(each):
            return issubclass(each, Averaging) and each is not Averaging
        if not inspect.isfunction(each) or name.startswith("_") or each.__module__ != module:
            return False
        signature = inspect.signature(each)
        return signature.return_annotation is Optimizer and "steps" in [*signature.parameters][:1]

    found = {
        name
        for module in pkgutil.walk_packages(lmlib.optim.__path__, "lmlib.optim.")
        for name, each in vars(importlib.import_module(module.name)).items()
        if is_ours(name, each, module.name)
    }
    tested = {
        getattr(each, "func", each).__name__
        for case in CASES.values()
        for each in (case.make, case.around, type(case.average))
        if each not in (None, type(None))
    }
    assert found == tested


@pytest.mark.parametrize("name", sentinels(CASES, "dion".__eq__))
def test_groups_have_rates_and_decays_of_their_own(name):
    rates = {"attention": 2.0, "mlp": 0.5}
    groups = {
        part: Group((f"*.{part}.*",), learning_rate=rate, decays=False)
        for part, rate in rates.items()
    }
    plain = second_updates(name, of_case(name))
    found = second_updates(name, of_case(name, weight_decay=0.1, trainable=groups))
    assert len(found) == 7
    for path, made in found.items():
        rate = next(rate for part, rate in rates.items() if f".{part}." in path)
        assert np.max(np.abs(made)) > 0
        np.testing.assert_allclose(made, rate * plain[path], rtol=1e-4, atol=1e-7, err_msg=path)


@functools.cache
def ratios(name):
    """Norms of updates with the rates of a smaller model, divided by those without, by path."""
    base = {"embed": E // 2, "heads": 2, "mlp": F // 2, "layers": 1}
    runs = (of_case(name, scaling=scaling) for scaling in (CompleteP(base), None))
    scaled, plain = (second_updates(name, run) for run in runs)
    return {path: np.linalg.norm(scaled[path]) / np.linalg.norm(plain[path]) for path in plain}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_rates_for_other_sizes_are_those_of_adamw_or_muon(name):
    base = {"embed": E // 2, "heads": 2, "mlp": F // 2, "layers": 1}
    if refused(name, "sizes", lambda: of_case(name, scaling=CompleteP(base))):
        return
    expected = ratios("muon" if CASES[name].orthogonal else "adamw")
    for path, ratio in ratios(name).items():
        assert ratio == pytest.approx(expected[path], rel=5e-3), path


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_adapters_train_alone(name):
    model = functools.partial(lora, CASES[name].model, 2)

    def make():
        return of_case(name, model=model, trainable=adapters())

    if refused(name, "adapters", make):
        return
    found = second_updates(name, make())
    assert len(found) == 14 and all(path.endswith((".down", ".up")) for path in found)
    for path, made in found.items():
        assert np.all(np.isfinite(made)) and np.any(made != 0), path


@pytest.mark.several_devices
@pytest.mark.parametrize("name", sentinels(CASES, ["dion", "shampoo"].__contains__))
def test_plan_counts_its_state_and_its_products(name):
    case = CASES[name]
    run, on_two = (of_case(name, mesh) for mesh in (ONE, TWO))
    state = run.abstract_state()
    arrays = [x for x in jax.tree.leaves(state.optimizer) if x.ndim and x.dtype != jnp.int32]
    of_matrices = LAYERS * sum(case.numbers(R, C) for R, C in MATRICES)
    numbers = of_matrices + case.of_others * OTHERS
    assert sum(x.size * x.dtype.itemsize for x in arrays) == pytest.approx(4 * numbers, rel=1e-9)
    whole, shared = (bytes_per_device(r.abstract_state().optimizer) for r in (run, on_two))
    assert whole / 2 <= shared < 0.51 * whole

    with jax.set_mesh(run.mesh):
        more, update = no_large_logits(name), run.training.optimizer.transformation.update
        traced = jax.make_jaxpr(functools.partial(update, **more))(
            state.model, state.optimizer, state.model
        )
    flops = LAYERS * sum(case.flops(R, C) for R, C in MATRICES)
    assert count_flops(traced).total == pytest.approx(flops, rel=1e-9)


same = functools.partial(jax.tree.map, np.testing.assert_array_equal)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_killed_run_goes_on_bit_for_bit_and_a_bad_update_is_not_made(name, tmp_path):
    run = of_case(name, weight_decay=0.1)
    step = run.trace_step().lower().compile({"xla_backend_optimization_level": 0})
    numbers = run.training.hyperparameters

    def trained(state, first):
        for i in range(first, 4):
            state, _ = step(state, jax.tree.map(jnp.asarray, run.data.batch(i)), numbers)
            if i == 1 and first == 0:
                with Checkpoints(tmp_path, keep=1) as checkpoints:
                    checkpoints.save(2, state.changing, {})
        return state

    state = trained(run.initial_state(), 0)
    kept = jax.device_get((state.model, state.optimizer))
    with Checkpoints(tmp_path, read_only=True) as checkpoints:
        again = checkpoints.restore_newest(run.abstract_state().changing).state
    again = trained(again, 2)
    same(jax.device_get((again.model, again.optimizer)), kept)

    nan = jax.tree.map(lambda x: x * np.nan, state.model.norm)
    poisoned = eqx.tree_at(lambda state: state.model.norm, state, nan)
    after, metrics = step(poisoned, jax.tree.map(jnp.asarray, run.data.batch(4)), numbers)
    assert metrics["skipped_updates"] == 1
    same(jax.device_get(after.optimizer), kept[1])
