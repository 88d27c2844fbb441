"""Tiny families: trained on a mesh of 8, resumed, and quantized."""

import numpy as np
import pytest
from states import assert_same_bits, cut_short

from runner import fit
from runner.config import configs

pytestmark = pytest.mark.slow
MESH = ("mesh.fsdp=4", "mesh.tensor=2", "compute.sequence_parallel=True")
# Gated or plain mlps, patterns of layers or one kind, with and without biases and norms of queries.
KINDS = ("llama_3_2_1b", "gemma3_1b", "gpt2_124m")
QUANTIZED = "compute.quantized={'projections': 'int8', 'mlp': 'int8'}"


def tiny(name, *overrides):
    settings = ["steps=6", "checkpoints.every=3", "validation=None", "optimizer.peak_lr=1e-2"]
    return configs.load(
        f"experiments/{name}", ["tiny"], [*settings, "compute.dtype=float32", *overrides]
    )


def losses(result):
    return [line["loss"] for line in result.metrics]


@pytest.fixture(scope="module", params=KINDS)
def trained(request, tmp_path_factory):
    """Returns the family's name, the run's folder and its result."""
    folder = tmp_path_factory.mktemp(request.param)
    return request.param, folder, fit(tiny(request.param, *MESH), folder / "whole")


def test_it_learns_on_a_mesh_as_it_does_alone(trained):
    name, folder, result = trained
    found, alone = losses(result), fit(tiny(name, "mesh.fsdp=1"), folder / "alone")
    np.testing.assert_allclose(found, losses(alone), rtol=1e-4)
    assert found[-1] < found[0]


def test_it_goes_on_from_a_checkpoint_to_the_same_bits(trained):
    name, folder, result = trained
    again = fit(tiny(name, *MESH), cut_short(folder / "whole", 3, folder / "parted"))
    assert_same_bits(again.state, result.state)


def test_quantized_it_learns_nearly_the_same(trained):
    name, folder, result = trained
    rounded = losses(fit(tiny(name, *MESH, QUANTIZED), folder / "quantized"))
    assert rounded != losses(result)
    np.testing.assert_allclose(rounded, losses(result), rtol=2e-2)
