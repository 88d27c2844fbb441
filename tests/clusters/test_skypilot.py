"""clusters/skypilot.yaml: its command, as SkyPilot would start it on each of two machines, here."""

import os
import subprocess

import yaml
from forked_processes import ROOT, succeeded

TASK = yaml.safe_load((ROOT / "clusters/skypilot.yaml").read_text(encoding="utf-8"))


def variables(rank, nodes):
    """Those by which SkyPilot tells a machine of the others."""
    addresses = "\n".join(["localhost"] * nodes)
    return {
        "SKYPILOT_NODE_IPS": addresses,
        "SKYPILOT_NUM_NODES": str(nodes),
        "SKYPILOT_NODE_RANK": str(rank),
    }


def arguments(rank, nodes):
    """Returns the arguments into which bash splits the command."""
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
    succeeded(ROOT / "tests/shared/check_flags.py", "runner", *flags)
