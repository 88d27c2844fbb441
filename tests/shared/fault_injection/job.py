"""A run through the real command line, started again and again in one workdir."""

import contextlib
import dataclasses
import errno
import os
import re
import resource
import shutil
from collections.abc import Iterable
from pathlib import Path

from folder_contents import files_of
from forked_processes import ROOT
from started import Started, flags_of, free_address

from fault_injection import experiment
from fault_injection.kinds import EVERYTHING, Kind
from lmlib.metrics.log import read_metrics

DEVICES = 8

# Messages of the runner at several stages.
READY = "saved activations"
RESUMED = r"resuming after step ([\d,]+) of|this run has already finished all its ([\d,]+) steps"
COMPILED = "compiled the step in"
FULL = os.strerror(errno.EFBIG)  # the error that `limit_file_sizes` causes

PROGRAMS = "programs"  # the folder of compiled programs, in `scratch`
UNFINISHED = re.compile(r"(\d+)\.orbax-checkpoint-tmp-[0-9a-f]{8}")


class Attempt(Started):
    """The processes of one start, until they end."""

    def __init__(self, job: "Job", files: list[Path]):
        super().__init__(files)
        self.job = job

    def says(self, text: str) -> bool:
        """Returns True if process 0 has written it."""
        return text in self.output()

    @property
    def resumed_step(self) -> int | None:
        """The step that it goes on from; `None` if it begins anew, or does not say yet."""
        found = re.search(RESUMED, self.output())
        return int((found[1] or found[2]).replace(",", "")) if found else None

    @property
    def trains(self) -> bool:
        """True once this attempt writes metrics.jsonl."""
        return self.says(COMPILED)

    def wait_for_checkpoint(self) -> bool:
        """Returns True if a new one became whole before a process ended."""
        newest = self.job.newest_checkpoint() or 0
        return self.wait_until(lambda: (self.job.newest_checkpoint() or 0) > newest)

    def limit_file_sizes(self, size: int, process: int = 0) -> None:
        """Lets no file grow beyond `size` bytes from now on, as on a full disk; Linux only."""
        with contextlib.suppress(ProcessLookupError):
            limits = size, resource.RLIM_INFINITY
            resource.prlimit(self.running[process].pid, resource.RLIMIT_FSIZE, limits)


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
        address = free_address() if self.processes > 1 else None
        commands = [("runner", *self._arguments(address, n)) for n in range(self.processes)]
        return self._begun("output", commands, fresh)

    def prune(self, keep: int) -> Attempt:
        """Starts `runner.checkpoint prune`."""
        return self._begun(
            "prune", [("runner.checkpoint", "prune", str(self.workdir), f"--keep={keep}")]
        )

    def _begun(self, what: str, commands: list[tuple[str, ...]], fresh: bool = False) -> Attempt:
        number = sum(1 for _ in self.scratch.glob(f"{self.name}.*.{what}.0"))
        names = [f"{self.name}.{number}.{what}.{n}" for n in range(len(commands))]
        attempt = Attempt(self, [self.scratch / name for name in names])
        settings = {"fresh": fresh, "cwd": self.scratch, "environment": self._variables()}
        for n, command in enumerate(commands):
            attempt.start(n, "-m", *command, **settings)
        return attempt

    def keep_programs(self) -> None:
        """Later attempts of any such job reuse the programs that were compiled up to now.

        Call it once an attempt has ended undisturbed: JAX does not write programs atomically.
        """
        shutil.copytree(self._programs, self._kept_programs)

    def another(self, scratch: Path) -> "Job":
        """A run that begins as this one did, in the new folder `scratch`, with its programs."""
        own = shutil.ignore_patterns(f"{self.name}*", PROGRAMS)
        shutil.copytree(self.scratch, scratch, ignore=own)
        return Job(scratch, "run", processes=self.processes, kind=self.kind)

    def whole_checkpoints(self) -> list[int]:
        """Returns their steps, from the names of their folders."""
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
        return [
            f"--fdl_config={experiment.__file__}",
            *([f"--fiddler={self.kind.fiddler}"] if self.kind.fiddler else []),
            f"--workdir={self.workdir}",
            *(f"--fdl.{override}" for override in self.overrides),
            *(flags_of(address, self.processes, process) if address else []),
        ]

    def _variables(self) -> dict[str, str]:
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
