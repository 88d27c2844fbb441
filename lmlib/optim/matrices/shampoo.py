"""Shampoo: momentum between inverse roots of averages of G Gᵀ and Gᵀ G, in the size of Adam's.

Shapes: N matrices, R rows, C columns, R ≤ C.
"""

import functools
import math
from collections.abc import Collection
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from lmlib.optim.matrices.beside_adamw import beside_adamw
from lmlib.optim.matrices.preconditioners import (
    at_times,
    averaged,
    check_sides,
    has,
    inverse_roots,
    preconditioned,
    rotated,
)
from lmlib.optim.matrices.whole_matrices import APART, norms
from lmlib.optim.optimizer import Decays, Optimizer, as_declared
from lmlib.optim.schedules import MakeSchedule, warmup_cosine

NAMES = "second", "of_rows", "of_columns", "root_of_rows", "root_of_columns"
_TINY_NORM = 1e-16  # added to the norm of a matrix


def shampoo(
    steps: int,
    peak_lr: float,
    schedule: MakeSchedule = warmup_cosine,
    b1: float = 0.9,
    b2: float = 0.95,
    every: int = 10,
    ridge: float = 1e-6,
    largest_side: int = 10_000,
    apart: Collection[str] = APART,
    adamw_learning_rate: float = 1.0,
    epsilon: float = 1e-8,
    weight_decay: float = 0.1,
    clip_norm: float | None = 1.0,
    decays: Decays = as_declared,
    cautious: bool = False,
    scaled: Any = None,
) -> Optimizer:
    """Shampoo (Gupta et al. 2018, arXiv:1802.09568), as distributed (Shi et al. 2023,
    arXiv:2309.06497, algorithm 2, with Adam's size, §3.2).

    The direction of a matrix is L^(-1/4) M R^(-1/4), scaled to the Frobenius norm of Adam's
    direction. M is the mean of gradients, L and R are the means of G Gᵀ and Gᵀ G. The size makes up
    for their bias. The roots are computed every `every` updates by eigendecomposition; the updates
    before the first roots are Adam's. Matrices, and the weights that AdamW updates, are the same as
    Muon's (`lmlib.optim.matrices.muon`), and so is the distribution over a mesh: for given
    gradients the result has the same bits on every mesh.

    Args:
      steps, peak_lr, schedule, epsilon, weight_decay, clip_norm, decays, cautious, scaled: as in
        `lmlib.optim.adamw.adamw`; `scaled` gives matrices Adam's factors.
      b1: decay of the mean of gradients.
      b2: decay of the means of G Gᵀ, Gᵀ G, and squares of elements.
      every: updates from one computation of the roots to the next.
      ridge: this fraction of the largest eigenvalue is added to all eigenvalues.
      largest_side: longer sides have no root; the other side then has the exponent -1/2.
      apart, adamw_learning_rate: as in `lmlib.optim.matrices.muon.muon`.

    Raises:
      ValueError: if a number is out of range.
    """
    check_sides(largest_side, every)
    if not 0 < ridge < math.inf:
        raise ValueError(f"ridge must be a positive number, got {ridge}")

    def mean(updates: Array, first: Array, gradient: Array) -> Array:
        return b1 * first + (1 - b1) * gradient

    descended = functools.partial(_descended, b1, b2, every, ridge, epsilon)
    rule = preconditioned(NAMES, largest_side, mean, descended, orthogonal=False)
    return beside_adamw(
        rule, steps, peak_lr, schedule, apart, adamw_learning_rate,
        b1, b2, epsilon, weight_decay, clip_norm, decays, cautious, scaled,
    )  # fmt: skip


def _descended(
    b1: float, b2: float, every: int, ridge: float, epsilon: float, updates: Array,
    first_NRC: Array, second_NRC: Array, of_rows: Array, of_columns: Array, root_of_rows: Array,
    root_of_columns: Array, gradient_NRC: Array,
) -> tuple[Array, ...]:  # fmt: skip
    """The direction for the mean `first_NRC` of gradients, and the new arrays of `NAMES`."""
    made = updates + 1
    second_NRC = b2 * second_NRC + (1 - b2) * gradient_NRC**2
    both = averaged((of_rows, of_columns), gradient_NRC, b2)

    def new(*old: Array) -> tuple[Array, ...]:
        return inverse_roots(gradient_NRC, both, ridge)

    roots = at_times(made, every, new, root_of_rows, root_of_columns)
    mean_NRC = first_NRC / (1 - b1**made)
    adams_NRC = mean_NRC / (jnp.sqrt(second_NRC / (1 - b2**made)) + epsilon)
    has_roots = any(has(mean_NRC, roots[side], side) for side in (0, 1))
    turned_NRC = rotated(mean_NRC, roots) if has_roots else adams_NRC
    size_N11 = norms(adams_NRC) / (norms(turned_NRC) + _TINY_NORM)
    direction_NRC = jnp.where(made < every, adams_NRC, size_N11 * turned_NRC)
    return direction_NRC, second_NRC, *both, *roots
