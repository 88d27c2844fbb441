"""A learning rate that falls as a power of the tokens seen, whatever the length of the run."""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array

from lmlib.optim.schedules import Schedule, warmup_stable_decay


class PowerLaw(eqx.Module):
    """A `Schedule`, multiplied by a power of the steps made; an `optax.Schedule`.

    Attributes:
      schedule: level between its rise and its fall.
      exponent: how fast the power falls: at twice the steps of the warm-up it is 2^-exponent. It is
        1 until the warm-up ends, and stays where it is once the fall begins.
    """

    schedule: Schedule
    exponent: float | Array

    def __call__(self, step: int | Array) -> Array:
        """A float32 scalar."""
        risen, falls = self.schedule.rising, self.schedule.steps - self.schedule.falling
        level = jnp.clip(step, risen, jnp.maximum(falls, risen))
        power = ((level + 1.0) / (risen + 1.0)) ** -self.exponent
        return jnp.asarray(self.schedule(step) * power, jnp.float32)


def warmup_power_decay(
    peak_lr: float,
    steps: int,
    warmup: float | int = 0.01,
    decay: float | int = 0.2,
    end: float = 0.0,
    exponent: float = 0.51,
) -> PowerLaw:
    """Warm-up, then a power of the tokens seen, then a line down over the last `decay` (the power
    scheduler of Shen et al. 2024, arXiv:2408.13359, whose rate is batch size · a · tokens^-exponent
    with an exponent of 0.51).

    All steps are taken to have equally many tokens. `peak_lr` is the rate where the warm-up ends,
    so it is their batch size · a · tokens^-exponent for the tokens of the warm-up.

    Args:
      warmup, decay: fractions or numbers of `steps`. Give `warmup` as a number: then the rate at a
        step is the same in runs of all lengths, until they decay.
      end: what the decay ends at, as a fraction of the rate that it begins with.

    Raises:
      ValueError: for a part of the steps that there is not, or an exponent that is not positive.
    """
    if not exponent > 0:
        raise ValueError(f"exponent must be positive, got {exponent}: the rate falls by it")
    return PowerLaw(warmup_stable_decay(peak_lr, steps, warmup, decay, end), float(exponent))
