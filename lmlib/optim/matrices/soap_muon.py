"""SOAP-Muon: SOAP's direction, orthogonalized.

Shapes: N matrices, R rows, C columns, R ≤ C.
"""

import functools
from collections.abc import Collection, Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from lmlib.optim.matrices.beside_adamw import Kinds, Rule, beside_adamw
from lmlib.optim.matrices.muon import ADAMW_RMS, POLAR_EXPRESS, Polynomial, orthogonalized
from lmlib.optim.matrices.preconditioners import (
    averaged,
    check_sides,
    on_preconditioned,
    preconditioners,
    rotated,
)
from lmlib.optim.matrices.soap import NAMES, moved
from lmlib.optim.matrices.whole_matrices import APART, Matrices
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

    def init(paths: list[str], forms: list[Matrices], matrices: list[Array]) -> Kinds:
        first = [*map(jnp.zeros_like, matrices)]
        return {"first": first} | preconditioners(NAMES, forms, matrices, largest_side)

    def update(
        forms: list[Matrices], gradients: list[Array], state: Kinds, updates: Array
    ) -> tuple[list[Array], Kinds]:
        def mixed(mean: Array, gradient: Array) -> Array:
            return momentum * mean + (1 - momentum) * gradient

        first = [*map(mixed, state["first"], gradients)]
        ahead = [*map(mixed, first, gradients)]
        function = functools.partial(
            _descended, preconditioner_decay, every, epsilon, polynomials, dtype
        )
        made, state = on_preconditioned(function, NAMES, updates, forms, ahead, state, gradients)
        return made, {"first": first} | state

    return beside_adamw(
        Rule(init, update, orthogonal=True), steps, peak_lr, schedule, apart, adamw_learning_rate,
        b1, b2, epsilon, weight_decay, clip_norm, decays, cautious, scaled,
        momentum=momentum, preconditioner_decay=preconditioner_decay,
    )  # fmt: skip


def _descended(
    preconditioner_decay: float, every: int, epsilon: float, polynomials: Sequence[Polynomial],
    dtype: str, updates: Array, ahead_NRC: Array, second_NRC: Array, of_rows: Array,
    of_columns: Array, basis_of_rows: Array, basis_of_columns: Array, gradient_NRC: Array,
) -> tuple[Array, ...]:  # fmt: skip
    """The direction for the momentum `ahead_NRC`, and the new arrays of `NAMES`."""
    bases = basis_of_rows, basis_of_columns
    turned_NRC = rotated(ahead_NRC, bases)
    second_NRC = preconditioner_decay * second_NRC + (1 - preconditioner_decay) * turned_NRC**2
    even_NRC = rotated(turned_NRC / (jnp.sqrt(second_NRC) + epsilon), bases, back=True)
    given_NRC = jnp.where(updates == 0, ahead_NRC, even_NRC)  # the first has no bases
    made_NRC = orthogonalized(given_NRC.astype(dtype), polynomials).astype(jnp.float32)
    made_NRC *= ADAMW_RMS * max(made_NRC.shape[1:]) ** 0.5
    both = averaged((of_rows, of_columns), gradient_NRC, preconditioner_decay)
    bases, second_NRC = moved(updates, every, both, bases, second_NRC)
    return made_NRC, second_NRC, *both, *bases
