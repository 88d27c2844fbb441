"""The command that trains a point: as a user would type it, or in a SLURM array job."""

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from lmlib.storage.atomic_file import make_folder, write_atomically
from runner.errors import ConfigError
from runner.sweep.folder import OUTPUT, Point
from runner.sweep.points import overrides_of

SCRIPT = "sweep.sbatch"
_COMMAND = "{command}"
_VARIABLES = ("PYTHONPATH", "XLA_FLAGS")  # not passed on by sbatch itself


def command_of(point: Point, experiment: Sequence[str], flags: Sequence[str]) -> list[str]:
    """Returns the words of a point's command; `experiment` has the flags that choose it."""
    settings = [f"--fdl.{override}" for override in overrides_of(point.settings)]
    workdir = f"--workdir={point.workdir}"
    return [sys.executable, "-m", "runner", *experiment, *settings, workdir, *flags]


def check_launcher(template: str) -> None:
    """Raises ConfigError unless `template` can be split into words and contains {command}."""
    try:
        words = shlex.split(template)
    except ValueError as error:
        raise ConfigError(f"--launcher={template}: {error}") from error
    if not any(_COMMAND in word for word in words):
        raise ConfigError(
            f"--launcher={template} lacks {_COMMAND}: write it as 'srun --ntasks=1 {_COMMAND}'"
        )


def launched(template: str, command: Sequence[str], point: Point, slot: int) -> list[str]:
    """Returns the words of `template` with its placeholders replaced.

    `{command}` is quoted for a shell if it is part of a longer word. `{name}` and `{workdir}`
    belong to the point. `{slot}` is a number that no other point running at the same time has.
    """
    values = {"{name}": point.name, "{workdir}": str(point.workdir), "{slot}": str(slot)}
    found = list[str]()
    for word in shlex.split(template):
        if word == _COMMAND:
            found += command
            continue
        for name, value in values.items():
            word = word.replace(name, value)
        found.append(word.replace(_COMMAND, shlex.join(command)))
    return found


def write_script(
    folder: Path,
    commands: Sequence[Sequence[str]],
    max_parallel: int | None,
    directives: Sequence[str],
) -> Path:
    """Writes a script for sbatch into the sweep's folder; its task i runs `commands[i]`.

    At most `max_parallel` tasks run at a time; `directives` are more sbatch flags.
    """
    limit = "" if max_parallel is None else f"%{max_parallel}"
    given = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
    lines = [
        "#!/bin/bash",
        f"#SBATCH --job-name={folder.name}",
        f"#SBATCH --array=0-{len(commands) - 1}{limit}",
        f"#SBATCH --output={folder / OUTPUT}/%A_%a.txt",
        "#SBATCH --ntasks=1",
        # Leaves time for a checkpoint before the job's limit; the same command resumes from it.
        "#SBATCH --signal=B:TERM@120",
        *(f"#SBATCH {directive}" for directive in directives),
        f"cd {shlex.quote(os.getcwd())} || exit 1",
        *(f"export {name}={shlex.quote(value)}" for name, value in given.items()),
        "case $SLURM_ARRAY_TASK_ID in",
        *(f"{i}) exec {shlex.join(words)} ;;" for i, words in enumerate(commands)),
        "esac",
    ]
    make_folder(folder / OUTPUT)
    write_atomically(folder / SCRIPT, "\n".join(lines) + "\n")
    return folder / SCRIPT


def check_sbatch() -> None:
    """Raises ConfigError if sbatch is not installed."""
    if shutil.which("sbatch") is None:
        raise ConfigError("--submit: sbatch is not installed here; submit the script elsewhere")


def submit(file: Path) -> None:
    """Submits a script; raises ConfigError with the message of sbatch if it is rejected."""
    done = subprocess.run(["sbatch", str(file)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConfigError(f"sbatch {file} failed: {done.stderr.strip() or done.stdout.strip()}")
    print(done.stdout.strip())
