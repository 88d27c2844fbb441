"""Checks on this machine that a killed and resumed run has the bits of an undisturbed one.

    python benchmarks/same_bits.py -- --fdl_config=experiments/llama_84m --fiddler=tiny \\
        --fiddler=synthetic
    python benchmarks/same_bits.py -- --fdl_config=experiments/llama_84m --fiddler=fast \\
        --fiddler=synthetic --fdl.compute.attention=triton

trains the runner's experiment three times for 50 steps: with --deterministic, the same but killed
(SIGKILL) after step 25 and started again, and without --deterministic. It compares each step's loss
and gradient norm, and the files of the last checkpoint by their digests, and prints what the flag
costs. It fails if the first two differ; the third shows whether this machine needs the flag.
"""

import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import app, flags

from lmlib.checkpoint.manifest import read_manifest
from lmlib.metrics.log import read_metrics
from lmlib.terminal.table import columns

COMPARED = "loss", "grad_norm"
SAVES = 5  # checkpoints per run
_STEPS = flags.DEFINE_integer("steps", 50, "Steps of each run.", lower_bound=2 * SAVES)


def start(workdir: Path, arguments: Sequence[str]) -> subprocess.Popen:
    """Starts a run whose output goes to a file beside its folder."""
    steps = _STEPS.value
    command = [sys.executable, "-m", "runner", *arguments, f"--workdir={workdir}"]
    command += [f"--fdl.steps={steps}", f"--fdl.checkpoints.every={steps // SAVES}"]
    with workdir.with_suffix(".txt").open("a") as output:
        return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)


def finish(workdir: Path, arguments: Sequence[str]) -> None:
    """Makes a run to its end; exits if it fails."""
    if code := start(workdir, arguments).wait():
        output = workdir.with_suffix(".txt").read_text(errors="replace")
        sys.exit(f"{workdir.name}: the run ended with code {code}\n{output[-3_000:]}")


def kill_halfway(workdir: Path, arguments: Sequence[str]) -> int:
    """Kills a run in the second half of its steps, and returns the last step that it logged."""
    process = start(workdir, arguments)
    while process.poll() is None and len(read_metrics(workdir)) <= _STEPS.value // 2:
        time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGKILL)
    if process.wait() != -signal.SIGKILL:
        sys.exit(f"{workdir.name}: the run ended before it could be killed; give it more --steps")
    return read_metrics(workdir)[-1]["step"]


def difference(workdir: Path, reference: Path) -> str:
    """Describes the first difference of a run from `reference`, or returns an empty text."""
    for ours, expected in zip(read_metrics(workdir), read_metrics(reference), strict=True):
        for name in COMPARED:
            if ours[name] != expected[name]:
                off = abs(ours[name] / expected[name] - 1)
                return f"{name} of step {ours['step']}, by a relative {off:.0e}"
    files, expected_files = (saved_files(each) for each in (workdir, reference))
    others = [
        name for name in files | expected_files if files.get(name) != expected_files.get(name)
    ]
    return f"{len(others)} files of the checkpoint, the first is {others[0]}" if others else ""


def saved_files(workdir: Path) -> dict[str, Any]:
    """Returns size and digest of each file of the last checkpoint's arrays.

    Orbax's own files beside them contain the time.
    """
    manifest = read_manifest(workdir / "checkpoints" / str(_STEPS.value))
    folders = {f"state/{name}" for name in manifest.arrays}
    return {
        name: file for name, file in manifest.files.items() if str(Path(name).parent) in folders
    }


def milliseconds(workdir: Path) -> str:
    """Returns the median time of a step, without those that compile or save."""
    times = [each["step_seconds"] for each in read_metrics(workdir)[2:]]
    return f"{statistics.median(times) * 1e3:,.1f}"


def main(arguments: Sequence[str]) -> None:
    given = arguments[1:]
    if not any(each.startswith("--fdl_config") for each in given):
        sys.exit("give the runner's arguments behind --, as in -- --fdl_config=experiments/NAME")
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    deterministic = [*given, "--deterministic"]
    with tempfile.TemporaryDirectory() as folder:
        whole, resumed, free = (Path(folder, name) for name in ("whole", "resumed", "free"))
        finish(whole, deterministic)
        killed = kill_halfway(resumed, deterministic)
        finish(resumed, deterministic)
        finish(free, given)
        rows = [["run", "ms per step", "differs from the first in"]]
        rows.append(["--deterministic", milliseconds(whole), ""])
        different = difference(resumed, whole)
        rows.append([f"killed after step {killed}", milliseconds(resumed), different or "no bit"])
        rows.append(["without the flag", milliseconds(free), difference(free, whole) or "no bit"])
        print(columns(rows))
    if different:
        sys.exit(1)


if __name__ == "__main__":
    app.run(main)
