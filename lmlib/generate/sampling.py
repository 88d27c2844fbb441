"""Chooses tokens from their logits.

Shapes: B batch (rows), V vocab.
"""

import dataclasses
from collections.abc import Callable
from numbers import Integral, Real
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, UInt32

_LEAST, _MOST = 1e-6, 1e6  # range of the logits' factor; they stay finite in float32


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Settings that determine which tokens may follow, and their probabilities.

    They are applied in the order of this list, except that the temperature comes after the penalty.
    Tokens of equal probability are all kept or all removed.

    Args:
      temperature: divides the logits; 0 always chooses the most likely token.
      top_k: keep only this many tokens, the most likely ones; `None`: all.
      top_p: keep the smallest set of most likely tokens with at least this total probability, among
        the tokens that `top_k` keeps (nucleus sampling: Holtzman et al. 2020, arXiv:1904.09751,
        §3.1); 1: all.
      min_p: keep only tokens with at least this fraction of the most likely token's probability
        (Nguyen et al. 2024, arXiv:2407.01082, §3); 0: all.
      repetition_penalty: logits of tokens that occur in the text, including the prompt, are divided
        by it if positive, and multiplied by it otherwise (Keskar et al. 2019, arXiv:1909.05858,
        §4.1); 1: no penalty.

    Raises:
      ValueError: if a value is not a number, or out of range.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        def in_range(value: Any) -> bool:
            return bool(_LEAST <= value <= _MOST)

        wide = f"from {_LEAST:g} to {_MOST:g}"
        ranges: dict[str, tuple[Callable[[Any], bool], str]] = {
            "temperature": (lambda value: value == 0 or in_range(value), f"0, or {wide}"),
            "top_k": (lambda value: 1 <= value < 2**31, "an integer in [1, 2^31), or None"),
            "top_p": (lambda value: 0 < value <= 1, "above 0 and at most 1"),
            "min_p": (lambda value: 0 <= value <= 1, "in [0, 1]"),
            "repetition_penalty": (in_range, wide),
        }
        for name, (is_allowed, text) in ranges.items():
            value, kind = getattr(self, name), Real
            if name == "top_k":
                if value is None:
                    continue
                kind = Integral
            if isinstance(value, bool) or not isinstance(value, kind) or not is_allowed(value):
                raise ValueError(f"{name} must be {text}, got {value!r:.80}")


GREEDY = Sampling(temperature=0.0)


Rules = frozenset[str]  # names of the settings in use; programs are compiled for each set
Numbers = dict[str, Float[Array, ""]]  # values of all settings; arguments of the programs


def rules_of(sampling: Sampling) -> Rules:
    """Returns the names of the settings in use; without "temperature", sampling is greedy."""
    found = set() if sampling.repetition_penalty == 1 else {"repetition_penalty"}
    if sampling.temperature > 0:
        found.add("temperature")
        found |= set() if sampling.top_k is None else {"top_k"}
        found |= set() if sampling.top_p == 1 else {"top_p"}
        found |= set() if sampling.min_p == 0 else {"min_p"}
    return frozenset(found)


def numbers_of(sampling: Sampling) -> Numbers:
    """Returns the settings' values as arrays."""
    values = dataclasses.asdict(dataclasses.replace(sampling, top_k=sampling.top_k or 1))
    return {name: jnp.float32(value) for name, value in values.items()}


def choose(
    logits_BV: Float[Array, "b vocab"],
    noise_BV: Float[Array, "b vocab"] | None,
    seen_BV: Bool[Array, "b vocab"] | None,
    numbers: Numbers,
    rules: Rules,
) -> tuple[Int32[Array, "b"], Float[Array, "b"]]:
    """Chooses a token for each row; also returns its log-probability in nats, without the rules.

    The token with the largest sum of logit and standard Gumbel noise is a sample (Maddison et al.
    2014, arXiv:1411.0030); greedy sampling needs no noise. The repetition penalty needs `seen_BV`.
    """
    allowed_BV = allowed(logits_BV, seen_BV, numbers, rules)
    if noise_BV is not None:
        allowed_BV += noise_BV
    token_B = jnp.argmax(allowed_BV, axis=-1).astype(jnp.int32)
    is_token_BV = jnp.arange(logits_BV.shape[-1]) == token_B[:, None]
    logit_B = jnp.sum(jnp.where(is_token_BV, logits_BV, 0), axis=-1)
    return token_B, logit_B - jax.nn.logsumexp(logits_BV, axis=-1)


