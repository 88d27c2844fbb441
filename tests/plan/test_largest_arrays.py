"""The listing of the largest arrays of a compiled program.

L layers, B rows, E embed.
"""

import jax
import jax.numpy as jnp
import pytest

from lmlib.plan.memory import largest_arrays
from lmlib.plan.program import read_program

L, B, E = 64, 16, 128


def arrays_of(compiled, size):
    found = largest_arrays(read_program(compiled.as_text()), count=100)
    return [one for one in found if one.bytes == size]


def test_an_array_whose_slices_are_replaced_is_listed_once():
    def layers(x, w):
        return jax.lax.scan(lambda x, _: (jnp.sin(x @ w), x), x, length=L)[1]

    x, w = jnp.zeros((B, E)), jnp.zeros((E, E))
    compiled = jax.jit(layers).lower(x, w).compile()
    assert "dynamic-update-slice" in compiled.as_text()
    stack = L * B * E * 4
    assert compiled.memory_analysis().output_size_in_bytes == stack
    assert compiled.memory_analysis().temp_size_in_bytes < stack
    assert len(arrays_of(compiled, stack)) == 1


@pytest.mark.parametrize(("donated", "made"), [((), 1), ((0,), 0)])
def test_an_array_that_is_copied_before_a_slice_is_replaced_is_listed(donated, made):
    def replaced(x, y):
        return jax.lax.dynamic_update_slice(x, y, (1, 0))

    compiled = jax.jit(replaced, donate_argnums=donated)
    compiled = compiled.lower(jnp.zeros((L, E)), jnp.zeros((1, E))).compile()
    aliased = compiled.memory_analysis().alias_size_in_bytes
    assert aliased == (0 if made else L * E * 4)
    assert len(arrays_of(compiled, L * E * 4)) == made
