"""What the tests keep of compiled programs: whole ones, the newest, told apart by names."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import zstandard
from compiled_programs import SETTINGS, XLA_FLAGS, tidy

from runner.jax_settings.xla_flags import keep_cpus_in_order, set_gpu_flags

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
