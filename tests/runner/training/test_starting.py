"""Checkpoints and settings that a run continues from, refuses, and keeps of each start."""

import json
import os
import shutil

import jax
import numpy as np
import pytest
from folder_contents import files_of
from sentinels import sentinels
from small_experiment import small
from small_folder import assert_same_weights
from states import target_of

from lmlib.checkpoint import Checkpoints
from runner import Options, fit
from runner.config import configs
from runner.errors import ConfigError
from runner.processes.lock import WorkdirLock
from runner.training.starts import Start


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Three steps, and their workdir."""
    workdir = tmp_path_factory.mktemp("trained")
    return fit(small("steps=3"), workdir), workdir


def test_a_run_begins_with_the_weights_of_another_alone(trained, tmp_path):
    result, other = trained
    options = Options(init_from=f"{other}@3")
    warm = fit(small("data.seed=5", "optimizer.peak_lr=1e-9", "steps=4"), tmp_path, options)
    leaves = jax.tree.leaves(result.state.model)
    norm = np.sqrt(sum(np.sum(np.square(leaf, dtype=np.float64)) for leaf in leaves))
    assert warm.metrics[0]["parameter_norm"] == pytest.approx(norm, rel=1e-6)
    assert_same_weights(warm.state.model, result.state.model, atol=1e-7)  # at this learning rate
    assert [line["step"] for line in warm.metrics] == [1, 2, 3, 4]
    with Checkpoints(tmp_path / "checkpoints", read_only=True) as checkpoints:
        _, notes = checkpoints.restore(4, target_of(warm.state))
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
            ((), "{other}/nowhere", "{other}/nowhere is not a folder; write RUN or RUN@STEP"),
            ((), "{other}/tensorboard", "has no checkpoint"),
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


def test_other_data_and_fewer_steps_are_refused(trained, tmp_path, capsys):
    _, workdir = trained
    shutil.copytree(workdir, tmp_path / "run")
    before = files_of(tmp_path / "run")
    changed = small("data.seed=5", "steps=4")
    with pytest.raises(ConfigError, match=r"checkpoint 3 was trained on other data.*another order"):
        fit(changed, tmp_path / "run")
    with pytest.raises(ConfigError, match="this run has made 3 steps, and steps is 2: set it to 3"):
        fit(small("steps=2"), tmp_path / "run")
    assert files_of(tmp_path / "run") == before
    result = fit(changed, tmp_path / "run", Options(allowed_changes=["data"]))
    assert [line["step"] for line in result.metrics] == [1, 2, 3, 4]
    assert "continuing with other data, since --allow_change=data" in capsys.readouterr().err


def test_other_settings_of_jax_are_refused_unless_allowed(trained, tmp_path, capsys):
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
    with jax.threefry_partitionable(False):
        result = fit(small("steps=4"), tmp_path / "run", Options(allowed_changes=["jax"]))
    assert [line["step"] for line in result.metrics] == [1, 2, 3, 4]
    assert "is false; continuing, since --allow_change=jax" in capsys.readouterr().err


NOT_HELD = WorkdirLock()


def assert_holds(folder, cfg):
    for name, content in configs.saved_files(cfg).items():
        assert (folder / name).read_text() == content


def fails(step):
    raise KeyboardInterrupt


@pytest.mark.slow
def test_the_config_kept_is_the_one_that_trained(tmp_path, capsys):
    first, second, third = (
        small("steps=2"),
        small("steps=2", "optimizer.peak_lr=0.5"),
        small("steps=3", "optimizer.peak_lr=0.25"),
    )
    fit(first, tmp_path)
    start = tmp_path / "starts" / "00000"
    assert_holds(tmp_path, first)
    assert_holds(start, first)
    facts = json.loads((start / "start.json").read_text())
    assert facts["first_step"] == 1 and facts["processes"] == 1
    assert len(facts["start"]) == 16
    assert json.loads((tmp_path / "result.json").read_text())["start"] == facts["start"]
    (account,) = json.loads((tmp_path / "goodput.json").read_text())["starts"]
    assert account["start"] == facts["start"]
    assert facts["versions"].keys() >= {"python", "jax", "jaxlib", "lmlib"}
    assert facts["jax_settings"]["JAX_THREEFRY_PARTITIONABLE"] == "true"
    assert {"lmlib/train.py", "experiments/llama_84m.py", "runner/__main__.py"} <= set(
        facts["code"]
    )

    fit(second, tmp_path)  # the run is finished: it trains nothing
    assert "+ optimizer.peak_lr = 0.5" in capsys.readouterr().err
    with pytest.raises(KeyboardInterrupt):  # before its first step is made
        fit(third, tmp_path, Options(stop=fails))
    assert_holds(tmp_path, first)
    assert [folder.name for folder in (tmp_path / "starts").iterdir()] == ["00000"]

    facts["code"]["lmlib/train.py"] = "another digest"
    facts["versions"]["jax"] = "0.1"
    (start / "start.json").write_text(json.dumps(facts))
    capsys.readouterr()
    fit(third, tmp_path)
    told = capsys.readouterr().err
    assert "- optimizer.peak_lr = 0.003" in told and "+ optimizer.peak_lr = 0.25" in told
    changes = f"jax 0.1 → {jax.__version__}, lmlib/train.py\n"
    assert f"the code has changed since this run was last trained: {changes}" in told
    assert_holds(tmp_path, third)
    assert_holds(tmp_path / "starts" / "00001", third)
    assert_holds(start, first)


EXPERIMENT = """
import fiddle as fdl
from code_beside import VALUE
from experiments import llama_84m

def config():
    return llama_84m.config()
"""


def changes(start):
    told = []
    start.tell_changes(told.append)
    return told


def test_edited_code_and_changed_flags_are_reported(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "code_beside.py").write_text("VALUE = 1")
    file = tmp_path / "code_of_mine.py"
    file.write_text(EXPERIMENT)
    cfg = configs.load(str(file))

    def start():
        return Start(cfg, tmp_path / "run", configs.experiment_file(str(file)))

    def told(what):
        return [f"{what} changed since this run was last trained: {change}"]

    assert changes(start()) == []  # without an earlier start
    start().record(1, NOT_HELD)
    assert changes(start()) == []
    for name, text in (("code_of_mine.py", EXPERIMENT + "# edited"), ("code_beside.py", "VALUE=2")):
        (tmp_path / name).write_text(text)
        change = f"{tmp_path.name}/{name}"
        assert changes(start()) == told("the code has")
        start().record(2, NOT_HELD)
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_enable_fast_math=true"
    monkeypatch.setenv("XLA_FLAGS", flags)
    change = "--xla_cpu_enable_fast_math: absent → true"
    assert changes(start()) == told("flags of XLA have")
