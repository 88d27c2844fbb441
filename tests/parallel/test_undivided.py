"""A model that was trained with split rows, or in stages, generates and scores with neither."""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from laid_out import laid_out

from lmlib.compute import Compute
from lmlib.data.synthetic import Synthetic
from lmlib.evaluate.scoring import Scorer
from lmlib.generate.generator import Generator
from lmlib.models.families.llama import llama
from lmlib.parallel.mesh import make_mesh
from lmlib.parallel.other_meshes import undivided, undivided_model

pytestmark = pytest.mark.several_devices

FLOAT32 = Compute(dtype="float32")
SPLIT = {"fsdp": 2, "context": 2, "tensor": 2}
STAGES = {"stage": 2, "fsdp": 2, "context": 2}


@functools.cache
def model():
    sizes = {"vocab": 64, "embed": 32, "layers": 2, "heads": 4, "mlp": 64}
    return llama(**sizes, key=jax.random.key(3))


@pytest.mark.slow
def test_rows_are_whole_and_no_weight_travels():
    mesh = make_mesh(**SPLIT)
    other = undivided(mesh)
    assert dict(other.shape) == {**mesh.shape, "fsdp": 4, "context": 1}
    assert {*other.devices.flat} == {*mesh.devices.flat}
    split = laid_out(model(), mesh)
    whole, _ = undivided_model(split, mesh)
    for before, after in zip(jax.tree.leaves(split), jax.tree.leaves(whole), strict=True):
        assert isinstance(after.sharding, NamedSharding) and after.sharding.mesh == other
        held = [{s.device: s.index for s in x.addressable_shards} for x in (before, after)]
        assert held[0] == held[1]


@pytest.mark.slow
def test_stages_become_fsdp():
    mesh = make_mesh(**STAGES)
    whole, other = undivided_model(laid_out(model(), mesh), mesh)
    assert dict(other.shape) == {**mesh.shape, "stage": 1, "fsdp": 8, "context": 1}
    assert {leaf.sharding.mesh for leaf in jax.tree.leaves(whole)} == {other}
    jax.tree.map(np.testing.assert_array_equal, whole, model())


@pytest.mark.slow
def test_scores_and_continuations_equal_those_of_one_device():
    batch = Synthetic(64, 8, 13).batch(0)  # of a length that no mesh divides
    results = []
    for sizes in ({}, SPLIT, STAGES):
        mesh = make_mesh(**sizes)
        laid = laid_out(model(), mesh)
        nats, _ = Scorer(mesh, FLOAT32)(laid, batch)
        made = Generator(laid, mesh, FLOAT32, rows=2, length=32, whole=False)([[1, 2, 3], [5]], 6)
        results.append((nats, [row.tokens for rows in made for row in rows]))
    for nats, tokens in results[1:]:
        np.testing.assert_allclose(nats, results[0][0], rtol=1e-5)
        assert tokens == results[0][1]
