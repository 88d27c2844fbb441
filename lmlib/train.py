"""The training step: from state, batch and hyperparameters to the new state and metrics.

Shapes: B batch, M microbatches, S sequence.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

from lmlib.data.batch import Batch
from lmlib.guard import choose
from lmlib.losses.objective import sums_of
from lmlib.optim.optimizer import Hyperparameters, arrays_of, with_arrays
from lmlib.parallel.axes import PartError
from lmlib.parallel.check import check_batch, check_model
from lmlib.parallel.layout import sharding, shardings, spec
from lmlib.state import State, Training

Metrics = dict[str, Array]


def step(
    state: State, batch: Batch, hyperparameters: Hyperparameters, training: Training
) -> tuple[State, Metrics]:
    """Makes one update from one global batch, with the optimizer's numbers in `hyperparameters`.

    The loss is the sum over the objective's units, usually valid targets, divided by their count
    in the whole batch, for any microbatches, devices and masks. If the guard rejects an
    update, weights, moments and the schedule stay the same. Random layers use `state.key`, folded
    with the step and then with the microbatch's index.

    Metrics are float32: means of the objective, and of the model (over tokens except padding);
    the optimizer's; `grad_norm` before clipping; `parameter_norm` of the weights that train, before
    the update; `update_norm`, 0 if it is not made; `learning_rate`. These are int32: `tokens`, the
    valid targets; the count of `Objective.units`; `skipped_updates` and `empty_batches` in total;
    `skipped_in_a_row`.

    Raises:
      LayoutError: if the mesh cannot split the weights or the batch.
      ValueError: if the model and the objective report under the same name.
    """
    gradients, reported, count = gradient(state, batch, training)
    with jax.named_scope("optimizer"):
        new_state, metrics = _updated(state, count, reported, gradients, hyperparameters, training)
    tokens = jnp.sum(batch.loss_mask, dtype=jnp.int32)
    metrics = {**reported.metrics, **metrics, "tokens": tokens}
    return new_state, metrics | {training.objective.units: count}


class _Reported(NamedTuple):  # of a microbatch; they add up to the whole batch's
    metrics: Metrics
    tallies: Any


def gradient(state: State, batch: Batch, training: Training) -> tuple[Any, _Reported, Array]:
    """Returns gradients of the weights that train, the batch's reports, and the count of units."""
    objective, microbatches = training.objective, training.microbatches
    check_model(state.whole_model, training.mesh)
    B, S = batch.tokens.shape
    check_batch(B, S, microbatches, training.compute, training.mesh)
    count = objective.count(batch)
    divisor = jnp.maximum(count, 1).astype(jnp.float32)
    step_key = jax.random.fold_in(state.key, state.step)
    positions = jnp.maximum(jnp.sum(batch.segment_ids > 0, dtype=jnp.int32), 1)

    def part_loss(trained: Any, index: Array | int, part: Batch) -> tuple[Array, _Reported]:
        # Gradients of frozen weights are unused, so XLA removes their products.
        model = state.merge_params(trained)
        key = jax.random.fold_in(step_key, index)
        compute = training.compute
        sums = sums_of(objective, model, state.reference_model, part, compute, key, **of_whole)
        of_model = {**sums.model.losses, **sums.model.statistics}
        if taken := of_model.keys() & sums.reported.keys():
            names = ", ".join(sorted(taken))
            raise ValueError(f"the model and the objective both report {names}: rename one")
        metrics = {name: x.astype(jnp.float32) / positions for name, x in of_model.items()}
        metrics |= {name: each / divisor for name, each in sums.reported.items()}
        reported = _Reported(metrics, sums.model.tallies)
        return objective.mean_loss(sums, divisor, positions), reported

    part_gradient = jax.grad(part_loss, has_aux=True)

    def accumulate(gradients: Any, indexed: tuple[Array, Batch]) -> tuple[Any, _Reported]:
        part_gradients, reported = part_gradient(state.model, *indexed)
        return jax.tree.map(jnp.add, gradients, part_gradients), reported

    of_whole: dict[str, Any] = {}
    if microbatches == 1:
        # Without a loop, since XLA's TPU compiler would run its body twice.
        gradients, reported = part_gradient(state.model, 0, batch)
    else:
        nothing = jax.tree.map(jnp.zeros_like, state.model)
        parts = jnp.arange(microbatches), split(batch, microbatches)
        models = state.whole_model, state.reference_model
        of_whole = objective.of_whole_batch(*models, parts[1], training.compute)
        with jax.named_scope("microbatches"):
            gradients, reported = jax.lax.scan(accumulate, nothing, parts)
        reported = jax.tree.map(_total, reported, is_leaf=lambda each: hasattr(each, "combined"))
    reported = reported._replace(metrics=objective.means(reported.metrics))
    return gradients, reported, count


def _total(each_M: Any) -> Any:  # over microbatches
    return each_M.combined() if hasattr(each_M, "combined") else jnp.sum(each_M, axis=0)


