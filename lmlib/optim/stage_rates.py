"""A learning rate that is higher in later stages, whose batches are larger, and then decays."""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array


class StageRates(eqx.Module):
    """The rate peak_lr · factor of the stage, which falls linearly to end · peak_lr.

    It falls from the step `decay_from` on, and stays at `end` from `decay_until` on. Source:
    modded-nanogpt, record 53. Its numbers are leaves, as in `lmlib.optim.schedules.Schedule`.
    """

    peak_lr: float | Array
    begins: tuple[int, ...]  # the first step of each stage after the first
    factors: tuple[float, ...]  # one for each stage
    decay_from: int
    decay_until: int
    end: float

    def __call__(self, step: int | Array) -> Array:
        """Returns the rate at a step, a float32 scalar."""
        stage = sum(jnp.asarray(step >= begin, jnp.int32) for begin in self.begins)
        factor = jnp.asarray(self.factors, jnp.float32)[stage]
        fallen = (step - self.decay_from) / (self.decay_until - self.decay_from)
        fallen = jnp.clip(fallen, 0.0, 1.0)
        return jnp.asarray(self.peak_lr * (factor * (1 - fallen) + self.end * fallen), jnp.float32)


def stage_rates(
    peak_lr: float,
    steps: int,
    begins: tuple[int, ...],
    factors: tuple[float, ...],
    decay_from: int,
    decay_until: int,
    end: float,
) -> StageRates:
    """Makes `StageRates`. All arguments but `peak_lr` are numbers of steps or factors.

    `steps` is not used: a run may end before the schedule does. Raises ValueError unless each
    stage has a factor and the decay ends after it begins.
    """
    if len(factors) != len(begins) + 1 or decay_from >= decay_until:
        raise ValueError(
            f"stages need a factor each, and the decay must end after it begins: {len(begins) + 1} "
            f"stages, {len(factors)} factors, decay from {decay_from} to {decay_until}"
        )
    return StageRates(peak_lr, tuple(begins), tuple(factors), decay_from, decay_until, end)
