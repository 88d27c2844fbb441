"""Learning rates over a run: linear warm-up, constant, then a decrease.

Lengths of rise and fall are fractions of the run's steps (a float), or numbers of steps (an int),
which stay the same if the run is extended or forked.
"""

from collections.abc import Callable

import equinox as eqx
import jax.numpy as jnp
import optax
from jaxtyping import Array

MakeSchedule = Callable[[float, int], optax.Schedule]
Shape = Callable[[Array], Array]


class Schedule(eqx.Module):
    """The learning rate at a step, an `optax.Schedule`.

    Its numbers are leaves of a tree, so that a compiled step can take them as arguments.
    """

    peak_lr: float | Array  # the highest rate
    steps: int | Array  # length of the schedule; the rate is constant afterwards
    rising: int | Array  # number of first steps, in which the rate rises linearly
    falling: int | Array  # number of last steps, in which the rate falls
    end: float | Array  # the final rate, as a fraction of `peak_lr`
    shape: Shape = eqx.field(static=True)  # the height, 1 to 0, at the remaining fraction

    def __call__(self, step: int | Array) -> Array:
        """Returns the rate at a step, a float32 scalar."""
        left = jnp.clip(self.steps - step, 0, self.falling) / jnp.maximum(self.falling, 1)
        height = jnp.where(self.falling > 0, self.shape(left), 1.0)
        # The first step already learns: the line starts one step above zero.
        risen = jnp.minimum((step + 1.0) / (self.rising + 1.0), 1.0)
        rate = self.peak_lr * risen * (self.end + (1.0 - self.end) * height)
        return jnp.asarray(rate, jnp.float32)


def warmup_cosine(
    peak_lr: float, steps: int, warmup: float | int = 0.1, end: float = 0.1
) -> Schedule:
    """Half a cosine from `peak_lr` to `end` · `peak_lr`, after a linear warm-up.

    Source: Loshchilov & Hutter 2017, arXiv:1608.03983, eq. 5.
    """
    rising = steps_of("warmup", warmup, steps)
    return _schedule(peak_lr, steps, rising, steps - rising, end, _half_cosine)


def warmup_linear(
    peak_lr: float, steps: int, warmup: float | int = 0.1, end: float = 0.0
) -> Schedule:
    """A straight line from `peak_lr` to `end` · `peak_lr`, after a linear warm-up."""
    rising = steps_of("warmup", warmup, steps)
    return _schedule(peak_lr, steps, rising, steps - rising, end, _line)


def warmup_stable_decay(
    peak_lr: float,
    steps: int,
    warmup: float | int = 0.01,
    decay: float | int = 0.2,
    end: float = 0.0,
) -> Schedule:
    """Warm-up, then constant, then linear to `end` · `peak_lr` over the last `decay` steps.

    WSD: Hu et al. 2024, arXiv:2404.06395, §4. Before the decay it equals `warmup_constant` with the
    same warm-up steps bit for bit: a run with that schedule can be forked and decayed anywhere.
    """
    rising, falling = steps_of("warmup", warmup, steps), steps_of("decay", decay, steps)
    if _share(warmup, steps) + _share(decay, steps) > 1:
        raise ValueError(
            f"warmup = {warmup} and decay = {decay} together exceed "
            + ("1" if isinstance(warmup, float) and isinstance(decay, float) else f"{steps} steps")
        )
    # Each half of three steps is rounded to two, so together they would exceed the steps.
    return _schedule(peak_lr, steps, rising, min(falling, steps - rising), end, _line)


def warmup_constant(peak_lr: float, steps: int, warmup: float | int = 0.01) -> Schedule:
    """Constant `peak_lr`, after a linear warm-up."""
    return _schedule(peak_lr, steps, steps_of("warmup", warmup, steps), 0, 1.0, _line)


def _schedule(
    peak_lr: float, steps: int, rising: int, falling: int, end: float, shape: Shape
) -> Schedule:
    # Fixed types, since other types of literals in a config would need another program.
    return Schedule(float(peak_lr), int(steps), rising, falling, float(end), shape)


def _half_cosine(left: Array) -> Array:
    """Equals ½ (1 + cos(π (1 - left))), without a difference that would round `left` away."""
    return jnp.sin(jnp.pi / 2 * left) ** 2


def _line(left: Array) -> Array:
    return left


def steps_of(name: str, part: float | int, steps: int) -> int:
    """Returns `part` of `steps` as a number of steps; ValueError if it is out of range."""
    if not 0 <= _share(part, steps) <= 1:
        raise ValueError(
            f"{name} is a fraction of the steps, from 0.0 to 1.0, or a whole number of them, here "
            f"at most {steps}; got {part}"
        )
    return part if isinstance(part, int) else round(part * steps)


def _share(part: float | int, steps: int) -> float:
    """`part` as a fraction of `steps`."""
    return part / steps if isinstance(part, int) else part
