"""The code of a run: digests of its files, versions of its packages, its commits."""

import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

import fiddle as fdl

import lmlib
from runner.config.text import nodes

OURS = ("lmlib", "runner", "experiments", "data_tools")
PACKAGES = ("lmlib", "jax", "jaxlib", "equinox", "fiddle", "numpy", "optax", "orbax-checkpoint")
_INSTALLED = [Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")]
_GIT_SECONDS = 5.0  # timeout for git in large or remote repositories


def code_digest(cfg: fdl.Config) -> str:
    """Returns a digest of the code of compiled programs: lmlib, and the files of `cfg`."""
    total = hashlib.sha256()
    for file in sorted({*_files_in(lmlib.__path__), *_named(cfg)}):
        total.update(f"{file.name} {_digest(file)}\n".encode())
    return total.hexdigest()


def code_files(cfg: fdl.Config, experiment: Path | None) -> dict[str, str]:
    """Returns the digest of each code file of a run, by machine-independent name.

    These are the files of this library, the file `experiment`, the files that define the names in
    `cfg`, and the modules beside them that are imported.
    """
    ours = {
        package: Path(folder)
        for package in OURS
        if (spec := importlib.util.find_spec(package)) is not None
        for folder in spec.submodule_search_locations or ()
    }
    found = {
        f"{package}/{file.relative_to(folder).as_posix()}": file
        for package, folder in ours.items()
        for file in _files_in([folder])
    }
    elsewhere = {file.resolve() for file in (*_named(cfg), *([experiment] if experiment else ()))}
    known = [folder.resolve() for folder in (*ours.values(), *_INSTALLED)]
    elsewhere = {file for file in elsewhere if not any(map(file.is_relative_to, known))}
    folders = {file.parent for file in elsewhere}
    # plain strings: `Path` is slow for thousands of files
    loaded = {
        file: os.path.dirname(file)
        for module in list(sys.modules.values())
        if isinstance(file := getattr(module, "__file__", None), str) and file.endswith(".py")
    }
    near = {folder for folder in {*loaded.values()} if Path(folder).resolve() in folders}
    beside = {Path(file).resolve() for file, folder in loaded.items() if folder in near}
    found |= {f"{file.parent.name}/{file.name}": file for file in sorted(elsewhere | beside)}
    return {name: _digest(file) for name, file in found.items() if file.is_file()}


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the packages that a run computes with."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def commit_of(file: Path) -> dict[str, str | bool] | None:
    """Returns the commit of the repository of `file`, and "dirty" for uncommitted changes.

    Returns `None` if git does not track the file, is not installed, or is too slow.
    """

    def git(*arguments: str) -> str:
        command = ["git", "--no-optional-locks", "-C", str(file.parent), *arguments]
        return subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=_GIT_SECONDS
        ).stdout

    try:
        git("ls-files", "--error-unmatch", file.name)
        changes = git("status", "--porcelain", "--untracked-files=no")
        return {"commit": git("rev-parse", "HEAD").strip(), "dirty": bool(changes)}
    except (OSError, subprocess.SubprocessError):
        return None


def _named(cfg: fdl.Config) -> Iterator[Path]:
    for module in {fdl.get_callable(node).__module__ for node in nodes(cfg)}:
        file = getattr(sys.modules.get(module), "__file__", None)
        if file is not None:
            yield Path(file)


def _files_in(folders: Iterable[str | Path]) -> Iterator[Path]:
    for folder in folders:
        yield from Path(folder).rglob("*.py")


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
