"""How a token is chosen of its logits.

Shapes: B batch (rows), V vocab.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, UInt32

_LEAST, _MOST = 1e-6, 1e6  # factors of logits, which stay finite in float32


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Which tokens may follow, and how likely each is. The settings act in the order in which they
    stand here but for the temperature, which comes after the penalty. Of tokens that are equally
    likely all stay, or none.

    Args:
      temperature: divides the logits; 0 takes the likeliest token always.
      top_k: only the so many likeliest tokens; `None`: all.
      top_p: only the likeliest tokens, as few as have this probability together (nucleus sampling:
        Holtzman et al. 2020, arXiv:1904.09751, §3.1), in what `top_k` leaves; 1: all.
      min_p: only tokens that are at least this share as likely as the likeliest (Nguyen et al.
        2024, arXiv:2407.01082, §3); 0: all.
      repetition_penalty: logits of tokens that the text has already, prompt included, are divided
        by it if positive, else multiplied (Keskar et al. 2019, arXiv:1909.05858, §4.1); 1: not.

    Raises:
      ValueError: for a value out of its range.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        if self.temperature != 0 and not _LEAST <= self.temperature <= _MOST:
            raise ValueError(
                f"temperature must be 0, or from {_LEAST:g} to {_MOST:g}, got {self.temperature}"
            )
        if self.top_k is not None and not 1 <= self.top_k < 2**31:
            raise ValueError(f"top_k must be in [1, 2^31), or None, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must be in [0, 1], got {self.min_p}")
        if not _LEAST <= self.repetition_penalty <= _MOST:
            raise ValueError(
                f"repetition_penalty must be from {_LEAST:g} to {_MOST:g}, got "
                f"{self.repetition_penalty}"
            )


GREEDY = Sampling(temperature=0.0)


Rules = frozenset[str]  # the settings that matter: programs are compiled for these
Numbers = dict[str, Float[Array, ""]]  # all settings: programs take the numbers as they run


def rules_of(sampling: Sampling) -> Rules:
    """The names of the settings that matter. Without "temperature" nothing is drawn."""
    found = set() if sampling.repetition_penalty == 1 else {"repetition_penalty"}
    if sampling.temperature > 0:
        found.add("temperature")
        found |= set() if sampling.top_k is None else {"top_k"}
        found |= set() if sampling.top_p == 1 else {"top_p"}
        found |= set() if sampling.min_p == 0 else {"min_p"}
    return frozenset(found)


def numbers_of(sampling: Sampling) -> Numbers:
    """The values of the settings, for the devices."""
    values = dataclasses.asdict(dataclasses.replace(sampling, top_k=sampling.top_k or 1))
    return {name: jnp.float32(value) for name, value in values.items()}


def choose(
    logits_BV: Float[Array, "b vocab"],
    noise_BV: Float[Array, "b vocab"] | None,
    seen_BV: Bool[Array, "b vocab"] | None,
    numbers: Numbers,
    rules: Rules,
) -> tuple[Int32[Array, "b"], Float[Array, "b"]]:
    """A token for each row, and its log-probability in nats under the logits as they are.

    Args:
      noise_BV: standard Gumbel noise: the likeliest token with it added is a draw (Maddison et al.
        2014, arXiv:1411.0030); not needed if greedy.
      seen_BV: which tokens the text has; needed if penalised.
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
    """The logits of the distribution that is drawn from: -inf where a token may not follow."""
    z_BV = logits_BV
    if "repetition_penalty" in rules:
        assert seen_BV is not None
        penalty = numbers["repetition_penalty"]
        z_BV = jnp.where(seen_BV, jnp.where(z_BV > 0, z_BV / penalty, z_BV * penalty), z_BV)
    if "temperature" not in rules:
        return z_BV
    z_BV = z_BV / numbers["temperature"]
    if "top_k" in rules:
        z_BV = _likeliest(z_BV, jnp.ones_like(z_BV), numbers["top_k"])
    if "top_p" in rules:
        z_BV = _likeliest(z_BV, jax.nn.softmax(z_BV, axis=-1), numbers["top_p"])
    if "min_p" in rules:
        highest_B1 = jnp.max(z_BV, axis=-1, keepdims=True)
        z_BV = jnp.where(z_BV >= highest_B1 + jnp.log(numbers["min_p"]), z_BV, -jnp.inf)
    return z_BV


def _likeliest(
    z_BV: Float[Array, "b vocab"], mass_BV: Float[Array, "b vocab"], limit: Float[Array, ""]
) -> Float[Array, "b vocab"]:
    """`z` where what is likelier has less than `limit` of the mass together; -inf elsewhere.

    The smallest such logit is found by bisection over bit patterns, in 32 sums over the vocabulary,
    where sorting it would take far longer.
    """
    rank_BV = _rank(z_BV)

    def halve(bit: Array, below_B1: Array) -> Array:
        # `below` has the limit's mass above it, and below + 2^(31 - bit) is tried.
        tried_B1 = below_B1 + (jnp.uint32(1) << (31 - bit).astype(jnp.uint32))
        above_B1 = jnp.sum(jnp.where(rank_BV > tried_B1, mass_BV, 0), axis=-1, keepdims=True)
        return jnp.where(above_B1 >= limit, tried_B1, below_B1)

    below_B1 = jax.lax.fori_loop(0, 32, halve, jnp.zeros_like(rank_BV[:, :1]))
    return jnp.where(rank_BV > below_B1, z_BV, -jnp.inf)


def _rank(z: Float[Array, "..."]) -> UInt32[Array, "..."]:
    """Integers in the order of the float32s `z`, the same for zeros of both signs."""
    bits = jax.lax.bitcast_convert_type(z.astype(jnp.float32), jnp.uint32)
    bits = jnp.where(z == 0, jnp.uint32(0), bits)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))
