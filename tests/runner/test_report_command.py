"""`python -m runner.report` and `runner.watch` through the command line."""

import json

import pytest
from forked_processes import run_forked
from left_runs import leave_run, losses
from pseudo_terminal import run_on_terminal


@pytest.mark.slow
def test_a_page_and_mistakes(tmp_path):
    leave_run(tmp_path / "sweep/a", {"seed": 0, "steps": 2}, losses(3.0, 2.0))
    leave_run(tmp_path / "sweep/b", {"seed": 1, "steps": 2}, losses(3.5, 2.5))
    done = run_forked("-m", "runner.report", tmp_path / "sweep")
    assert done.stdout == f"{tmp_path / 'sweep/report.html'}\n" and not done.returncode
    assert "2 runs" in (tmp_path / "sweep/report.html").read_text("utf-8")
    for arguments, told in {
        (): "give the runs, as in",
        (tmp_path / "none",): f"there is no run in {tmp_path / 'none'}",
        (tmp_path / "sweep", "--to=a", "--pictures=b"): "give --to or --pictures, not both",
        (tmp_path / "sweep", "--baseline=a"): "give --baseline and --margin together",
        (tmp_path / "sweep", "--pictures=b", "--metrics=lss"): "no curve of 'lss'; there are loss",
        (tmp_path / "sweep", "--to=/dev/null/page.html"): "/dev/null",
    }.items():
        done = run_forked("-m", "runner.report", *arguments, cwd=tmp_path)
        assert done.returncode == 2 and done.stderr.startswith("error: "), done.stderr
        assert told in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize("ended", ["diverged", "interrupted", ""])
def test_a_view_ends_once_no_run_goes_on(tmp_path, ended):
    """Also where no run has finished; it says the state."""
    run = leave_run(tmp_path / "a", {"steps": 9}, losses(3.0, 2.0), goodput={"steps": 1.0})
    kept = json.loads((run / "goodput.json").read_text())
    kept["starts"][-1] |= {"ended": ended, "reason": "64 updates"}
    (run / "goodput.json").write_text(json.dumps(kept))
    status, sent = run_on_terminal("-m", "runner.watch", str(run), "--terminal")
    assert status == 0 and f"a  {ended or 'not running'}, step 2 of 9" in sent


def test_a_view_goes_into_a_pipe_once(tmp_path):
    run = leave_run(tmp_path / "a", {"steps": 9}, losses(3.0, 2.0))
    done = run_forked("-m", "runner.watch", run, "--terminal")
    assert not done.returncode and done.stdout.startswith("a  not running, step 2 of 9\n")
    done = run_forked("-m", "runner.watch", tmp_path / "none")
    assert done.returncode == 2 and "there is no run in" in done.stderr
