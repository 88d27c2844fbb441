"""Own actions: one writes an average of the weights so far, which resumes with the run, and one
measures them. Nothing of lmlib or the runner is edited."""

import fiddle as fdl
import jax
import numpy as np
import pytest
from small_experiment import small

from lmlib.experiment import PeriodicCallback
from runner import Options, fit
from runner.errors import StoppedEarly

pytestmark = pytest.mark.several_devices

TIMES = {
    *("tokens_per_second", "step_seconds", "data_wait_seconds", "goodput", "peak_memory_bytes"),
    *("process_memory_bytes", "device_memory_bytes", "cpu_cores", "gpu_utilization"),
}


class AverageWeights:
    """Keeps the exponential moving average of all weights in WORKDIR/average."""

    def __init__(self, decay):
        self.decay = decay

    def __call__(self, now):
        weights = [np.asarray(each) for each in jax.tree.leaves(jax.device_get(now.state.model))]
        folder = now.workdir / "average"
        folder.mkdir(exist_ok=True)
        if files := [file for file in folder.iterdir() if int(file.stem) < now.step]:
            with np.load(max(files, key=lambda file: int(file.stem))) as before:
                old = [before[name] for name in before.files]
            weights = [
                self.decay * a + (1 - self.decay) * b for a, b in zip(old, weights, strict=True)
            ]
        np.savez(folder / f"{now.step}.npz", *weights)
        now.tell(f"averaged after step {now.step}, of loss {now.metrics['loss']:.2f}")


def largest_weight(now):
    """A metric of its own, from arrays on all devices."""
    return {"largest_weight": max(abs(each).max() for each in jax.tree.leaves(now.state.model))}


def run(workdir, devices, stop=lambda step: False):
    cfg = small("steps=5", f"mesh.fsdp={devices}", "checkpoints.every=2", "compute.dtype=float32")
    average = fdl.Config(AverageWeights, decay=0.5)
    cfg.actions = [fdl.Config(PeriodicCallback, 2, average, at_end=True)]
    options = Options(stop=stop, actions=[PeriodicCallback(1, largest_weight)])
    lines = fit(cfg, workdir, options).metrics
    with np.load(workdir / "average" / "5.npz") as average:
        return [untimed(line) for line in lines], [average[name] for name in average.files]


def untimed(line):
    return {name: value for name, value in line.items() if name not in TIMES}


@pytest.mark.parametrize(("at_end", "expected"), [(False, [2, 4]), (True, [2, 4, 5])])
def test_an_action_is_due_every_so_many_steps(at_end, expected):
    every = PeriodicCallback(2, largest_weight, at_end)
    assert [step for step in range(1, 6) if every.due(step, last=step == 5)] == expected


@pytest.mark.slow
def test_actions_are_alike_on_any_mesh_and_after_any_stop(tmp_path, capsys):
    lines, average = run(tmp_path / "one", 1)
    assert all(line["largest_weight"] > 0 for line in lines)
    assert sorted(file.stem for file in (tmp_path / "one/average").iterdir()) == ["2", "4", "5"]
    assert "averaged after step 4, of loss" in capsys.readouterr().err
    many, average_of_many = run(tmp_path / "many", 8)
    for name in ("loss", "largest_weight"):
        found, expected = ([line[name] for line in each] for each in (many, lines))
        np.testing.assert_allclose(found, expected, rtol=1e-5)
    for found, expected in zip(average_of_many, average, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(StoppedEarly):
        run(tmp_path / "stopped", 8, stop=lambda step: step == 3)
    again, average_again = run(tmp_path / "stopped", 8)
    assert again == many
    assert all(map(np.array_equal, average_again, average_of_many))


def test_an_action_cannot_write_over_a_metric(tmp_path):
    options = Options(actions=[PeriodicCallback(1, lambda now: {"loss": 0.0})])
    with pytest.raises(ValueError, match="returns 'loss', which the step has already"):
        fit(small("steps=1"), tmp_path, options)
