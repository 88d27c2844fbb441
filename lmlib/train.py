"""The training step: a pure function from state and batch to state and metrics.

Shapes: B batch, M microbatches, S sequence.
"""

import dataclasses
import functools
from collections.abc import Callable, Set
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int32, Key

from lmlib.compute import Compute
from lmlib.data.batch import Batch
from lmlib.guard import Guard, GuardState, choose
from lmlib.losses import NextToken, Objective
from lmlib.models.weights import fold
from lmlib.optim.optimizer import Optimizer
from lmlib.parallel.axes import M, map_weights
from lmlib.parallel.check import check_batch, check_model
from lmlib.parallel.layout import creator, partition, shardings, spec, stored
from lmlib.recipe import parted

Metrics = dict[str, Array]
FINITE = Guard()  # skips what is not finite, and nothing else
NEXT_TOKEN = NextToken()


class State(eqx.Module):
    """All that training needs from one step to the next.

    Attributes:
      step: counts the batches seen so far.
      model: the weights that train, float32; `None` in place of others.
      key: stays the same: what is random in a step is drawn from it, the step and the microbatch,
        never from what happened before.
      frozen: the model's other weights, which stay as they are; `None`: there are none.
      reference_model: the frozen model that the objective needs, in the compute dtype; `None`: it
        needs none.
    """

    step: Int32[Array, ""]
    model: Any
    optimizer: optax.OptState
    guard: GuardState
    key: Key[Array, ""]
    frozen: Any = None
    reference_model: Any = None

    @property
    def whole_model(self) -> Any:
        """The model with all its weights."""
        return _whole(self.model, self.frozen)

    @property
    def changing(self) -> "State":
        """What a step changes: nothing that is frozen. A checkpoint holds this."""
        return self.with_frozen(None).with_reference_model(None)

    def with_frozen(self, frozen: Any) -> "State":
        return eqx.tree_at(lambda state: state.frozen, self, frozen, is_leaf=lambda x: x is None)

    def with_reference_model(self, reference_model: Any) -> "State":
        return eqx.tree_at(
            lambda s: s.reference_model, self, reference_model, is_leaf=lambda x: x is None
        )


def init(
    make_model: Callable[[], eqx.Module],
    optimizer: Optimizer,
    mesh: Mesh,
    guard: Guard = FINITE,
    seed: int = 0,
    trained: Set[str] | None = None,
) -> State:
    """The state before the first step, laid out on `mesh` from the start.

    `seed` is for what is random in the steps; that of the weights is in `make_model`. `trained` are
    the paths of the weights that train; `None`: all do.
    """
    return begin(new_model(make_model, mesh), optimizer, mesh, guard, seed, trained)


def new_model(make_model: Callable[[], M], mesh: Mesh, made: M | None = None) -> M:
    """The model with new weights, laid out on `mesh` from the start; `made`: as in `creator`."""
    with jax.set_mesh(mesh):
        return creator(make_model, mesh, made)()


def begin(
    model: Any,
    optimizer: Optimizer,
    mesh: Mesh,
    guard: Guard = FINITE,
    seed: int = 0,
    trained: Set[str] | None = None,
) -> State:
    """The state before the first step from the weights of `model`, which lie as `abstract_model`
    says. They are donated: their buffers become the state's."""
    layout = shardings(abstract_state(lambda: model, optimizer, mesh, guard, trained))
    fresh = functools.partial(
        fresh_state, optimizer=optimizer, guard=guard, seed=seed, trained=trained
    )
    with jax.set_mesh(mesh):
        return jax.jit(fresh, out_shardings=layout, donate_argnums=0)(model)


def fresh_state(
    model: Any,
    optimizer: Optimizer,
    guard: Guard = FINITE,
    seed: int = 0,
    trained: Set[str] | None = None,
) -> State:
    parts = parted(model, trained)
    return State(
        step=jnp.zeros((), jnp.int32),
        model=parts.trained,
        optimizer=optimizer.transformation.init(parts.trained),
        guard=guard.init(),
        # Folded, since a model is commonly made from the seed's own key.
        key=fold(jax.random.key(seed), "steps"),
        frozen=parts.frozen,
    )


