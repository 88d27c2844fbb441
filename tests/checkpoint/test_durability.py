"""Files are synced, renamed and deleted in an order in which a power cut loses no checkpoint.

benchmarks/power_cuts.py makes real cuts.
"""

import errno
import itertools
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from lmlib.checkpoint import Checkpoints
from lmlib.checkpoint.folders import UNFINISHED
from lmlib.checkpoint.manifest import read_manifest
from lmlib.metrics.log import FILE_NAME, MetricsLog
from lmlib.storage.atomic_file import make_folder, write_atomically
from lmlib.storage.failures import storage_failure

Call = tuple[str, str]  # of the system, and its path


@pytest.fixture(scope="module")
def calls() -> Iterator[list[Call]]:
    """Yields the system calls in order; a renaming has its old path."""
    made: list[Call] = []
    patches = pytest.MonkeyPatch()

    def record(name: str) -> None:
        real: Callable[..., Any] = getattr(os, name)

        def recording(path: Any, *others: Any, **more: Any) -> Any:
            if name == "fsync":
                place = os.readlink(f"/proc/self/fd/{path}")
            elif more.get("dir_fd") is not None:
                place = os.path.join(os.readlink(f"/proc/self/fd/{more['dir_fd']}"), path)
            else:
                folder, file = os.path.split(os.path.abspath(path))
                place = os.path.join(os.path.realpath(folder), file)  # perhaps through /proc
            made.append((name, place))
            return real(path, *others, **more)

        patches.setattr(os, name, recording)

    for name in ("fsync", "rename", "replace", "unlink", "remove", "rmdir"):
        record(name)
    yield made
    patches.undo()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, calls: list[Call]) -> tuple[Path, list[Call]]:
    """A folder of checkpoints with step 2, which has replaced step 1, and the calls of its save.

    In them the folders that are not whole yet have the names that they have when they are.
    """
    workdir = tmp_path_factory.mktemp("run")
    with (
        MetricsLog(workdir, resume_step=None) as log,
        Checkpoints(workdir / "checkpoints", keep=1) as checkpoints,
    ):
        for step in (1, 2):
            calls.clear()
            log.write(step, {"loss": 1.0})
            state = {"weight": jnp.ones((4, 4)), "step": jnp.ones(())}
            checkpoints.save(step, state, {"tokens": step}, beforehand=log.sync)
            checkpoints.wait()
        unfinished = f"{re.escape(UNFINISHED)}(-[0-9a-f]{{8}})?"
        whole = r"/\.([^/]+)\.[0-9a-f]+\.unfinished$"
        made = [(call, re.sub(whole, r"/\1", re.sub(unfinished, "", path))) for call, path in calls]
    assert [entry.name for entry in (workdir / "checkpoints").iterdir()] == ["2"]
    return workdir / "checkpoints", made


def last(calls: list[Call], wanted: Call) -> int:
    """Returns the index of a call's last occurrence."""
    return max(number for number, call in enumerate(calls) if call == wanted)


def test_all_of_a_step_is_on_the_disk_before_it_gets_its_name(saved):
    directory, calls = saved
    step = directory / "2"
    named = last(calls, ("rename", str(step)))
    files = read_manifest(step).files
    assert files.keys() > {"notes/notes.json", "state/weight/.zarray", "state/weight/0.0"}
    manifest = calls.index(("fsync", str(step / "manifest.json")))
    for name in files:
        assert last(calls, ("fsync", str(step / name))) < manifest
    for place in {(step / name).parent for name in files}:
        # After its last file got its name. The step's folder holds the names of its parts.
        assert ("fsync", str(place)) in calls[:named]
    given = last(calls, ("rename", str(step / "state")))
    assert given < manifest < last(calls[:named], ("fsync", str(step))) < named


def test_the_metrics_are_on_the_disk_before_a_step_that_claims_them(saved):
    directory, calls = saved
    log = directory.parent / FILE_NAME
    assert last(calls, ("fsync", str(log))) < last(calls, ("rename", str(directory / "2")))


def test_the_name_of_a_step_is_on_the_disk_before_an_older_one_is_removed(saved):
    directory, calls = saved
    named = last(calls, ("rename", str(directory / "2")))
    deleted = [
        number
        for number, (call, path) in enumerate(calls)
        if call in ("unlink", "remove", "rmdir") and path.startswith(f"{directory / '1'}")
    ]
    renamed = last(calls, ("rename", str(directory / "1")))
    assert named < last(calls[:renamed], ("fsync", str(directory)))
    # The loss of its name too, before the first of its files is deleted: no half of it comes back.
    assert renamed < last(calls, ("fsync", str(directory))) < min(deleted)


def test_file_then_name_then_folder_reach_the_disk(tmp_path, calls):
    calls.clear()
    file = tmp_path / "file.json"
    write_atomically(file, "Größe\r\n")
    assert file.read_bytes() == "Größe\r\n".encode()
    (first, unfinished), (second, renamed), third = calls
    assert (first, second) == ("fsync", "replace") and unfinished == renamed != str(file)
    assert third == ("fsync", str(tmp_path)) and os.listdir(tmp_path) == ["file.json"]
    before = os.umask(0)
    os.umask(before)
    assert file.stat().st_mode & 0o777 == 0o666 & ~before  # others may read it as any other file


def test_new_folders_are_on_the_disk(tmp_path, calls):
    calls.clear()
    make_folder(tmp_path / "run" / "checkpoints")
    make_folder(tmp_path / "run")
    assert set(calls) == {("fsync", str(tmp_path)), ("fsync", str(tmp_path / "run"))}


def test_a_log_that_is_closed_is_on_the_disk(tmp_path, calls):
    with MetricsLog(tmp_path, resume_step=None) as log:
        log.write(1, {"loss": 1.0})
        calls.clear()
    log.sync()
    assert ("fsync", str(tmp_path / FILE_NAME)) in calls


def test_a_save_fails_with_the_file_that_could_not_be_synced(tmp_path):
    log = tmp_path / FILE_NAME

    def fail() -> None:
        raise storage_failure(f"write {log}", tmp_path, errno.ENOSPC)

    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        checkpoints.save(1, {"weight": jnp.ones(4)}, {}, beforehand=fail)
        with pytest.raises(OSError, match=rf"save step 1 in .*: cannot write {log}: .* is full, "):
            checkpoints.wait()
        assert checkpoints.steps() == []


def test_a_clock_that_is_set_meanwhile_fails_no_save(tmp_path, monkeypatch):
    now, looks = time.time, itertools.count()
    monkeypatch.setattr(time, "time", lambda: now() + 60 * next(looks))
    with Checkpoints(tmp_path, save_seconds=100) as checkpoints:
        checkpoints.save(1, {"weight": jnp.ones((4, 4))}, {})
        checkpoints.wait()
        assert checkpoints.newest_sound() == 1
