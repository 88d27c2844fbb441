"""Some eighty small faults, one at a time: does a default test find each?

    python benchmarks/mutations.py [--only=attend,guard] [--scratch=DIR]

Each fault of faults_of_code/ is put into a copy of the checkout, and the tests that should find
it run there, as plain `pytest` selects them, until one fails. First they all run without any fault,
for a test that fails anyway finds nothing. A fault that stays unseen is one that a change could
bring in: the table says so, and the exit code is 1.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from absl import app, flags

sys.path.insert(0, str(Path(__file__).parent))

from faults_of_code import MUTATIONS
from faults_of_code.mutation import Mutation

from lmlib.terminal.table import columns

_ONLY = flags.DEFINE_list("only", [], "Only faults whose file or description has one of these.")
_SCRATCH = flags.DEFINE_string("scratch", None, "New folder for the copy, kept.")

CHECKOUT = Path(__file__).parents[1]
SECONDS = 900  # for the tests of one fault
PASSED, FAILED = 0, 1  # exit codes of pytest
LEFT_OUT = shutil.ignore_patterns(".git", ".venv*", "__pycache__", "build", "dist", "*.egg-info")


def run_tests(
    copy: Path, tests: Sequence[str], *options: str, seconds: int | None = None
) -> tuple[int | None, str]:
    """Exit code of pytest, `None` if it takes too long, and what it printed."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, *tests]
    try:
        done = subprocess.run(
            command,
            cwd=copy,
            env={**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        return None, ""
    return done.returncode, done.stdout


def found_by(copy: Path, mutation: Mutation) -> str | None:
    """The test that fails with the fault; `None` if none does.

    Raises:
      SystemExit: if the tests end in another way than by passing or failing.
    """
    file = copy / mutation.file
    original = file.read_text(encoding="utf-8")
    file.write_text(original.replace(mutation.before, mutation.after), encoding="utf-8")
    try:
        tests = mutation.tests.split()
        code, output = run_tests(copy, tests, "-x", "--numprocesses=0", seconds=SECONDS)
    finally:
        file.write_text(original, encoding="utf-8")
    if code is None:
        return f"no end within {SECONDS} s"
    if code not in (PASSED, FAILED):
        raise SystemExit(f"{mutation.what}: pytest ended with {code}\n{output[-2_000:]}")
    failures = [line for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return failures[0].split()[1] if failures else None


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected {argv[1]}")
    chosen = [
        one
        for one in MUTATIONS
        if not _ONLY.value or any(word in f"{one.file} {one.what}" for word in _ONLY.value)
    ]
    parent = Path(_SCRATCH.value or tempfile.mkdtemp(prefix="mutations_"))
    copy = parent / "checkout"
    shutil.copytree(CHECKOUT, copy, ignore=LEFT_OUT)
    try:
        tests = sorted({file for one in chosen for file in one.tests.split()})
        code, output = run_tests(copy, tests)
        if code != PASSED:
            raise SystemExit(f"without any fault the tests fail:\n{output[-4_000:]}")
        print(f"without any fault all pass: {output.splitlines()[-1]}", flush=True)
        rows, missed = [("fault", "in", "found by", "s")], 0
        for number, one in enumerate(chosen, 1):
            began = time.monotonic()
            found = found_by(copy, one)
            missed += found is None
            seconds = f"{time.monotonic() - began:.0f}"
            rows.append((one.what, one.file, found or "NOT FOUND", seconds))
            print(f"{number} of {len(chosen)}: {one.what}: {found or 'NOT FOUND'}", flush=True)
    finally:
        if _SCRATCH.value is None:
            shutil.rmtree(parent)
    print(f"\n{columns(rows)}\n\n{len(chosen) - missed} of {len(chosen)} found")
    raise SystemExit(1 if missed else 0)


if __name__ == "__main__":
    app.run(main)
