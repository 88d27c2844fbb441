"""clusters/*.Dockerfile are built elsewhere. Here, copied files exist and pip gets its options."""

import re
import tomllib

import pytest
from forked_processes import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
FILES = sorted((ROOT / "clusters").glob("*.Dockerfile"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_all_packages_go_in_with_extras_that_there_are(file):
    text = file.read_text(encoding="utf-8")
    copied = " ".join(re.findall(r"^COPY (.*) \S+$", text, re.MULTILINE)).split()
    assert all((ROOT / name).exists() for name in copied)
    packages = PROJECT["tool"]["setuptools"]["packages"]["find"]["include"]
    assert {name.rstrip("*") for name in packages} <= {*copied}
    assert {"pyproject.toml", PROJECT["project"]["readme"], "constraints.txt"} <= {*copied}
    (extras,) = re.findall(r"--constraint constraints.txt '\.\[(.*)\]'", text)
    assert {*extras.split(",")} <= {*PROJECT["project"]["optional-dependencies"]}
    (python,) = re.findall(r"FROM python:([\d.]+)-slim", text)
    assert python == PROJECT["tool"]["mypy"]["python_version"]  # that of the newest JAX
