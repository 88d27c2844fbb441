"""A SLURM cluster on this machine: its controller, and nodes at 127.0.0.1 and on."""

import datetime
import getpass
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

PROGRAMS = ("slurmctld", "slurmd", "srun", "sbatch", "scontrol", "sinfo", "scancel")
IS_HERE = all(shutil.which(program) for program in PROGRAMS)
_SECONDS = 300  # that anything may take
_MARK = "SLURM_OF_TEST_NODE"  # in the environment of a node's daemon and of its children
_CONFIG = """\
ClusterName=here
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={port}
AuthType=auth/none
CryptoType=crypto/none
CredType=cred/none
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/controller.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/controller.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SlurmdTimeout=10
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{nodes}
PartitionName=all Nodes=ALL Default=YES State=UP MaxTime=INFINITE PriorityTier=1 GraceTime=120
PartitionName=urgent Nodes=ALL State=UP MaxTime=INFINITE PriorityTier=2 PreemptMode=OFF
"""


class SlurmCluster:
    """A running cluster, to be stopped."""

    def __init__(self, folder: Path, nodes: int, environment: Mapping[str, str]):
        """Starts it in `folder` and waits until all nodes are idle; jobs also get `environment`."""
        self.folder = folder
        config = folder / "slurm.conf"
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        self.environment = {**os.environ, **environment, "SLURM_CONF": str(config), "PATH": path}
        self.names = [f"127.0.0.{number + 1}" for number in range(nodes)]
        port, *ports = _free_ports(nodes + 1)
        described = [
            f"NodeName={name} Port={port} CPUs={os.cpu_count()}"
            for name, port in zip(self.names, ports, strict=True)
        ]
        config.write_text(
            _CONFIG.format(
                port=port, user=getpass.getuser(), folder=folder, nodes="\n".join(described)
            )
        )
        (folder / "state").mkdir()
        self._daemons = [self._daemon("slurmctld", "-D")]
        for name in self.names:
            (folder / f"spool.{name}").mkdir()
            self.start_node(name)

    def start_node(self, name: str) -> None:
        self._daemons.append(self._daemon("slurmd", "-D", "-N", name, **{_MARK: name}))
        self.wait_until(lambda: "idle" in self.run("sinfo", "-h", "-n", name, "-o", "%T"))

    def kill_node(self, name: str) -> None:
        """At once, with all that runs on it."""
        for process, environment in _environments():
            if environment.get("SLURMD_NODENAME") == name or environment.get(_MARK) == name:
                os.kill(process, signal.SIGKILL)

    def run(self, *command: str) -> str:
        """Returns the output of a command, which must succeed."""
        done = subprocess.run(
            command, cwd=self.folder, env=self.environment, capture_output=True, text=True,
            check=False, timeout=_SECONDS,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    def submit(self, *arguments: str) -> str:
        """The number of the job that sbatch makes of its arguments."""
        return self.run("sbatch", "--parsable", *arguments).strip()

    def job(self, number: str) -> dict[str, str]:
        """Returns SLURM's fields of a job: "JobState", "Restarts" and more."""
        return dict(re.findall(r"(\w+)=(\S*)", self.run("scontrol", "show", "job", number)))

    def hurried(self, number: str) -> dict[str, str]:
        """Returns `job`, and starts a requeued job within seconds instead of two minutes.

        A node may still be about to kill the job if it started at once.
        """
        job = self.job(number)
        starts = job.get("StartTime", "Unknown")  # while the job is being put back
        if job["JobState"] == "PENDING" and job["Restarts"] != "0" and starts != "Unknown":
            wait = datetime.datetime.fromisoformat(starts) - datetime.datetime.now()
            if wait > datetime.timedelta(seconds=10):
                self.run("scontrol", "update", f"JobId={number}", "StartTime=now+3")
        return job

    def finished(self, number: str) -> dict[str, str]:
        """The same once the job has ended for good."""
        ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")
        self.wait_until(lambda: self.hurried(number)["JobState"] in ended)
        return self.job(number)

    def stop(self) -> None:
        self.run("scancel", "--user", getpass.getuser())
        for name in self.names:
            self.kill_node(name)
        for daemon in self._daemons:
            daemon.kill()
            daemon.wait()

    def _daemon(self, *command: str, **variables: str) -> subprocess.Popen:
        output = (self.folder / "daemons.out").open("a")
        return subprocess.Popen(
            command, env=self.environment | variables, stdout=output, stderr=output
        )

    def wait_until(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + _SECONDS
        while not condition():
            assert time.monotonic() < end, (self.folder / "controller.log").read_text()[-3_000:]
            time.sleep(0.2)


def _free_ports(count: int) -> list[int]:
    taken = [socket.socket() for _ in range(count)]
    for each in taken:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in taken]
    for each in taken:
        each.close()
    return ports


def _environments():
    """Yields the number and the variables of each process of this user."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            content = (entry / "environ").read_bytes().decode(errors="replace")
        except OSError:  # of somebody else, or gone
            continue
        yield (
            int(entry.name),
            dict(each.split("=", 1) for each in content.split("\0") if "=" in each),
        )
