"""AdamW, built on optax's Adam."""

from typing import Any

from lmlib.optim.optimizer import Decays, Optimizer, as_declared, scaled_adam, with_decoupled_decay
from lmlib.optim.schedules import MakeSchedule, warmup_cosine


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
    cautious: bool = False,
    first_moment_dtype: str = "float32",
    scaled: Any = None,
) -> Optimizer:
    """AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101) after clipping by global norm.

    Args:
      steps: length of the schedule; set by the run.
      peak_lr: the schedule's highest learning rate. Weight decay is multiplied by the learning
        rate, as in the paper's equation 12.
      schedule: made from (peak_lr, steps). If it is a tree of numbers, such as a `Schedule`, they
        are hyperparameters; numbers of a function are constants of the program.
      clip_norm: largest global gradient norm; `None` does not clip.
      decays: returns True for weights that decay.
      cautious: decays an element only where its update shrinks it (Chen et al. 2025,
        arXiv:2510.12402).
      first_moment_dtype: "bfloat16" saves 2 bytes for each parameter; sums are still in float32.
      scaled: a `lmlib.optim.transfer.Scaled`, if the other settings are meant for a smaller model;
        set by the experiment.

    Raises ValueError for a number that is out of range, or an unknown dtype.
    """
    if first_moment_dtype not in ("float32", "bfloat16"):
        raise ValueError(
            f"first_moment_dtype must be 'float32' or 'bfloat16', got {first_moment_dtype!r}"
        )
    adam = scaled_adam(b1, b2, epsilon, scaled, first_moment_dtype)
    return with_decoupled_decay(
        adam, steps, peak_lr, schedule, weight_decay, clip_norm, decays, cautious, scaled
    )
