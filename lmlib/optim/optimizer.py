"""Optimizers out of optax; which weights decay is what they declare."""

import math
from collections.abc import Callable
from types import MappingProxyType
from typing import Any, NamedTuple

import equinox as eqx
import jax.numpy as jnp
import optax
from jaxtyping import Array

from lmlib.optim.hyperparameters import Hyperparameters
from lmlib.optim.schedules import MakeSchedule, warmup_cosine
from lmlib.parallel.axes import Weight, map_weights

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
      hyperparameters: by name, what each step gives to `transformation.update` (optax's extra
        arguments) and to `learning_rate`. The numbers in it, which may be leaves of trees, are
        arguments of the compiled step: other numbers need no other program.
    """

    transformation: optax.GradientTransformation
    learning_rate: Callable[..., Array]
    decays: Decays
    metrics: Callable[[optax.OptState], dict[str, Array]] = nothing_more
    hyperparameters: Hyperparameters = MappingProxyType({})


def as_declared(weight: Weight) -> bool:
    """Whether a weight decays, as its module declares: matrices and tables do; scales and biases,
    whatever their shape, do not."""
    return weight.declaration.decays


def decay_mask(model: eqx.Module, decays: Decays = as_declared) -> eqx.Module:
    """The model's tree with `decays(weight)` in place of each array."""
    return map_weights(lambda weight, array: decays(weight), model)


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
      schedule: made from (peak_lr, steps). Its numbers are hyperparameters if it is a tree of them,
        as a `Schedule` is, and stay in the program if it is a function.
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
    made = schedule(peak_lr, steps)
    clip = optax.identity() if clip_norm is None else optax.clip_by_global_norm(clip_norm)

    def chain(learning_rate: optax.Schedule, weight_decay: Any) -> optax.GradientTransformation:
        return optax.chain(
            clip,
            optax.scale_by_adam(b1, b2, epsilon, mu_dtype=first_moment_dtype),
            optax.add_decayed_weights(weight_decay, mask=lambda tree: decay_mask(tree, decays)),
            optax.scale_by_learning_rate(learning_rate),
        )

    def update(
        updates: Any,
        state: optax.OptState,
        model: Any = None,
        *,
        learning_rate: optax.Schedule = made,
        weight_decay: Any = weight_decay,
        **others: Any,
    ) -> tuple[Any, optax.OptState]:
        return chain(learning_rate, weight_decay).update(updates, state, model)

    def rate(step: Any, *, learning_rate: optax.Schedule = made, **others: Any) -> Array:
        return jnp.asarray(learning_rate(step))

    return Optimizer(
        optax.GradientTransformationExtraArgs(chain(made, weight_decay).init, update),
        rate,
        decays,
        hyperparameters={"learning_rate": made, "weight_decay": float(weight_decay)},
    )
