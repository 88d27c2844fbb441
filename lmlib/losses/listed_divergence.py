"""How far a student is from a teacher of whom only the likeliest ids of each token are known.

Shapes: V vocab, N tokens of a chunk, K ids of each.
"""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from lmlib.losses.fused import TokenLosses
from lmlib.losses.logit_chunks import ChunkLogits
from lmlib.losses.next_token import CrossEntropy
from lmlib.parallel.collectives import axis_index, pmax, psum
from lmlib.parallel.layout import along


@dataclasses.dataclass(frozen=True)
class ListedDivergence:
    """(1 - weight) · cross-entropy + weight · KL over K + 1 outcomes: the K ids that are listed of
    a token, and one that stands for all the others.

    With p the listed probabilities and q the student's,

        KL = Σ p_i (log p_i - log q_i) + r (log r - log(1 - Σ q_i)),   r = 1 - Σ p_i

    summed over the listed ids. It is no more than the KL over all ids. Rounded probabilities that
    sum to more than 1 are divided by their sum. If all ids are listed, they are too, and nothing
    is left for the last outcome: it is the whole KL then.

    A `lmlib.losses.fused.TokenLoss`, which is given ids and log-probabilities, (n, k) each.

    Args:
      weight: of the divergence.
      vocab: ids that there are, on all devices.
    """

    weight: float
    vocab: int

    def __call__(
        self, logits: ChunkLogits, tokens: tuple[Array, ...], tables: tuple[Array, ...]
    ) -> TokenLosses:
        ids_NK, log_p_NK = tokens
        log_p_NK, r_N = self._outcomes(log_p_NK.astype(logits.logits_NV.dtype))
        log_p_NV = _spread(ids_NK, log_p_NK, logits.logits_NV.shape[1])
        is_listed_NV = log_p_NV > -jnp.inf
        p_NV = jnp.exp(log_p_NV)
        of_listed_NV = jnp.where(is_listed_NV, p_NV * (log_p_NV - logits.log_p_NV), 0)
        divergence_N = psum(jnp.sum(of_listed_NV, axis=-1), along("vocab"))
        slope_NV = logits.p_NV - p_NV  # d KL / d logit
        if self._others(ids_NK):
            others = _others(logits.logits_NV, is_listed_NV)
            some_N = jnp.where(r_N > 0, r_N, 1)
            of_others_N = r_N * (jnp.log(some_N) - (others.log_sum_N - logits.log_z_N))
            divergence_N += of_others_N
            slope_NV -= r_N[:, None] * others.shares_NV
        _, reported, dlogits_NV = CrossEntropy()(logits, (), ())
        minimised_N = (1 - self.weight) * reported["loss"] + self.weight * divergence_N
        return TokenLosses(
            minimised_N,
            {"loss": minimised_N, "cross_entropy": reported["loss"], "divergence": divergence_N},
            (1 - self.weight) * dlogits_NV + self.weight * slope_NV,
        )

    def _others(self, ids_NK: Array) -> bool:
        """Whether there are ids that are not listed."""
        return ids_NK.shape[1] < self.vocab

    def _outcomes(self, log_p_NK: Array) -> tuple[Float[Array, "n k"], Float[Array, "n"]]:
        """The log-probabilities of the listed ids, and the probability of all others."""
        listed_N = jnp.sum(jnp.exp(log_p_NK), axis=-1)
        whole_N = jnp.maximum(listed_N, 1) if self._others(log_p_NK) else listed_N
        return log_p_NK - jnp.log(whole_N)[:, None], 1 - listed_N / whole_N


class _Others(NamedTuple):
    """log Σ exp logits of the ids that are not listed, and the share of each in that sum."""

    log_sum_N: Float[Array, "n"]
    shares_NV: Float[Array, "n v"]


def _spread(
    ids_NK: Int32[Array, "n k"], values_NK: Float[Array, "n k"], vocab: int
) -> Float[Array, "n v"]:
    """The values at their ids in this device's share of the vocabulary, and -∞ at others."""
    places_NK = ids_NK - vocab * axis_index(along("vocab"))
    is_here_NK = (places_NK >= 0) & (places_NK < vocab)
    places_NK = jnp.where(is_here_NK, places_NK, vocab)  # which is outside, and dropped
    N = ids_NK.shape[0]
    nothing_NV = jnp.full((N, vocab), -jnp.inf, values_NK.dtype)
    return nothing_NV.at[jnp.arange(N)[:, None], places_NK].set(values_NK, mode="drop")


def _others(logits_NV: Float[Array, "n v"], is_listed_NV: Array) -> _Others:
    others_NV = jnp.where(is_listed_NV, -jnp.inf, logits_NV)
    # Their own largest, since next to the listed ones all of them may vanish.
    highest_N = pmax(jnp.max(others_NV, axis=-1), along("vocab"))
    exponentials_NV = jnp.exp(others_NV - highest_N[:, None])
    sum_N = psum(jnp.sum(exponentials_NV, axis=-1), along("vocab"))
    return _Others(highest_N + jnp.log(sum_N), exponentials_NV / sum_N[:, None])
