"""The mean of a run's last checkpoints, as a workdir that what reads models takes."""

import jax
import numpy as np
import pytest
from forked_processes import run_forked
from small_experiment import small

from runner import Options, fit
from runner.inference.loading import load


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("trained")
    fit(small("steps=4", "checkpoints.every=1", "checkpoints.keep=9"), workdir)
    return workdir


def weights(reference):
    return [np.asarray(each, np.float64) for each in jax.tree.leaves(model(reference))]


def model(reference):
    return load(reference, trusted=["bigram"]).model


def average(*flags):
    return run_forked("-m", "runner.average", *flags)


@pytest.mark.slow
def test_it_is_the_mean_and_is_taken_as_a_run_is(trained, tmp_path):
    ended = average(f"--from={trained}", "--last=3", f"--to={tmp_path / 'mean'}")
    assert ended.returncode == 0, ended.stderr
    assert "the mean of steps 2, 3, 4, 16.4 k parameters" in ended.stdout
    each = [weights(f"{trained}@{step}") for step in (2, 3, 4)]
    for found, *of in zip(weights(tmp_path / "mean"), *each, strict=True):
        np.testing.assert_array_equal(found, np.mean(of, axis=0).astype(np.float32))
    begun = fit(
        small("steps=1", "optimizer.peak_lr=1e-9"),
        tmp_path / "begun",
        Options(init_from=str(tmp_path / "mean")),
    )
    for found, of in zip(
        jax.tree.leaves(begun.state.model), weights(tmp_path / "mean"), strict=True
    ):
        np.testing.assert_allclose(found, of, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reference", "flags", "message"),
    [
        ("", ("--last=5",), "has 4 checkpoints, [1, 2, 3, 4], and --last is 5"),
        ("@2", ("--last=3",), "has 2 checkpoints, [1, 2]"),
        ("@7", (), "no whole checkpoint at step 7"),
        ("/nowhere", (), "is no folder"),
    ],
)
def test_what_has_no_mean_is_refused(trained, tmp_path, reference, flags, message):
    ended = average(f"--from={trained}{reference}", *flags, f"--to={tmp_path / 'mean'}")
    assert ended.returncode == 2 and message in ended.stderr
    assert "Traceback" not in ended.stderr and not (tmp_path / "mean").exists()
