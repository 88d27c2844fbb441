"""An interrupted save leaves no folder that looks complete."""

import functools
import os

import jax
import pytest

from lmlib import hf
from lmlib.adapters.lora import with_adapters
from lmlib.models.families.llama import llama


def model():
    return llama(vocab=32, embed=8, layers=1, heads=2, mlp=16, key=jax.random.key(0))


def adapted():
    return with_adapters(model(), rank=2, key=jax.random.key(1))


@pytest.mark.parametrize(
    ("save", "make"),
    [
        pytest.param(hf.save, model, id="model"),
        pytest.param(
            functools.partial(hf.save_adapters, trained=()),
            adapted,
            id="adapters",
            marks=pytest.mark.landing,
        ),
    ],
)
def test_an_interrupted_save_leaves_no_complete_folder(tmp_path, monkeypatch, save, make):
    def ended(descriptor):
        raise KeyboardInterrupt

    with monkeypatch.context() as patches:
        patches.setattr(os, "fsync", ended)
        with pytest.raises(KeyboardInterrupt):
            save(make(), tmp_path / "out")
    assert not [*(tmp_path / "out").glob("*.safetensors"), *(tmp_path / "out").glob("*.json")]
    with pytest.raises(FileExistsError, match="is not empty: give a new folder"):
        save(make(), tmp_path / "out")
    save(make(), tmp_path / "again")
    assert len([*(tmp_path / "again").glob("*.safetensors")]) == 1
    assert not [each for each in (tmp_path / "again").iterdir() if each.is_dir()]