def _updated(
    state: State, count: Array, reported: _Reported, gradients: Any,
    hyperparameters: Hyperparameters, training: Training,
) -> tuple[State, Metrics]:  # fmt: skip
    """Returns the state after the update from `gradients`, and metrics of the update."""
    loss = reported.metrics["loss"]
    optimizer, guard = training.optimizer, training.guard
    given = with_arrays(optimizer.hyperparameters, hyperparameters)
    given = {**given, **{name: reported.tallies for name in given if name == "tallies"}}
    transformation = optax.with_extra_args_support(optimizer.transformation)
    grad_norm = optax.global_norm(gradients)
    returned = transformation.update(gradients, state.optimizer, state.model, **given)
    updates, moments = _checked_update(returned, state)
    update_norm = optax.global_norm(updates)
    made, guarded = guard.judge(state.guard, loss, grad_norm, update_norm, count)
    updates_made = state.step - state.guard.skipped - state.guard.empty_batches
    metrics = {
        **optimizer.metrics(moments),
        **state.whole_model.measured(reported.tallies),
        "grad_norm": grad_norm,
        "parameter_norm": optax.global_norm(state.model),
        "update_norm": jnp.where(made, update_norm, 0),
        "learning_rate": jnp.asarray(optimizer.learning_rate(updates_made, **given), jnp.float32),
        "skipped_updates": guarded.skipped,
        "skipped_in_a_row": guarded.skipped_in_a_row,
        "empty_batches": guarded.empty_batches,
    }
    new_state = dataclasses.replace(
        state,
        step=state.step + 1,
        model=choose(made, optax.apply_updates(state.model, updates), state.model),
        optimizer=choose(made, moments, state.optimizer),
        guard=guarded,
        buffers=choose(made, _updated_buffers(state, reported.tallies), state.buffers),
    )
    return new_state, metrics


def _checked_update(returned: Any, state: State) -> tuple[Any, Any]:
    """Returns the result of an optimizer. Updates of other shapes would broadcast: PartError."""
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise PartError(
            "the optimizer's transformation must return a tuple (updates, state), got a "
            f"{type(returned).__name__}"
        )

    def shapes(updates: Any, state: Any) -> dict[str, tuple[int, ...]]:
        leaves = jax.tree.leaves_with_path({"updates": updates, "state": state})
        return {jax.tree_util.keystr(path): jnp.shape(leaf) for path, leaf in leaves}

    found, wanted = shapes(*returned), shapes(state.model, state.optimizer)
    for path in wanted | found:
        if (given := found.get(path, "nothing")) != (due := wanted.get(path, "nothing")):
            raise PartError(
                "the optimizer's transformation must return updates of the weights' shapes and a "
                f"state of the shapes that it was given: {path} has {given} instead of {due}"
            )
    return returned


def _updated_buffers(state: State, tallies: Any) -> Any:
    """The model's weights without a gradient, after a step whose whole batch gave `tallies`."""
    if state.buffers is None:
        return None

    def moved(new: Array | None, old: Array | None) -> Array | None:
        return None if old is None else jax.sharding.reshard(new, jax.typeof(old).sharding.spec)

    new = state.buffers.updated(tallies)
    return jax.tree.map(moved, new, state.buffers, is_leaf=lambda leaf: leaf is None)


def split(batch: Batch, microbatches: int) -> Batch:
    """Splits arrays (B, S, …) into (M, B / M, S, …): each device its own rows, nothing is sent."""

    def part(x_BS: Array) -> Array:
        B, *rest = x_BS.shape
        shape = B // microbatches, microbatches, *rest
        x_BMS = jnp.reshape(x_BS, shape, out_sharding=spec("batch microbatch seq"))
        return jnp.moveaxis(x_BMS, 1, 0)

    return jax.tree.map(part, batch)


def trace_step(state: State, batch: Batch, training: Training) -> jax.stages.Traced:
    """Traces `step` for `state` and `batch`, which may be abstract; the state is donated.

    Call the compiled step as `state, metrics = compiled(state, batch, hyperparameters)`, with
    `Training.hyperparameters` of this optimizer or one with other numbers.
    """
    everywhere = NamedSharding(training.mesh, PartitionSpec())
    hyperparameters = arrays_of(training.optimizer.hyperparameters, training.mesh, abstract=True)
    with jax.set_mesh(training.mesh):
        whole = functools.partial(step, training=training)
        jitted = jax.jit(whole, donate_argnums=0, out_shardings=(shardings(state), everywhere))
        return jitted.trace(state, batch, hyperparameters)


def make_step(training: Training) -> Callable[[State, Batch], tuple[State, Metrics]]:
    """Returns `step` for custom loops, as `state, metrics = step(state, batch)`.

    Each shape of a batch is compiled once. The old state is donated. Batches may be NumPy's.
    """
    rows = sharding("batch seq", training.mesh)
    compiled = jax.jit(functools.partial(step, training=training), donate_argnums=0)

    def call(state: State, batch: Batch) -> tuple[State, Metrics]:
        B, S = batch.tokens.shape
        check_batch(B, S, training.microbatches, training.compute, training.mesh)
        with jax.set_mesh(training.mesh):
            return compiled(state, jax.device_put(batch, rows), training.hyperparameters)

    return call
