"""The suite of a saved run, and the same numbers in the metrics of its training."""

import copy
import dataclasses
import json
import sys

import fiddle as fdl
import jax
import jax.numpy as jnp
import pytest
from forked_processes import run_forked
from run_on_bytes import write_run_on_bytes

from lmlib.evaluate.suite.suite import Suite
from lmlib.parallel.mesh import make_mesh
from runner.config import configs
from runner.errors import ConfigError
from runner.evaluation.measuring import measure_suite
from runner.evaluation.results import suite_json, suite_table
from runner.evaluation.tasks import Tasks, evaluate_tasks
from runner.inference.loading import load
from runner.training.validation import Validation


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bytes")
    write_run_on_bytes(folder)
    return folder


@pytest.mark.slow
def test_a_saved_run_scores_what_its_evaluations_wrote(folder, tmp_path):
    loaded = load(str(folder / "run"), mesh=make_mesh())
    assert loaded.cfg is not None
    cfg = copy.deepcopy(loaded.cfg)
    cfg.evaluation.suite = fdl.Config(Suite, longest=16)
    cfg.mesh = fdl.Config(make_mesh)
    configs.save(cfg, tmp_path)
    experiment = fdl.build(configs.load(str(tmp_path / "config.json")))
    experiment.check()
    state = experiment.initial_state(jax.tree.map(jnp.copy, loaded.model))
    written = Validation(experiment).metrics(state)
    assert set(written) == set(experiment.evaluation_metrics)
    name, found = measure_suite(loaded, Suite(longest=16))
    assert found == {name: value for name, value in written.items() if "suite/" in name}
    assert {"suite/copying_loss/8", "suite/induction_loss/4"} <= set(found)
    assert "suite/bits_per_byte/code" in found
    lines = suite_table([(name, found)]).splitlines()
    assert len(lines) == 1 + len(found) and lines[1].startswith("bits_per_byte/prose")
    assert json.loads(suite_json([(name, found)])) == [{"model": name, "results": found}]
    with pytest.raises(ValueError, match=r"evaluation\.suite is measured where validation is"):
        dataclasses.replace(experiment, validation=None).check()


def test_tasks_need_the_extra(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    loaded = load(str(folder / "run"), mesh=make_mesh())
    with pytest.raises(ConfigError, match=r"--tasks needs lm-eval: pip install 'lmlib\[eval\]'"):
        evaluate_tasks(loaded, Tasks(("arc_easy",)))


@pytest.mark.slow
def test_the_command_measures_one_thing_at_a_time(folder, tmp_path):
    of_run = f"--from={folder / 'run'}"
    done = run_forked("-m", "runner.evaluate", of_run, "--suite", f"--json={tmp_path / 'found'}")
    both = run_forked("-m", "runner.evaluate", of_run, "--suite", "--tasks=arc_easy")
    assert done.returncode == 0 and "copying_accuracy/8" in done.stdout, done.stderr
    (found,) = json.loads((tmp_path / "found").read_text())
    loaded = load(str(folder / "run"), mesh=make_mesh())
    assert set(found["results"]) == set(Suite().metrics(24, loaded.codec))
    assert both.returncode == 2 and "three evaluations: give one" in both.stderr
