import functools
import math

import jax
import numpy as np
import pytest

from lmlib.adapters.lora import lora
from lmlib.inspect.description import describe
from lmlib.models.families.llama import llama
from lmlib.models.weights import creator
from lmlib.optim.trainable import adapters
from lmlib.parallel.matrix import number_of_weights
from lmlib.parallel.mesh import make_mesh
from lmlib.recipe import Recipe
from lmlib.terminal.quantities import bytes_text
from lmlib.terminal.table import WIDTH

pytestmark = pytest.mark.several_devices

make = functools.partial(
    llama, vocab=512, embed=64, layers=2, heads=8, kv_heads=4, mlp=256, key=jax.random.key(0)
)


@pytest.mark.slow
def test_rows_describe_the_arrays():
    mesh = make_mesh(fsdp=4, tensor=2)
    with jax.set_mesh(mesh):
        model = creator(make, mesh)()
    table = describe(model, mesh)
    leaves = jax.tree_util.tree_leaves_with_path(model)
    assert len(table.parameters) == len(leaves)
    for row, (path, leaf) in zip(table.parameters, leaves, strict=True):
        assert row.path == jax.tree_util.keystr(path, simple=True, separator=".")
        assert row.shape == leaf.shape
        assert row.bytes_per_device == leaf.addressable_shards[0].data.nbytes
        if row.initial_values == "ones":
            assert np.all(np.asarray(leaf) == 1)
        else:
            assert np.std(np.asarray(leaf)) == pytest.approx(float(row.initial_values), rel=0.03)
        assert row.decays == ("norm" not in row.path)
    assert table.size == sum(leaf.size for _, leaf in leaves)
    local = [leaf.addressable_shards[0].data.nbytes for _, leaf in leaves]
    assert table.bytes_per_device == sum(local)
    assert str(describe(jax.eval_shape(make), mesh)) == str(table)  # shapes suffice


def test_the_text_names_axes_layout_and_totals():
    text = str(describe(jax.eval_shape(make), make_mesh(fsdp=4, tensor=2)))
    row = next(line for line in text.splitlines() if line.startswith("stack.patterns.0.0.mlp.down"))
    # The cells go on in the lines below.
    below = " ".join(text.partition(row)[2].split("norm.scale")[0].split())
    assert "layer 2 ×" in row and below.startswith("mlp 256 ×")
    assert "whole, " in row and "tensor, fsdp" in below
    assert bytes_text(2 * 256 * 64 * 4 // 8) in row
    assert "yes" in row
    assert f"{256**-0.5 / 2:.4g}" in row  # a residual write of two layers
    total = 2 * 512 * 64 + 64 + 2 * (2 * 64 + 64 * 8 * 8 * 2 + 64 * 4 * 8 * 2 + 3 * 64 * 256)
    assert f"\n{total:,} parameters in 12 arrays" in text
    assert " ".join(text.split()).endswith("KB on each device of mesh fsdp 4 × tensor 2")
    assert max(map(len, text.splitlines())) <= WIDTH


@pytest.mark.parametrize(
    ("sizes", "layout", "where"),
    [
        ({}, ("whole", "whole", "whole"), "KB on one device"),
        ({"tensor": 2}, ("whole", "tensor", "whole"), "mesh tensor 2"),
        ({"fsdp": 2, "expert": 4}, ("whole", "whole", "fsdp × expert"), "mesh fsdp 2 × expert 4"),
    ],
)
def test_layouts_name_only_axes_that_split(sizes, layout, where):
    table = describe(jax.eval_shape(make), make_mesh(**sizes))
    (down,) = [row for row in table.parameters if row.path == "stack.patterns.0.0.mlp.down"]
    assert down.layout == layout
    assert table.short().endswith(where)


def test_decay_follows_the_rule_given():
    mesh = make_mesh()
    none = describe(jax.eval_shape(make), mesh, decays=lambda weight: "vocab" in weight.axes)
    assert {row.path for row in none.parameters if row.decays} == {"embedding", "unembedding"}
    assert math.isclose(none.size, sum(row.size for row in none.parameters))


@pytest.mark.parametrize("kind", ["int8", "nf4", "mxfp4"])
def test_matrices_in_few_bits_count_the_weights_that_they_stand_for(kind):
    mesh = make_mesh(devices=jax.devices()[:1])
    build = functools.partial(
        lora, functools.partial(make, embed=128), rank=4, alpha=8.0, dropout=0.0
    )
    arrays, stored = (
        Recipe(build, 0, adapters(), dtype).abstract_model for dtype in ("bfloat16", kind)
    )
    assert number_of_weights(stored) == number_of_weights(arrays)
    tables = describe(arrays, mesh), describe(stored, mesh)
    assert tables[0].size == sum(leaf.size for leaf in jax.tree.leaves(arrays))
    assert tables[1].size == tables[0].size
    assert tables[1].bytes_per_device == sum(
        leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(stored)
    )
    assert tables[1].bytes_per_device < 0.8 * tables[0].bytes_per_device
