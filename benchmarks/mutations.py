"""Puts hundreds of small faults into the code, one at a time: does a default test find each?

    python benchmarks/mutations.py [--only=attend,guard] [--scratch=DIR]

Each fault of mutations.toml is put into a copy of the checkout, where the tests that should find it
run, as plain `pytest` selects them. All of them run first without any fault. The exit code is 1 if
a fault is not found.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path

from absl import app, flags

from lmlib.terminal.table import columns

_ONLY = flags.DEFINE_list("only", [], "Only faults whose file or description has one of these.")
_SCRATCH = flags.DEFINE_string("scratch", None, "New folder for the copy, kept.")

CHECKOUT = Path(__file__).parents[1]
SECONDS = 900  # timeout of the tests of one fault
PASSED, FAILED = 0, 1  # exit codes of pytest
LEFT_OUT = shutil.ignore_patterns(".git", ".venv*", "__pycache__", "build", "dist", "*.egg-info")


def run_tests(copy: Path, tests: Sequence[str], *options: str) -> tuple[int, str]:
    """Returns the exit code and the output of pytest."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, *tests],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS if options else None,
    )
    if done.returncode not in (PASSED, FAILED):
        raise SystemExit(f"pytest ended with {done.returncode}\n{done.stdout[-2_000:]}")
    return done.returncode, done.stdout


def found_by(file: Path, fault: dict[str, str], copy: Path) -> str | None:
    """Returns the test that fails with the fault, or `None`."""
    original = file.read_text(encoding="utf-8")
    file.write_text(original.replace(fault["before"], fault["after"]), encoding="utf-8")
    try:
        _, output = run_tests(copy, fault["tests"].split(), "-x", "--numprocesses=0")
    except subprocess.TimeoutExpired:
        return f"no end within {SECONDS} s"
    finally:
        file.write_text(original, encoding="utf-8")
    failures = [line for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return failures[0].split()[1] if failures else None


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected {argv[1]}")
    listed = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    chosen = [
        (name, fault)
        for name, faults in listed.items()
        for fault in faults
        if not _ONLY.value or any(word in f"{name} {fault['what']}" for word in _ONLY.value)
    ]
    if not chosen:
        raise app.UsageError(f"--only={','.join(_ONLY.value)} chooses no fault of mutations.toml")
    parent = Path(_SCRATCH.value or tempfile.mkdtemp(prefix="mutations_"))
    copy = parent / "checkout"
    shutil.copytree(CHECKOUT, copy, ignore=LEFT_OUT)
    try:
        tests = sorted({each for _, fault in chosen for each in fault["tests"].split()})
        code, output = run_tests(copy, tests)
        if code != PASSED:
            raise SystemExit(f"without any fault the tests fail:\n{output[-4_000:]}")
        print(f"without any fault all pass: {output.splitlines()[-1]}", flush=True)
        rows, missed = [("fault", "in", "found by", "s")], 0
        for number, (name, fault) in enumerate(chosen, 1):
            began = time.monotonic()
            found = found_by(copy / name, fault, copy)
            missed += found is None
            seconds = f"{time.monotonic() - began:.0f}"
            rows.append((fault["what"], name, found or "NOT FOUND", seconds))
            print(f"{number} of {len(chosen)}: {fault['what']}: {rows[-1][2]}", flush=True)
    finally:
        if _SCRATCH.value is None:
            shutil.rmtree(parent)
    print(f"\n{columns(rows)}\n\n{len(chosen) - missed} of {len(chosen)} found")
    raise SystemExit(1 if missed else 0)


if __name__ == "__main__":
    app.run(main)
