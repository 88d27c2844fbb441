"""Families that are another one but for a few arguments."""

import inspect

import fiddle as fdl
import jax
import numpy as np
import pytest

from lmlib.models.families.llama import llama
from lmlib.models.families.mistral import mistral
from lmlib.models.families.variants import PARTS

SIZES = {"vocab": 16, "embed": 8, "layers": 1, "heads": 2, "mlp": 8}


def test_a_variant_has_the_parameters_of_its_family_but_for_those_it_names():
    own = dict(inspect.signature(mistral).parameters)
    theirs = dict(inspect.signature(llama).parameters)
    without = ["rope_scaling", "rotary_fraction", *PARTS.split()]
    assert [*own] == [name for name in theirs if name not in without]
    assert own.pop("window").default == 4_096
    assert all(parameter == theirs[name] for name, parameter in own.items())
    with pytest.raises(TypeError, match="rotary_fraction"):
        fdl.Partial(mistral, rotary_fraction=0.5)
    with pytest.raises(TypeError, match="rotary_fraction"):
        mistral(**SIZES, rotary_fraction=0.5, key=jax.random.key(0))


@pytest.mark.slow
def test_its_arguments_come_by_name_or_by_place():
    key = jax.random.key(0)
    found = [mistral(**SIZES, key=key), mistral(*SIZES.values(), key=key)]
    expected = llama(**SIZES, window=4_096, key=key)
    for model in found:
        assert jax.tree.structure(model) == jax.tree.structure(expected)
        for one, other in zip(jax.tree.leaves(model), jax.tree.leaves(expected), strict=True):
            np.testing.assert_array_equal(one, other)
