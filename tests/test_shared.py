"""Helpers in tests/shared: processes, kept programs, checked annotations, turns."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryFile

import numpy as np
import pytest
import zstandard
from beartype.roar import BeartypeCallHintParamViolation
from compiled_programs import SETTINGS, XLA_FLAGS, tidy
from forked_processes import ForkedProcess, fresh_process, run_forked
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import TypeCheckError
from turns import left_for_another

from lmlib.data.batch import Batch
from lmlib.models.parts.rope_scaling import document_lengths
from lmlib.terminal.quantities import bytes_text
from runner.jax_settings.xla_flags import keep_cpus_in_order, set_gpu_flags

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


# Compiles the same at two places, and with another name, and tells how many programs are kept.
COMPILING = """
import os, jax
for lines, scope in (0, "one"), (2, "one"), (2, "other"):
    exec("\\n" * lines + f'''
def double(x):
    with jax.named_scope({scope!r}):
        return x + x
jax.jit(double)(1.0)
''')
    print(len(os.listdir(jax.config.jax_compilation_cache_dir)))
"""


def kept(folder: Path, size: int, age: int) -> Path:
    entry = folder / f"jit_step-{age}-cache"
    entry.write_bytes(zstandard.compress(os.urandom(size)))
    newest = folder.stat().st_mtime
    os.utime(entry, (newest - age, newest - age))
    return entry


def test_the_oldest_programs_go_first(tmp_path):
    new, old, oldest = (kept(tmp_path, 1000, age) for age in (0, 10, 20))
    tidy(tmp_path, largest=2100)
    assert new.exists() and old.exists() and not oldest.exists()
    tidy(tmp_path, largest=2100)
    assert new.exists() and old.exists()


def test_a_run_adds_no_flag():
    """With one more it would compile by itself what the tests have compiled."""
    environment = {"XLA_FLAGS": XLA_FLAGS}
    set_gpu_flags(environment)
    keep_cpus_in_order(several_processes=True, environment=environment)
    assert environment["XLA_FLAGS"] == XLA_FLAGS


@pytest.mark.slow
def test_another_name_of_a_scope_is_another_program_and_another_line_is_not(tmp_path):
    settings = SETTINGS | {"JAX_COMPILATION_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", COMPILING],
        env=os.environ | settings,
        capture_output=True,
        text=True,
        check=True,
    )
    first, again, other = map(int, done.stdout.split())
    assert again == first and other == first + 1


TOKENS_BS = np.zeros((2, 3), np.int32)


def test_a_type_is_checked():
    with pytest.raises(BeartypeCallHintParamViolation, match="size"):
        bytes_text("1 MB")


@pytest.mark.parametrize("positions", [TOKENS_BS[0], TOKENS_BS.astype(np.float32)])
def test_shape_and_dtype_of_an_array_are_checked(positions):
    with pytest.raises(TypeCheckError, match="positions_BS"):
        document_lengths(positions)


def test_shapes_of_fields_are_checked_against_each_other():
    with pytest.raises(TypeCheckError, match="targets"):
        Batch(TOKENS_BS, TOKENS_BS[:1], TOKENS_BS, TOKENS_BS, TOKENS_BS.astype(bool))


@dataclasses.dataclass(frozen=True)
class Case:
    nodeid: str
    slow: bool

    def get_closest_marker(self, name):
        return self.slow and name == "slow"


@pytest.mark.landing
@given(st.sets(st.tuples(st.text(), st.booleans())), st.integers(1, 5), st.integers(0, 3))
def test_a_slow_case_has_one_turn_and_any_other_each(cases, turns, first):
    cases = {Case(*case) for case in cases}
    for case in cases:
        among_all = [case not in left_for_another([*cases], f"{k}/{turns}") for k in range(turns)]
        assert sum(among_all) == (1 if case.slow else turns)
        alone = [case not in left_for_another([case], f"{k}/{turns}") for k in range(turns)]
        assert alone == among_all
        assert left_for_another([case], f"{first + turns}/{turns}") == left_for_another(
            [case], f"{first}/{turns}"
        )


@pytest.mark.parametrize("turn", ["3", "1/0", "a/3", "1/3/5", "-1/3"])
def test_invalid_turns_are_refused(turn):
    with pytest.raises(pytest.UsageError, match=f"--turn={turn}: it is K/N"):
        left_for_another([], turn)
