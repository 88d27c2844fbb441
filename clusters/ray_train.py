"""Trains on a Ray cluster, one process per host, and restarts after the loss of a host.

    python clusters/ray_train.py --hosts=4 --gpus=8 --fdl_config=experiments/llama_1b \
      --workdir=/shared/runs/llama_1b

Flags that are not listed below go to `python -m runner`. A restart resumes from the newest
checkpoint. All hosts have lmlib installed and see the workdir at the same path. Needs lmlib[ray].
"""

import argparse
import functools
import os
import signal
import socket
import subprocess
import sys
import threading
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

# Exit codes of the runner. After the first three a restart would be useless or unwanted. A lost
# host counts like a process that lost another one.
FINISHED, MISTAKE, STOPPED, LOST = 0, 2, 75, 3


@ray.remote(max_restarts=0, max_concurrency=2)  # `stop` is called while `run` waits
class Host:
    """A host of the run, with all its accelerators."""

    process: subprocess.Popen[bytes] | None = None
    stopped = False

    def address(self) -> str:
        """Returns the address of this host with a free port."""
        with socket.socket() as free:
            free.bind(("", 0))
            return f"{ray.util.get_node_ip_address()}:{free.getsockname()[1]}"

    def run(self, folder: str, arguments: list[str]) -> int:
        """Runs the runner and returns its exit code; Ray shows its output."""
        if self.stopped:
            return STOPPED
        command = [sys.executable, "-m", "runner", *arguments]
        self.process = subprocess.Popen(command, cwd=folder, stdin=subprocess.DEVNULL)
        return self.process.wait()

    def stop(self) -> None:
        self.stopped = True
        if self.process is not None:
            self.process.send_signal(signal.SIGTERM)


def placed(flags: argparse.Namespace) -> PlacementGroup:
    """Reserves the requested hosts, or fewer if they are not available after `wait_seconds`."""
    each = {"CPU": flags.cpus, "GPU": flags.gpus, "TPU": flags.tpus}
    bundle = {name: amount for name, amount in each.items() if amount}
    for hosts in range(flags.hosts, flags.fewest - 1, -1):
        group = placement_group([bundle] * hosts, strategy="STRICT_SPREAD")
        seconds = flags.wait_seconds if hosts == flags.hosts else 5
        # short waits, so that signals are handled in between
        if any(group.wait(1) for _ in range(seconds)):
            return group
        remove_placement_group(group)
    raise SystemExit(
        f"error: within {flags.wait_seconds} s Ray had no {flags.fewest} hosts with {bundle}; "
        f"it has {ray.available_resources()}"
    )


def started(group: PlacementGroup, flags: argparse.Namespace) -> list[Any]:
    """Starts the hosts of `group`."""
    return [
        Host.options(
            num_cpus=flags.cpus,
            num_gpus=flags.gpus,
            resources={"TPU": flags.tpus} if flags.tpus else None,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, index),
        ).remote()
        for index in range(group.bundle_count)
    ]


def exit_code(running: Any) -> int:
    """Returns the exit code of a host's runner, or of a lost process if the host is gone."""
    try:
        return ray.get(running)
    except ray.exceptions.RayError as error:
        print(f"a host is lost: {str(error).strip().splitlines()[0]}", file=sys.stderr)
        return LOST


def run(hosts: list[Any], arguments: list[str]) -> list[int]:
    """Runs all processes once; returns their exit codes."""
    try:
        coordinator = ray.get(hosts[0].address.remote())
    except ray.exceptions.RayError:
        return [LOST]
    many = [f"--coordinator={coordinator}", f"--num_processes={len(hosts)}"]
    running = [
        host.run.remote(os.getcwd(), [*arguments, *many, f"--process_id={index}"])
        for index, host in enumerate(hosts)
    ]
    return [exit_code(each) for each in running]


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False, formatter_class=raw)
    add = functools.partial(parser.add_argument, type=int)
    add("--hosts", required=True, help="each with one process of the run")
    add("--fewest", help="hosts to go on with where no more are there; by default all of them")
    add("--gpus", default=0, help="of each host")
    add("--tpus", default=0, help="chips of each host")
    add("--cpus", default=1, help="that Ray counts for each host")
    add("--wait_seconds", default=600, help="for hosts, at each start")
    add("--restarts", default=20, help="after hosts or processes died")
    parser.add_argument("--address", default="auto", help="of the cluster")
    flags, arguments = parser.parse_known_args()
    flags.fewest = flags.hosts if flags.fewest is None else flags.fewest
    if not 1 <= flags.fewest <= flags.hosts:
        parser.error(f"--fewest={flags.fewest}: from 1 to --hosts, which is {flags.hosts}")
    # A remaining process of the previous start holds the workdir until its heartbeat expires.
    arguments = ["--lock_seconds=300", *arguments]
    ray.init(address=flags.address)
    asked_to_stop = threading.Event()
    hosts: list[Any] = []

    def stop(*_: Any) -> None:
        asked_to_stop.set()
        if not hosts:
            raise SystemExit(STOPPED)
        for host in hosts:  # the processes agree on a step
            host.stop.remote()

    signal.signal(signal.SIGTERM, stop)  # after Ray's own
    signal.signal(signal.SIGINT, stop)
    for restart in range(flags.restarts + 1):
        print(f"waiting for {flags.hosts} hosts", file=sys.stderr)
        group = placed(flags)
        hosts[:] = started(group, flags)
        print(f"start {restart + 1}: {len(hosts)} of {flags.hosts} hosts", file=sys.stderr)
        codes = run(hosts, arguments)
        hosts.clear()
        remove_placement_group(group)
        if set(codes) == {FINISHED}:
            return FINISHED
        if MISTAKE in codes:
            return MISTAKE
        if STOPPED in codes or asked_to_stop.is_set():
            return STOPPED
        print(f"ended with exit codes {codes}", file=sys.stderr)
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
