"""The state of a run's training, and its creation."""

import dataclasses
import functools
from collections.abc import Callable, Set
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int32, Key

from lmlib.compute import Compute
from lmlib.data.batch import Batch
from lmlib.guard import Guard, GuardState
from lmlib.losses.next_token import NextToken
from lmlib.losses.objective import Objective
from lmlib.models.weights import creator, fold_in_name
from lmlib.optim.optimizer import Hyperparameters, Optimizer, arrays_of
from lmlib.parallel.axes import M, map_weights
from lmlib.parallel.layout import mesh_axes_for, num_shards, partition, shardings, storage_spec


@dataclasses.dataclass(frozen=True)
class Training:
    """The settings of a training run, the same for all steps.

    Args:
      microbatches: parts of a batch whose gradients are added before one update.
      seed: seed of random numbers in steps; initial weights have a different one.
      trained: the paths of the weights that train; `None`: all do.
    """

    optimizer: Optimizer
    mesh: Mesh
    compute: Compute = Compute()
    objective: Objective = NextToken()
    guard: Guard = Guard()
    microbatches: int = 1
    seed: int = 0
    trained: Set[str] | None = None

    @functools.cached_property
    def hyperparameters(self) -> Hyperparameters:
        """The optimizer's numbers as arrays on every device, for `lmlib.train.step`."""
        return arrays_of(self.optimizer.hyperparameters, self.mesh)


class State(eqx.Module):
    """All data that training needs from one step to the next.

    A model's weights are in `model`, `buffers` and `frozen`, with `None` in place of the others'.
    """

    step: Int32[Array, ""]  # number of batches seen so far
    model: Any  # the weights that train, float32
    optimizer: optax.OptState
    guard: GuardState
    key: Key[Array, ""]  # constant; a step's random numbers depend on it, step and microbatch
    buffers: Any = None  # weights without a gradient, which the model updates itself
    frozen: Any = None  # weights that never change
    reference_model: Any = None  # the frozen model that the objective needs, in the compute dtype

    @property
    def whole_model(self) -> Any:
        """The model with all its weights."""
        return self.merge_params(self.model)

    def merge_params(self, trained: Any) -> Any:
        """The model with `trained` in place of `model`."""
        parts = trained, self.buffers, self.frozen
        return eqx.combine(*(part for part in parts if part is not None))

    @property
    def changing(self) -> "State":
        """The part of the state that steps change, and checkpoints contain: no frozen weights."""
        return self.with_frozen(None).with_reference_model(None)

    def with_frozen(self, frozen: Any) -> "State":
        return eqx.tree_at(lambda state: state.frozen, self, frozen, is_leaf=lambda x: x is None)

    def with_reference_model(self, model: Any) -> "State":
        return eqx.tree_at(lambda s: s.reference_model, self, model, is_leaf=lambda x: x is None)


class ModelParts(NamedTuple):
    """A model split into three trees; each has `None` where the weight is in another."""

    trained: Any  # weights with a gradient
    buffers: Any  # optional: weights without a gradient that the model updates itself
    frozen: Any  # optional: weights that never change


def split_by_training(model: Any, trained: Set[str] | None) -> ModelParts:
    """Splits `model`; `trained` are the paths of the weights that are not frozen; `None`: all."""
    changes = map_weights(lambda weight, _: trained is None or weight.path in trained, model)
    has_gradient = map_weights(lambda weight, _: weight.declaration.gradient, model)
    changing, frozen = eqx.partition(model, changes)
    gradient, buffers = eqx.partition(changing, has_gradient)
    buffers = buffers if jax.tree.leaves(buffers) else None
    return ModelParts(gradient, buffers, None if trained is None else frozen)


def new_state(make_model: Callable[[], eqx.Module], training: Training) -> State:
    """Returns the state before the first step, with new weights, laid out from the start."""
    return initial_state(new_model(make_model, training.mesh), training)


def new_model(make_model: Callable[[], M], mesh: Mesh, made: M | None = None) -> M:
    """Returns a model with new weights, laid out on `mesh` from the start; see `creator`."""
    with jax.set_mesh(mesh):
        return creator(make_model, mesh, made)()


def initial_state(model: Any, training: Training) -> State:
    """Returns the state before the first step with the weights of `model`, which are donated.

    They have the layout of `abstract_model`.
    """
    layout = shardings(abstract_state(lambda: model, training))
    fresh = functools.partial(fresh_state, training=training)
    with jax.set_mesh(training.mesh):
        return jax.jit(fresh, out_shardings=layout, donate_argnums=0)(model)


def fresh_state(model: Any, training: Training) -> State:
    """`initial_state` for tracing; the caller sets the layout."""
    parts = split_by_training(model, training.trained)
    return State(
        step=jnp.zeros((), jnp.int32),
        model=parts.trained,
        optimizer=training.optimizer.transformation.init(parts.trained),
        guard=training.guard.init(),
        # Folded, since a model is commonly made from the seed's own key.
        key=fold_in_name(jax.random.key(training.seed), "steps"),
        buffers=parts.buffers,
        frozen=parts.frozen,
    )


def abstract_model(make_model: Callable[[], eqx.Module], mesh: Mesh) -> Any:
    """The model's shapes, dtypes and stored `NamedSharding`s, without making arrays."""
    return map_weights(
        lambda weight, array: _placed(array, storage_spec(weight, array.shape, mesh), mesh),
        jax.eval_shape(make_model),
    )


def abstract_state(make_model: Callable[[], eqx.Module], training: Training) -> State:
    """The state's shapes, dtypes and `NamedSharding`s, without making arrays."""
    mesh = training.mesh
    fresh = functools.partial(fresh_state, training=training)
    with jax.set_mesh(mesh):
        # Moments have the layout of their weights, which is in the types of the trace.
        state = jax.eval_shape(fresh, abstract_model(make_model, mesh))
    return jax.tree.map(lambda leaf: _placed(leaf, jax.typeof(leaf).sharding.spec, mesh), state)


def abstract_batch(
    batch_size: int,
    sequence_length: int,
    mesh: Mesh,
    teacher_k: int | None = None,
    whole_rows: bool = False,
    labelled: bool = False,
) -> Batch:
    """Shapes, dtypes and `NamedSharding`s of a global batch; see `lmlib.data.batch.Source`."""

    order = "zigzag" if num_shards(mesh_axes_for("seq"), mesh) > 1 else "plain"

    def blank() -> Batch:
        def zeros(dtype: Any, *rest: int) -> Array:
            return jnp.zeros((batch_size, sequence_length, *rest), dtype)

        fields = *(zeros(jnp.int32),) * 4, zeros(bool)
        taught: dict[str, Any] = {}
        if teacher_k is not None:
            taught["teacher_ids"] = zeros(jnp.int32, teacher_k)
            taught["teacher_log_probabilities"] = zeros(jnp.float16, teacher_k)
        if labelled:
            taught["labels"] = zeros(bool)
        return Batch(*fields, order=order, whole_rows=whole_rows, **taught)

    rows = partition("batch seq", mesh=mesh)
    return jax.tree.map(lambda leaf: _placed(leaf, rows, mesh), jax.eval_shape(blank))


def _placed(leaf: Any, spec: PartitionSpec, mesh: Mesh) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))
