"""A run through the real command line, started again and again in one workdir."""

import contextlib
import dataclasses
import errno
import os
import re
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from folder_contents import files_of
from forked_processes import ROOT, ForkedProcess, free_port, fresh_process

from fault_injection import experiment
from fault_injection.kinds import EVERYTHING, Kind
from lmlib.metrics.log import read_metrics

DEVICES = 8
POLL_SECONDS = 0.002
LONGEST_LOOK = 1.0  # seconds from one look to the next
LIMIT_SECONDS = 300.0  # for whatever is waited for
HEARTBEAT_SECONDS = 10  # of several processes

# What the runner says when it has come so far.
READY = "saved activations"
RESUMED = r"resuming after step ([\d,]+) of|this run has already finished all its ([\d,]+) steps"
COMPILED = "compiled the step in"
FULL = os.strerror(errno.EFBIG)  # for what `limit_file_sizes` makes impossible

PROGRAMS = "programs"  # the folder of what was compiled, in `scratch`
UNFINISHED = re.compile(r"(\d+)\.orbax-checkpoint-tmp-[0-9a-f]{8}")

Process = subprocess.Popen[bytes] | ForkedProcess


class HangError(Exception):
    """What was waited for did not come in time."""


class Limit:
    """Of waiting, in seconds in which this process looked: it may be held meanwhile."""

    def __init__(self, seconds: float):
        self._left, self._looked_at = seconds, time.monotonic()

    def is_over(self) -> bool:
        now = time.monotonic()
        self._left -= min(now - self._looked_at, LONGEST_LOOK)
        self._looked_at = now
        return self._left < 0