def allowed(
    logits_BV: Float[Array, "b vocab"],
    seen_BV: Bool[Array, "b vocab"] | None,
    numbers: Numbers,
    rules: Rules,
) -> Float[Array, "b vocab"]:
    """Returns the logits to sample from, with -inf for tokens that are not allowed."""
    z_BV = logits_BV
    if "repetition_penalty" in rules:
        assert seen_BV is not None
        z_BV = penalised(z_BV, seen_BV, numbers["repetition_penalty"])
    if "temperature" not in rules:
        return z_BV
    z_BV = z_BV / numbers["temperature"]
    if "top_k" in rules:
        z_BV = likeliest(z_BV, numbers["top_k"])
    if "top_p" in rules:
        z_BV = nucleus(z_BV, numbers["top_p"])
    if "min_p" in rules:
        z_BV = at_least(z_BV, numbers["min_p"])
    return z_BV


def penalised(
    z_V: Float[Array, "*b vocab"], seen_V: Bool[Array, "*b vocab"], penalty: Float[Array, ""]
) -> Float[Array, "*b vocab"]:
    """The repetition penalty of `Sampling`."""
    return jnp.where(seen_V, jnp.where(z_V > 0, z_V / penalty, z_V * penalty), z_V)


def likeliest(z_BV: Float[Array, "b vocab"], top_k: Float[Array, ""]) -> Float[Array, "b vocab"]:
    """Keeps the `top_k` likeliest tokens."""
    return _likeliest(z_BV, jnp.ones_like(z_BV), top_k)


def nucleus(z_BV: Float[Array, "b vocab"], top_p: Float[Array, ""]) -> Float[Array, "b vocab"]:
    """Keeps the likeliest tokens with at least the probability `top_p`."""
    return _likeliest(z_BV, jax.nn.softmax(z_BV, axis=-1), top_p)


def at_least(z_BV: Float[Array, "b vocab"], min_p: Float[Array, ""]) -> Float[Array, "b vocab"]:
    """Keeps tokens with at least `min_p` of the likeliest one's probability."""
    highest_B1 = jnp.max(z_BV, axis=-1, keepdims=True)
    return jnp.where(z_BV >= highest_B1 + jnp.log(min_p), z_BV, -jnp.inf)


def _likeliest(
    z_BV: Float[Array, "b vocab"], mass_BV: Float[Array, "b vocab"], limit: Float[Array, ""]
) -> Float[Array, "b vocab"]:
    """Keeps `z` if more likely tokens have less than `limit` of the total mass, else -inf.

    Bisects over bit patterns, in 32 sums over the vocabulary, which is much faster than sorting.
    """
    rank_BV = _rank(z_BV)

    def halve(bit: Array, below_B1: Array) -> Array:
        # The mass above `below` reaches the limit; next, below + 2^(31 - bit) is tried.
        tried_B1 = below_B1 + (jnp.uint32(1) << (31 - bit).astype(jnp.uint32))
        above_B1 = jnp.sum(jnp.where(rank_BV > tried_B1, mass_BV, 0), axis=-1, keepdims=True)
        return jnp.where(above_B1 >= limit, tried_B1, below_B1)

    below_B1 = jax.lax.fori_loop(0, 32, halve, jnp.zeros_like(rank_BV[:, :1]))
    return jnp.where(rank_BV > below_B1, z_BV, -jnp.inf)


def _rank(z: Float[Array, "..."]) -> UInt32[Array, "..."]:
    """Maps float32s to integers in the same order; zeros of both signs are equal."""
    bits = jax.lax.bitcast_convert_type(z.astype(jnp.float32), jnp.uint32)
    bits = jnp.where(z == 0, jnp.uint32(0), bits)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))
