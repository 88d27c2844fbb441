"""Allowed tokens against a definition in NumPy that sorts; and draws of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from forked_processes import run_forked
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lmlib.generate import GREEDY, Sampling
from lmlib.generate.sampling import allowed, choose, numbers_of, rules_of

V = 37


def by_definition(z, seen, sampling):
    """Probabilities in float64 of one row, and where rounding may decide which tokens follow."""
    z = z.astype(np.float64)
    if sampling.repetition_penalty != 1:
        penalty = sampling.repetition_penalty
        z = np.where(seen, np.where(z > 0, z / penalty, z * penalty), z)
    if sampling.temperature == 0:
        return (np.arange(V) == np.argmax(z)).astype(np.float64), np.zeros(V, bool)
    z /= sampling.temperature
    p = np.exp(z - z.max())
    p /= p.sum()
    order = np.argsort(-z)
    if sampling.top_k is not None:
        p[order[sampling.top_k :]] = 0
        p /= p.sum()
    may_fall = np.zeros(V, bool)
    if sampling.top_p < 1:
        mass = 0.0
        for token in order:
            may_fall[token] = abs(mass - sampling.top_p) < 1e-5
            if mass >= sampling.top_p:
                p[token] = 0
            mass += p[token]
    least = sampling.min_p * p.max()
    may_fall |= (least > 0) & (np.abs(p - least) < 1e-5 * least)
    p[p < least] = 0
    return p / p.sum(), may_fall


def found(z_BV, seen_BV, sampling):
    """Probabilities in float32, and which tokens may follow."""
    allowed_BV = allowed(
        jnp.asarray(z_BV), jnp.asarray(seen_BV), numbers_of(sampling), rules_of(sampling)
    )
    return np.asarray(jax.nn.softmax(allowed_BV, axis=-1)), np.isfinite(allowed_BV)


SAMPLINGS = st.builds(
    Sampling,
    temperature=st.floats(0.2, 3),
    top_k=st.none() | st.integers(1, V + 3),
    top_p=st.just(1.0) | st.floats(0.05, 0.99),
    min_p=st.just(0.0) | st.floats(0.01, 0.6),
    repetition_penalty=st.just(1.0) | st.floats(0.5, 2.0),
)


@example(Sampling(temperature=0.22, repetition_penalty=0.5), 1)  # softmax has zeros in float32
@settings(max_examples=60)
@given(SAMPLINGS, st.integers(0, 2**32 - 1))
def test_the_distribution_follows_the_definition(sampling, seed):
    rng = np.random.default_rng(seed)
    z_BV = rng.normal(0, 3, (4, V)).astype(np.float32)
    seen_BV = rng.random((4, V)) < 0.3
    p_BV, may_follow_BV = found(z_BV, seen_BV, sampling)
    for row in range(4):
        expected, may_fall = by_definition(z_BV[row], seen_BV[row], sampling)
        differs = may_follow_BV[row] != (expected > 0)
        assert not np.any(differs & ~may_fall)
        if not differs.any():
            np.testing.assert_allclose(p_BV[row], expected, atol=1e-5)


ZEROS = [
    [-0.0, 0.0, -0.0, 0.0, -1.0],
    [0.0, -0.0, -1.0, -2.0, -3.0],
    [1.0, -0.0, 0.0, -0.0, -2.0],
    [1.0, 0.9, 0.0, -0.0, -2.0],  # the penalty changes which is the likeliest
]


@pytest.mark.parametrize(
    "sampling",
    [Sampling(top_k=1), Sampling(top_k=2), Sampling(top_p=0.2), Sampling(top_p=0.6),
     Sampling(min_p=1.0), Sampling(min_p=0.3), Sampling(temperature=0.5, top_k=3, top_p=0.4),
     Sampling(repetition_penalty=2.0, top_k=2), GREEDY,
     Sampling(temperature=0.0, repetition_penalty=1.5)],
    ids=str,
)  # fmt: skip
def test_zeros_of_both_signs_are_equally_likely(sampling):
    """Equal logits all stay or none does, and the first is the likeliest: NumPy compares values."""
    z_BV, seen_BV = np.array(ZEROS, np.float32), np.arange(5)[None] % 2 == np.zeros((4, 1))
    token_B, _ = choose(
        jnp.asarray(z_BV), None, jnp.asarray(seen_BV), numbers_of(sampling), rules_of(sampling)
    )
    _, may_follow_BV = found(z_BV, seen_BV, sampling)
    penalty = sampling.repetition_penalty
    y_BV = z_BV.astype(np.float64)
    y_BV = np.where(seen_BV, np.where(y_BV > 0, y_BV / penalty, y_BV * penalty), y_BV)
    np.testing.assert_array_equal(token_B, np.argmax(y_BV, axis=1))
    for y_V, may_follow_V in zip(y_BV, may_follow_BV, strict=True):
        if sampling.temperature == 0:
            break
        y_V = y_V / sampling.temperature
        stays_V = np.ones(5, bool)
        if sampling.top_k is not None:
            stays_V = np.array([np.sum(y_V > y) < sampling.top_k for y in y_V])
        p_V = np.where(stays_V, np.exp(y_V), 0) / np.exp(y_V)[stays_V].sum()
        stays_V &= np.array([np.sum(p_V[y_V > y]) < sampling.top_p for y in y_V])
        stays_V &= p_V >= sampling.min_p * p_V[stays_V].max() * (1 - 1e-6)
        np.testing.assert_array_equal(may_follow_V, stays_V)


@pytest.mark.slow
def test_a_token_is_drawn_as_often_as_it_is_likely_and_told_with_its_own_probability():
    sampling, draws = Sampling(temperature=0.7, top_k=9, top_p=0.9), 20_000
    z_V = np.random.default_rng(0).normal(0, 2, V).astype(np.float32)
    z_BV = jnp.broadcast_to(z_V, (draws, V))
    noise_BV = jax.random.gumbel(jax.random.key(1), (draws, V))
    token_B, logprob_B = choose(z_BV, noise_BV, None, numbers_of(sampling), rules_of(sampling))
    p, _ = by_definition(z_V, np.zeros(V, bool), sampling)
    counts = np.bincount(np.asarray(token_B), minlength=V)
    assert (np.abs(counts - draws * p) <= 5 * np.sqrt(draws * p * (1 - p)) + 1e-6).all()
    own = np.log(by_definition(z_V, np.zeros(V, bool), Sampling())[0])
    np.testing.assert_allclose(logprob_B, own[np.asarray(token_B)], atol=1e-5)


@pytest.mark.parametrize("temperature", [1e-6, 1e6])
@pytest.mark.parametrize("penalty", [1e-6, 1e6])
def test_the_extremes_are_computed(temperature, penalty):
    sampling = Sampling(temperature, top_k=2**31 - 1, repetition_penalty=penalty)
    z_1V = np.linspace(-1e4, 1e4, V, dtype=np.float32)[None]
    given = jnp.asarray(z_1V), jnp.asarray(np.arange(V)[None] < 9)
    assert np.isfinite(allowed(*given, numbers_of(sampling), rules_of(sampling))).all()


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"temperature": 1e-320},
        {"temperature": 1e300},
        {"top_k": 0},
        {"top_k": 2**31},
        {"top_p": 0.0},
        {"min_p": 1.5},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": 1e300},
    ],
)
def test_values_out_of_range_are_refused(wrong):
    (name,) = wrong
    with pytest.raises(ValueError, match=f"{name} must be"):
        Sampling(**wrong)


WRONG_TYPES = """
from lmlib.generate import Sampling
for wrong in ({"temperature": "0.7"}, {"temperature": None}, {"top_k": 2.5}, {"top_p": True}):
    try:
        Sampling(**wrong)
    except ValueError as error:
        print(error)
"""


def test_values_of_wrong_types_are_refused():
    """Runs in another process, because the tests check annotations."""
    assert run_forked("-c", WRONG_TYPES).stdout.splitlines() == [
        "temperature must be 0, or from 1e-06 to 1e+06, got '0.7'",
        "temperature must be 0, or from 1e-06 to 1e+06, got None",
        "top_k must be an integer in [1, 2^31), or None, got 2.5",
        "top_p must be above 0 and at most 1, got True",
    ]
