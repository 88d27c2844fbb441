"""clusters/skypilot.yaml: its command, as SkyPilot would start it on each of two machines, here."""

import os
import socket
import subprocess
import sys

import pytest
import yaml
from compiled_programs import XLA_FLAGS
from forked_processes import PATHS, ROOT, run_forked

TASK = yaml.safe_load((ROOT / "clusters/skypilot.yaml").read_text(encoding="utf-8"))
SECONDS = 300


def variables(rank, nodes):
    """Those by which SkyPilot tells a machine of the others."""
    addresses = "\n".join(["localhost"] * nodes)
    return {
        "SKYPILOT_NODE_IPS": addresses,
        "SKYPILOT_NUM_NODES": str(nodes),
        "SKYPILOT_NODE_RANK": str(rank),
    }


def arguments(rank, nodes):
    """What bash makes of the command."""
    shown = "python() { printf '%s\\n' \"$@\"; }\n" + TASK["run"]
    made = subprocess.run(
        ["bash", "-ec", shown], env=os.environ | variables(rank, nodes),
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return made.stdout.splitlines()


def test_its_command_has_the_flags_that_it_shows():
    dash_m, module, *flags = arguments(1, TASK["num_nodes"])
    assert (dash_m, module) == ("-m", "runner")
    assert "--coordinator=localhost:9876" in flags
    assert f"--num_processes={TASK['num_nodes']}" in flags and "--process_id=1" in flags
    ended = run_forked(ROOT / "tests/shared/check_flags.py", "runner", *flags)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.slow
def test_its_processes_train(tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    small = " --fiddler=tiny --fdl.steps=2 --fdl.model.layers=1 --fdl.validation=None"
    command = TASK["run"].rstrip().replace("gs://my-runs", str(tmp_path)).replace("9876", str(port))
    command = command.replace("python ", f"{sys.executable} ", 1) + small
    environment = os.environ | {
        "PYTHONPATH": PATHS,
        "XLA_FLAGS": f"--xla_force_host_platform_device_count=4 {XLA_FLAGS}",
    }
    machines = [
        subprocess.Popen(
            ["bash", "-ec", command],
            env=environment | variables(rank, 2),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [each.communicate(timeout=SECONDS)[0] for each in machines]
    finally:
        for each in machines:
            each.kill()
    assert [each.returncode for each in machines] == [0, 0], outputs
    assert "step 2/2" in outputs[0]
