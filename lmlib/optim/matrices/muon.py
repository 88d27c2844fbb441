"""Muon: orthogonalised momentum for matrices, AdamW for all other weights.

Shapes: N matrices, R rows, C columns, R ≤ C.
"""

import functools
from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from lmlib.optim.matrices.beside_adamw import Kinds, Rule, beside_adamw
from lmlib.optim.matrices.whole_matrices import (
    APART,
    Matrices,
    layout_of,
    norms,
    on_whole_matrices,
)
from lmlib.optim.optimizer import Decays, Optimizer, as_declared
from lmlib.optim.schedules import MakeSchedule, warmup_cosine

Polynomial = tuple[float, float, float]

# The same polynomial five times. It maps singular values of at least 0.01 to between 0.68 and 1.13
# (Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural networks"). Their code first
# divides a matrix by its norm; see `orthogonalized`.
CLASSIC: tuple[Polynomial, ...] = ((3.4445, -4.7750, 2.0315),) * 5

# Each is the best one after the preceding ones, for singular values from 0.001 to 1 (Amsel et al.
# 2025, "The Polar Express", arXiv:2505.16932, algorithm 1, with its cushion of 0.024). All except
# the last tolerate values that rounding has made 1 % too large.
POLAR_EXPRESS: tuple[Polynomial, ...] = (
    (8.205161, -22.901937, 16.460727),
    (4.066395, -2.861154, 0.518400),
    (3.909595, -2.823352, 0.525037),
    (3.285564, -2.415302, 0.485294),
    (2.300652, -1.668904, 0.418807),
)

_TINY_NORM = 1e-7  # added to the norm of a matrix


def orthogonalized(
    x_NRC: Float[Array, "n r c"], polynomials: Sequence[Polynomial]
) -> Float[Array, "n r c"]:
    """About U Vᵀ for each matrix U S Vᵀ; zeros stay zeros.

    Newton–Schulz: for a, b, c of each of the `polynomials` in turn, X becomes a X + b (X Xᵀ) X + c
    (X Xᵀ)² X, so each of its singular values s becomes a s + b s³ + c s⁵. X and the operands of
    products have the dtype of `x_NRC`. Each polynomial takes N · (4 R² C + 2 R³) FLOPs.

    X starts as the matrix divided by 1.01 times its Frobenius norm, which leaves room for rounding,
    as in the code of the Polar Express. The code of Jordan et al. divides by the norm itself.
    """
    dtype = x_NRC.dtype
    wide_NRC = x_NRC.astype(jnp.float32)
    # Singular values are at most the Frobenius norm; after rounding they may be slightly larger.
    start_NRC = (wide_NRC / (norms(wide_NRC) * 1.01 + _TINY_NORM)).astype(dtype)

    def iterate(x_NRC: Array, abc: Array) -> tuple[Array, None]:
        a, b, c = abc  # float32, and so are their products
        gram_NRR = jnp.einsum("nrc,nsc->nrs", x_NRC, x_NRC)
        square_NRR = jnp.einsum("nrs,nst->nrt", gram_NRR, gram_NRR)
        factor_NRR = (b * gram_NRR + c * square_NRR).astype(dtype)
        y_NRC = jnp.einsum("nrs,nsc->nrc", factor_NRR, x_NRC)
        return (a * x_NRC + y_NRC).astype(dtype), None

    done_NRC, _ = jax.lax.scan(iterate, start_NRC, jnp.asarray(polynomials, jnp.float32))
    return done_NRC


# The approximate root mean square of AdamW's updates (Liu et al. 2025, arXiv:2502.16982, §2.2).
ADAMW_RMS = 0.2
_TINY = 1e-8  # added to roots


