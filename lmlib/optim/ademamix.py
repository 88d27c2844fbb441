"""AdEMAMix: AdamW with a second, much slower mean of gradients."""

import math
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array
from optax import contrib

from lmlib.optim.optimizer import Decays, Optimizer, as_declared, check_adam, with_decoupled_decay
from lmlib.optim.schedules import MakeSchedule, steps_of, warmup_cosine


def ademamix(
    steps: int,
    peak_lr: float,
    schedule: MakeSchedule = warmup_cosine,
    b1: float = 0.9,
    b2: float = 0.999,
    b3: float = 0.9999,
    alpha: float = 8.0,
    mixing: float | int = 1.0,
    epsilon: float = 1e-8,
    weight_decay: float = 0.1,
    clip_norm: float | None = 1.0,
    decays: Decays = as_declared,
    cautious: bool = False,
    scaled: Any = None,
) -> Optimizer:
    """AdEMAMix (Pagliardini et al. 2024, arXiv:2409.03137, algorithm 1 and equations 3 and 4).

    The direction is (m1 + α m2) / (√v + epsilon). The slow mean m2 starts at zero and is not
    corrected for that. The state takes 12 bytes for each parameter, AdamW's takes 8.

    Args:
      steps, peak_lr, schedule, weight_decay, clip_norm, decays, cautious, scaled: as in
        `lmlib.optim.adamw.adamw`.
      b1, b2, epsilon: settings of Adam.
      b3: final decay of the slow mean m2.
      alpha: final factor of m2.
      mixing: number of steps, or their fraction, over which α rises from 0, and the decay of m2
        from b1: its half-life grows linearly. They are constants of the program.
    """
    check_adam(b1, b2, epsilon, b3=b3)
    if not 0 <= alpha < math.inf:
        raise ValueError(f"alpha must be a number of at least 0, got {alpha}")
    if not 0 < b1 < b3:
        raise ValueError(f"b1 must be above 0 and below b3 = {b3}, which it grows to, got {b1}")
    rising = max(steps_of("mixing", mixing, steps), 1)

    def risen(count: Array) -> Array:
        return jnp.minimum((count + 1) / rising, 1.0)

    first, last = 1 / math.log(b1), 1 / math.log(b3)  # half-lives, divided by log ½

    def b3_at(count: Array) -> Array:
        return jnp.exp(1 / (first + risen(count) * (last - first)))

    direction = contrib.scale_by_ademamix(
        b1, b2, b3_at, lambda count: alpha * risen(count), epsilon
    )
    if scaled is not None:
        direction = scaled.of_adam(direction)
    return with_decoupled_decay(
        direction, steps, peak_lr, schedule, weight_decay, clip_norm, decays, cautious, scaled
    )
