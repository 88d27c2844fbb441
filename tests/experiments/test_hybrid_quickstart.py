"""The tiny hybrid quickstart is killed, resumed, asked for text and read by transformers."""

import json
import re
import signal

import jax
import numpy as np
import pytest
from golden_models import logits
from hugging_face_families import KEPT, tokens
from small_runs import SmallRun
from states import assert_same_bits, without_times

from lmlib import hf
from lmlib.metrics.log import read_metrics
from runner import convert, fit, load
from runner.config import configs

pytestmark = pytest.mark.slow
TINY = ("--fdl_config=experiments/hybrid_quickstart", "--fiddler=tiny")
SETTINGS = ("checkpoints.every=8", "samples.prompts=()", "mesh.fsdp=1")


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


def test_killed_and_resumed_it_has_the_same_bits_and_is_exported(tmp_path):
    cfg = configs.load("experiments/hybrid_quickstart", ["tiny"], SETTINGS)
    whole, workdir = tmp_path / "undisturbed", tmp_path / "run"
    undisturbed = SmallRun(whole, *SETTINGS, experiment=TINY)
    assert undisturbed.exit_code() == 0, undisturbed.output()
    run = SmallRun(workdir, *SETTINGS, experiment=TINY)
    run.reach((workdir / "checkpoints/8").exists, "a checkpoint")
    run.kill()
    assert run.exit_code() == -signal.SIGKILL
    again = SmallRun(workdir, *SETTINGS, experiment=TINY)
    assert again.exit_code() == 0, again.output()
    assert re.search(r"resuming after step (8|16) of 20", again.output())
    assert without_times(read_metrics(workdir)) == without_times(read_metrics(whole))
    expected = fit(cfg, whole)  # both have finished, so this only reads
    assert_same_bits(fit(cfg, workdir).state, expected.state)

    loaded = load(str(workdir))
    assert loaded.generate("def ", max_tokens=5) == loaded.generate("def ", max_tokens=5)

    model = expected.state.model
    hf.save(model, tmp_path / "hf")
    assert json.loads((tmp_path / "hf/config.json").read_text())["model_type"] == "olmo_hybrid"
    jax.tree.map(np.testing.assert_array_equal, hf.load(tmp_path / "hf"), model)


def test_transformers_computes_the_same_from_an_exported_run(tmp_path):
    golden = pytest.importorskip("golden_by_transformers", reason="needs lmlib[parity]")
    cfg = configs.load("experiments/hybrid_quickstart", ["tiny"], (*SETTINGS, "steps=1"))
    model = fit(cfg, tmp_path / "run").state.model
    convert.bring_out(str(tmp_path / "run"), tmp_path / "hf")
    ids = tokens(model.vocab)[0].astype(np.int32)
    with jax.default_matmul_precision("highest"):
        found = np.asarray(logits(model, ids))[0, KEPT]
    theirs = golden.loaded(tmp_path / "hf", "float32")
    expected = golden.logits_of_prompt(theirs, model.vocab).numpy()
    assert np.abs(found - expected).max() <= 2e-5 * np.abs(expected).max()
