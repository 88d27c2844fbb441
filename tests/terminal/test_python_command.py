"""Printed commands can be pasted, with any arguments and any python in the shell's path."""

import shlex
import sys

import pytest

from lmlib.terminal.python_command import python_command


@pytest.fixture
def environments(tmp_path, monkeypatch):
    """Two virtual environments of one Python, which runs from the first."""
    folders = [tmp_path / name / "bin" for name in ("mine", "others")]
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / "python").symlink_to(sys.executable)
        (folder / "python3").symlink_to("python")
    monkeypatch.setattr(sys, "executable", str(folders[0] / "python3"))
    return folders


def test_a_shell_splits_the_printed_command(tmp_path):
    arguments = [f"--out={tmp_path}/it's a folder", "--prompt=def $x", "plain"]
    assert shlex.split(python_command("runner", *arguments))[1:] == ["-m", "runner", *arguments]


def test_an_activated_environment_is_python(environments, monkeypatch):
    monkeypatch.setenv("PATH", str(environments[0]))
    assert python_command("runner") == "python -m runner"


def test_an_environment_that_is_not_activated_is_named(environments, monkeypatch):
    for path in (str(environments[1]), str(environments[0].parent)):
        monkeypatch.setenv("PATH", path)
        assert python_command("runner") == f"{environments[0]}/python3 -m runner"
