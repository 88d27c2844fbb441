"""`--help` lists what there is."""

from pathlib import Path

import pytest
from forked_commands import Commands

import runner
from runner.config import configs

FOLDER = Path(runner.__file__).parent


def first_line(file: Path) -> str:
    return file.read_text().removeprefix('"""').splitlines()[0]


@pytest.fixture(scope="module")
def commands(tmp_path_factory):
    commands = Commands(tmp_path_factory.mktemp("outputs"))
    yield commands
    commands.close()


def test_help_lists_every_command_and_every_experiment_with_its_first_line(commands):
    ended = commands.run("runner", ["--help"])
    assert ended.returncode == 0
    lines = [" ".join(line.split()) for line in ended.stdout.splitlines()]
    files = {f"python -m runner.{file.stem}": file for file in FOLDER.glob("[!_]*.py")}
    assert {"python -m runner.plan", "python -m runner.replay"} < set(files)
    files |= {"python -m runner": FOLDER / "__main__.py"} | configs.experiments()
    assert "experiments/llama_84m" in files
    for name, file in files.items():
        assert f"{name} {first_line(file)}" in lines


@pytest.mark.parametrize("module", ["runner", "runner.plan"])
def test_help_shows_the_fiddlers_of_an_experiment(commands, module):
    ended = commands.run(module, ["--fdl_config=experiments/llama_84m", "--help"])
    assert ended.returncode == 0
    lines = [" ".join(line.split()) for line in ended.stdout.splitlines()]
    assert "tiny The same experiment at a size for tests: synthetic data, seconds on a laptop." in (
        lines
    )


def test_help_for_an_experiment_that_is_not_there_is_a_mistake(commands):
    ended = commands.run("runner", ["--fdl_config=experiments/lama_84m", "--help"])
    assert ended.returncode == 2
    assert "Did you mean experiments/llama_84m" in ended.stderr
