"""SOAP-Muon: SOAP's direction, orthogonalized.

Shapes: N matrices, R rows, C columns, R ≤ C.
"""

import functools
from collections.abc import Collection, Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from lmlib.optim.matrices.beside_adamw import beside_adamw
from lmlib.optim.matrices.muon import ADAMW_RMS, POLAR_EXPRESS, Polynomial, orthogonalized
from lmlib.optim.matrices.preconditioners import averaged, check_sides, preconditioned, rotated
from lmlib.optim.matrices.soap import NAMES, moved
from lmlib.optim.matrices.whole_matrices import APART
from lmlib.optim.optimizer import Decays, Optimizer, as_declared
from lmlib.optim.schedules import MakeSchedule, warmup_cosine


def soap_muon(
    steps: int,
    peak_lr: float,
    schedule: MakeSchedule = warmup_cosine,
    momentum: float = 0.95,
    preconditioner_decay: float = 0.9,
    every: int = 1,
    polynomials: Sequence[Polynomial] = POLAR_EXPRESS,
    dtype: str = "bfloat16",
    largest_side: int = 10_000,
    apart: Collection[str] = APART,
    adamw_learning_rate: float = 1.0,
    b1: float = 0.9,
    b2: float = 0.95,
    epsilon: float = 1e-8,
    weight_decay: float = 0.1,
    clip_norm: float | None = 1.0,
    decays: Decays = as_declared,
    cautious: bool = False,
    scaled: Any = None,
) -> Optimizer:
    """SOAP-Muon (Vyas, "SOAP-Muon"), as in the records of modded-nanogpt's optimizer track.

    Muon's momentum, with Nesterov's step, is rotated into SOAP's eigenbases, divided there by the
    root of its mean square, rotated back, and orthogonalized. Updates have Muon's size. The bases
    are SOAP's (`lmlib.optim.matrices.soap`), of averages of the gradients' products; the first
    update is Muon's. Matrices, and the weights that AdamW updates, are the same as Muon's, and so
    is the distribution over a mesh. For given gradients the result has the same bits on every mesh.

    Parts of the records that depend on the weights are left out, such as a floor of the updates'
    size relative to the weights' size.

    Args:
      steps, peak_lr, schedule, weight_decay, clip_norm, decays, cautious, scaled: as in
        `lmlib.optim.adamw.adamw`.
      momentum: decay of the mean of gradients.
      preconditioner_decay: decay of the averages of G Gᵀ and Gᵀ G, and of the mean square.
      every: updates from one basis to the next.
      polynomials, apart, adamw_learning_rate: as in `lmlib.optim.matrices.muon.muon`.
      dtype: dtype in which matrices are orthogonalized: "bfloat16" or "float32".
      largest_side: longer sides have no basis; only the other side is rotated.
      b1, b2: settings of AdamW.
      epsilon: is added to roots, also AdamW's.

    Raises:
      ValueError: if a number is out of range.
    """
    check_sides(largest_side, every)
    if dtype not in ("bfloat16", "float32"):
        raise ValueError(f"dtype must be 'bfloat16' or 'float32', got {dtype!r}")

    def mean(updates: Array, first: Array, gradient: Array) -> Array:
        return momentum * first + (1 - momentum) * gradient

    descended = functools.partial(
        _descended, momentum, preconditioner_decay, every, epsilon, polynomials, dtype
    )
    rule = preconditioned(NAMES, largest_side, mean, descended, orthogonal=True)
    return beside_adamw(
        rule, steps, peak_lr, schedule, apart, adamw_learning_rate,
        b1, b2, epsilon, weight_decay, clip_norm, decays, cautious, scaled,
        momentum=momentum, preconditioner_decay=preconditioner_decay,
    )  # fmt: skip


def _descended(
    momentum: float, preconditioner_decay: float, every: int, epsilon: float,
    polynomials: Sequence[Polynomial], dtype: str, updates: Array, first_NRC: Array,
    second_NRC: Array, of_rows: Array, of_columns: Array, basis_of_rows: Array,
    basis_of_columns: Array, gradient_NRC: Array,
) -> tuple[Array, ...]:  # fmt: skip
    """The direction for the momentum `first_NRC`, and the new arrays of `NAMES`."""
    bases = basis_of_rows, basis_of_columns
    ahead_NRC = momentum * first_NRC + (1 - momentum) * gradient_NRC  # Nesterov's step
    turned_NRC = rotated(ahead_NRC, bases)
    second_NRC = preconditioner_decay * second_NRC + (1 - preconditioner_decay) * turned_NRC**2
    even_NRC = rotated(turned_NRC / (jnp.sqrt(second_NRC) + epsilon), bases, back=True)
    given_NRC = jnp.where(updates == 0, ahead_NRC, even_NRC)  # the first has no bases
    made_NRC = orthogonalized(given_NRC.astype(dtype), polynomials).astype(jnp.float32)
    made_NRC *= ADAMW_RMS * max(made_NRC.shape[1:]) ** 0.5
    both = averaged((of_rows, of_columns), gradient_NRC, preconditioner_decay)
    bases, second_NRC = moved(updates, every, both, bases, second_NRC)
    return made_NRC, second_NRC, *both, *bases
