"""SOAP: Adam in the eigenbases of Shampoo's preconditioners.

Shapes: N matrices, R rows, C columns, R ≤ C.
"""

import functools
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from lmlib.optim.matrices.beside_adamw import beside_adamw
from lmlib.optim.matrices.preconditioners import (
    at_times,
    averaged,
    check_sides,
    eigenbases,
    preconditioned,
    refreshed,
    rotated,
)
from lmlib.optim.matrices.whole_matrices import APART
from lmlib.optim.optimizer import Decays, Optimizer, as_declared
from lmlib.optim.schedules import MakeSchedule, warmup_cosine

NAMES = "second", "of_rows", "of_columns", "basis_of_rows", "basis_of_columns"


def soap(
    steps: int,
    peak_lr: float,
    schedule: MakeSchedule = warmup_cosine,
    b1: float = 0.95,
    b2: float = 0.95,
    preconditioner_decay: float = 0.95,
    every: int = 10,
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
    """SOAP (Vyas et al. 2024, arXiv:2409.11321, algorithm 3), as in its authors' code.

    Gradients are rotated into the eigenbases of averages of G Gᵀ and Gᵀ G; Adam's second moments
    are averages there. The bases are eigenvectors at first, and move by one step of power iteration
    and a QR decomposition every `every` updates. The first gradient only makes the bases: matrices
    have no update then, except for weight decay. Epsilon is added to the root of the second moments
    before their bias is corrected. Matrices, and the weights that AdamW updates, are the same as
    Muon's (`lmlib.optim.matrices.muon`), and so is the distribution over a mesh: for given
    gradients the result has the same bits on every mesh.

    Args:
      steps, peak_lr, schedule, epsilon, weight_decay, clip_norm, decays, cautious, scaled: as in
        `lmlib.optim.adamw.adamw`; `scaled` gives matrices Adam's factors.
      b1, b2: decays of the first and second moments, also AdamW's.
      preconditioner_decay: decay of the averages of G Gᵀ and Gᵀ G.
      every: updates from one basis to the next.
      largest_side: longer sides have no basis; only the other side is rotated.
      apart, adamw_learning_rate: as in `lmlib.optim.matrices.muon.muon`.

    Raises ValueError for a number that is out of range.
    """
    check_sides(largest_side, every)

    def mean(updates: Array, first: Array, gradient: Array) -> Array:
        return jnp.where(updates == 0, first, b1 * first + (1 - b1) * gradient)

    descended = functools.partial(_descended, b1, b2, preconditioner_decay, every, epsilon)
    rule = preconditioned(NAMES, largest_side, mean, descended, orthogonal=False)
    return beside_adamw(
        rule, steps, peak_lr, schedule, apart, adamw_learning_rate,
        b1, b2, epsilon, weight_decay, clip_norm, decays, cautious, scaled,
        preconditioner_decay=preconditioner_decay,
    )  # fmt: skip


def _descended(
    b1: float, b2: float, preconditioner_decay: float, every: int, epsilon: float, updates: Array,
    first_NRC: Array, second_NRC: Array, of_rows: Array, of_columns: Array, basis_of_rows: Array,
    basis_of_columns: Array, gradient_NRC: Array,
) -> tuple[Array, ...]:  # fmt: skip
    """The direction for the mean `first_NRC` of gradients, and the new arrays of `NAMES`."""
    bases = basis_of_rows, basis_of_columns
    turned_NRC = rotated(gradient_NRC, bases)
    second_NRC = b2 * second_NRC + (1 - b2) * turned_NRC**2  # zeros at first, and so are bases
    adams_NRC = rotated(first_NRC, bases) / (jnp.sqrt(second_NRC) + epsilon)
    counted = jnp.maximum(updates, 1)  # gradients in the moments
    correction = jnp.sqrt(1 - b2**counted) / (1 - b1**counted)
    made_NRC = correction * rotated(adams_NRC, bases, back=True)
    both = averaged((of_rows, of_columns), gradient_NRC, preconditioner_decay)
    bases, second_NRC = moved(updates, every, both, bases, second_NRC)
    return jnp.where(updates == 0, 0, made_NRC), second_NRC, *both, *bases


def moved(updates: Array, every: int, both: Any, bases: Any, second_NRC: Array) -> tuple[Any, Any]:
    """The bases of the averages `both` for the next update, and second moments in their order."""

    def new(rows: Array, columns: Array, second_NRC: Array) -> tuple[Array, ...]:
        def first() -> tuple[Any, Array]:
            return eigenbases(second_NRC, both), jnp.zeros_like(second_NRC)

        def later() -> tuple[Any, Array]:
            return refreshed(both, (rows, columns), second_NRC)

        made, second_NRC = jax.lax.cond(updates == 0, first, later)
        return *made, second_NRC

    *moved, second_NRC = at_times(updates, every, new, *bases, second_NRC)
    return tuple(moved), second_NRC
