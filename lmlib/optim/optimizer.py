"""Optimizers and schedules out of optax; which weights decay is what they declare."""

import math
from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import optax
from jaxtyping import Array

from lmlib.parallel.axes import Weight, map_weights

MakeSchedule = Callable[[float, int], optax.Schedule]
Decays = Callable[[Weight], bool]


def nothing_more(state: optax.OptState) -> dict[str, Array]:
    """No metrics but those of every optimizer."""
    return {}


class Optimizer(NamedTuple):
    """How gradients become updates.

    Attributes:
      transformation: makes updates of gradients.
      learning_rate: that it uses at each step.
      decays: which weights it decays, from what they declare.
      metrics: float32 scalars by name, of the transformation's state after a step.
    """

    transformation: optax.GradientTransformation
    learning_rate: optax.Schedule
    decays: Decays
    metrics: Callable[[optax.OptState], dict[str, Array]] = nothing_more


def as_declared(weight: Weight) -> bool:
    """Whether a weight decays, as its module declares: matrices and tables do; scales and biases,
    whatever their shape, do not."""
    return weight.declaration.decays


def decay_mask(model: eqx.Module, decays: Decays = as_declared) -> eqx.Module:
    """The model's tree with `decays(weight)` in place of each array."""
    return map_weights(lambda weight, array: decays(weight), model)


def warmup_cosine(
    peak_lr: float, steps: int, warmup: float = 0.1, end: float = 0.1
) -> optax.Schedule:
    """Half a cosine from `peak_lr` to `end` · `peak_lr` (Loshchilov & Hutter 2017,
    arXiv:1608.03983, eq. 5), after a linear warm-up over the fraction `warmup` of `steps`."""
    rising = _fraction("warmup", warmup, steps)
    falling = steps - rising
    return _joined(
        peak_lr, rising, falling, lambda: optax.cosine_decay_schedule(peak_lr, falling, end)
    )


def warmup_linear(
    peak_lr: float, steps: int, warmup: float = 0.1, end: float = 0.0
) -> optax.Schedule:
    """A straight line from `peak_lr` to `end` · `peak_lr`, after a linear warm-up."""
    rising = _fraction("warmup", warmup, steps)
    falling = steps - rising
    return _joined(
        peak_lr, rising, falling, lambda: optax.linear_schedule(peak_lr, end * peak_lr, falling)
    )


def warmup_stable_decay(
    peak_lr: float, steps: int, warmup: float = 0.01, decay: float = 0.2, end: float = 0.0
) -> optax.Schedule:
    """Warm-up, then constant, then linear to `end` · `peak_lr` over the last fraction `decay` of
    `steps` (WSD; Hu et al. 2024, arXiv:2404.06395, §4)."""
    rising, falling = _fraction("warmup", warmup, steps), _fraction("decay", decay, steps)
    stable = steps - rising - falling
    if stable < 0:
        raise ValueError(f"warmup = {warmup} and decay = {decay} together exceed 1")
    return _joined(
        peak_lr,
        rising,
        falling,
        lambda: optax.linear_schedule(peak_lr, end * peak_lr, falling, stable),
    )


def warmup_constant(peak_lr: float, steps: int, warmup: float = 0.01) -> optax.Schedule:
    """`peak_lr` for ever, after a linear warm-up."""
    rising = _fraction("warmup", warmup, steps)
    return _joined(peak_lr, rising, 0, lambda: optax.constant_schedule(peak_lr))


def adamw(
    steps: int,
    peak_lr: float,
    schedule: MakeSchedule = warmup_cosine,
    b1: float = 0.9,
    b2: float = 0.95,
    epsilon: float = 1e-8,
    weight_decay: float = 0.1,
    clip_norm: float | None = 1.0,
    decays: Decays = as_declared,
    first_moment_dtype: str = "float32",
) -> Optimizer:
    """AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101) after clipping by global norm.

    Args:
      steps: length of the schedule; the run supplies it.
      peak_lr: the schedule's highest learning rate. Weight decay is multiplied by the learning
        rate, as in the paper's equation 12.
      schedule: made from (peak_lr, steps).
      clip_norm: largest global gradient norm; `None` does not clip.
      decays: which weights decay.
      first_moment_dtype: "bfloat16" takes 2 bytes less for each parameter; moments are summed in
        float32 all the same.

    Raises:
      ValueError: for a number that is out of range, or a dtype that is none, naming it.
    """
    if steps < 1 or not 0 < peak_lr < math.inf:
        raise ValueError(f"steps and peak_lr must be positive, got {steps} and {peak_lr}")
    for name, decay in (("b1", b1), ("b2", b2)):
        if not 0 <= decay < 1:
            raise ValueError(f"{name} must be at least 0 and less than 1, got {decay}")
    if not (0 < epsilon < math.inf and 0 <= weight_decay < math.inf):
        raise ValueError(
            f"epsilon must be positive and weight_decay not negative, got {epsilon} and "
            f"{weight_decay}"
        )
    if clip_norm is not None and not clip_norm > 0:
        raise ValueError(f"clip_norm must be positive, or None, got {clip_norm}")
    if first_moment_dtype not in ("float32", "bfloat16"):
        raise ValueError(
            f"first_moment_dtype must be 'float32' or 'bfloat16', got {first_moment_dtype!r}"
        )
    learning_rate = schedule(peak_lr, steps)
    clip = optax.identity() if clip_norm is None else optax.clip_by_global_norm(clip_norm)
    transformation = optax.chain(
        clip,
        optax.scale_by_adam(b1, b2, epsilon, mu_dtype=first_moment_dtype),
        optax.add_decayed_weights(weight_decay, mask=lambda tree: decay_mask(tree, decays)),
        optax.scale_by_learning_rate(learning_rate),
    )
    return Optimizer(transformation, learning_rate, decays)


def _joined(
    peak_lr: float, rising: int, falling: int, fall: Callable[[], optax.Schedule]
) -> optax.Schedule:
    """A line up over `rising` steps, then `fall()`, or `peak_lr` if no step is left to fall in."""
    then = fall() if falling else optax.constant_schedule(peak_lr)
    # The first step already learns: the line starts one step above zero.
    warmup = optax.linear_schedule(peak_lr / (rising + 1), peak_lr, rising)
    return optax.join_schedules([warmup, then], [rising]) if rising else then


def _fraction(name: str, fraction: float, steps: int) -> int:
    if not 0 <= fraction <= 1:
        raise ValueError(f"{name} is a fraction of the steps, from 0 to 1; got {fraction}")
    return round(fraction * steps)
