"""A user without a name and a home folder, as in containers: all works, and keeps less."""

import pwd
import subprocess
import sys
import tempfile

import pytest
from forked_processes import ROOT

from data_tools.standard_library import standard_library
from lmlib.storage.local_folder import cache_folder
from runner.aot import plan_cache as kept_plans

COMPILED = """
import pwd

def getpwuid(number):
    raise KeyError(number)

pwd.getpwuid = getpwuid
import jax
from runner.jax_settings.compilation_cache import keep_compiled_programs
print(keep_compiled_programs(), jax.numpy.ones(3).sum())
"""


@pytest.fixture
def a_number(monkeypatch, tmp_path):
    """Nobody knows the user; files go to `tmp_path`."""

    def getpwuid(number):
        raise KeyError(number)

    monkeypatch.setattr(pwd, "getpwuid", getpwuid)
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)


def test_there_is_no_cache_folder(a_number, monkeypatch):
    assert cache_folder() is None
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert str(cache_folder()) == "/cache/lmlib"


def test_a_plan_that_is_not_cached_says_so(a_number, capsys, tmp_path):
    kept_plans.write("key", {"text": "", "json": {}})
    assert "this plan is not cached: this user has no home folder" in capsys.readouterr().err
    assert kept_plans.read("key") is None
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_standard_library_goes_to_a_temporary_folder(a_number, capsys, tmp_path):
    folder = standard_library(vocab_size=260, max_bytes=40_000)
    (own,) = tmp_path.iterdir()
    assert folder.startswith(f"{own}/standard-library-")
    assert f"no home folder, so the data goes to {own}, which may not" in capsys.readouterr().err


@pytest.mark.slow
def test_programs_compile_and_are_not_kept(tmp_path):
    ended = subprocess.run(
        [sys.executable, "-c", COMPILED],
        cwd=tmp_path,
        env={"PATH": "", "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert (ended.returncode, ended.stdout) == (0, "None 3.0\n"), ended.stderr
    assert "compiled programs are not cached: this user has no home folder" in ended.stderr
    assert not list(tmp_path.iterdir())
