"""Compiled programs in the user's cache folder."""

import os
import signal
import subprocess
import sys

import pytest
from small_runs import SmallRun

from runner.processes.endings import STOPPED

PROGRAM = """
import jax
from runner.jax_settings.compilation_cache import keep_compiled_programs
folder = keep_compiled_programs()
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.jit(lambda x: x @ x)(jax.numpy.ones((4, 4)))
print(folder)
"""


def ended(**changed):
    unset = {name for name in os.environ if name.startswith(("JAX_", "XDG_CACHE"))}
    kept = {name: value for name, value in os.environ.items() if name not in unset}
    return subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=kept | {"JAX_PLATFORMS": "cpu"} | changed,
        capture_output=True,
        text=True,
        check=True,
    )


def run(**changed):
    return ended(**changed).stdout.strip()


@pytest.mark.landing
@pytest.mark.parametrize(
    ("variable", "below"),
    [("XDG_CACHE_HOME", "lmlib/compiled"), ("HOME", ".cache/lmlib/compiled")],
)
def test_programs_are_kept_in_the_users_cache_folder(tmp_path, variable, below):
    assert run(**{variable: str(tmp_path)}) == str(tmp_path / below)
    assert list((tmp_path / below).iterdir())


def test_the_users_own_folder_is_taken(tmp_path):
    home, own = tmp_path / "home", tmp_path / "own"
    assert run(HOME=str(home), JAX_COMPILATION_CACHE_DIR=str(own)) == str(own)
    assert list(own.iterdir())
    assert not home.exists()


@pytest.mark.slow
def test_a_folder_that_cannot_be_written_is_told_and_done_without():
    made = ended(XDG_CACHE_HOME="/proc/nowhere")
    assert made.stdout.strip() == "None"
    (told,) = [line for line in made.stderr.splitlines() if "compiled programs" in line]
    assert "/proc/nowhere/lmlib/compiled cannot be written" in told
    assert "/proc/nowhere" not in made.stderr.replace(told, "")


@pytest.mark.slow
def test_nothing_is_kept_where_the_user_says_so(tmp_path):
    assert run(HOME=str(tmp_path), JAX_ENABLE_COMPILATION_CACHE="false") == "None"
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_simulated_devices_do_not_wait_for_each_other_in_a_kept_program(tmp_path):
    """JAX 0.10 and 0.11 forget the order of the collectives in it. With this scheduler, and without
    a flag that the command line adds, a run like the second was aborted after 27 to 119 steps."""
    settings = ("mesh.fsdp=4", "mesh.tensor=2", "steps=150", "checkpoints.every=150")
    experiment = ("--fdl_config=experiments/llama_84m", "--fiddler=tiny", "--fdl.validation=None")
    environment = {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8 "
        "--xla_cpu_enable_concurrency_optimized_scheduler=false --xla_backend_optimization_level=1",
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "kept"),
    }

    def begun(name):
        return SmallRun(tmp_path / name, *settings, experiment=experiment, environment=environment)

    compiling = begun("compiling")
    compiling.wait_for("step 1/150")
    compiling.process.send_signal(signal.SIGTERM)
    assert compiling.exit_code() == STOPPED, compiling.output()
    with_kept_program = begun("with_kept_program")
    assert with_kept_program.exit_code() == 0, with_kept_program.output()