def muon(
    steps: int,
    peak_lr: float,
    schedule: MakeSchedule = warmup_cosine,
    momentum: float = 0.95,
    nesterov: bool = True,
    polynomials: Sequence[Polynomial] = POLAR_EXPRESS,
    dtype: str = "bfloat16",
    apart: Collection[str] = APART,
    neuron_decay: float | None = None,
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
    """Muon (Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural networks").

    Updates have the size of AdamW's, so that its learning rates and weight decay carry over (Liu et
    al. 2025, arXiv:2502.16982): 0.2 √max(R, C) times the orthogonalised momentum.

    Matrices are the weights that multiply activations, except for the vocabulary's, separately for
    each stacked layer; they include the pairs of adapters. Several axes, such as heads and
    head_dim, may form one side. Tables, heads, norms, biases and routers use AdamW.

    On a mesh each device orthogonalises its share of the matrices; see
    `lmlib.optim.matrices.whole_matrices`. For given gradients the result has the same bits on every
    mesh.

    Args:
      steps, peak_lr, schedule, weight_decay, clip_norm, decays, cautious, scaled: as in
        `lmlib.optim.adamw.adamw`.
      momentum: decay of the mean of gradients.
      nesterov: True descends along a mean of momentum and gradient, with the same coefficients.
      polynomials: polynomials for orthogonalisation; see `lmlib.optim.matrices.muon`.
      dtype: dtype in which matrices are sent and multiplied: "bfloat16" or "float32".
      apart: names of axes along which each index is a separate matrix, in addition to layers. With
        "heads" and "kv_heads" the matrices of attention are orthogonalised head by head.
      neuron_decay: decay of the mean square of each column's updates, by whose root they are
        divided (NorMuon: Li et al. 2025, arXiv:2510.05491, algorithm 1, with 0.95). A column makes
        one output. `None` skips this.
      adamw_learning_rate: factor of the learning rate for the weights that AdamW updates.
      b1, b2, epsilon: settings of AdamW.
    """
    if dtype not in ("bfloat16", "float32"):
        raise ValueError(f"dtype must be 'bfloat16' or 'float32', got {dtype!r}")
    decay = {} if neuron_decay is None else {"neuron_decay": neuron_decay}

    def init(paths: list[str], forms: list[Matrices], matrices: list[Array]) -> Kinds:
        state = {"momentum": [*map(jnp.zeros_like, matrices)]}
        if neuron_decay is not None:
            state["neurons"] = [*map(_neurons, forms, matrices)]
        return state

    def update(
        forms: list[Matrices], gradients: list[Array], state: Kinds, updates: Array
    ) -> tuple[list[Array], Kinds]:
        average = _averaged(momentum, state["momentum"], gradients)
        ahead = _averaged(momentum, average, gradients) if nesterov else average
        kinds = [(forms, [each.astype(dtype) for each in ahead])]
        if neuron_decay is not None:
            kinds.append((forms, state["neurons"]))
        descended = functools.partial(_descended, polynomials, neuron_decay)
        made, *neurons = on_whole_matrices(descended, *kinds)
        new = {"momentum": average}
        if neurons:
            new["neurons"] = neurons[0]
        return [each.astype(jnp.float32) for each in made], new

    return beside_adamw(
        Rule(init, update, orthogonal=True), steps, peak_lr, schedule, apart, adamw_learning_rate,
        b1, b2, epsilon, weight_decay, clip_norm, decays, cautious, scaled,
        momentum=momentum, **decay,
    )  # fmt: skip


def _averaged(decay: float, average: list[Array], gradients: list[Array]) -> list[Array]:
    return [decay * m + (1 - decay) * g for m, g in zip(average, gradients, strict=True)]


def _neurons(form: Matrices, matrices: Array) -> Array:
    """Zeros for each column: the axes that products sum over have size 1."""
    shape = [1 if i in form.summed else size for i, size in enumerate(matrices.shape)]
    if jax.sharding.get_abstract_mesh().empty:
        return jnp.zeros(shape, jnp.float32)
    places = [None if i in form.summed else each for i, each in enumerate(layout_of(matrices))]
    return jnp.zeros(shape, jnp.float32, out_sharding=PartitionSpec(*places))


def _descended(
    polynomials: Sequence[Polynomial], neuron_decay: float | None, x_NRC: Array, *neurons: Array
) -> tuple[Array, ...]:
    """The orthogonalised matrices, scaled to the size of AdamW's updates, and updated `neurons`.

    These are nothing, or the mean square of each column's updates, [N, 1, C], or [N, R, 1] for
    transposed matrices: columns are divided by its root, and matrices keep their norm.
    """
    y_NRC = orthogonalized(x_NRC, polynomials).astype(jnp.float32)
    size = ADAMW_RMS * max(y_NRC.shape[1:]) ** 0.5
    if neuron_decay is None:
        return ((size * y_NRC).astype(x_NRC.dtype),)
    (squares,) = neurons
    summed = 2 if squares.shape[2] < y_NRC.shape[2] else 1
    mean = jnp.mean(y_NRC**2, axis=summed, keepdims=True)
    squares = neuron_decay * squares + (1 - neuron_decay) * mean
    even_NRC = y_NRC / (jnp.sqrt(squares) + _TINY)
    even_NRC *= norms(y_NRC) / (norms(even_NRC) + _TINY)
    return (size * even_NRC).astype(x_NRC.dtype), squares
