"""What `forked_processes` begins is as a process of its own: beside one that Python starts."""

import json
import signal
import time
from tempfile import TemporaryFile

import pytest
from forked_processes import ForkedProcess, fresh_process, run_forked

DESCRIBES_ITSELF = """
import atexit, json, os, sys, threading
import jax
found = {
    "arguments": sys.argv,
    "started again by": sys.orig_argv,
    "finds modules in": sys.path[0],
    "folder": os.getcwd(),
    "environment": dict(os.environ),
    "stdin": sys.stdin.read(),
    "main": sys.modules["__main__"].__name__,
    "threads": threading.active_count(),
    "group": os.getpgrp(),
    "interrupted by": str(__import__("signal").getsignal(2)),
    "devices": jax.device_count(),
}
print(json.dumps(found))
print("some words", file=sys.stderr)
atexit.register(lambda: print("the end"))
sys.exit(7)
"""
FLAGS = {"XLA_FLAGS": "--xla_force_host_platform_device_count=3", "OF_ONE": "1"}


def ended(start, *arguments, **settings):
    """Its status and what it wrote."""
    with TemporaryFile("w+") as out, TemporaryFile("w+") as err:
        process = start(*arguments, stdout=out, stderr=err, **settings)
        status = process.wait(300)
        out.seek(0), err.seek(0)
        return status, out.read(), err.read()


@pytest.mark.slow
@pytest.mark.parametrize("way", ["code", "module", "file"])
def test_a_forked_process_sees_what_a_fresh_one_sees(tmp_path, way):
    (tmp_path / "mine.py").write_text(DESCRIBES_ITSELF)
    asked = {"code": ("-c", DESCRIBES_ITSELF), "module": ("-m", "mine"), "file": ("mine.py",)}[way]
    settings = {"cwd": tmp_path, "environment": FLAGS}
    fresh, forked = (
        ended(start, *asked, "--a", "b c", **settings) for start in (fresh_process, ForkedProcess)
    )
    assert forked[0] == fresh[0] == 7
    assert forked[2] == fresh[2] == "some words\n"
    (first, end), (other, _) = (each[1].splitlines() for each in (forked, fresh))
    found, expected = json.loads(first), json.loads(other)
    # Of what has been imported for others, some may have set a variable.
    assert found.pop("environment").items() >= expected.pop("environment").items()
    assert found == expected
    assert found["devices"] == 3 and end == "the end"


@pytest.mark.landing
def test_an_error_and_a_signal_of_its_own_give_the_status():
    failed = run_forked("-c", "1 / 0")
    assert failed.returncode == 1 and failed.stderr.endswith(
        "ZeroDivisionError: division by zero\n"
    )
    assert run_forked("-c", "import os; os.abort()").returncode == -signal.SIGABRT


def test_it_says_when_it_was_started_itself():
    before = time.time()
    told = run_forked("-c", "import runner; print(runner.IMPORTED_AT)")
    assert before <= float(told.stdout) <= time.time()
