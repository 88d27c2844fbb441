"""Own actions and sinks of metrics: an average of the weights and a table resume with their run, a
measure of the weights is in both, and a sink fails. Nothing of lmlib or the runner is edited."""

import json

import fiddle as fdl
import jax
import numpy as np
import pytest
from small_experiment import small
from states import without_times

from lmlib.experiment import PeriodicCallback
from runner import Options, fit
from runner.errors import StoppedEarly

pytestmark = pytest.mark.several_devices


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


@pytest.mark.parametrize(("at_end", "expected"), [(False, [2, 4]), (True, [2, 4, 5])])
def test_an_action_is_due_every_so_many_steps(at_end, expected):
    every = PeriodicCallback(2, largest_weight, at_end)
    assert [step for step in range(1, 6) if every.due(step, last=step == 5)] == expected


def test_an_action_cannot_write_over_a_metric(tmp_path):
    options = Options(actions=[PeriodicCallback(1, lambda now: {"loss": 0.0})])
    with pytest.raises(ValueError, match="returns 'loss', which the step has already"):
        fit(small("steps=1"), tmp_path, options)


class Table:
    """WORKDIR/NAME, a step and a column a line."""

    def __init__(self, workdir, first_step, name="table"):
        path = workdir / name
        lines = path.read_text().splitlines() if path.exists() else []
        kept = [line for line in lines if int(line.split()[0]) < first_step]
        self.file = path.open("w")
        self.file.writelines(f"{line}\n" for line in kept)

    def write(self, step, metrics):
        for name, value in metrics.items():
            self.file.write(f"{step} {name} {json.dumps(value)}\n")

    def close(self):
        self.file.close()


class Failing:
    """A service that is gone after the second step."""

    def __init__(self, workdir, first_step):
        self.closed = False

    def write(self, step, metrics):
        if step > 2:
            raise RuntimeError("no route to the service")

    def close(self):
        raise AssertionError("a sink that has failed is left alone")


def run(workdir, devices, stop=lambda step: False):
    """The metrics of five steps, which the table has too, and the average of the weights."""
    cfg = small("steps=5", f"mesh.fsdp={devices}", "checkpoints.every=2", "compute.dtype=float32")
    average = fdl.Config(AverageWeights, decay=0.5)
    cfg.actions = [fdl.Config(PeriodicCallback, 2, average, at_end=True)]
    cfg.sinks = [fdl.Partial(Table, name="table.txt")]
    actions = [PeriodicCallback(1, largest_weight)]
    metrics = fit(cfg, workdir, Options(stop=stop, actions=actions, sinks=[Failing])).metrics
    rows: dict = {}
    for line in (workdir / "table.txt").read_text().splitlines():
        step, name, value = line.split()
        rows.setdefault(int(step), {})[name] = json.loads(value)
    assert metrics == [{"step": step, **values} for step, values in rows.items()]
    with np.load(workdir / "average" / "5.npz") as average:
        return without_times(metrics), [average[name] for name in average.files]


@pytest.mark.landing
def test_actions_and_sinks_are_alike_on_any_mesh_and_after_any_stop(tmp_path, capsys):
    lines, average = run(tmp_path / "one", 1)
    assert all(line["largest_weight"] > 0 for line in lines)
    assert sorted(file.stem for file in (tmp_path / "one/average").iterdir()) == ["2", "4", "5"]
    many, average_of_many = run(tmp_path / "many", 8)
    told = capsys.readouterr().err
    assert told.count("averaged after step 4, of loss") == 2
    assert told.count("WARNING: Failing gets no more metrics: RuntimeError: no route to") == 2
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


def test_a_sink_that_cannot_be_opened_ends_no_run(tmp_path, capsys):
    (tmp_path / "table").mkdir()
    metrics = fit(small("steps=1"), tmp_path, Options(sinks=[Table])).metrics
    assert [line["step"] for line in metrics] == [1]
    assert "WARNING: Table gets no more metrics: IsADirectoryError" in capsys.readouterr().err
