"""What the tensors of a stranger's folder hold: finite numbers, one head, one set of files."""

import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from small_folder import (
    HEAD,
    assert_same_weights,
    change,
    copy_small_folder,
    golden_model,
    rewritten,
    with_head,
)

from lmlib import hf, make_mesh
from lmlib.hf.tensor_files import read_header
from lmlib.models.families.hugging_face.settings import FolderError


@pytest.fixture
def folder(tmp_path):
    return copy_small_folder(tmp_path)


def test_a_tied_head_may_be_in_the_file_or_not(folder):
    change(folder, tie_word_embeddings=True)
    with_head(folder, lambda table: table)
    both = hf.load(folder)
    rewritten(folder, lambda held: {n: each for n, each in held.items() if n != HEAD})
    assert both.unembedding is None
    assert_same_weights(hf.load(folder), both)


@pytest.mark.parametrize("make", [lambda table: table + np.eye(62, 16), lambda table: table[:-1]])
def test_a_tied_head_that_is_another_matrix_is_refused(folder, make):
    """transformers would use it."""
    change(folder, tie_word_embeddings=True)
    with_head(folder, lambda table: make(table).astype(np.float32))
    with pytest.raises(FolderError, match=r"lm_head.weight differs from model.embed_tokens.weight"):
        hf.load(folder)
    change(folder, tie_word_embeddings=False)
    with_head(folder, lambda table: table + 1)
    assert hf.load(folder).unembedding is not None


def write_index(folder, file):
    names = dict.fromkeys(read_header(folder / "model.safetensors"), file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


def test_an_index_of_other_files_than_the_single_one_is_refused(folder):
    shutil.copy(folder / "model.safetensors", folder / "other.safetensors")
    write_index(folder, "other.safetensors")
    with pytest.raises(FolderError, match=r"model.safetensors, which transformers reads, and an"):
        hf.load(folder)
    write_index(folder, "model.safetensors")
    assert_same_weights(hf.load(folder), golden_model())


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")  # float64's 1e300
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_values_that_are_not_finite_are_refused_by_name(folder, dtype):
    name = "model.layers.1.mlp.up_proj.weight"

    def broken(held):
        values = held[name].astype(jnp.dtype(dtype))
        values[3, 5], values[7, 1] = np.inf if dtype != "float64" else 1e300, np.nan
        return held | {name: values}

    rewritten(folder, broken)
    with pytest.raises(FolderError) as error:
        hf.load(folder)
    told = f"2 of 384 values of {name} are not finite in float32, the first is inf at (3, 5)"
    assert told in str(error.value) and str(folder) in str(error.value)


@pytest.mark.several_devices
def test_they_are_refused_on_a_mesh_too(folder):
    def broken(held):
        held["model.norm.weight"][-1] = -np.inf  # in the share of the last device
        return held

    rewritten(folder, broken)
    with pytest.raises(
        FolderError, match=r"1 of 16 values of model.norm.weight .* -inf at \(15,\)"
    ):
        hf.load(folder, make_mesh(fsdp=4, tensor=2))
