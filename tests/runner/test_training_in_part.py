"""Runs that train a part of their model: adapters, groups, and weights that stay as they were."""

import shutil
from pathlib import Path

import fiddle as fdl
import jax
import numpy as np
import pytest

from lmlib import hf
from lmlib.adapters import lora, merged
from lmlib.checkpoint.manifest import read_manifest
from lmlib.parallel.mesh import make_mesh
from lmlib.trainable import Group, adapters
from runner import Options, fit
from runner.command_line.errors import ConfigError
from runner.config import configs
from runner.inference.loaded import load

GOLDEN = Path(__file__).parents[1] / "hf" / "golden"
SMALL = ("validation=None", "mesh.fsdp=1", "steps=4", "checkpoint_every=2")


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(GOLDEN / "llama", tmp_path / "base")


def adapted(folder, *overrides, **settings):
    """Adapters on the model of a folder."""
    cfg = configs.load(
        "experiments/from_hf", ["tiny"], [f"folder={str(folder)!r}", *SMALL, *overrides]
    )
    cfg.model = fdl.Partial(lora, of=cfg.model, rank=2, dropout=0.1)
    cfg.trainable = fdl.Config(adapters)
    for name, value in settings.items():
        setattr(cfg, name, value)
    return cfg


def same(one, other):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize(
    "dtype", [None, *(pytest.param(each, marks=pytest.mark.slow) for each in ("int8", "float32"))]
)
def test_adapters_go_on_bit_for_bit_and_checkpoints_hold_them_alone(folder, tmp_path, dtype):
    whole = fit(adapted(folder, frozen_dtype=dtype), tmp_path / "whole")
    half = adapted(folder, frozen_dtype=dtype)
    stop = Options(stop=lambda step: step == 2)
    with pytest.raises(Exception, match="stopped after step 2"):
        fit(half, tmp_path / "cut", stop)
    again = fit(half, tmp_path / "cut")
    same(whole.state.changing.model, again.state.changing.model)
    same(whole.state.optimizer, again.state.optimizer)
    same(whole.state.frozen, again.state.frozen)
    saved = read_manifest(tmp_path / "cut" / "checkpoints" / "4").arrays
    of_model = [name for name in saved if name.startswith("model.")]
    assert of_model
    assert all(name.endswith((".down", ".up")) for name in of_model)
    kept = {str(leaf.dtype) for leaf in jax.tree.leaves(whole.state.frozen)}
    assert kept == {None: {"bfloat16"}, "int8": {"bfloat16", "int8", "float32"}}.get(
        dtype, {"float32"}
    )

    base = hf.load(folder)
    loaded = load(str(tmp_path / "cut"), mesh=make_mesh(devices=jax.devices()[:1])).model
    same(loaded, whole.state.whole_model)
    if dtype == "float32":
        gained = merged(loaded).stack[0][0].mlp.up - base.stack[0][0].mlp.up
        assert 0 < np.max(np.abs(gained)) < 0.1


def test_another_base_is_refused(folder, tmp_path):
    cfg = adapted(folder)
    with pytest.raises(Exception, match="stopped after step 2"):
        fit(cfg, tmp_path / "run", Options(stop=lambda step: step == 2))
    file = folder / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(ConfigError, match="not those that the run was trained with"):
        fit(cfg, tmp_path / "run")
    shutil.rmtree(folder)
    with pytest.raises(ConfigError, match="is no folder"):
        fit(cfg, tmp_path / "run")
    original = Options(init_from=str(GOLDEN / "llama"))
    assert fit(cfg, tmp_path / "run", original).summary.steps == 4


def test_a_group_trains_alone_from_new_weights_and_from_another_run(folder, tmp_path):
    cfg = configs.load("experiments/llama_84m", ["tiny"], SMALL)
    cfg.trainable = {
        "head": fdl.Config(Group, axes=("vocab",), learning_rate=0.5),
        "norms": fdl.Config(Group, paths=("*norm.scale",), decays=False),
    }
    first = fit(cfg, tmp_path / "first")
    fresh = fdl.build(cfg).init()
    same(first.state.frozen, fresh.frozen)
    assert not np.array_equal(first.state.model.embedding, fresh.model.embedding)
    assert fit(cfg, tmp_path / "first").summary.steps == 4
    cfg.seed = 5  # its own new weights would be others
    second = fit(cfg, tmp_path / "second", Options(init_from=str(tmp_path / "first")))
    same(second.state.frozen, first.state.frozen)
    same(fit(cfg, tmp_path / "second").state.frozen, first.state.frozen)
