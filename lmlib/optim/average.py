"""Averages of the trained weights, stored in the optimizer's state."""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int32

from lmlib.optim.optimizer import Hyperparameters, Optimizer
from lmlib.optim.schedules import steps_of

# Paths in the state of a run: an average that commands read if they are asked for it, and one that
# they read in place of the weights.
KEPT, EVALUATED = "optimizer.average", "optimizer.evaluated"

_RATE, _START = "averaging_rate", "averaging_start"


class Averaging(abc.ABC):
    """An average of the weights that train, for `Experiment.average`.

    It becomes a part of the optimizer's state. If the state has a field `evaluated`, weights in the
    tree of the trained ones, the run evaluates, samples and exports them.
    """

    @abc.abstractmethod
    def added_to(self, optimizer: Optimizer, steps: int) -> Optimizer:
        """Returns `optimizer` with the average, for a run of `steps` updates."""


def evaluated_model(state: Any) -> Any:
    """Returns the model of a `lmlib.state.State` with the weights that the run evaluates."""
    found = getattr(state.optimizer, "evaluated", None)
    return state.whole_model if found is None else state.merge_params(found)


class AveragedState(NamedTuple):
    """An optimizer's state, and the average of the weights: float32, in their layout.

    The average is one of the last two, and the other is `None`. At first it is the weights.
    """

    optimizer: optax.OptState
    updates: Int32[Array, ""]  # number of updates made
    average: Any = None
    evaluated: Any = None


@dataclasses.dataclass(frozen=True)
class WeightAverage(Averaging):
    """The mean of the weights after each update, with larger weights for newer updates.

    After t updates it is Σ (1 - decay) decay^(t - i) w_i / (1 - decay^t). It does not include the
    initial weights, so it needs no warm-up (Polyak & Juditsky 1992; unbiased like the moments of
    Kingma & Ba 2015, arXiv:1412.6980, §3).

    Args:
      decay: factor of an update's weight after each further update; the mean covers about the last
        1 / (1 - decay) updates. 1 gives all updates equal weights.
      start: number of first updates that are left out, or their fraction of the run's steps. Until
        then the mean is the last weights.
      share: the average is share · mean + (1 - share) · last weights.
      evaluated: True if the run evaluates, samples and exports the average, not the last weights.
    """

    decay: float = 0.999
    start: float | int = 0
    share: float = 1.0
    evaluated: bool = False

    def __post_init__(self) -> None:
        for name, value in {"decay": self.decay, "share": self.share}.items():
            if not 0 < value <= 1:
                raise ValueError(f"{name} of an average must be above 0, at most 1, got {value}")

    def added_to(self, optimizer: Optimizer, steps: int) -> Optimizer:
        """See `Averaging`."""
        share, field = self.share, "evaluated" if self.evaluated else "average"

        def update(
            updates: Any, state: AveragedState, model: Any, given: Hyperparameters
        ) -> tuple[Any, AveragedState]:
            made, rate = state.updates + 1, given[_RATE]
            counted = jnp.maximum(made - given[_START], 1)
            # Equals rate / (1 - decay^counted), without a difference that would round small values
            # away.
            decaying = rate / -jnp.expm1(counted * jnp.log1p(-rate))
            newest = jnp.where(rate > 0, decaying, 1 / counted)

            def moved(average: Array, old: Array, new: Array) -> Array:
                if share == 1:
                    return average + newest * (new - average)
                mean = old + (average - old) / share  # which is not stored
                return new + share * (1 - newest) * (mean - new)

            weights = optax.apply_updates(model, updates)
            average = jax.tree.map(moved, getattr(state, field), model, weights)
            return updates, state._replace(updates=made, **{field: average})

        def init(model: Any) -> AveragedState:
            return AveragedState(None, jnp.zeros((), jnp.int32), **{field: float32_copy(model)})

        own = {_RATE: 1.0 - self.decay, _START: steps_of("start", self.start, steps)}
        return with_more_state(optimizer, init, update, own)


def with_more_state(
    optimizer: Optimizer,
    init: Callable[[Any], Any],
    update: Callable[[Any, Any, Any, Hyperparameters], tuple[Any, Any]],
    own: Hyperparameters,
) -> Optimizer:
    """Adds a state to `optimizer`, whose own state becomes its field `optimizer`.

    `init(model)` makes it, a named tuple. `update(updates, state, model, hyperparameters)` receives
    the updates of `optimizer` and returns new ones, and the new state. `own` are its
    hyperparameters, in addition to the optimizer's.
    """
    inner = optax.with_extra_args_support(optimizer.transformation)

    def of_inner(given: Hyperparameters) -> dict[str, Any]:
        return {name: value for name, value in given.items() if name not in own}

    def whole_update(
        gradients: Any, state: Any, model: Any = None, **given: Any
    ) -> tuple[Any, Any]:
        updates, moments = inner.update(gradients, state.optimizer, model, **of_inner(given))
        updates, state = update(updates, state, model, {**own, **given})
        return updates, state._replace(optimizer=moments)

    return optimizer._replace(
        transformation=optax.GradientTransformationExtraArgs(
            lambda model: init(model)._replace(optimizer=inner.init(model)), whole_update
        ),
        learning_rate=lambda step, **given: optimizer.learning_rate(step, **of_inner(given)),
        metrics=lambda state: optimizer.metrics(state.optimizer),
        hyperparameters={**optimizer.hyperparameters, **own},
    )


def float32_copy(model: Any) -> Any:
    """Returns a copy of the weights in float32, in their layout."""
    return jax.tree.map(lambda weight: jnp.array(weight, jnp.float32, copy=True), model)