def _whole(trained: Any, frozen: Any) -> Any:
    return trained if frozen is None else eqx.combine(trained, frozen)


def abstract_model(make_model: Callable[[], eqx.Module], mesh: Mesh) -> Any:
    """The model's shapes, dtypes and stored `NamedSharding`s; makes no array."""
    return map_weights(
        lambda weight, array: _placed(array, stored(weight, array.shape, mesh), mesh),
        jax.eval_shape(make_model),
    )


def abstract_state(
    make_model: Callable[[], eqx.Module],
    optimizer: Optimizer,
    mesh: Mesh,
    guard: Guard = FINITE,
    trained: Set[str] | None = None,
) -> State:
    """The state's shapes, dtypes and `NamedSharding`s; makes no array."""
    fresh = functools.partial(fresh_state, optimizer=optimizer, guard=guard, trained=trained)
    with jax.set_mesh(mesh):
        # Moments take their weights' layout; the types that tracing gives them say so.
        state = jax.eval_shape(fresh, abstract_model(make_model, mesh))
    return jax.tree.map(lambda leaf: _placed(leaf, jax.typeof(leaf).sharding.spec, mesh), state)


def abstract_batch(
    batch_size: int, sequence_length: int, mesh: Mesh, teacher_k: int | None = None
) -> Batch:
    """Shapes, dtypes and `NamedSharding`s of a global batch; `teacher_k`: as of a source."""

    def blank() -> Batch:
        integers = jnp.zeros((batch_size, sequence_length), jnp.int32)
        batch = Batch(integers, integers, integers, integers, integers.astype(bool))
        if teacher_k is None:
            return batch
        listed = jnp.zeros((batch_size, sequence_length, teacher_k), jnp.int32)
        return dataclasses.replace(
            batch, teacher_ids=listed, teacher_log_probabilities=listed.astype(jnp.float16)
        )

    return jax.tree.map(
        lambda leaf: _placed(leaf, partition("batch seq"), mesh), jax.eval_shape(blank)
    )


def _placed(leaf: Any, spec: PartitionSpec, mesh: Mesh) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))


