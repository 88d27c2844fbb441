"""Processes that are lost: what JAX says of them, and the run that goes on with those left."""

import io
import os
import re
import signal
import socket

import pytest
from forked_processes import SECONDS, ForkedProcess, run_forked
from several_processes import STEPS, SeveralProcesses, assert_same_curve

from lmlib.metrics.log import read_metrics
from runner.command_line.exit_status import PEER_ENDED, STOPPED
from runner.processes.endings import detects_nothing, ending

PROCESS = """
import sys, jax
address, process = sys.argv[1], int(sys.argv[2])
jax.distributed.initialize(
    address, 2, process, cluster_detection_method="deactivate",
    heartbeat_timeout_seconds=4, shutdown_timeout_seconds=2,
)
print("joined", flush=True)
sys.stdin.readline()
jax.distributed.shutdown()
"""
SIGNALS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}
NOTHING = "import jax\njax.distributed.initialize(cluster_detection_method='deactivate')"


def missed(missing, how, folder):
    """What the other of two processes writes when `missing` ends or stays away; its exit code."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    both, asked, told = [], [], []
    for n in range(2):
        (stdin, question), (answer, stdout) = os.pipe(), os.pipe()
        asked.append(question), told.append(answer)
        with (folder / str(n)).open("w") as file:
            process = ForkedProcess(
                *("-c", PROCESS, address, str(n)), stdin=stdin, stdout=stdout, stderr=file
            )
        both.append(process)
        os.close(stdin), os.close(stdout)
    other = 1 - missing
    try:
        assert [io.FileIO(each, closefd=False).readline() for each in told] == [b"joined\n"] * 2
        if how in SIGNALS:
            both[missing].send_signal(SIGNALS[how])
        else:  # comes not to the end
            os.write(asked[other], b"\n")
        returncode = both[other].wait(SECONDS)
        return (folder / str(other)).read_text(), returncode
    finally:
        for process in both:
            process.kill()
        for end in (*asked, *told):
            os.close(end)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("missing", "how", "message"),
    [
        (1, "killed", "process 0 ends because process 1 ended or stopped answering"),
        (0, "killed", "process 1 ends because process 0, the coordinator, ended"),
        (0, "stopped", "process 1 ends because process 0, the coordinator, ended, stopped"),
        (1, "waits", "process 0 ends because process 1 did not come to a barrier in time"),
    ],
)
def test_who_was_missed_is_found_in_what_jax_writes(missing, how, message, tmp_path):
    written, returncode = missed(missing, how, tmp_path)
    assert returncode == -signal.SIGABRT, written
    told = ending(
        returncode, written, 1 - missing, True, True, heartbeat_seconds=4, startup_seconds=60
    )
    assert told.exit_code == PEER_ENDED
    assert message in told.message, written


def test_jax_says_that_it_detects_no_processes():
    ended = run_forked("-c", NOTHING)
    assert ended.returncode == 1
    assert detects_nothing(RuntimeError(ended.stderr)), ended.stderr


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
