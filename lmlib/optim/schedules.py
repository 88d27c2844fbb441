"""Learning rates over a run: up in a line, level, then down.

How long a schedule rises and falls is said in one of two ways: a float is a fraction of the run's
steps, an int is a number of them, which stays when the run is made longer or is forked.
"""

from collections.abc import Callable

import equinox as eqx
import jax.numpy as jnp
import optax
from jaxtyping import Array

MakeSchedule = Callable[[float, int], optax.Schedule]
Shape = Callable[[Array], Array]


class Schedule(eqx.Module):
    """The learning rate at a step, an `optax.Schedule`. Its numbers are leaves of a tree, so that
    a compiled step can take them as arguments.

    Attributes:
      peak_lr: the highest.
      steps: after which it stays as it is.
      rising: of these, the first, in which it rises in a line.
      falling: the last, in which it falls.
      end: what it falls to, as a fraction of `peak_lr`.
      shape: of the fall: the height, from 1 to 0, for the fraction of it that is left.
    """

    peak_lr: float | Array
    steps: int | Array
    rising: int | Array
    falling: int | Array
    end: float | Array
    shape: Shape = eqx.field(static=True)

    def __call__(self, step: int | Array) -> Array:
        """A float32 scalar, to its rounding: what is left is counted in whole steps."""
        left = jnp.clip(self.steps - step, 0, self.falling) / jnp.maximum(self.falling, 1)
        height = jnp.where(self.falling > 0, self.shape(left), 1.0)
        # The first step already learns: the line starts one step above zero.
        risen = jnp.minimum((step + 1.0) / (self.rising + 1.0), 1.0)
        rate = self.peak_lr * risen * (self.end + (1.0 - self.end) * height)
        return jnp.asarray(rate, jnp.float32)


def warmup_cosine(
    peak_lr: float, steps: int, warmup: float | int = 0.1, end: float = 0.1
) -> Schedule:
    """Half a cosine from `peak_lr` to `end` · `peak_lr` (Loshchilov & Hutter 2017,
    arXiv:1608.03983, eq. 5), after a linear warm-up over `warmup`, a fraction or a number of
    `steps`."""
    rising = _steps_of("warmup", warmup, steps)
    return _schedule(peak_lr, steps, rising, steps - rising, end, _half_cosine)


def warmup_linear(
    peak_lr: float, steps: int, warmup: float | int = 0.1, end: float = 0.0
) -> Schedule:
    """A straight line from `peak_lr` to `end` · `peak_lr`, after a linear warm-up."""
    rising = _steps_of("warmup", warmup, steps)
    return _schedule(peak_lr, steps, rising, steps - rising, end, _line)


def warmup_stable_decay(
    peak_lr: float,
    steps: int,
    warmup: float | int = 0.01,
    decay: float | int = 0.2,
    end: float = 0.0,
) -> Schedule:
    """Warm-up, then constant, then linear to `end` · `peak_lr` over the last `decay`, a fraction or
    a number of `steps` (WSD; Hu et al. 2024, arXiv:2404.06395, §4).

    Before the decay it is `warmup_constant` of the same `peak_lr` and the same number of steps of
    warm-up, bit for bit: a run with that schedule can be forked and decayed from any step.
    """
    rising, falling = _steps_of("warmup", warmup, steps), _steps_of("decay", decay, steps)
    if _share(warmup, steps) + _share(decay, steps) > 1:
        raise ValueError(
            f"warmup = {warmup} and decay = {decay} together exceed "
            + ("1" if isinstance(warmup, float) and isinstance(decay, float) else f"{steps} steps")
        )
    # Halves of three steps are two each by themselves.
    return _schedule(peak_lr, steps, rising, min(falling, steps - rising), end, _line)


def warmup_constant(peak_lr: float, steps: int, warmup: float | int = 0.01) -> Schedule:
    """`peak_lr` for ever, after a linear warm-up."""
    return _schedule(peak_lr, steps, _steps_of("warmup", warmup, steps), 0, 1.0, _line)


def _schedule(
    peak_lr: float, steps: int, rising: int, falling: int, end: float, shape: Shape
) -> Schedule:
    # Of one type each, whatever literal a config has: other types make another program.
    return Schedule(float(peak_lr), int(steps), rising, falling, float(end), shape)


def _half_cosine(left: Array) -> Array:
    """½ (1 + cos(π (1 - left))), without the difference that rounds away what is left."""
    return jnp.sin(jnp.pi / 2 * left) ** 2


def _line(left: Array) -> Array:
    return left


def _steps_of(name: str, part: float | int, steps: int) -> int:
    """`part` of `steps` as a number of steps."""
    if not 0 <= _share(part, steps) <= 1:
        raise ValueError(
            f"{name} is a fraction of the steps, from 0.0 to 1.0, or a whole number of them, here "
            f"at most {steps}; got {part}"
        )
    return part if isinstance(part, int) else round(part * steps)


def _share(part: float | int, steps: int) -> float:
    """`part` as a fraction of `steps`."""
    return part / steps if isinstance(part, int) else part
