"""A run whose node is lost goes on with the nodes that are left, and with all once it is back."""

import re
import signal

import pytest
from several_processes import STEPS, SeveralProcesses, assert_same_curve

from lmlib.metrics.log import read_metrics
from runner.command_line.exit_status import PEER_ENDED, STOPPED

# A device for each process; four and three of them share the rows and the weights.
FLAGS = ("--fdl.mesh.tensor=1", "--fdl.data.batch_size=12", "--fdl.validation.batch_size=12",
         "--fdl.model.embed=48", "--fdl.model.mlp=96")  # fmt: skip


def start(processes, workdir, outputs):
    return SeveralProcesses(processes, workdir, outputs, devices=processes, flags=FLAGS)


@pytest.mark.slow
def test_four_then_three_then_four_make_the_curve_of_one(tmp_path):
    workdir, outputs = tmp_path / "run", tmp_path / "outputs"
    run = start(4, workdir, outputs / "four")
    run.wait_for_lines(workdir, 7)
    run.running[3].send_signal(signal.SIGKILL)
    assert run.exit_codes() == [PEER_ENDED] * 3 + [-signal.SIGKILL], run.everything()

    left = start(3, workdir, outputs / "three")
    left.wait_for_lines(workdir, 14)
    left.running[0].send_signal(signal.SIGTERM)
    assert left.exit_codes() == [STOPPED] * 3, left.everything()
    stopped = len(read_metrics(workdir))
    assert 14 <= stopped < STEPS

    again = start(4, workdir, outputs / "again").finished()
    assert re.search(r"resuming after step 5 of 30", left.output(0))
    assert f"resuming after step {stopped} of {STEPS}" in again.output(0)
    start(1, tmp_path / "alone", outputs / "one").finished()
    assert_same_curve(workdir, tmp_path / "alone")
