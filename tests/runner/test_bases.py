"""Adapters, preferences and distillation that begin with a run, whatever that trained."""

from pathlib import Path

import fiddle as fdl
import jax
import numpy as np
import pytest
from adapter_runs import write_adapter_run
from run_on_bytes import write_run_on_bytes
from small_folder import assert_same_weights

from lmlib.adapters.lora import merged
from lmlib.data.synthetic import Synthetic
from lmlib.models.matrices.adapted import without_adapters
from runner import fit
from runner.config import configs
from runner.errors import ConfigError
from runner.weights.given import GivenWeights
from runner.weights.models import read_weights
from runner.weights.target import LoadOptions, LoadTarget

TWO_STEPS = ("steps=2", "checkpoints.every=2", "data.batch_size=8", "mesh.fsdp=1")
LLAMA = Path(__file__).parents[1] / "hf" / "golden" / "llama"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The workdir of a run on bytes whose weights all train, its model, and its data."""
    folder = tmp_path_factory.mktemp("bytes")
    return *write_run_on_bytes(folder), folder / "data"


def config(name, base, data, *overrides):
    return configs.load(
        f"experiments/{name}", (), [f"base={str(base)!r}", f"tokens={str(data)!r}", *overrides]
    )


def distilled(teacher, data):
    """A student of the teacher's size, on the teacher's data."""
    cfg = configs.load("experiments/distil", (), [f"teacher={str(teacher)!r}"])
    of_teacher = configs.load(str(teacher))
    cfg.model, cfg.compute = cfg.objective.teacher, of_teacher.compute
    cfg.data, cfg.validation, cfg.samples.prompts = of_teacher.data, None, ()
    cfg.data.batch_size = 8
    cfg.mesh.fsdp, cfg.steps, cfg.checkpoints.every = 1, 2, 2
    return cfg


def close(found, expected):
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)


def first_weights(cfg):
    experiment = fdl.build(cfg)
    wanted = LoadTarget(experiment.recipe, experiment.mesh, experiment.data)
    return read_weights(experiment.init_from, wanted)[0]


def reference_model(cfg):
    return GivenWeights(fdl.build(cfg), LoadOptions()).reference_model()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lora", "dpo"])
def test_new_adapters_begin_on_a_run(run, name):
    workdir, model, data = run
    cfg = config(name, workdir, data)
    assert cfg.data.sequence_length == 24  # as the run's
    found = first_weights(cfg)
    assert_same_weights(without_adapters(found), model)
    assert_same_weights(merged(found), model)  # they start at zero
    assert reference_model(cfg) is None  # of preferences the model without its adapters


@pytest.mark.slow
def test_a_run_teaches(run):
    workdir, model, data = run
    assert_same_weights(reference_model(distilled(workdir, data)), model)


def test_what_is_no_model_is_no_base(run):
    with pytest.raises(ConfigError, match="is no folder; write RUN or RUN@STEP"):
        config("lora", "nowhere", run[2])
    with pytest.raises(ConfigError, match=r"lora has no default for base: give --fdl\.base=…"):
        configs.load("experiments/lora")


def test_a_run_of_another_model_is_told_by_names_and_values(run):
    workdir, _, data = run
    cfg = config("lora", LLAMA, data)
    cfg.init_from = str(workdir)
    with pytest.raises(ConfigError, match=r"has model\.embedding as float32\[258, 16\], but"):
        first_weights(cfg)


@pytest.mark.slow
def test_a_run_of_adapters_is_a_base_of_all_three(run, tmp_path):
    workdir, model, data = run
    adapted = tmp_path / "adapted"
    trained = write_adapter_run(config("lora", workdir, data), workdir, adapted)
    base = merged(trained)
    assert not np.allclose(base.stack.patterns[0][0].mlp.up, model.stack.patterns[0][0].mlp.up)
    # It goes on with its adapters.
    assert_same_weights(first_weights(config("lora", adapted, data)), trained)
    other = config("lora", adapted, data)
    other.model.alpha = 7.0
    with pytest.raises(ConfigError, match=r"rank 16 and alpha 32, here rank 16 and alpha 7[)]"):
        first_weights(other)
    preferring = config("dpo", adapted, data)
    assert_same_weights(first_weights(preferring), trained)
    close(reference_model(preferring), base)
    assert_same_weights(reference_model(distilled(adapted, data)), trained)
    plain = configs.load(str(workdir))
    plain.init_from, plain.mesh.data = str(adapted), 1
    close(first_weights(plain), base)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lora", "dpo", "distil"])
def test_two_steps_of_each_on_a_run(run, tmp_path, name):
    workdir, _, data = run
    of_a_base = name != "distil"
    cfg = config(name, workdir, data, *TWO_STEPS) if of_a_base else distilled(workdir, data)
    if name == "dpo":  # the run's data has no pairs
        cfg.data = fdl.Config(Synthetic, vocab_size=258, batch_size=8, sequence_length=24)
    result = fit(cfg, tmp_path / "run")
    told = {"lora": "training loss", "dpo": "training DPO loss", "distil": "training distillation"}
    assert told[name] in result.summary.text(tmp_path, "")
    assert fit(cfg, tmp_path / "run").summary.steps == 2  # and it is found again
