"""One run at a time writes to a workdir: the lock of a folder on a disk."""

import errno
import fcntl
import itertools
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from folder_contents import files_of
from forked_processes import ROOT, run_forked
from small_experiment import small

from runner import Options, fit
from runner.errors import ConfigError, WorkdirLost
from runner.processes.lock import FolderLock, wait_for_lock
from runner.training.starts import Start

HOLDER = """
import sys
from pathlib import Path
from runner.processes.lock import FolderLock
with FolderLock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def files_without(prefix: str, workdir: Path) -> dict[str, bytes]:
    files = files_of(workdir)
    return {name: files[name] for name in files if not name.startswith(prefix)}


@pytest.fixture
def elsewhere(tmp_path):
    """A workdir with the lock of a run on another host."""
    with FolderLock(tmp_path / "run"):
        content = json.loads((tmp_path / "run" / "lock").read_text())
    content |= {"user": "ada (pid 7 on far)", "machine": "another", "start": "another"}
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "lock").write_text(json.dumps(content))
    return tmp_path / "run"


def test_a_second_start_is_refused_and_changes_nothing(tmp_path):
    workdir, seconds = tmp_path / "run", []

    def start_another(step: int) -> bool:
        if step == 2:
            before = files_without("lock", workdir)
            flags = ("--fdl_config=experiments/llama_84m", "--fiddler=tiny")
            another = run_forked("-m", "runner", f"--workdir={workdir}", *flags)
            seconds.append((another, files_without("lock", workdir) == before))
        return False

    result = fit(small("steps=3"), workdir, Options(stop=start_another))
    ((another, nothing_changed),) = seconds
    assert another.returncode == 2, another.stderr
    assert f"error: {workdir} is in use by the run of " in another.stderr
    assert f"(pid {os.getpid()} on " in another.stderr
    assert len(another.stderr.splitlines()) == 1
    assert nothing_changed
    assert [line["step"] for line in result.metrics] == [1, 2, 3]
    assert not (workdir / "lock").exists()


def test_the_lock_of_a_dead_process_is_taken_at_once(tmp_path):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout and holder.stdout.readline() == "held\n"
    with pytest.raises(ConfigError, match=rf"in use by the run of .*\(pid {holder.pid} on"):
        FolderLock(tmp_path)
    holder.kill()
    holder.communicate()
    assert (tmp_path / "lock").exists()
    with FolderLock(tmp_path, abandoned_seconds=float("inf")):  # it does not wait
        pass
    assert not list(tmp_path.iterdir())


def test_release_removes_the_lock_and_the_folders_made_for_it(tmp_path):
    for _ in range(2):
        held = pytest.raises(ConfigError, match="only one run at a time")
        with FolderLock(tmp_path / "a" / "b"), held:
            FolderLock(tmp_path / "a" / "b")
        assert not list(tmp_path.iterdir())
    with pytest.raises(KeyError), FolderLock(tmp_path / "a"):
        (tmp_path / "a" / "kept").touch()
        raise KeyError
    assert os.listdir(tmp_path / "a") == ["kept"]


def test_a_lock_that_another_host_renews_is_respected(elsewhere, monkeypatch):
    """The clock advances by a second at each look, and every fifth look finds the lock renewed."""
    now, lock = itertools.count(), elsewhere / "lock"

    def look() -> float:
        if (seconds := next(now)) % 15 == 0:
            lock.write_bytes(lock.read_bytes() + b" ")
        return seconds

    monkeypatch.setattr(time, "monotonic", look)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    with pytest.raises(ConfigError, match=r"in use by the run of ada \(pid 7 on far\)"):
        wait_for_lock(elsewhere, seconds=180, abandoned_seconds=60)
    assert lock.exists()


def test_an_abandoned_lock_of_another_host_is_taken(elsewhere, capsys):
    asleep = os.open(elsewhere / "lock", os.O_RDWR)
    with FolderLock(elsewhere, abandoned_seconds=0.01) as taken:
        os.pwrite(asleep, b"{}", 0)  # as its owner does when it wakes up
        assert f"(pid {os.getpid()} on" in json.loads((elsewhere / "lock").read_text())["user"]
        taken.check()
    os.close(asleep)
    assert "is locked by the run of ada (pid 7 on far" in capsys.readouterr().err


def test_a_start_can_wait_for_the_end_of_another_run(tmp_path):
    held = FolderLock(tmp_path)
    ended = threading.Timer(0.05, held.__exit__)
    ended.start()
    wait_for_lock(tmp_path, seconds=60, abandoned_seconds=0.1)
    ended.join()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("content", [b"", b"\0" * 300, b"[]", b'{"pid": 1}'])
def test_a_damaged_lock_is_taken_at_once(tmp_path, content):
    (tmp_path / "lock").write_bytes(content)
    with FolderLock(tmp_path, abandoned_seconds=float("inf")) as held:
        held.check()


@pytest.mark.parametrize("ended", [False, True])
def test_an_owner_that_slept_notices_the_takeover(elsewhere, tmp_path, ended):
    """While the other run is active, or after its end."""
    who = "another run may have" if ended else r"ada \(pid 7 on far\) has"
    told = f"^{who} taken over .*mine, since this process did not renew the lock for"
    asleep = FolderLock(tmp_path / "mine", abandoned_seconds=0.0)
    with pytest.raises(WorkdirLost, match=told), asleep as mine:
        mine.check()
        if ended:
            (tmp_path / "mine" / "lock").unlink()
        else:
            (elsewhere / "lock").rename(tmp_path / "mine" / "lock")
        with pytest.raises(WorkdirLost):
            mine.check()
        raise OSError("another error")
    assert os.listdir(tmp_path / "mine") == ([] if ended else ["lock"])


@pytest.mark.parametrize(("kernel_locks", "limit"), [(True, 60.0), (True, 0.0), (False, 60.0)])
def test_the_owner_of_a_deleted_lock_notices_the_next_run(
    tmp_path, monkeypatch, kernel_locks, limit
):

    def without_locks(descriptor: int, kind: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    if not kernel_locks:
        monkeypatch.setattr(fcntl, "flock", without_locks)
    first = FolderLock(tmp_path, abandoned_seconds=limit)
    first.check()
    (tmp_path / "lock").unlink()
    with FolderLock(tmp_path) as second:
        told = (
            rf"\(pid {os.getpid()} on .* has taken over {tmp_path}, since .*lock was deleted: this"
        )
        for look in (first.check, first.__exit__):
            with pytest.raises(WorkdirLost, match=told):
                look()
        second.check()


def replace_by_a_copy(workdir: Path) -> None:
    (workdir / "copy").write_bytes((workdir / "lock").read_bytes())
    (workdir / "copy").rename(workdir / "lock")


def write_into_it(workdir: Path) -> None:
    """A run without kernel locks writes the same if the file was emptied."""
    owner = json.loads((workdir / "lock").read_text()) | {"user": "ada", "start": "another"}
    (workdir / "lock").write_text(json.dumps(owner))


@pytest.mark.parametrize(
    ("act", "told"),
    [
        (
            lambda workdir: (workdir / "lock").unlink(),
            "^another run may have taken over .*lock was deleted",
        ),
        (replace_by_a_copy, "^another run may have taken over .*lock was deleted"),
        (write_into_it, "^ada has taken over .*lock was deleted"),
        (shutil.rmtree, "run was deleted or moved during the run"),
        (lambda workdir: workdir.rename(workdir.with_name("moved")), "run was deleted or moved"),
    ],
)
def test_a_lost_lock_or_folder_is_noticed(tmp_path, act, told):
    with pytest.raises(WorkdirLost, match=told), FolderLock(tmp_path / "run") as held:
        act(tmp_path / "run")
        with pytest.raises(WorkdirLost, match=told):
            held.check()


def test_an_emptied_lock_still_belongs_to_its_owner(tmp_path):
    with FolderLock(tmp_path) as held:
        (tmp_path / "lock").write_text("")
        held.check()
        with pytest.raises(ConfigError, match="in use by a run that has just started"):
            FolderLock(tmp_path)


@pytest.mark.slow
def test_a_run_whose_lock_is_deleted_leaves_the_next_unchanged(tmp_path):
    """The second run starts and ends between two steps of the first."""
    workdir, seconds = tmp_path / "run", []

    def start_another(step: int) -> bool:
        if step == 2:
            (workdir / "lock").unlink()
            seconds.append(fit(small("steps=3"), workdir))
            seconds.append(files_without("tensorboard/", workdir))
        return False

    with pytest.raises(WorkdirLost, match=r"taken over .*lock was deleted"):
        fit(small("steps=4"), workdir, Options(stop=start_another))
    second, left = seconds
    assert [line["step"] for line in second.metrics] == [1, 2, 3]
    assert files_without("tensorboard/", workdir) == left
    (lines,) = (left[name] for name in left if name.startswith("metrics.jsonl."))
    assert [json.loads(line)["step"] for line in lines.splitlines()] == [1]


@pytest.mark.slow
@pytest.mark.parametrize("writes", range(6))
def test_an_owner_overtaken_between_two_files_of_a_start_writes_no_more(
    elsewhere, tmp_path, writes
):
    """Another owner takes over before each of the checks in turn."""
    workdir, checks, before = tmp_path / "run_of_mine", [], {}

    class Overtaken(FolderLock):
        def check(self) -> None:
            checks.append(1)
            if len(checks) == writes + 1:
                (elsewhere / "lock").rename(workdir / "lock")
                before.update(finished_files(workdir))
            super().check()

    with pytest.raises(WorkdirLost), Overtaken(workdir) as mine:
        Start(small("steps=1"), workdir, None).record(1, mine)
    assert len(checks) > writes
    assert finished_files(workdir) == before


def finished_files(workdir: Path) -> dict[str, bytes]:
    files = files_of(workdir)
    return {name: files[name] for name in files if not name.endswith(".unfinished")}


def test_a_run_that_lost_its_lock_writes_no_more(elsewhere, tmp_path):
    workdir, before = tmp_path / "taken", {}

    def take(step: int) -> bool:
        if step == 2:
            (elsewhere / "lock").rename(workdir / "lock")
            before.update(files_without("tensorboard/", workdir))
        return False

    with pytest.raises(WorkdirLost, match=r"^ada \(pid 7 on far\) has taken over .*taken, since"):
        fit(small("steps=3"), workdir, Options(stop=take))
    assert files_without("tensorboard/", workdir) == before
