"""A copy of a small Llama's folder, and changes of it."""

import functools
import json
import shutil

import jax
import numpy as np
from hugging_face_families import GOLDEN, tensors

from lmlib import hf
from lmlib.hf.tensor_files import begin_files, laid_out, read_header, stored_tensors, write

HEAD = "lm_head.weight"


def copy_small_folder(to):
    for name in ("config.json", "model.safetensors"):
        shutil.copy(GOLDEN / "llama" / name, to)
    return to


def change(folder, **keys):
    """Sets keys of config.json; `...` removes one."""
    file = folder / "config.json"
    content = json.loads(file.read_text()) | keys
    file.write_text(json.dumps({key: each for key, each in content.items() if each is not ...}))


def rewritten(folder, change):
    """The tensors after `change` of a dict of arrays."""
    file = folder / "model.safetensors"
    held = change(tensors(file))
    placed = laid_out(folder, {n: (each.dtype, each.shape) for n, each in held.items()}, 1 << 40)
    begin_files(placed)
    for name, each in held.items():
        write(placed[name], 0, each.reshape(-1))


@functools.cache
def golden_model():
    return hf.load(GOLDEN / "llama")


def with_head(folder, make):
    """The head as `make` makes it of the table."""
    rewritten(folder, lambda held: held | {HEAD: make(held["model.embed_tokens.weight"])})


def tensors_of(file):
    """Returns the arrays of a file by name, without the package safetensors."""
    stored = read_header(file)
    return {name: each.read(0, each.size).reshape(each.shape) for name, each in stored.items()}


def assert_same_tensors(one, other):
    """Asserts that two files or folders hold the same tensors, with the same dtypes."""
    found, expected = (
        {name: each.read(0, each.size) for name, each in held.items()}
        for held in (stored_tensors(f) if f.is_dir() else read_header(f) for f in (one, other))
    )
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert found[name].dtype == values.dtype
        np.testing.assert_array_equal(found[name], values)


def assert_same_weights(found, expected, **tolerance):
    """Asserts that all leaves are equal, or are within `rtol` and `atol`."""
    same = np.testing.assert_allclose if tolerance else np.testing.assert_array_equal
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        same(one, other, **tolerance)