def step(
    state: State,
    batch: Batch,
    optimizer: Optimizer,
    compute: Compute,
    objective: Objective = NEXT_TOKEN,
    guard: Guard = FINITE,
    microbatches: int = 1,
) -> tuple[State, Metrics]:
    """One update from one global batch.

    The loss is the sum over what `objective` counts, valid target tokens say, divided by their
    count in the whole batch, so neither microbatches nor devices nor uneven masks change it. An
    update that `guard` finds unsound, and that of a batch without anything to count, is not made:
    weights, moments and the learning rate's schedule stay where they are.
    Random layers draw from `state.key`, folded with the step and then with the microbatch's index.
    Frozen weights have no gradient and no moments, and stay in their buffers.

    Metrics, float32 unless said: `loss` and what else `objective` reports, on average;
    `grad_norm` before clipping, `parameter_norm` of what trains, before the update, `update_norm`,
    0 if it is not made, `learning_rate`, and, int32, `tokens`, the valid target tokens of this
    batch, `skipped_updates` in all, `skipped_in_a_row`, and `empty_batches`, in all, which had
    nothing to count.

    Raises:
      LayoutError: if the mesh that is set cannot split the weights or the batch.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty:
        check_model(state.whole_model, mesh)
        B, S = batch.tokens.shape
        check_batch(B, S, microbatches, compute.sequence_parallel, mesh)
    count = objective.count(batch)
    divisor = jnp.maximum(count, 1).astype(jnp.float32)
    step_key = jax.random.fold_in(state.key, state.step)

    def part_loss(trained: Any, index: Array | int, part: Batch) -> tuple[Array, dict[str, Array]]:
        # Nothing asks for the gradient of what is frozen, so XLA leaves its products out.
        model = _whole(trained, state.frozen)
        key = jax.random.fold_in(step_key, index)
        sums = objective.sums(model, state.reference_model, part, compute, key)
        reported = {name: each / divisor for name, each in sums.reported.items()}
        return sums.minimised / divisor, reported

    gradient = jax.grad(part_loss, has_aux=True)

    def accumulate(gradients: Any, indexed: tuple[Array, Batch]) -> tuple[Any, dict[str, Array]]:
        part_gradients, reported = gradient(state.model, *indexed)
        return jax.tree.map(jnp.add, gradients, part_gradients), reported

    if microbatches == 1:
        # Without a loop, which XLA's TPU compiler would run twice.
        gradients, reported = gradient(state.model, 0, batch)
    else:
        nothing = jax.tree.map(jnp.zeros_like, state.model)
        parts = jnp.arange(microbatches), split(batch, microbatches)
        with jax.named_scope("microbatches"):
            gradients, reported = jax.lax.scan(accumulate, nothing, parts)
        reported = {name: jnp.sum(each_M) for name, each_M in reported.items()}
    with jax.named_scope("optimizer"):
        new_state, metrics = _updated(state, count, reported["loss"], gradients, optimizer, guard)
    tokens = jnp.sum(batch.loss_mask, dtype=jnp.int32)
    return new_state, {**reported, **metrics, "tokens": tokens}


def _updated(
    state: State, count: Array, loss: Array, gradients: Any, optimizer: Optimizer, guard: Guard
) -> tuple[State, Metrics]:
    """The state after the update that `gradients` ask for, and what there is to say of it."""
    grad_norm = optax.global_norm(gradients)
    updates, moments = optimizer.transformation.update(gradients, state.optimizer, state.model)
    update_norm = optax.global_norm(updates)
    made, guarded = guard.judge(state.guard, loss, grad_norm, update_norm, count)
    updates_made = state.step - state.guard.skipped - state.guard.empty_batches
    metrics = {
        "grad_norm": grad_norm,
        "parameter_norm": optax.global_norm(state.model),
        "update_norm": jnp.where(made, update_norm, 0),
        "learning_rate": jnp.asarray(optimizer.learning_rate(updates_made), jnp.float32),
        "skipped_updates": guarded.skipped,
        "skipped_in_a_row": guarded.skipped_in_a_row,
        "empty_batches": guarded.empty_batches,
    }
    new_state = State(
        step=state.step + 1,
        model=choose(made, optax.apply_updates(state.model, updates), state.model),
        optimizer=choose(made, moments, state.optimizer),
        guard=guarded,
        key=state.key,
        frozen=state.frozen,
        reference_model=state.reference_model,
    )
    return new_state, metrics


def split(batch: Batch, microbatches: int) -> Batch:
    """(B, S, …) arrays as (M, B / M, S, …). Each device splits its own rows, so nothing travels."""

    def part(x_BS: Array) -> Array:
        B, *rest = x_BS.shape
        x_BMS = jnp.reshape(
            x_BS,
            (B // microbatches, microbatches, *rest),
            out_sharding=spec("batch microbatch seq"),
        )
        return jnp.moveaxis(x_BMS, 1, 0)

    return jax.tree.map(part, batch)


def trace_step(
    state: State,
    batch: Batch,
    optimizer: Optimizer,
    mesh: Mesh,
    compute: Compute,
    objective: Objective = NEXT_TOKEN,
    guard: Guard = FINITE,
    microbatches: int = 1,
) -> jax.stages.Traced:
    """`step` traced for `state` and `batch`, which may be abstract.

    Lowered and compiled, it is called as `state, metrics = compiled(state, batch)`. The old state
    is donated: its buffers become the new one's.
    """
    one_step = functools.partial(
        step,
        optimizer=optimizer,
        compute=compute,
        objective=objective,
        guard=guard,
        microbatches=microbatches,
    )
    everywhere = NamedSharding(mesh, PartitionSpec())
    with jax.set_mesh(mesh):
        return jax.jit(
            one_step, donate_argnums=0, out_shardings=(shardings(state), everywhere)
        ).trace(state, batch)
