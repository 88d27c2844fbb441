"""A sweep as an array job of SLURM: a script with a line for each point."""

import os
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from lmlib.storage.whole_file import make_folder, write_whole
from runner.errors import ConfigError
from runner.sweep.folder import OUTPUT

SCRIPT = "sweep.sbatch"
_VARIABLES = ("PYTHONPATH", "XLA_FLAGS")  # a job has them only if sbatch is told to take them along


def script(
    folder: Path, commands: Sequence[Sequence[str]], at_once: int | None, directives: Sequence[str]
) -> str:
    """A script for sbatch whose task number i runs the words of `commands[i]`.

    Args:
      at_once: tasks that may run at the same time; `None`: as many as there is room for.
      directives: more of sbatch's flags, a line each.
    """
    limit = "" if at_once is None else f"%{at_once}"
    variables = [
        f"export {name}={shlex.quote(os.environ[name])}"
        for name in _VARIABLES
        if name in os.environ
    ]
    tasks = [f"{i}) exec {shlex.join(words)} ;;" for i, words in enumerate(commands)]
    lines = [
        "#!/bin/bash",
        f"#SBATCH --job-name={folder.name}",
        f"#SBATCH --array=0-{len(commands) - 1}{limit}",
        f"#SBATCH --output={folder / OUTPUT}/%A_%a.txt",
        "#SBATCH --ntasks=1",
        # Time for a checkpoint before the job's limit: the same command goes on from it.
        "#SBATCH --signal=B:TERM@120",
        *(f"#SBATCH {directive}" for directive in directives),
        f"cd {shlex.quote(os.getcwd())} || exit 1",
        *variables,
        "case $SLURM_ARRAY_TASK_ID in",
        *tasks,
        "esac",
    ]
    return "\n".join(lines) + "\n"


def write_script(folder: Path, text: str) -> Path:
    """Writes it into the sweep's folder, and the folder that its output needs."""
    make_folder(folder / OUTPUT)
    file = folder / SCRIPT
    write_whole(file, text)
    return file


def check_sbatch() -> None:
    """Raises ConfigError if there is no sbatch here."""
    if shutil.which("sbatch") is None:
        raise ConfigError(
            "--submit: there is no sbatch on this machine; leave it out, and submit the script "
            "where there is one"
        )


def submit(file: Path) -> None:
    """Raises ConfigError if sbatch refuses, with what it said."""
    done = subprocess.run(["sbatch", str(file)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConfigError(f"sbatch {file} failed: {done.stderr.strip() or done.stdout.strip()}")
    print(done.stdout.strip())
