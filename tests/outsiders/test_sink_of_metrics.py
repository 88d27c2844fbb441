"""Own sinks of metrics: a table that resumes with its run, and one that fails. Nothing of lmlib or
the runner is edited."""

import json

import fiddle as fdl
import numpy as np
import pytest
from small_experiment import small

from runner import Options, fit
from runner.errors import StoppedEarly

pytestmark = pytest.mark.several_devices

TIMES = {
    *("tokens_per_second", "step_seconds", "data_wait_seconds", "goodput", "peak_memory_bytes"),
    *("process_memory_bytes", "device_memory_bytes", "cpu_cores", "gpu_utilization"),
}


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
        raise AssertionError("what has failed is left alone")


def run(workdir, devices, stop=lambda step: False):
    cfg = small("steps=5", f"mesh.fsdp={devices}", "checkpoints.every=2", "compute.dtype=float32")
    cfg.sinks = [fdl.Partial(Table, name="table.txt")]
    metrics = fit(cfg, workdir, Options(stop=stop, sinks=[Failing])).metrics
    rows: dict = {}
    for line in (workdir / "table.txt").read_text().splitlines():
        step, name, value = line.split()
        rows.setdefault(int(step), {})[name] = json.loads(value)
    assert metrics == [{"step": step, **values} for step, values in rows.items()]
    return [{name: row[name] for name in row if name not in TIMES} for row in rows.values()]


@pytest.mark.landing
def test_a_sink_has_what_metrics_jsonl_has_on_any_mesh_and_after_any_stop(tmp_path, capsys):
    one, many = run(tmp_path / "one", 1), run(tmp_path / "many", 8)
    np.testing.assert_allclose([r["loss"] for r in many], [r["loss"] for r in one], rtol=1e-5)
    told = capsys.readouterr().err
    assert told.count("WARNING: Failing gets no more metrics: RuntimeError: no route to") == 2
    with pytest.raises(StoppedEarly):
        run(tmp_path / "stopped", 8, stop=lambda step: step == 3)
    assert run(tmp_path / "stopped", 8) == many


def test_a_sink_that_cannot_be_opened_ends_no_run(tmp_path, capsys):
    (tmp_path / "table").mkdir()
    metrics = fit(small("steps=1"), tmp_path, Options(sinks=[Table])).metrics
    assert [line["step"] for line in metrics] == [1]
    assert "WARNING: Table gets no more metrics: IsADirectoryError" in capsys.readouterr().err