class Attempt:
    """The processes of one start, until they end. What each writes goes to one of `files`."""

    def __init__(self, job: "Job", processes: list[Process], files: list[Path]):
        self.job = job
        self.processes = processes
        self.files = files
        self._began = time.monotonic()

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self._began

    def output(self, process: int = 0) -> str:
        """All that it has written so far."""
        return self.files[process].read_text(errors="replace")

    def says(self, text: str) -> bool:
        """Whether process 0 has written it."""
        return text in self.output()

    @property
    def resumed_step(self) -> int | None:
        """The step that it goes on from; `None` if it begins anew, or does not say yet."""
        found = re.search(RESUMED, self.output())
        return int((found[1] or found[2]).replace(",", "")) if found else None

    @property
    def trains(self) -> bool:
        """Whether metrics.jsonl is that of this attempt by now."""
        return self.says(COMPILED)

    @property
    def ended(self) -> bool:
        """Whether one of its processes has ended."""
        return any(process.poll() is not None for process in self.processes)

    def wait_until(self, condition: Callable[[], bool]) -> bool:
        """Whether `condition` came to hold before a process ended; polled.

        Raises HangError after `LIMIT_SECONDS`; then nothing is left running.
        """
        limit = Limit(LIMIT_SECONDS)
        while not condition():
            if self.ended:
                return False
            self._check(limit)
            time.sleep(POLL_SECONDS)
        return True

    def wait_for_checkpoint(self) -> bool:
        """Whether a new one became whole before a process ended."""
        newest = self.job.newest_checkpoint() or 0
        return self.wait_until(lambda: (self.job.newest_checkpoint() or 0) > newest)

    def exit_codes(self, limit_seconds: float = LIMIT_SECONDS) -> list[int]:
        """Those of all processes, once they have ended. Raises HangError after the limit."""
        limit = Limit(limit_seconds)
        while any(process.poll() is None for process in self.processes):
            self._check(limit)
            time.sleep(POLL_SECONDS)
        return [process.returncode for process in self.processes]

    def send(self, number: signal.Signals, process: int = 0) -> None:
        self.processes[process].send_signal(number)

    def limit_file_sizes(self, size: int, process: int = 0) -> None:
        """From now on no file may grow beyond `size` bytes, as on a full disk; Linux only."""
        with contextlib.suppress(ProcessLookupError):
            limits = size, resource.RLIM_INFINITY
            resource.prlimit(self.processes[process].pid, resource.RLIMIT_FSIZE, limits)

    def kill(self) -> None:
        """Ends all with SIGKILL."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()

    def _check(self, limit: Limit) -> None:
        if limit.is_over():
            self.kill()
            raise HangError(f"nothing came of this in its time:\n{self.output()[-3000:]}")


@dataclasses.dataclass(frozen=True)
class Job:
    """A run in `scratch/name`; `Kind.prepare` made `scratch`, where its processes print too."""

    scratch: Path
    name: str
    overrides: tuple[str, ...] = ()
    processes: int = 1
    kind: Kind = EVERYTHING

    @property
    def workdir(self) -> Path:
        return self.scratch / self.name

    @property
    def checkpoints(self) -> Path:
        return self.workdir / "checkpoints"

    def start(self, *, beside_another: bool = False, fresh: bool = False) -> Attempt:
        """Starts the run, or goes on with it; `fresh`: as `fresh_process` does."""
        if not beside_another:
            self._restore_programs()
        address = f"localhost:{free_port()}" if self.processes > 1 else None
        commands = [("runner", *self._arguments(address, n)) for n in range(self.processes)]
        return self._begun("output", commands, fresh_process if fresh else ForkedProcess)

    def prune(self, keep: int) -> Attempt:
        """Starts `runner.checkpoint prune`."""
        command = ("runner.checkpoint", "prune", str(self.workdir), f"--keep={keep}")
        return self._begun("prune", [command], ForkedProcess)

    def _begun(
        self, what: str, commands: list[tuple[str, ...]], begin: Callable[..., Process]
    ) -> Attempt:
        number = sum(1 for _ in self.scratch.glob(f"{self.name}.*.{what}.0"))
        files = [self.scratch / f"{self.name}.{number}.{what}.{n}" for n in range(len(commands))]
        started = []
        for path, command in zip(files, commands, strict=True):
            with path.open("wb") as output:
                started.append(
                    begin(
                        *("-m", *command),
                        stdout=output,
                        stderr=output,
                        cwd=self.scratch,
                        environment=self._environment(),
                    )
                )
        return Attempt(self, started, files)

    def keep_programs(self) -> None:
        """What was compiled up to now is not compiled again by later attempts of any such job.

        Call it once an attempt has ended undisturbed: JAX does not write programs atomically.
        """
        shutil.copytree(self._programs, self._kept_programs)

    def another(self, scratch: Path) -> "Job":
        """A run that begins as this one did, in the new folder `scratch`, with its programs."""
        own = shutil.ignore_patterns(f"{self.name}*", PROGRAMS)
        shutil.copytree(self.scratch, scratch, ignore=own)
        return Job(scratch, "run", processes=self.processes, kind=self.kind)

    def whole_checkpoints(self) -> list[int]:
        """Their steps, by the names of their folders alone."""
        return sorted(int(folder.name) for folder in self._folders() if folder.name.isdecimal())

    def newest_checkpoint(self) -> int | None:
        """Its step; it may be damaged."""
        return max(self.whole_checkpoints(), default=None)

    def unfinished_checkpoint(self) -> Path | None:
        """The folder of one that is being saved, or was when the run was killed."""
        found = [folder for folder in self._folders() if UNFINISHED.fullmatch(folder.name)]
        return found[0] if found else None

    def last_step(self) -> int:
        """That of the last whole line of metrics.jsonl; 0 if there is none."""
        # A run that resumes shortens the file, perhaps while it is read here.
        lines = read_metrics(self.workdir)
        return lines[-1]["step"] if lines else 0

    def files(self) -> dict[str, bytes]:
        """The content of each file of the run but its logs and its lock, by its path."""
        content = files_of(self.workdir)
        return {
            name: content[name]
            for name in content
            if not name.startswith("logs/") and name != "lock"
        }

    def _folders(self) -> Iterable[Path]:
        return self.checkpoints.iterdir() if self.checkpoints.is_dir() else ()

    @property
    def _programs(self) -> Path:
        return self.scratch / PROGRAMS

    @property
    def _kept_programs(self) -> Path:
        return self._programs.with_suffix(".kept")

    def _restore_programs(self) -> None:
        if self._kept_programs.exists():
            shutil.rmtree(self._programs, ignore_errors=True)
            shutil.copytree(self._kept_programs, self._programs)

    def _arguments(self, address: str | None, process: int) -> list[str]:
        several = [
            f"--coordinator={address}",
            f"--num_processes={self.processes}",
            f"--process_id={process}",
            f"--heartbeat_seconds={HEARTBEAT_SECONDS}",
        ]
        return [
            f"--fdl_config={experiment.__file__}",
            *([f"--fiddler={self.kind.fiddler}"] if self.kind.fiddler else []),
            f"--workdir={self.workdir}",
            *(f"--fdl.{override}" for override in self.overrides),
            *(several if address else []),
        ]

    def _environment(self) -> dict[str, str]:
        return {
            "PYTHONPATH": str(ROOT),
            "PYTHONUNBUFFERED": "1",
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES // self.processes} "
            "--xla_backend_optimization_level=1",
            "JAX_COMPILATION_CACHE_DIR": PROGRAMS,  # relative: the keys depend on it
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }


def step_of(unfinished: Path) -> int:
    """The step of a checkpoint that is being saved."""
    found = UNFINISHED.fullmatch(unfinished.name)
    assert found
    return int(found[1])
