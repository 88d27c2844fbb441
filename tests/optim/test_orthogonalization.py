"""Newton–Schulz against a singular value decomposition in float64."""

import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import linprog

from lmlib.optim.muon import CLASSIC, POLAR_EXPRESS, orthogonalized

RANDOM = np.random.default_rng(0)
MATRICES = {
    "wide": RANDOM.normal(size=(24, 80)),
    "square": RANDOM.normal(size=(32, 32)),
    "a row": RANDOM.normal(size=(1, 7)),
    "nearly of rank 4": RANDOM.normal(size=(16, 4)) @ RANDOM.normal(size=(4, 40))
    + 1e-2 * RANDOM.normal(size=(16, 40)),
}


def composed(s, polynomials):
    for a, b, c in polynomials:
        s = a * s + b * s**3 + c * s**5
    return s


@pytest.mark.parametrize("polynomials", [CLASSIC, POLAR_EXPRESS], ids=["classic", "polar_express"])
@pytest.mark.parametrize("name", MATRICES)
def test_singular_values_go_through_the_polynomials(name, polynomials):
    matrix = MATRICES[name]
    u, s, vt = np.linalg.svd(matrix, full_matrices=False)
    expected = (u * composed(s / (1.01 * np.linalg.norm(matrix)), polynomials)) @ vt
    given = jnp.asarray(np.stack([matrix, 1e-3 * matrix]), jnp.float32)
    for made in orthogonalized(given, polynomials):
        np.testing.assert_allclose(made, expected, atol=3e-3 * np.abs(expected).max())


def test_bfloat16_is_near_enough():
    matrix = MATRICES["wide"]
    u, _, vt = np.linalg.svd(matrix, full_matrices=False)
    made = np.asarray(
        orthogonalized(jnp.asarray(matrix[None], jnp.bfloat16), POLAR_EXPRESS)[0], float
    )
    assert np.linalg.norm(made - u @ vt) < 0.13 * np.sqrt(24)


def test_they_end_near_one():
    s = np.geomspace(0.01, 1 / 1.01, 2_000)
    classic, polar = composed(s, CLASSIC), composed(s, POLAR_EXPRESS)
    assert (classic.min(), classic.max()) == pytest.approx((0.68, 1.14), abs=0.02)
    assert np.abs(polar - 1).max() < 0.13


def test_zeros_stay_zeros():
    assert not orthogonalized(jnp.zeros((2, 3, 5)), POLAR_EXPRESS).any()


def test_each_polynomial_is_the_best_after_those_before():
    """As arXiv:2505.16932, algorithm 1, chooses them: by linear programs over points."""
    low, high = 1e-3, 1.0
    for i, chosen in enumerate(POLAR_EXPRESS):
        least = max(low, 0.0240733 * high)
        x = np.concatenate([np.geomspace(least, high, 300), np.linspace(least, high, 300)])
        powers, ones = np.stack([x, x**3, x**5], 1), np.ones((len(x), 1))
        best = linprog(
            [0, 0, 0, 1],  # the largest distance from 1
            A_ub=np.block([[powers, -ones], [-powers, -ones]]),
            b_ub=np.concatenate([np.ones(len(x)), -np.ones(len(x))]),
            bounds=[(None, None)] * 3 + [(0, None)],
        ).x[:3]
        # At 1 on average, also where values are below the cushion.
        best *= 2 / (composed(low, [best]) + composed(high, [best]))
        last = i == len(POLAR_EXPRESS) - 1
        slack = 1.0 if last else 1.01
        np.testing.assert_allclose(chosen, best / slack ** np.array([1, 3, 5]), rtol=2e-3)
        low = composed(low, [best])
        high = 2 - low
