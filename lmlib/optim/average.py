"""An exponential moving average of the trained weights, stored in the optimizer's state."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int32

from lmlib.optim.optimizer import Optimizer

IN_STATE = "optimizer.average"  # path of the average in the state of a run

_RATE = "averaging_rate"


@dataclasses.dataclass(frozen=True)
class WeightAverage:
    """The mean of the weights after each update, with larger weights for newer updates.

    After t updates it is Σ (1 - decay) decay^(t - i) w_i / (1 - decay^t). It does not include the
    initial weights, so it needs no warm-up (Polyak & Juditsky 1992; unbiased like the moments of
    Kingma & Ba 2015, arXiv:1412.6980, §3).

    Args:
      decay: factor of an update's weight after each further update; the mean covers about the last
        1 / (1 - decay) updates.
    """

    decay: float = 0.999

    def __post_init__(self) -> None:
        if not 0 < self.decay < 1:
            raise ValueError(f"decay of an average must be between 0 and 1, got {self.decay}")


class AveragedState(NamedTuple):
    """An optimizer's state, and the average."""

    optimizer: optax.OptState
    updates: Int32[Array, ""]  # number of updates made
    average: Any  # of the weights after each, float32, in their layout; at first the weights


def with_average(optimizer: Optimizer, average: WeightAverage | None) -> Optimizer:
    """Adds a weight average to `optimizer`; `None` returns it unchanged.

    The average covers the weights that have an update, after it is applied.
    """
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
        # Equals rate / (1 - decay^made), without a difference that would round small values away.
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
