"""A learning rate that falls as a power of the tokens seen, independent of the run's length."""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array

from lmlib.optim.schedules import Schedule, warmup_stable_decay


class PowerLaw(eqx.Module):
    """A `Schedule` multiplied by (steps / warm-up)^-exponent; an `optax.Schedule`.

    The power is 1 until the warm-up ends, and stays constant once the fall begins.
    """

    schedule: Schedule  # constant between its rise and its fall
    exponent: float | Array

    def __call__(self, step: int | Array) -> Array:
        """Returns the rate at a step, a float32 scalar."""
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
    """Warm-up, then a power of the tokens seen, then a linear decay over the last `decay` steps.

    This is the power scheduler of Shen et al. 2024, arXiv:2408.13359, whose rate is batch size · a
    · tokens^-exponent with an exponent of 0.51, for equally large steps. `peak_lr` is the rate at
    the end of the warm-up.

    Args:
      warmup, decay: fractions or numbers of `steps`. If `warmup` is a number, the rate at a step is
        the same in runs of all lengths, until they decay.
      end: the rate at the end, as a fraction of the rate at which the decay begins.
    """
    if not exponent > 0:
        raise ValueError(f"exponent must be positive, got {exponent}: the rate falls by it")
    return PowerLaw(warmup_stable_decay(peak_lr, steps, warmup, decay, end), float(exponent))
