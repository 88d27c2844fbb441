"""What JAX says of processes that are missed, as it says it now, and what is made of it."""

import os
import signal
import socket
import subprocess
import sys

import pytest

from runner.processes.endings import PEER_ENDED, ending
from runner.processes.jax_messages import detects_nothing

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


def missed(missing, how):
    """What the other of two processes writes when `missing` ends or stays away; its exit code."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    both = [
        subprocess.Popen([sys.executable, "-c", PROCESS, address, str(n)], text=True, **pipes)
        for n in range(2)
    ]
    try:
        assert [each.stdout.readline() for each in both] == ["joined\n"] * 2
        other = both[1 - missing]
        if how in SIGNALS:
            both[missing].send_signal(SIGNALS[how])
            written = other.stderr.read()
            other.wait()
        else:  # comes not to the end
            _, written = other.communicate("\n")
        return written, other.returncode
    finally:
        for each in both:
            each.kill()
            each.communicate()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("missing", "how", "message"),
    [
        (1, "killed", "process 0 ends because process 1 ended or stopped answering"),
        (0, "killed", "process 1 ends because process 0, the coordinator, ended"),
        pytest.param(
            *(0, "stopped", "process 1 ends because process 0, the coordinator, ended, stopped"),
            marks=pytest.mark.slow,
        ),
        (1, "waits", "process 0 ends because process 1 did not come to a barrier in time"),
    ],
)
def test_who_was_missed_is_found_in_what_jax_writes(missing, how, message):
    written, returncode = missed(missing, how)
    assert returncode == -signal.SIGABRT, written
    told = ending(returncode, written, 1 - missing, True, heartbeat_seconds=4, startup_seconds=60)
    assert told.exit_code == PEER_ENDED
    assert message in told.message, written


def test_jax_says_that_it_detects_no_processes():
    ended = subprocess.run(
        [sys.executable, "-c", NOTHING], capture_output=True, text=True, env=os.environ
    )
    assert ended.returncode == 1
    assert detects_nothing(RuntimeError(ended.stderr)), ended.stderr
