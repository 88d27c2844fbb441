"""`--help` lists what there is."""

import subprocess
import sys
from pathlib import Path

import runner
from runner.config import configs

FOLDER = Path(runner.__file__).parent


def first_line(file: Path) -> str:
    return file.read_text().removeprefix('"""').splitlines()[0]


def test_help_lists_every_command_and_every_experiment_with_its_first_line():
    command = [sys.executable, "-m", "runner", "--help"]
    shown = subprocess.run(command, cwd=FOLDER.parent, capture_output=True, text=True).stdout
    lines = [" ".join(line.split()) for line in shown.splitlines()]
    files = {f"python -m runner.{file.stem}": file for file in FOLDER.glob("[!_]*.py")}
    assert {"python -m runner.plan", "python -m runner.replay"} < set(files)
    files |= {"python -m runner": FOLDER / "__main__.py"} | configs.experiments()
    assert "experiments/llama_84m" in files
    for name, file in files.items():
        assert f"{name} {first_line(file)}" in lines
