"""Optimizers of matrices, with AdamW for all other weights."""

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int32

from lmlib.optim.matrices.whole_matrices import Matrices, is_matrix, matrices_of
from lmlib.optim.optimizer import Decays, Optimizer, by_weight, scaled_adam, with_decoupled_decay
from lmlib.optim.schedules import MakeSchedule
from lmlib.parallel.axes import Weight, map_weights

Kinds = dict[str, list[Array]]  # the arrays of a state by name, one for each weight of matrices


class Rule(NamedTuple):
    """How matrices change. Lists have one entry for each weight."""

    # The state before the first update, from the weights' paths, forms and arrays.
    init: Callable[[list[str], list[Matrices], list[Array]], Kinds]
    # (forms, gradients, state, earlier updates) → (directions of descent, new state)
    update: Callable[[list[Matrices], list[Array], Kinds, Array], tuple[list[Array], Kinds]]
    # True if directions are orthogonal matrices times √(the longer side), as Muon's; False if their
    # elements have the size of Adam's. Rates for other sizes of a model depend on it.
    orthogonal: bool


class MatricesState(NamedTuple):
    """The state of an optimizer of matrices."""

    updates: Int32[Array, ""]  # number of updates made
    matrices: dict[str, Any]  # trees like the model, `None` in place of other weights
    adam: optax.OptState  # the moments of the other weights


def beside_adamw(
    rule: Rule, steps: int, peak_lr: float, schedule: MakeSchedule, apart: Collection[str],
    adamw_learning_rate: float, b1: float, b2: float, epsilon: float, weight_decay: float,
    clip_norm: float | None, decays: Decays, cautious: bool, scaled: Any, **fractions: float,
) -> Optimizer:  # fmt: skip
    """Updates matrices by `rule`, other weights by AdamW at `adamw_learning_rate` times the rate.

    Matrices are the same as Muon's; other arguments are as in `lmlib.optim.adamw.adamw`. Raises
    ValueError for a number that is out of range; `fractions` must be in [0, 1).
    """
    adam = scaled_adam(b1, b2, epsilon, None, "float32", **fractions)
    if not adamw_learning_rate > 0:
        raise ValueError(f"adamw_learning_rate must be positive, got {adamw_learning_rate}")
    if isinstance(apart, str):
        raise ValueError(f"apart must be several names of axes, got the text {apart!r}")

    def is_ours(weight: Weight) -> bool:
        return is_matrix(weight, apart)

    def matrices_and_others(tree: Any) -> tuple[Any, Any]:
        return eqx.partition(tree, map_weights(lambda weight, _: is_ours(weight), tree))

    def forms_of(matrices: Any) -> list[Matrices]:
        forms = map_weights(lambda weight, x: matrices_of(weight, x.shape, apart), matrices)
        return jax.tree.leaves(forms)

    def init(model: Any) -> MatricesState:
        matrices, others = matrices_and_others(model)
        arrays, structure = jax.tree.flatten(matrices)
        paths = jax.tree.leaves(map_weights(lambda weight, _: weight.path, matrices))
        kinds = rule.init(paths, forms_of(matrices), arrays)
        trees = {name: jax.tree.unflatten(structure, kind) for name, kind in kinds.items()}
        return MatricesState(jnp.zeros((), jnp.int32), trees, adam.init(others))

    def update(gradients: Any, state: MatricesState, model: Any = None) -> tuple[Any, Any]:
        matrices, others = matrices_and_others(gradients)
        arrays, structure = jax.tree.flatten(matrices)
        kinds = {name: jax.tree.leaves(tree) for name, tree in state.matrices.items()}
        made, kinds = rule.update(forms_of(matrices), arrays, kinds, state.updates)
        of_others, moments = adam.update(others, state.adam)
        trees = {name: jax.tree.unflatten(structure, kind) for name, kind in kinds.items()}
        directions = eqx.combine(jax.tree.unflatten(structure, made), of_others)
        return directions, MatricesState(state.updates + 1, trees, moments)

    def muons_over_adams_rate(weight: Weight) -> float:
        if not is_ours(weight):
            return 1.0
        return scaled.of_orthogonal(weight, apart) / scaled.factors[weight.path].rate

    direction = optax.GradientTransformation(init, update)
    if scaled is not None:
        direction = scaled.of_adam(direction)
        if rule.orthogonal:
            direction = optax.chain(direction, by_weight(muons_over_adams_rate))
    made = with_decoupled_decay(
        direction, steps, peak_lr, schedule, weight_decay, clip_norm, decays, cautious, scaled
    )
    if adamw_learning_rate == 1:
        return made
    slower = by_weight(lambda weight: 1.0 if is_ours(weight) else adamw_learning_rate)
    return made._replace(transformation=optax.chain(made.transformation, slower))
