"""Where JAX starts on the CPU, and where it is left to look for accelerators."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import small_experiment
from compiled_programs import XLA_FLAGS
from forked_processes import PATHS

import runner
from lmlib.hardware.detection import has_accelerator, has_tpu

ROOT = Path(runner.__file__).parents[1]
EXPERIMENT = (f"--fdl_config={small_experiment.__file__}", "--fdl.validation=None")
PLUGIN = """
import sys, jax
def initialize():
    print("started for", jax.config.jax_platforms, file=sys.stderr)
    if "broken" in __name__:
        raise RuntimeError("its library is not there")
"""


def stderr_of_a_run(tmp_path, plugin, **environment):
    """Of a run with `plugin` installed as well."""
    (tmp_path / "jax_plugins" / plugin).mkdir(parents=True)
    (tmp_path / "jax_plugins" / plugin / "__init__.py").write_text(PLUGIN)
    unset = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    python_path = {"PYTHONPATH": f"{PATHS}:{tmp_path}"}
    arguments = [*EXPERIMENT, "--fdl.steps=1", f"--workdir={tmp_path / 'run'}"]
    ended = subprocess.run(
        [sys.executable, "-m", "runner", *arguments],
        env=unset | python_path | {"XLA_FLAGS": XLA_FLAGS} | environment,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize("can_run", [False, True])
def test_plugins_without_hardware_are_not_started(tmp_path, can_run):
    """The warning is for those who have installed the libraries for running on GPUs."""
    if can_run:
        (tmp_path / "nvidia" / "cudnn").mkdir(parents=True)
    written = stderr_of_a_run(tmp_path, "xla_cuda0")
    if has_accelerator():
        assert "started for None" in written
    else:
        assert written.startswith("WARNING: no accelerator was found") == can_run
        assert "started for cpu" in written
        assert "Traceback" not in written and "TPU_" not in written


NOTEBOOK = """
import jax
from lmlib import llama
print(jax.numpy.zeros(2))
"""


@pytest.mark.slow
@pytest.mark.parametrize("platforms", [None, "cpu", ""])
def test_a_notebook_starts_no_plugins_without_hardware(tmp_path, platforms):
    """Quietly, unless the user has said which to start."""
    (tmp_path / "jax_plugins" / "xla_cuda0").mkdir(parents=True)
    (tmp_path / "jax_plugins" / "xla_cuda0" / "__init__.py").write_text(PLUGIN)
    environment = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    environment |= {"PYTHONPATH": f"{ROOT}:{tmp_path}", "XLA_FLAGS": ""}
    environment |= {} if platforms is None else {"JAX_PLATFORMS": platforms}
    ended = subprocess.run(
        [sys.executable, "-c", NOTEBOOK], env=environment, capture_output=True, text=True
    )
    assert ended.stdout == "[0. 0.]\n", ended.stderr
    if platforms is None and not has_accelerator():
        assert ended.stderr == "started for cpu\n"  # JAX asks each plugin to register itself
    else:
        assert f"started for {platforms}\n" in ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plugin", "platforms"), [("xla_cuda0", {"JAX_PLATFORMS": "cpu"}), ("another_maker", {})]
)
def test_jax_is_left_alone(tmp_path, plugin, platforms):
    written = stderr_of_a_run(tmp_path, plugin, **platforms)
    assert "no accelerator was found" not in written
    assert f"started for {platforms.get('JAX_PLATFORMS')}" in written


@pytest.mark.slow
@pytest.mark.parametrize("command", [("runner.plan", "--topology=h100:1x1"), ("runner",)])
def test_plugins_for_two_versions_of_cuda_are_a_mistake(tmp_path, command):
    for name in ("xla_cuda98", "xla_cuda99"):
        (tmp_path / "jax_plugins" / name).mkdir(parents=True)
        (tmp_path / "jax_plugins" / name / "__init__.py").write_text(PLUGIN)
    workdir = [f"--workdir={tmp_path / 'run'}"] * (command == ("runner",))
    python_path = {"PYTHONPATH": f"{PATHS}:{tmp_path}", "JAX_PLATFORMS": "cuda"}
    ended = subprocess.run(
        [sys.executable, "-m", *command, *EXPERIMENT, *workdir],
        env=os.environ | python_path,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 2
    assert ended.stderr.startswith("error: the JAX plugins ")
    assert "xla_cuda98 and xla_cuda99 are installed, and JAX can load one" in ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize("platforms", ["nonsense", "rocm", "cuda"])
def test_platforms_that_are_not_here_are_a_mistake(tmp_path, platforms):
    if platforms == "cuda" and has_accelerator():
        pytest.skip("this machine may have that")
    ended = subprocess.run(
        [sys.executable, "-m", "runner", *EXPERIMENT, f"--workdir={tmp_path / 'run'}"],
        env=os.environ | {"PYTHONPATH": PATHS, "JAX_PLATFORMS": platforms},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 2, ended.stderr
    *before, last = ended.stderr.splitlines()
    assert last.startswith(f"error: JAX cannot start the devices of JAX_PLATFORMS={platforms}: ")
    assert last.endswith("; unset JAX_PLATFORMS, or set it to cpu")
    assert not before and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("nvidiactl", True),
        ("nvidia0", True),
        ("dxg", True),
        ("kfd", True),
        ("accel0", True),
        ("vfio/0", True),
        ("vfio/vfio", False),
        ("null", False),
    ],
)
def test_an_accelerator_is_seen_by_its_device_file(tmp_path, file, expected):
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).touch()
    assert has_accelerator(tmp_path) == (expected or has_tpu())


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        ({}, False),
        ({"0000:00:04.0": ("0x1ae0", "0x0063")}, True),
        ({"0000:00:04.0": ("0x10de", "0x2330"), "0000:00:05.0": ("0x1ae0", "0x0042")}, False),
    ],
)
def test_a_tpu_is_seen_by_its_pci_device(tmp_path, devices, expected):
    for name, (vendor, device) in devices.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "vendor").write_text(f"{vendor}\n")
        (tmp_path / name / "device").write_text(f"{device}\n")
    assert has_tpu(tmp_path) == expected
    assert not has_tpu(tmp_path / "absent")
