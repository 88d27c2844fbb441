"""What a run goes on from: its own checkpoint, the weights of another run, and what it refuses."""

import shutil
import sys
from pathlib import Path

import fiddle as fdl
import jax
import numpy as np
import pytest
from folder_contents import files_of
from sentinels import sentinels
from small_experiment import small

from lmlib.checkpoint import Checkpoints
from runner import Options, fit
from runner.config import configs
from runner.errors import ConfigError
from runner.monitoring.progress import Progress
from runner.training.beginning import check_config


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Three steps, and their workdir."""
    workdir = tmp_path_factory.mktemp("trained")
    return fit(small("steps=3"), workdir), workdir


def weights(state):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(state.model)]


def test_a_run_begins_with_the_weights_of_another_alone(trained, tmp_path):
    result, other = trained
    options = Options(init_from=f"{other}@3")
    warm = fit(small("data.seed=5", "optimizer.peak_lr=1e-9", "steps=4"), tmp_path, options)
    norm = np.sqrt(sum(np.sum(np.square(leaf, dtype=np.float64)) for leaf in weights(result.state)))
    assert warm.metrics[0]["parameter_norm"] == pytest.approx(norm, rel=1e-6)
    for one, before in zip(weights(warm.state), weights(result.state), strict=True):
        np.testing.assert_allclose(one, before, atol=1e-7)  # at such a learning rate
    assert [line["step"] for line in warm.metrics] == [1, 2, 3, 4]
    with Checkpoints(tmp_path / "checkpoints", read_only=True) as checkpoints:
        target = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding),
            warm.state,
        )
        _, notes = checkpoints.restore(4, target)
    assert notes["initialised_from"] == f"{other / 'checkpoints'}@3"


@pytest.mark.slow
def test_once_it_has_checkpoints_a_run_goes_on_from_them(trained, tmp_path, capsys):
    _, other = trained
    options = Options(init_from=str(other))
    first = fit(small("steps=2"), tmp_path, options)
    again = fit(small("steps=3"), tmp_path, options)
    assert [line["step"] for line in again.metrics] == [1, 2, 3]
    assert again.metrics[:2] == first.metrics
    assert "is ignored: this run has checkpoints" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("overrides", "reference", "message"),
    sentinels(
        [
            ((), "{other}@2", "no whole checkpoint at step 2; it has [3]"),
            ((), "{other}/nowhere", "{other}/nowhere is no folder; write RUN or RUN@STEP"),
            ((), "{other}/tensorboard", "holds no checkpoint"),
            (("model.embed=32",), "{other}", "model.table_VE as float32[512, 16]"),
            (("model.vocab=600",), "{other}", "float32[512, 16], but float32[600, 16] is wanted"),
        ],
        lambda case: case[0] != ("model.vocab=600",),
    ),
)
def test_weights_that_cannot_be_taken_are_refused(trained, tmp_path, overrides, reference, message):
    _, other = trained
    with pytest.raises(ConfigError) as error:
        fit(small(*overrides), tmp_path / "run", Options(init_from=reference.format(other=other)))
    assert message.format(other=other) in str(error.value)


def test_damaged_weights_are_refused(trained, tmp_path):
    _, other = trained
    shutil.copytree(other / "checkpoints", tmp_path / "other")
    state = tmp_path / "other" / "3" / "state"
    file = next(path for path in sorted(state.rglob("*")) if path.name.startswith("0"))
    file.write_bytes(bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:])
    with pytest.raises(ConfigError, match="is damaged"):
        fit(small(), tmp_path / "run", Options(init_from=str(tmp_path / "other")))


def test_other_data_is_refused_unless_allowed(trained, tmp_path, capsys):
    _, workdir = trained
    shutil.copytree(workdir, tmp_path / "run")
    before = files_of(tmp_path / "run")
    changed = small("data.seed=5", "steps=4")
    with pytest.raises(ConfigError, match=r"checkpoint 3 was trained on other data.*another order"):
        fit(changed, tmp_path / "run")
    assert files_of(tmp_path / "run") == before
    result = fit(changed, tmp_path / "run", Options(allowed_changes=["data"]))
    assert [line["step"] for line in result.metrics] == [1, 2, 3, 4]
    assert "going on with other data, since --allow_change=data" in capsys.readouterr().err


def test_fewer_steps_than_were_made_are_refused(trained, tmp_path):
    _, workdir = trained
    shutil.copytree(workdir, tmp_path / "run")
    before = files_of(tmp_path / "run")
    with pytest.raises(ConfigError, match="this run has made 3 steps, and steps is 2: set it to 3"):
        fit(small("steps=2"), tmp_path / "run")
    assert files_of(tmp_path / "run") == before


def test_other_settings_of_jax_are_refused(trained, tmp_path):
    _, workdir = trained
    shutil.copytree(workdir, tmp_path / "run")
    before = files_of(tmp_path / "run")
    settings = {
        "JAX_DEFAULT_PRNG_IMPL was threefry2x32 and is rbg": jax.default_prng_impl("rbg"),
        "JAX_DEFAULT_MATMUL_PRECISION was .* and is float32": jax.default_matmul_precision(
            "float32"
        ),
        "JAX_ENABLE_X64 was false and is true": jax.enable_x64(True),
    }
    for told, setting in settings.items():
        with setting, pytest.raises(ConfigError, match=f"{told}. The same step .* as they were"):
            fit(small("steps=4"), tmp_path / "run")
    with jax.default_prng_impl("rbg"), pytest.raises(ConfigError, match=r"and is rbg\. .*workdir$"):
        fit(small("steps=4"), tmp_path / "run", Options(allowed_changes=["jax"]))
    assert files_of(tmp_path / "run") == before


@pytest.mark.landing
def test_other_settings_of_jax_are_told_where_they_are_allowed(trained, tmp_path, capsys):
    _, workdir = trained
    shutil.copytree(workdir, tmp_path / "run")
    with jax.threefry_partitionable(False):
        result = fit(small("steps=4"), tmp_path / "run", Options(allowed_changes=["jax"]))
    assert [line["step"] for line in result.metrics] == [1, 2, 3, 4]
    assert "is false; going on all the same, since --allow_change=jax" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="JAX_THREEFRY_PARTITIONABLE was false and is true"):
        fit(small("steps=5"), tmp_path / "run")


def check(cfg, workdir: Path, *allowed: str) -> None:
    with Progress(1, sys.stderr) as progress:
        check_config(
            cfg, lambda: fdl.build(cfg).abstract_state(), workdir, allowed, progress.message
        )


def test_another_model_of_the_same_shape_is_refused_unless_allowed(tmp_path, capsys):
    configs.save(configs.load("experiments/llama_84m"), tmp_path)
    changed = configs.load("experiments/llama_84m", [], ["model.rope_theta=5e5"])
    with pytest.raises(ConfigError, match=r"model.rope_theta changed since the run in"):
        check(changed, tmp_path)
    check(changed, tmp_path, "model")
    assert "+ model.rope_theta = 500000.0" in capsys.readouterr().err


def test_a_new_init_from_is_too_late_once_there_are_checkpoints(tmp_path, capsys):
    configs.save(small(), tmp_path)
    changed = small("init_from=elsewhere")
    check(changed, tmp_path)
    assert "is ignored" not in capsys.readouterr().err
    (tmp_path / "checkpoints/3").mkdir(parents=True)
    check(changed, tmp_path)
    assert "the new init_from is ignored: this run has checkpoints" in capsys.readouterr().err
    check(small(), tmp_path)
    assert "is ignored" not in capsys.readouterr().err


def test_what_may_change_is_only_shown(tmp_path, capsys):
    configs.save(small(), tmp_path)
    check(small(), tmp_path)
    check(small(), tmp_path / "new")
    assert capsys.readouterr().err == ""
    for override in ("compute.dtype=float32", "compute.saved=('query',)", "steps=9", "seed=3"):
        check(small(override), tmp_path)
        assert override.partition("=")[0] in capsys.readouterr().err
