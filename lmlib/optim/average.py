"""An exponential moving average of the weights that train, kept beside an optimizer's state."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int32

from lmlib.optim.optimizer import Optimizer

IN_STATE = "optimizer.average"  # where the average lies in the state of a run

_RATE = "averaging_rate"


@dataclasses.dataclass(frozen=True)
class WeightAverage:
    """The mean of the weights after each update, newer ones weighing more: of t updates
    Σ (1 - decay) decay^(t - i) w_i / (1 - decay^t). The initial weights are not in it, so it needs
    no warm-up (Polyak & Juditsky 1992; without bias as the moments of Kingma & Ba 2015,
    arXiv:1412.6980, §3).

    Args:
      decay: of an update's weight from one update to the next; the mean reaches about
        1 / (1 - decay) updates back.

    Raises:
      ValueError: if it is not between 0 and 1.
    """

    decay: float = 0.999

    def __post_init__(self) -> None:
        if not 0 < self.decay < 1:
            raise ValueError(f"decay of an average must be between 0 and 1, got {self.decay}")


class AveragedState(NamedTuple):
    """An optimizer's state, and the average.

    Attributes:
      updates: that were made.
      average: of the weights after them, float32, which lies as the weights do; before the first
        the weights.
    """

    optimizer: optax.OptState
    updates: Int32[Array, ""]
    average: Any


def with_average(optimizer: Optimizer, average: WeightAverage | None) -> Optimizer:
    """`optimizer`, whose state keeps the average of the weights too: of those that have an update,
    once it is made. `None`: as it is."""
    if average is None:
        return optimizer
    inner = optax.with_extra_args_support(optimizer.transformation)
    decay_rate = 1.0 - average.decay

    def of_inner(given: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in given.items() if name != _RATE}

    def init(model: Any) -> AveragedState:
        copies = jax.tree.map(lambda weight: jnp.array(weight, jnp.float32, copy=True), model)
        return AveragedState(inner.init(model), jnp.zeros((), jnp.int32), copies)

    def update(
        gradients: Any, state: AveragedState, model: Any = None, **given: Any
    ) -> tuple[Any, AveragedState]:
        updates, moments = inner.update(gradients, state.optimizer, model, **of_inner(given))
        made, rate = state.updates + 1, given.get(_RATE, decay_rate)
        # rate / (1 - decay^made), without the difference that rounds away what is small.
        share = rate / -jnp.expm1(made * jnp.log1p(-rate))

        def moved(mean: Array, weight: Array) -> Array:
            return mean + share * (weight - mean)

        weights = optax.apply_updates(model, updates)
        means = jax.tree.map(moved, state.average, weights)
        return updates, AveragedState(moments, made, means)

    return optimizer._replace(
        transformation=optax.GradientTransformationExtraArgs(init, update),
        learning_rate=lambda step, **given: optimizer.learning_rate(step, **of_inner(given)),
        metrics=lambda state: optimizer.metrics(state.optimizer),
        hyperparameters={**optimizer.hyperparameters, _RATE: decay_rate},
    )
