"""Commands that read checkpoints while their run removes them."""

import json
import shutil

import numpy as np
import pytest
from byte_texts import TEXTS
from forked_processes import run_forked
from run_on_bytes import write_run_on_bytes

from lmlib.checkpoint import RemovedCheckpointError, folders
from lmlib.checkpoint.folders import remove
from lmlib.hf.tensor_files import stored_tensors
from runner.errors import ConfigError
from runner.weights.models import use_model
from runner.weights.target import LoadOptions

STEPS = (3, 5, 7)

# Runs a module, and removes a checkpoint when the first file of a checkpoint is opened. The content
# of saved_next becomes new checkpoints before that.
REMOVING = """
import os, pathlib, runpy, sys
from lmlib.checkpoint.folders import remove

_, opened, removed, module, *arguments = sys.argv
removed = pathlib.Path(removed)

def audit(event, details):
    if event == "open" and str(details[0]).startswith(opened) and removed.is_dir():
        for new in removed.parents[1].glob("saved_next/*"):
            new.rename(removed.parent / new.name)
        remove([removed])

sys.addaudithook(audit)
sys.argv = [module, *arguments]
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    workdir, _ = write_run_on_bytes(tmp_path_factory.mktemp("bytes"), STEPS)
    return workdir


@pytest.fixture
def checkpoints(run, tmp_path):
    return shutil.copytree(run, tmp_path / "run") / "checkpoints"


def evaluated(checkpoints, tmp_path, removed):
    """Evaluates all checkpoints; `removed` disappears when the one of step 3 is opened."""
    (tmp_path / "text.txt").write_text(TEXTS[0])
    return run_forked(
        *("-c", REMOVING, f"{checkpoints}/3/", checkpoints / removed, "runner.evaluate"),
        *(f"--from={checkpoints.parent}", "--all_checkpoints", f"--data={tmp_path}/text.txt"),
        f"--json={tmp_path}/out.json",
    )


@pytest.mark.slow
def test_a_removed_checkpoint_is_named_and_the_others_are_evaluated(checkpoints, tmp_path):
    (chunk,) = (checkpoints / "7/state/model.embedding").glob("[0-9]*")
    chunk.unlink()  # the damage of the last one is reported after the others
    ended = evaluated(checkpoints, tmp_path, "5")
    assert ended.returncode == 2
    assert f"{checkpoints}/5 was removed meanwhile" in ended.stderr
    assert "7 is damaged: state/model.embedding/" in ended.stderr.splitlines()[-1]
    assert ended.stdout.startswith(f"{checkpoints.parent}@3, sequences of 24 tokens")
    (result,) = json.loads((tmp_path / "out.json").read_text())["results"]
    assert result["step"] == 3


@pytest.mark.slow
def test_if_all_checkpoints_are_removed_a_newer_one_is_evaluated(checkpoints, tmp_path):
    remove([checkpoints / "5"])
    (checkpoints.parent / "saved_next").mkdir()
    (checkpoints / "7").rename(checkpoints.parent / "saved_next" / "7")
    ended = evaluated(checkpoints, tmp_path, "3")
    assert ended.returncode == 0, ended.stderr
    assert f"{checkpoints}/3 was removed meanwhile" in ended.stderr
    assert ended.stdout.startswith(f"{checkpoints.parent}@7, sequences of 24 tokens")


@pytest.mark.slow
@pytest.mark.parametrize(("step", "status"), [("", 0), ("@7", 2)])
def test_the_next_newest_replaces_a_removed_checkpoint_unless_it_was_named(
    checkpoints, tmp_path, step, status
):
    ended = run_forked(
        *("-c", REMOVING, f"{checkpoints}/7/state/", checkpoints / "7", "runner.convert"),
        *(f"--from={checkpoints.parent}{step}", f"--to={tmp_path}/out", "--dtype=float32"),
    )
    assert ended.returncode == status, ended.stderr
    assert f"{checkpoints}/7 was removed meanwhile" in ended.stderr
    assert "damaged" not in ended.stderr
    assert (tmp_path / "out").exists() == (status == 0)
    if status == 0:
        assert f"step 5 of {checkpoints.parent}" in ended.stdout
        assert np.isfinite(stored_tensors(tmp_path / "out")["model.norm.weight"].read(0, 4)).all()


@pytest.mark.slow
def test_a_checkpoint_removed_while_it_is_read_is_replaced_by_the_newest(checkpoints):
    """Not if the step was named, and not forever."""
    told: list[str] = []

    def removed(run):
        remove([run.folder])
        return run.model(None)

    def removed_once(run):
        return removed(run) if run.step == 7 else run.step

    assert use_model(str(checkpoints), removed_once, LoadOptions(show=told.append)) == 5
    assert len(told) == 1 and told[0].startswith(f"the checkpoint {checkpoints}/7 was removed")
    with pytest.raises(RemovedCheckpointError, match="5 was removed meanwhile"):
        use_model(f"{checkpoints}@5", removed)
    assert folders.steps_in(checkpoints) == [3]
    with pytest.raises(ConfigError, match="has no checkpoint"):
        use_model(str(checkpoints), removed)
    assert len(told) == 1
