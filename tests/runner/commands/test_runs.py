"""Commands that show runs: checkpoint, compare, ladder, coordinate_check, report, watch."""

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import pytest
from compiled_programs import XLA_FLAGS
from documented_world import write_ladder, write_sweep
from forked_processes import run_forked, succeeded
from made_up_runs import leave_files as leave_lines
from made_up_runs import leave_run, losses
from pseudo_terminal import run_on_terminal

from lmlib.checkpoint import Checkpoints
from lmlib.inspect.coordinates import LOOKED_AT
from runner.processes.lock import FolderLock


def command(*arguments):
    """Returns exit status, stdout and stderr."""
    return dataclasses.astuple(run_forked("-m", "runner.checkpoint", *map(str, arguments)))


@pytest.fixture
def workdir(tmp_path):
    state = {"weight": jnp.ones((3, 1024), jnp.bfloat16), "key": jax.random.key(0)}
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        for step in (1000, 2000, 3000):
            checkpoints.save(step, state, {"tokens": 7 * step})
            checkpoints.rank(step, 3e3 / step)
    return tmp_path


def test_list_and_show(workdir):
    (workdir / "checkpoints/4000.orbax-checkpoint-tmp").mkdir()
    (workdir / "checkpoints/2000/manifest.json").unlink()
    status, output, _ = command("list", workdir)
    lines = output.splitlines()
    assert status == 0
    assert lines[0].split() == ["step", "saved", "at", "size", "arrays", "metric"]
    assert lines[1].split()[0] == "1,000"
    assert lines[1].split()[-2:] == ["2", "3"]
    assert lines[2].split() == ["2,000", "damaged"]
    assert "2000 is damaged: manifest.json is missing" in lines[4]
    assert lines[5].startswith("4000.orbax-checkpoint-tmp is being saved")
    assert len(lines) == 6

    status, output, _ = command("show", workdir / "checkpoints")
    assert status == 0
    assert output.startswith("step 3,000, saved at ")
    assert ["weight", "bfloat16", "3", "×", "1024", "6.14", "KB"] in [
        line.split() for line in output.splitlines()
    ]
    assert ["key", "key<fry>", "scalar", "8", "B"] in [line.split() for line in output.splitlines()]
    assert '"tokens": 21000' in output


def test_verify_and_prune(workdir):
    assert command("verify", workdir)[0] == 0
    chunk = workdir / "checkpoints/3000/state/weight/0.0"
    chunk.write_bytes(b"\1" + chunk.read_bytes()[1:])
    status, output, _ = command("verify", workdir)
    assert status == 1
    verdicts = [line.split()[2].strip(",:") for line in output.splitlines()]
    assert verdicts == ["sound", "sound", "DAMAGED"]
    assert f"{workdir}/checkpoints/3000 is damaged: state/weight/0.0 has other bytes" in output
    assert command("verify", workdir, "--step=2000")[0] == 0

    status, _, errors = command("prune", workdir, "--keep=1")
    assert status == 2
    assert "step 2000 is the newest sound checkpoint, and --keep=1 would remove it" in errors
    assert len(list((workdir / "checkpoints").iterdir())) == 3
    status, output, _ = command("prune", workdir, "--keep=2")
    assert status == 0
    assert output.splitlines() == [f"removed {workdir}/checkpoints/1000", "kept 2,000, 3,000"]
    assert sorted(entry.name for entry in (workdir / "checkpoints").iterdir()) == ["2000", "3000"]


@pytest.mark.slow
def test_checkpoints_of_an_active_run_are_shown_and_not_removed(workdir):
    with FolderLock(workdir):
        assert command("list", workdir)[0] == command("verify", workdir)[0] == 0
        for folder in (workdir, workdir / "checkpoints"):
            status, _, errors = command("prune", folder, "--keep=1")
            assert status == 2
            assert f"{workdir} is in use by the run of" in errors
    assert len(list((workdir / "checkpoints").iterdir())) == 3


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    write_sweep(folder / "sweep")
    write_ladder(folder / "ladder")
    return folder


def test_a_sweep_is_compared_in_a_table_and_as_json(places):
    arguments = ("sweep", "--baseline=optimizer.peak_lr=1e-3", "--margin=0.01", "--json=out.json")
    ended = succeeded("-m", "runner.compare", *arguments, cwd=places)
    lines = [line.split() for line in ended.stdout.splitlines()]
    assert lines[0][0] == "optimizer.peak_lr" and lines[1][0] == "0.003" and "better" in lines[1]
    assert lines[2][0] == "0.001" and "baseline" in lines[2]
    content = json.loads((places / "out.json").read_text())
    assert [each["is_baseline"] for each in content["groups"]] == [False, True]
    assert content["margin"] == 0.01


