"""Products of rows by groups, against a loop over rows in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sentinels import sentinels

from lmlib.models.experts import triton_grouped
from lmlib.models.experts.grouped import IMPLEMENTATIONS, Groups, grouped_product
from lmlib.models.experts.triton_grouped import Launch

E, F, X, N = 5, 3, 4, 40


@st.composite
def group_sizes(draw):
    """Draws sizes of X groups in N rows. Groups may be empty, and rows may belong to none."""
    ends = sorted(draw(st.lists(st.integers(0, N), min_size=X, max_size=X)))
    return np.diff([0, *ends]).astype(np.int32)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@example(np.array([0, 0, 0, 0], np.int32))
@example(np.array([N, 0, 0, 0], np.int32))
@example(np.array([0, 0, 0, 7], np.int32))
@example(np.array([9, 8, 7, 16], np.int32))
@given(group_sizes())
@settings(max_examples=50)
def test_each_row_is_multiplied_by_the_matrix_of_its_group(implementation, sizes):
    rng = np.random.default_rng(0)
    x, w, dy = (rng.normal(size=shape) for shape in ((N, E), (X, E, F), (N, F)))
    groups, rows = np.repeat(np.arange(X), sizes), sizes.sum()
    y, dx, dw = np.zeros((N, F)), np.zeros((N, E)), np.zeros((X, E, F))
    for row, group in enumerate(groups):
        y[row], dx[row] = x[row] @ w[group], w[group] @ dy[row]
        dw[group] += np.outer(x[row], dy[row])
    x[rows:] = dy[rows:] = np.nan  # the rest of a buffer must not be read
    single = implementation == "triton"  # its sums are in float32
    given = (each.astype(np.float32 if single else np.float64) for each in (x, w, dy))
    with jax.enable_x64(not single):
        ours = _PROGRAMS[implementation](*given, sizes)
    for found, wanted in zip(ours, (y, dx, dw), strict=True):
        np.testing.assert_allclose(found, wanted, *2 * ((2e-5 if single else 1e-12),))


def _program(implementation):
    def run(x, w, dy, sizes):
        y, back = jax.vjp(lambda x, w: grouped_product(x, w, Groups(sizes, implementation)), x, w)
        return y, *back(dy)

    return jax.jit(run)


_PROGRAMS = {name: _program(name) for name in IMPLEMENTATIONS}


@pytest.mark.parametrize(
    ("rows", "groups"),
    sentinels([(1, 1), (3, 16), (700, 3), (4_096, 2)], (3, 16).__eq__, landing=lambda case: True),
)
def test_any_number_of_rows(rows, groups):
    rng = np.random.default_rng(1)
    x, w = rng.integers(-4, 5, (rows, 4)), rng.integers(-4, 5, (groups, 4, 4))
    sizes = rng.multinomial(rows, np.ones(groups) / groups).astype(np.int32)
    arrays = (jnp.asarray(each, "bfloat16") for each in (x, w))
    y = grouped_product(*arrays, Groups(jnp.asarray(sizes)))
    wanted = np.einsum("ne,nef->nf", x, w[np.repeat(np.arange(groups), sizes)])
    np.testing.assert_array_equal(np.asarray(y, np.float32), wanted)  # small integers are exact


@pytest.mark.parametrize("launch", [Launch(64, 16, 32, 4, 2), Launch(16, 64, 64, 8, 4)])
def test_other_tiles_give_the_same_products(launch):
    rng = np.random.default_rng(3)
    x, w, dy = (rng.normal(size=shape) for shape in ((70, 64), (3, 64, 64), (70, 64)))
    sizes = jnp.array([41, 0, 25], jnp.int32)
    groups = np.repeat(np.arange(3), sizes)
    y, dx, dw = np.zeros((70, 64)), np.zeros((70, 64)), np.zeros((3, 64, 64))
    for row, group in enumerate(groups):
        y[row], dx[row] = x[row] @ w[group], w[group] @ dy[row]
        dw[group] += np.outer(x[row], dy[row])
    single = [jnp.asarray(each, jnp.float32) for each in (x, w, dy)]
    for transposed, rows, wanted in ((False, single[0], y), (True, single[2], dx)):
        found = triton_grouped.rows_by_groups([rows], single[1:2], sizes, transposed, launch)
        np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=2e-4)
    found = triton_grouped.products_of_groups(single[0], single[2], sizes, launch)
    np.testing.assert_allclose(found, dw, rtol=2e-5, atol=2e-4)


@settings(max_examples=10)
@given(st.integers(1, 40), st.integers(1, 3), st.integers(0, 99))
def test_triton_sums_the_rows_of_a_token(tokens, choices, seed):
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(N, E)).astype(np.float32)
    places = rng.integers(-1, N, (tokens, choices)).astype(np.int32)
    wanted = np.where(places[..., None] < 0, 0, rows.astype(np.float64)[places]).sum(1)
    found = triton_grouped.sums_of_rows(jnp.asarray(rows), jnp.asarray(places))
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6)
