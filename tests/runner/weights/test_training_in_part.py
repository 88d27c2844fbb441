"""Runs that train a part of their model: adapters, groups, and weights that stay as they were."""

import shutil
from pathlib import Path

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_folder import assert_same_weights
from states import assert_same_bits, cut_short

from lmlib import hf
from lmlib.adapters.lora import lora, merged
from lmlib.checkpoint.manifest import read_manifest
from lmlib.models.matrices.lora import without_adapters
from lmlib.optim.trainable import Group, adapters
from lmlib.parallel.mesh import make_mesh
from runner import Options, convert, fit
from runner.config import configs
from runner.errors import ConfigError
from runner.inference.loaded import load

GOLDEN = Path(__file__).parents[2] / "hf" / "golden"
SMALL = ("validation=None", "mesh.fsdp=1", "steps=4", "checkpoints.every=2")


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(GOLDEN / "llama", tmp_path / "base")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A finished run of adapters with dropout: its base, config, result and workdir."""
    here = tmp_path_factory.mktemp("trained")
    base = shutil.copytree(GOLDEN / "llama", here / "base")
    cfg = adapted(base, dropout=0.1)
    return base, cfg, fit(cfg, here / "run"), here / "run"


def adapted(folder, *overrides, dropout=0.0, **settings):
    """Adapters on the model of a folder."""
    cfg = configs.load(
        "experiments/from_hf", ["tiny"], [f"folder={str(folder)!r}", *SMALL, *overrides]
    )
    cfg.model = fdl.Partial(lora, of=cfg.model, rank=2, dropout=dropout)
    cfg.trainable = fdl.Config(adapters)
    for name, value in settings.items():
        setattr(cfg, name, value)
    return cfg


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [None, "int8", "float32"])
def test_adapters_resume_bit_for_bit_from_checkpoints_without_the_base(
    folder, tmp_path, dtype, request
):
    if dtype is None:
        folder, cfg, whole, workdir = request.getfixturevalue("trained")
    else:
        cfg, workdir = adapted(folder, frozen_dtype=dtype), tmp_path / "whole"
        whole = fit(cfg, workdir)
    again = fit(cfg, cut_short(workdir, 2, tmp_path / "cut"))
    assert_same_weights(whole.state.changing.model, again.state.changing.model)
    assert_same_weights(whole.state.optimizer, again.state.optimizer)
    assert_same_weights(whole.state.frozen, again.state.frozen)
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
    assert_same_weights(loaded, whole.state.whole_model)
    if dtype == "float32":
        gained = merged(loaded).stack.patterns[0][0].mlp.up - base.stack.patterns[0][0].mlp.up
        assert 0 < np.max(np.abs(gained)) < 0.1


@pytest.mark.parametrize("rate", [1.0, 16.0])
def test_matrices_named_like_adapters_do_not_train(folder, rate):
    """An MLP has matrices called down and up."""
    cfg = adapted(folder, trainable=fdl.Config(adapters, learning_rate_of_up=rate))
    cfg.model.paths = ("stack.*.attention.query",)
    trained = fdl.build(cfg).recipe.trained
    assert trained == {f"stack.patterns.0.0.attention.query.{each}" for each in ("down", "up")}


@pytest.mark.slow
def test_another_base_is_refused_and_a_moved_base_is_found(trained, tmp_path):
    base, cfg, _, workdir = trained
    run = cut_short(workdir, 2, tmp_path / "run")
    moved = base.rename(tmp_path / "moved")
    file = shutil.copytree(moved, base) / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(ConfigError, match="differ from the weights that the run was trained with"):
        fit(cfg, run)
    shutil.rmtree(base)
    with pytest.raises(ConfigError, match="is not a folder"):
        fit(cfg, run)
    assert fit(cfg, run, Options(init_from=str(moved))).summary.steps == 4
    moved.rename(base)


@pytest.mark.slow
def test_only_a_group_trains_from_new_weights_and_from_a_run(folder, tmp_path):
    cfg = configs.load("experiments/llama_84m", ["tiny"], SMALL)
    cfg.trainable = {
        "head": fdl.Config(Group, axes=("vocab",), learning_rate=0.5),
        "norms": fdl.Config(Group, paths=("*norm.scale",), decays=False),
    }
    first = fit(cfg, tmp_path / "first")
    fresh = fdl.build(cfg).initial_state()
    assert_same_weights(first.state.frozen, fresh.frozen)
    assert not np.array_equal(first.state.model.embedding, fresh.model.embedding)
    assert fit(cfg, tmp_path / "first").summary.steps == 4
    cfg.seed = 5  # its own new weights would be others
    second = fit(cfg, tmp_path / "second", Options(init_from=str(tmp_path / "first")))
    assert_same_weights(second.state.frozen, first.state.frozen)
    assert_same_weights(fit(cfg, tmp_path / "second").state.frozen, first.state.frozen)


@pytest.mark.slow
def test_the_405b_at_a_small_size_from_a_folder_to_both_formats(tmp_path):
    """On eight devices: the base comes from disk in bfloat16, a cut run goes on bit for bit."""
    small = ("mesh.fsdp=4", "mesh.tensor=2", "checkpoints.every=3", "steps=6", "validation=None")
    cfg = configs.load("experiments/llama_405b_lora", ["tiny"], small)
    base = fdl.build(cfg.model.of)(key=jax.random.key(7))
    hf.save(base, tmp_path / "base", model_type="llama", dtype="bfloat16")
    cfg.init_from = str(tmp_path / "base")
    whole = fit(cfg, tmp_path / "whole")
    again = fit(cfg, cut_short(tmp_path / "whole", 3, tmp_path / "cut"))
    for name in ("model", "optimizer"):
        assert_same_weights(getattr(again.state, name), getattr(whole.state, name))
    kept = jax.tree.leaves(without_adapters(whole.state.frozen))
    assert_same_bits(kept, [x.astype(jnp.bfloat16) for x in jax.tree.leaves(base)])
    losses = [line["loss"] for line in whole.metrics]
    assert losses[-1] < losses[0]
    run = f"{tmp_path / 'cut'}@6"
    convert.bring_out(run, tmp_path / "merged", dtype="float32")
    found, expected = hf.load(tmp_path / "merged"), merged(whole.state.whole_model)
    assert_same_weights(found, expected, rtol=1e-6, atol=1e-7)
