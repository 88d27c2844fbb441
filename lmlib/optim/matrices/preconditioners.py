"""Rules with products of gradients, G Gᵀ and Gᵀ G, and the eigenbases of these products.

Each matrix has one of both for its rows and one for its columns, unless the side is too long.
Shapes: N matrices, R rows, C columns, D either of both.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from lmlib.optim.matrices.beside_adamw import Kinds, Rule
from lmlib.optim.matrices.whole_matrices import Matrices, on_whole_matrices

# Precision of float32 products on accelerators: TF32 on GPUs, three passes of bfloat16 on TPUs.
PRECISION = "high"

Square = Array  # [N, D, D], or [N, 1, 1] if there is none for a side
Pair = tuple[Square, Square]  # of rows, of columns
# Names in a state of the second moments, the averages of both products, and two further squares.
Names = tuple[str, str, str, str, str]


def check_sides(largest_side: int, every: int) -> None:
    """Raises ValueError for a number that is not positive."""
    for name, number in {"largest_side": largest_side, "every": every}.items():
        if number < 1:
            raise ValueError(f"{name} must be at least 1, got {number}")


def squares(
    forms: Sequence[Matrices], matrices: Sequence[Array], side: int, largest: int
) -> list[Array]:
    """Zeros [..., D, D] for side 0 (rows) or 1 (columns) of each weight's matrices, as stored.

    Sides longer than `largest` have a single zero.
    """
    made = []
    for form, x in zip(forms, matrices, strict=True):
        axes = (form.rows, form.columns)[side]
        length = math.prod(x.shape[i] for i in axes)
        made.append(form.zeros_beside(axes, x, length if length <= largest else 0))
    return made


def preconditioned(
    names: Names, largest_side: int, mean: Callable[[Array, Array, Array], Array],
    descended: Callable[..., tuple[Array, ...]], orthogonal: bool,
) -> Rule:  # fmt: skip
    """A rule whose state is a mean of gradients, "first", and the arrays of `names`.

    `mean` gets the number of earlier updates, the old mean of a weight and its gradient, and
    returns the new mean. `descended` works on whole matrices: it gets the number of earlier
    updates, the new mean, the arrays of `names` and the gradient, and returns the direction and the
    new arrays of `names`. Sides longer than `largest_side` have no squares.
    """

    def init(paths: list[str], forms: list[Matrices], matrices: list[Array]) -> Kinds:
        of_sides = [squares(forms, matrices, side, largest_side) for side in (0, 1, 0, 1)]
        kinds = [[*map(jnp.zeros_like, matrices)], *of_sides]
        first = [*map(jnp.zeros_like, matrices)]
        return {"first": first} | dict(zip(names, kinds, strict=True))

    def update(
        forms: list[Matrices], gradients: list[Array], state: Kinds, updates: Array
    ) -> tuple[list[Array], Kinds]:
        pairs = zip(state["first"], gradients, strict=True)
        first = [mean(updates, old, gradient) for old, gradient in pairs]
        rows = [form.beside(form.rows) for form in forms]
        columns = [form.beside(form.columns) for form in forms]
        of_kinds = forms, rows, columns, rows, columns
        kinds = [*zip(of_kinds, (state[name] for name in names), strict=True)]
        made, *new = on_whole_matrices(
            descended, (forms, first), *kinds, (forms, gradients), returned=6, numbers=(updates,)
        )
        return made, {"first": first} | dict(zip(names, new, strict=True))

    return Rule(init, update, orthogonal)


def has(x_NRC: Array, square: Square, side: int) -> bool:
    """True if there is a square for this side of the matrices."""
    return square.shape[1] == x_NRC.shape[1 + side] > 1


def _of_sides(function: Callable[[int, Square], Square], x_NRC: Array, squares: Pair) -> Pair:
    """`function(side, square)` for each side that has a square; the other sides stay."""
    rows, columns = (
        function(side, square) if has(x_NRC, square, side) else square
        for side, square in enumerate(squares)
    )
    return rows, columns


def averaged(squares: Pair, x_NRC: Array, decay: float) -> Pair:
    """Moves the averages towards X Xᵀ and Xᵀ X by 1 - decay."""
    subscripts = "nrc,nsc->nrs", "nrc,nrd->ncd"

    def moved(side: int, old: Square) -> Square:
        product = jnp.einsum(subscripts[side], x_NRC, x_NRC, precision=PRECISION)
        return decay * old + (1 - decay) * product

    return _of_sides(moved, x_NRC, squares)


def rotated(x_NRC: Array, bases: Pair, back: bool = False) -> Array:
    """Q_Rᵀ X Q_C, or, `back`, Q_R X Q_Cᵀ; a side without a basis stays."""
    if has(x_NRC, bases[0], 0):
        rows = "nrs,nsc->nrc" if back else "nsr,nsc->nrc"
        x_NRC = jnp.einsum(rows, bases[0], x_NRC, precision=PRECISION)
    if has(x_NRC, bases[1], 1):
        columns = "nrc,ndc->nrd" if back else "nrc,ncd->nrd"
        x_NRC = jnp.einsum(columns, x_NRC, bases[1], precision=PRECISION)
    return x_NRC


def eigenbases(x_NRC: Array, squares: Pair) -> Pair:
    """Eigenvectors in columns, by falling eigenvalue, for the sides that have squares."""
    return _of_sides(lambda _, square: jnp.linalg.eigh(square)[1][..., ::-1], x_NRC, squares)


def refreshed(squares: Pair, bases: Pair, second_NRC: Array) -> tuple[Pair, Array]:
    """One step of power iteration for bases, and second moments in the new order of their columns.

    Source: SOAP, arXiv:2409.11321, algorithm 4; as in its code, columns are first ordered by their
    estimated eigenvalues.
    """
    new = []
    for side in (0, 1):
        basis = bases[side]
        if has(second_NRC, basis, side):
            power = jnp.einsum("nde,nef->ndf", squares[side], basis, precision=PRECISION)
            order = jnp.argsort(-jnp.sum(basis * power, axis=1), axis=1)
            across = order[:, :, None] if side == 0 else order[:, None, :]
            second_NRC = jnp.take_along_axis(second_NRC, across, axis=1 + side)
            basis = jnp.linalg.qr(jnp.take_along_axis(power, order[:, None, :], axis=2))[0]
        new.append(basis)
    return (new[0], new[1]), second_NRC


def inverse_roots(x_NRC: Array, squares: Pair, ridge: float) -> Pair:
    """Inverse roots S^(-1/4) of the squares, S^(-1/2) if there are squares for one side only.

    `ridge` times the largest eigenvalue is added to all of them.
    """
    sides = sum(has(x_NRC, squares[side], side) for side in (0, 1))

    def root(_: int, square: Square) -> Square:
        values_ND, basis_NDE = jnp.linalg.eigh(square)
        largest_N1 = values_ND[:, -1:]
        # Rounding makes zeros slightly negative. Without any gradient all are zero.
        lifted_ND = jnp.maximum(values_ND, 0) + ridge * largest_N1
        powers_ND = jnp.where(largest_N1 > 0, lifted_ND, 1) ** (-0.25 / sides)
        # Equal factors: the same bits in any layout.
        half_NDE = basis_NDE * powers_ND[:, None, :]
        return jnp.einsum("nde,nfe->ndf", half_NDE, half_NDE, precision=PRECISION)

    return _of_sides(root, x_NRC, squares)


def at_times(updates: Array, every: int, new: Callable[..., Any], *old: Array) -> Any:
    """`new(*old)` if the number of earlier `updates` is a multiple of `every`, else `old`.

    `new` runs only then.
    """
    return jax.lax.cond(updates % every == 0, new, lambda *old: old, *old)
