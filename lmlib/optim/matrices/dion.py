"""Dion: orthonormal updates of low rank, by a step of power iteration with error feedback.

Shapes: N matrices, R rows, C columns, R ≤ C, K rank.
"""

import functools
import math
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from lmlib.models.weights import approx_normal, fold_in_name
from lmlib.optim.matrices.beside_adamw import Kinds, Rule, beside_adamw
from lmlib.optim.matrices.muon import ADAMW_RMS
from lmlib.optim.matrices.preconditioners import PRECISION
from lmlib.optim.matrices.whole_matrices import APART, Matrices, on_whole_matrices
from lmlib.optim.optimizer import Decays, Optimizer, as_declared
from lmlib.optim.schedules import MakeSchedule, warmup_cosine

_einsum = functools.partial(jnp.einsum, precision=PRECISION)


def dion(
    steps: int,
    peak_lr: float,
    schedule: MakeSchedule = warmup_cosine,
    momentum: float = 0.95,
    rank: float = 0.25,
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
    """Dion (Ahn et al. 2025, arXiv:2504.05295, algorithm 1).

    B is the momentum plus the gradient. P is an orthonormal basis of B Q, by a QR decomposition,
    and the new Q are the columns of Bᵀ P divided by their norms. The direction is P Qᵀ, and the
    momentum keeps B without (1 - momentum) P Pᵀ B: what the rank left out comes back later. Updates
    have Muon's size, 0.2 √max(R, C) P Qᵀ, for each rank. The first Q is random and depends on the
    weight's path alone. Matrices, and the weights that AdamW updates, are the same as Muon's
    (`lmlib.optim.matrices.muon`). Each device computes its share of whole matrices: for given
    gradients the result has the same bits on every mesh.

    Args:
      steps, peak_lr, schedule, weight_decay, clip_norm, decays, cautious, scaled: as in
        `lmlib.optim.adamw.adamw`.
      momentum: the part of P Pᵀ B that stays in the momentum.
      rank: fraction of a matrix's shorter side, rounded up.
      apart, adamw_learning_rate: as in `lmlib.optim.matrices.muon.muon`.
      b1, b2: settings of AdamW.
      epsilon: is added to norms of columns, also AdamW's.

    Raises:
      ValueError: if a number is out of range.
    """
    if not 0 < rank <= 1:
        raise ValueError(f"rank must be above 0 and at most 1, got {rank}")

    def init(paths: list[str], forms: list[Matrices], matrices: list[Array]) -> Kinds:
        def right(path: str, form: Matrices, x: Array) -> Array:
            shorter = math.prod(x.shape[i] for i in form.rows)
            length = math.ceil(rank * shorter)
            shape = form.shape_beside(form.columns, x, length)

            def make() -> Array:
                return approx_normal(fold_in_name(jax.random.key(0), path), shape, 1.0)

            if jax.sharding.get_abstract_mesh().empty:
                return make()
            layout = form.layout_beside(form.columns, x, length)
            return jax.sharding.auto_axes(make, out_sharding=layout)()

        rights = [*map(right, paths, forms, matrices)]
        return {"momentum": [*map(jnp.zeros_like, matrices)], "right": rights}

    def update(
        forms: list[Matrices], gradients: list[Array], state: Kinds, updates: Array
    ) -> tuple[list[Array], Kinds]:
        columns = [form.beside(form.columns) for form in forms]
        kept, rights, made = on_whole_matrices(
            functools.partial(_descended, momentum, epsilon),
            (forms, state["momentum"]),
            (columns, state["right"]),
            (forms, gradients),
        )
        return made, {"momentum": kept, "right": rights}

    return beside_adamw(
        Rule(init, update, orthogonal=True), steps, peak_lr, schedule, apart, adamw_learning_rate,
        b1, b2, epsilon, weight_decay, clip_norm, decays, cautious, scaled, momentum=momentum,
    )  # fmt: skip


def _descended(
    momentum: float, epsilon: float, momentum_NRC: Array, right_NCK: Array, gradient_NRC: Array
) -> tuple[Array, Array, Array]:
    """The new momentum and Q, and the direction."""
    sum_NRC = momentum_NRC + gradient_NRC
    left_NRK = jnp.linalg.qr(_einsum("nrc,nck->nrk", sum_NRC, right_NCK))[0]
    product_NCK = _einsum("nrc,nrk->nck", sum_NRC, left_NRK)
    kept_NRC = sum_NRC - (1 - momentum) * _einsum("nrk,nck->nrc", left_NRK, product_NCK)
    norms_N1K = jnp.sqrt(jnp.sum(product_NCK**2, axis=1, keepdims=True))
    # Matrices without any gradient, such as one beside zeros, keep their Q.
    right_NCK = jnp.where(norms_N1K > 0, product_NCK / (norms_N1K + epsilon), right_NCK)
    size = jnp.where(norms_N1K > 0, ADAMW_RMS * max(sum_NRC.shape[1:]) ** 0.5, 0)
    return kept_NRC, right_NCK, _einsum("nrk,nck->nrc", size * left_NRK, right_NCK)
