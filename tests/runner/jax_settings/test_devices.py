"""The choice between the CPU and accelerators, and errors when devices cannot start."""

import os
import subprocess
import sys

import pytest
from compiled_programs import XLA_FLAGS
from forked_processes import PATHS
from small_runs import EXPERIMENT

from lmlib.hardware.detection import has_accelerator, has_tpu

PLUGIN = """
import sys, jax
def initialize():
    print("started for", jax.config.jax_platforms, file=sys.stderr)
"""


def ended_with(plugins, tmp_path, *command, **environment):
    """Runs `python COMMAND` with additional JAX plugins installed."""
    for name in plugins:
        (tmp_path / "jax_plugins" / name).mkdir(parents=True)
        (tmp_path / "jax_plugins" / name / "__init__.py").write_text(PLUGIN)
    unset = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    ours = {"PYTHONPATH": f"{PATHS}:{tmp_path}", "XLA_FLAGS": XLA_FLAGS}
    return subprocess.run(
        [sys.executable, *command], env=unset | ours | environment, capture_output=True, text=True
    )


def run(tmp_path):
    return "-m", "runner", *EXPERIMENT, "--fdl.steps=1", f"--workdir={tmp_path / 'run'}"


@pytest.mark.slow
@pytest.mark.parametrize("can_run", [False, True])
def test_plugins_without_hardware_are_not_started(tmp_path, can_run):
    """A warning appears only with the libraries for running on GPUs."""
    if can_run:
        (tmp_path / "nvidia" / "cudnn").mkdir(parents=True)
    ended = ended_with(["xla_cuda0"], tmp_path, *run(tmp_path))
    assert ended.returncode == 0, ended.stderr
    if has_accelerator():
        assert "started for None" in ended.stderr
    else:
        assert ended.stderr.startswith("WARNING: no accelerator was found") == can_run
        assert "started for cpu" in ended.stderr
        assert "Traceback" not in ended.stderr and "TPU_" not in ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plugin", "platforms"), [("xla_cuda0", {"JAX_PLATFORMS": "cpu"}), ("another_maker", {})]
)
def test_the_choice_of_the_user_is_kept(tmp_path, plugin, platforms):
    ended = ended_with([plugin], tmp_path, *run(tmp_path), **platforms)
    assert ended.returncode == 0, ended.stderr
    assert "no accelerator was found" not in ended.stderr
    assert f"started for {platforms.get('JAX_PLATFORMS')}" in ended.stderr


NOTEBOOK = """
import jax
from lmlib import llama
print(jax.numpy.zeros(2))
"""


@pytest.mark.slow
@pytest.mark.parametrize("platforms", [{}, {"JAX_PLATFORMS": "cpu"}, {"JAX_PLATFORMS": ""}])
def test_a_notebook_starts_no_plugins_without_hardware(tmp_path, platforms):
    """Silently, unless the user has chosen platforms."""
    ended = ended_with(["xla_cuda0"], tmp_path, "-c", NOTEBOOK, **platforms)
    assert ended.stdout == "[0. 0.]\n", ended.stderr
    if not platforms and not has_accelerator():
        assert ended.stderr == "started for cpu\n"  # JAX asks each plugin to register itself
    else:
        assert f"started for {platforms.get('JAX_PLATFORMS')}\n" in ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize("command", ["runner.plan", "runner"])
def test_plugins_for_two_cuda_versions_are_refused(tmp_path, command):
    flags = ["--topology=h100:1x1"] if command == "runner.plan" else run(tmp_path)[-2:]
    arguments = ("-m", command, *EXPERIMENT, *flags)
    ended = ended_with(["xla_cuda98", "xla_cuda99"], tmp_path, *arguments, JAX_PLATFORMS="cuda")
    assert ended.returncode == 2
    assert ended.stderr.startswith("error: the JAX plugins ")
    assert "xla_cuda98 and xla_cuda99 are installed, and JAX can load one" in ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize("platforms", ["nonsense", "rocm", "cuda"])
def test_missing_platforms_are_refused(tmp_path, platforms):
    if platforms == "cuda" and has_accelerator():
        pytest.skip("this machine may have that")
    ended = ended_with([], tmp_path, *run(tmp_path), JAX_PLATFORMS=platforms)
    assert ended.returncode == 2, ended.stderr
    (told,) = ended.stderr.splitlines()
    assert told.startswith(f"error: JAX cannot start the devices of JAX_PLATFORMS={platforms}: ")
    assert told.endswith("; unset it, or set it to cpu")
    assert not (tmp_path / "run").exists()


FILES = ("nvidiactl", "nvidia0", "dxg", "kfd", "accel0", "vfio/0", "vfio/vfio", "null")


@pytest.mark.parametrize("file", FILES)
def test_accelerators_are_detected_by_device_files(tmp_path, file):
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).touch()
    assert has_accelerator(tmp_path) == (file not in FILES[-2:] or has_tpu())


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        ({}, False),
        ({"0000:00:04.0": ("0x1ae0", "0x0063")}, True),
        ({"0000:00:04.0": ("0x10de", "0x2330"), "0000:00:05.0": ("0x1ae0", "0x0042")}, False),
    ],
)
def test_tpus_are_detected_by_pci_devices(tmp_path, devices, expected):
    for name, (vendor, device) in devices.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "vendor").write_text(f"{vendor}\n")
        (tmp_path / name / "device").write_text(f"{device}\n")
    assert has_tpu(tmp_path) == expected
    assert not has_tpu(tmp_path / "absent")
