"""`--help` lists what there is."""

import re
from pathlib import Path

import pytest
from forked_processes import run_forked
from sentinels import sentinels

import data_tools
import runner
from runner.config import configs

DATA_TOOLS = Path(data_tools.__file__).parent
FOLDER = Path(runner.__file__).parent


def first_line(file: Path) -> str:
    return file.read_text().removeprefix('"""').splitlines()[0]


def data_programs() -> dict[str, Path]:
    return {file.parent.name: file for file in DATA_TOOLS.glob("*/__main__.py")}


def test_help_lists_every_command_and_every_experiment_with_its_first_line():
    ended = run_forked("-m", "runner", "--help")
    assert ended.returncode == 0
    lines = [" ".join(line.split()) for line in ended.stdout.splitlines()]
    runs = '__name__ == "__main__"'
    files = {
        f"python -m runner.{file.stem}": file
        for file in FOLDER.glob("[!_]*.py")
        if runs in file.read_text()
    }
    assert not any("runner.errors" in line for line in lines)
    assert {"python -m runner.plan", "python -m runner.replay"} < set(files)
    files |= {f"python -m runner.{f.parent.name}": f for f in FOLDER.glob("*/__main__.py")}
    assert "python -m runner.sweep" in files
    files |= {"python -m runner": FOLDER / "__main__.py"} | configs.experiments()
    prepares = {f"python -m data_tools.{name}": file for name, file in data_programs().items()}
    assert "python -m data_tools.pretokenize" in prepares
    files |= prepares
    assert "experiments/llama_84m" in files
    for name, file in files.items():
        assert first_line(file).endswith(".")  # and goes on in no second line
        assert f"{name} {first_line(file)}" in lines


FLAGS = {
    "convert": {"tokenizer"},
    "inspect": {"batch", "verify", "sample_length"},
    "prepare_chats": {
        "dataset",
        "tokenizer",
        "out",
        "max_length",
        "validation_fraction",
        "workers",
    },
    "pretokenize": {"dataset", "text_column", "tokenizer", "out", "shards", "validation_fraction"},
    "train_tokenizer": {"dataset", "text_column", "vocab_size", "out", "on_bad_row"},
}


@pytest.mark.parametrize("module", ["runner", "data_tools.pretokenize"])
def test_the_full_help_has_the_flags_of_every_module(module):
    short, full = (run_forked("-m", module, flag) for flag in ("--help", "--helpfull"))
    assert (short.returncode, full.returncode, full.stderr) == (0, 0, "")
    shown = [
        set(re.findall(r"^  --(?:\[no\])?(\w+):", ended.stdout, re.MULTILINE))
        for ended in (short, full)
    ]
    assert shown[0] and shown[0] | {"logtostderr"} <= shown[1]


@pytest.mark.parametrize("name", sentinels(FLAGS, lambda name: name == "pretokenize"))
def test_help_shows_the_flags_of_a_program_that_prepares_data(name):
    ended = run_forked("-m", f"data_tools.{name}", "--help")
    assert ended.returncode == 0
    assert ended.stdout.startswith(first_line(data_programs()[name]))
    shown = set(re.findall(r"^  --(?:\[no\])?(\w+):", ended.stdout, re.MULTILINE))
    assert shown >= FLAGS[name]
    assert not shown & {"logtostderr", "debug", "verbosity"}  # absl's own, and the runner's


def test_every_program_that_prepares_data_is_tried_here():
    assert set(FLAGS) == set(data_programs())


@pytest.mark.parametrize("module", ["runner", "runner.plan"])
def test_help_shows_the_fiddlers_of_an_experiment(module):
    ended = run_forked("-m", module, "--fdl_config=experiments/llama_84m", "--help")
    assert ended.returncode == 0
    lines = [" ".join(line.split()) for line in ended.stdout.splitlines()]
    assert "tiny The same experiment at a size for tests: synthetic data, seconds on a laptop." in (
        lines
    )


def test_help_for_an_experiment_that_is_not_there_is_a_mistake():
    ended = run_forked("-m", "runner", "--fdl_config=experiments/lama_84m", "--help")
    assert ended.returncode == 2
    assert "Did you mean experiments/llama_84m" in ended.stderr
