"""The commands of points, by themselves, through others and as an array job."""

import shlex
import subprocess
import sys

import pytest

from runner.errors import ConfigError
from runner.sweep.commands import check_through, command_of, through, write_script
from runner.sweep.folder import Point


@pytest.fixture
def point(tmp_path):
    return Point(tmp_path / "a folder" / "x=1", {"model.kind": "'a b'", "seed": "1"})


def test_a_command_is_one_that_a_user_would_type(point):
    words = command_of(point, ["--fdl_config=experiments/quickstart"], ["--deterministic"])
    assert words == [
        sys.executable, "-m", "runner", "--fdl_config=experiments/quickstart",
        "--fdl.model.kind='a b'", "--fdl.seed=1", f"--workdir={point.workdir}", "--deterministic",
    ]  # fmt: skip


def test_a_template_takes_the_command_as_words_or_as_one(point):
    command = ["python", "-c", "print('it is')"]
    assert through("env GPU={slot} {command}", command, point, 3) == ["env", "GPU=3", *command]
    words = through("sh -c 'echo {name}; {command}'", command, point, 0)
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout == "x=1\nit is\n"
    assert through("{command} > {workdir}", [], point, 0) == [">", str(point.workdir)]


@pytest.mark.parametrize("template", ["srun", "", "sh -c 'unfinished {command}"])
def test_a_template_without_a_command_is_refused(template):
    with pytest.raises(ConfigError, match="--through="):
        check_through(template)


def test_each_task_of_an_array_runs_its_own_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "/some where")
    told = "import os; print(os.environ['PYTHONPATH'], os.getcwd())"
    commands = [[sys.executable, "-c", f"print({i}); {told}"] for i in range(3)]
    file = write_script(tmp_path, commands, 2, ["--gres=gpu:1"])
    lines = file.read_text().splitlines()
    assert lines[0] == "#!/bin/bash"
    assert {"#SBATCH --array=0-2%2", "#SBATCH --gres=gpu:1", "#SBATCH --ntasks=1"} <= set(lines)
    assert (tmp_path / "output").is_dir()
    for i in range(3):
        done = subprocess.run(
            ["bash", file],
            cwd="/",
            env={"SLURM_ARRAY_TASK_ID": str(i)},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout == f"{i}\n/some where {tmp_path}\n"
    assert all(shlex.join(words) in file.read_text() for words in commands)