def test_a_ladder_is_fitted_in_a_table_and_as_json(places):
    arguments = ("ladder", "--budget=1e19", "--json=law.json")
    ended = succeeded("-m", "runner.ladder", *arguments, cwd=places)
    assert "L = E + A/N^α + B/D^β, fitted to 9 runs" in ended.stdout
    assert "Best for 1e+19 FLOPs" in ended.stdout and "WARNING" not in ended.stdout
    numbers = json.loads((places / "law.json").read_text())["numbers"]
    expected = {"E": 1.7, "A": 400, "B": 400, "α": 0.34, "β": 0.28}
    found = {name: each["value"] for name, each in numbers.items()}
    assert found == pytest.approx(expected, rel=1e-2)


def test_an_unbounded_interval_end_is_null(places, tmp_path):
    """The loss falls once, and wavers: any greater scale would do with a greater exponent."""
    for number, loss in enumerate([4, 3.1, 3.0, 3.05, 2.97, 3.02]):
        sizes = {"parameters": 10**7, "tokens": 10**8 * 2**number, "steps": 10}
        leave_run(tmp_path / f"{number}", loss, {"data.batch_size": 2**number}, **sizes)
    ended = succeeded("-m", "runner.ladder", tmp_path, "--json=law.json", cwd=places)
    assert re.search("^B .* to inf$", ended.stdout, re.MULTILINE), ended.stdout
    assert json.loads((places / "law.json").read_text())["numbers"]["B"]["high"] is None


TRANSFER = "--fdl_config=experiments/transfer"


def test_a_wider_or_deeper_model_of_the_coordinate_check():
    base = {"embed": 64, "heads": 4, "mlp": 128, "layers": 2}
    code = f"""
from runner.coordinate_check.__main__ import model_arguments
print(model_arguments({base}, "width", 96), model_arguments({base}, "depth", 6))
"""
    wider, deeper = {"embed": 96, "heads": 6, "mlp": 192, "layers": 2}, {**base, "layers": 6}
    assert run_forked("-c", code).stdout == f"{wider} {deeper}\n"


@pytest.mark.slow
def test_coordinate_check_writes_a_table_a_picture_and_json(tmp_path):
    flags = [
        TRANSFER, "--fiddler=tiny", "--widths=32,64", "--depths=1,2", "--steps=2",
        "--fdl.data.batch_size=8",
        "--fdl.scaling.base={'embed': 64, 'heads': 4, 'mlp': 128, 'layers': 2}",
        f"--picture={tmp_path}/check.svg", f"--json={tmp_path}/check.json",
    ]  # fmt: skip
    environment = {"XLA_FLAGS": XLA_FLAGS}  # a device
    done = succeeded("-m", "runner.coordinate_check", *flags, environment=environment)
    assert all(name in done.stdout for name in LOOKED_AT) and "after 2 steps" in done.stdout
    rows = json.loads((tmp_path / "check.json").read_text())
    assert len(rows) == 2 * 2 * 2 * 4 * 2  # by, rule, size, looked at, step
    assert (tmp_path / "check.svg").read_text().startswith("<svg")


@pytest.mark.slow
def test_report_writes_a_page(tmp_path):
    leave_lines(tmp_path / "sweep/a", {"seed": 0, "steps": 2}, losses(3.0, 2.0))
    leave_lines(tmp_path / "sweep/b", {"seed": 1, "steps": 2}, losses(3.5, 2.5))
    done = run_forked("-m", "runner.report", tmp_path / "sweep")
    assert done.stdout == f"{tmp_path / 'sweep/report.html'}\n" and not done.returncode
    assert "2 runs" in (tmp_path / "sweep/report.html").read_text("utf-8")


@pytest.mark.parametrize("ended", ["diverged", "interrupted", ""])
def test_a_view_ends_when_no_run_is_active(tmp_path, ended):
    """Also where no run has finished; it says the state."""
    run = leave_lines(tmp_path / "a", {"steps": 9}, losses(3.0, 2.0), goodput={"steps": 1.0})
    kept = json.loads((run / "goodput.json").read_text())
    kept["starts"][-1] |= {"ended": ended, "reason": "64 updates"}
    (run / "goodput.json").write_text(json.dumps(kept))
    status, sent = run_on_terminal("-m", "runner.watch", str(run), "--terminal")
    assert status == 0 and f"a  {ended or 'not running'}, step 2 of 9" in sent


def test_a_view_is_written_to_a_pipe_once(tmp_path):
    run = leave_lines(tmp_path / "a", {"steps": 9}, losses(3.0, 2.0))
    done = run_forked("-m", "runner.watch", run, "--terminal")
    assert not done.returncode and done.stdout.startswith("a  not running, step 2 of 9\n")
