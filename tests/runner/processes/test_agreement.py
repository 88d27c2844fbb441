"""Processes compare their settings before anything compiles, and name the differences."""

import re
import shutil

import pytest
from byte_texts import write_ids
from compiled_programs import XLA_FLAGS
from forked_processes import ROOT
from several_processes import SeveralProcesses
from small_experiment import small
from small_runs import EXPERIMENT as SMALL

from runner import fit
from runner.command_line.exit_status import MISTAKE
from runner.processes.agreement import differing

START = (
    "start all processes with the same code, packages, experiment, fiddlers, overrides, flags and "
    "JAX environment variables"
)
# `SeveralProcesses` gives these to each of two.
FOUR_DEVICES = f"--xla_force_host_platform_device_count=4 {XLA_FLAGS}"


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (
            [{"jax": "0.12", "numpy": "2"}, {"jax": "0.12", "numpy": "2"}, {"jax": "0.11"}],
            "of process 2 differs from process 0 (jax: 0.11 instead of 0.12, numpy: absent instead "
            "of 2)",
        ),
        (
            [{"a.py": "0" * 64, "b.py": "1" * 64}, {"a.py": "2" * 64, "b.py": "1" * 64}],
            "of process 1 differs from process 0 (a.py)",
        ),
        (
            [{str(n): "0" for n in range(9)}, {}, {}],
            "of process 1, 2 differs from process 0 ("
            + "".join(f"{n}: absent instead of 0, " for n in range(6))
            + "and 3 more)",
        ),
    ],
)
def test_the_message_names_processes_and_values(found, message):
    assert differing("the code", found) == f"the code {message}: {START}"


def assert_refused(run, folder, message):
    """Exit code 2 on all; one line on the terminal of process 0, and the same line in all logs."""
    assert set(run.exit_codes()) == {MISTAKE}, run.everything()
    line = re.compile(f"^error: .*{message}.*$", re.MULTILINE)
    (told,) = line.findall(run.output(0))
    assert "Traceback" not in run.output(0)
    for process in range(1, len(run.files)):
        assert run.output(process) == ""
    for log in folder.rglob("process_*.log"):
        assert told in log.read_text()


OTHER = "of process 1 differs from process 0"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"own": {1: ["--fdl.seed=1"]}}, rf"the config {OTHER} \(seed: 1 instead of 0\)"),
        ({"own": {1: ["--allow_change=data"]}}, rf"the command {OTHER} .*--allow_change: data i"),
        (
            {"environments": {1: {"XLA_FLAGS": f"{FOUR_DEVICES} --xla_cpu_enable_fast_math=true"}}},
            rf"XLA_FLAGS {OTHER} \(--xla_cpu_enable_fast_math: true instead of absent",
        ),
        *[
            (
                {"environments": {1: {variable: value}}},
                rf"the configuration of JAX {OTHER} \({variable}: {value} instead of {usual}\)",
            )
            for variable, value, usual in (
                ("JAX_DEFAULT_PRNG_IMPL", "rbg", "threefry2x32"),
                ("JAX_THREEFRY_PARTITIONABLE", "false", "true"),
                ("JAX_DISABLE_JIT", "true", "false"),
            )
        ],
        (
            {"environments": {0: {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}}},
            r"the processes have different numbers of devices \(2 on process 0; 4 on process 1\)",
        ),
        ({"own": {1: ["--fdl.model.embde=1"]}}, "process 1: .*embde.*embed"),
        ({"own": {1: ["--num_processes=3"]}}, "process 1: --num_processes=3, but 2 on process 0"),
    ],
)
def test_other_settings_are_refused(tmp_path, settings, message):
    run = SeveralProcesses(2, tmp_path / "run", tmp_path / "outputs", **settings)
    assert_refused(run, tmp_path / "run", message)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["logs"]


@pytest.mark.slow
def test_other_code_is_refused(tmp_path):
    copy = tmp_path / "copy"
    for package in ("lmlib", "runner", "experiments", "data_tools"):
        shutil.copytree(ROOT / package, copy / package)
    with (copy / "lmlib" / "train.py").open("a") as file:
        file.write("# edited\n")
    run = SeveralProcesses(2, tmp_path / "run", tmp_path / "outputs", roots={1: copy})
    assert_refused(run, tmp_path / "run", r"the code of process 1 .* \(lmlib/train.py\)")


@pytest.mark.slow
def test_another_workdir_is_refused(tmp_path):
    other = [f"--workdir={tmp_path}/other"]
    run = SeveralProcesses(2, tmp_path / "run", tmp_path / "outputs", own={1: other})
    message = f"process 1 does not see the files of process 0: its workdir is {tmp_path}/other on "
    assert_refused(run, tmp_path, f"{message}.*, and process 0 has {tmp_path}/run on ")
    for name in ("run", "other"):
        assert [path.name for path in (tmp_path / name).iterdir()] == ["logs"]


RELATIVE = """
import fiddle as fdl
import small_experiment
from lmlib.data.flat_tokens import FlatTokens


def config():
    cfg = small_experiment.config()
    cfg.data = fdl.Config(FlatTokens, "data", "train", batch_size=8, sequence_length=16)
    return cfg
"""


@pytest.mark.slow
@pytest.mark.parametrize("what", ["data", "weights"])
def test_other_content_at_the_same_relative_path_is_refused(tmp_path, what):
    folders = {process: tmp_path / f"folder_{process}" for process in range(2)}
    for process, folder in folders.items():
        if what == "data":
            write_ids(folder / "data", [[1 + process] * 5] * 40)
        else:
            fit(small("steps=1", f"seed={process}"), folder / "base")
    if what == "data":
        (tmp_path / "experiment.py").write_text(RELATIVE)
        experiment = [f"--fdl_config={tmp_path}/experiment.py", "--fdl.validation=None"]
        name, place = "data", "data/train"
    else:
        experiment = [*SMALL, "--fdl.mesh.fsdp=-1", "--init_from=base@1"]
        name, place = "the weights of base@1: the model", "base/checkpoints/1"
    run = SeveralProcesses(
        2, tmp_path / "run", tmp_path / "outputs", folders=folders, experiment=experiment
    )
    places = [f"{folder}/{place} on .*" for folder in folders.values()]
    message = rf"{name} {OTHER} \({places[1]}; process 0 has {places[0]}\)"
    assert_refused(run, tmp_path / "run", message)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["logs"]
