"""Schedule-free learning: a constant rate, and an average of the weights in place of its fall."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float32, Int32

from lmlib.optim.average import Averaging, float32_copy, with_more_state
from lmlib.optim.optimizer import Hyperparameters, Optimizer


class ScheduleFreeState(NamedTuple):
    """An optimizer's state, and the average x of its weights z.

    z is not stored: the weights y, at which gradients are taken, are (1 - b1) z + b1 x.
    """

    optimizer: optax.OptState
    evaluated: Any  # x, float32, in the layout of the weights
    updates: Int32[Array, ""]  # number of updates made
    counted: Float32[Array, ""]  # sum of the averaged weights' factors, divided by the last factor
    highest: Float32[Array, ""]  # learning rate so far


@dataclasses.dataclass(frozen=True)
class ScheduleFree(Averaging):
    """Schedule-free learning (Defazio et al. 2024, arXiv:2405.15682, equations 3 to 5, 20 to 22).

    The optimizer's updates move z, its weight decay uses y, and the average x is evaluated, sampled
    and exported. With AdamW without a first moment (`b1=0`) and a constant rate this is
    schedule-free AdamW. x takes as much memory as the first moment did.

    Args:
      b1: the place of gradients, from z (0) to the average (1): a momentum.
      power: the factor of the weights after update t is t^power, and
      rate_power: the highest learning rate so far to this power.
    """

    b1: float = 0.9
    power: float = 0.0
    rate_power: float = 2.0

    def __post_init__(self) -> None:
        if not 0 <= self.b1 < 1:
            raise ValueError(f"b1 must be at least 0 and less than 1, got {self.b1}")
        for name, value in {"power": self.power, "rate_power": self.rate_power}.items():
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} must be a number of at least 0, got {value}")

    def added_to(self, optimizer: Optimizer, steps: int) -> Optimizer:
        """See `Averaging`; `steps` has no effect."""
        b1 = self.b1

        def init(model: Any) -> ScheduleFreeState:
            zero = jnp.zeros((), jnp.float32)
            count = jnp.zeros((), jnp.int32)
            return ScheduleFreeState(None, float32_copy(model), count, zero, zero)

        def update(
            updates: Any, state: ScheduleFreeState, model: Any, given: Hyperparameters
        ) -> tuple[Any, ScheduleFreeState]:
            rate = optimizer.learning_rate(state.updates, **given)
            highest = jnp.maximum(state.highest, rate)
            made = state.updates + 1
            # Factors relative to the newest do not grow, so float32 represents their sum.
            older = (state.updates / made) ** self.power
            older *= jnp.where(highest > 0, state.highest / highest, 1) ** self.rate_power
            counted = state.counted * older + 1

            def averaged(x: Array, y: Array, change: Array) -> Array:
                z = x + (y - x) / (1 - b1) + change
                return x + (z - x) / counted

            def moved(x: Array, new_x: Array, change: Array) -> Array:
                return b1 * (new_x - x) + (1 - b1) * change  # of y

            new = jax.tree.map(averaged, state.evaluated, model, updates)
            changes = jax.tree.map(moved, state.evaluated, new, updates)
            return changes, ScheduleFreeState(None, new, made, counted, highest)

        return with_more_state(optimizer, init, update, {})
