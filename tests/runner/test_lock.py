"""One run at a time in a workdir: by the kernel's lock, and beyond its reach by the content."""

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
from small_experiment import small

import runner
from runner import Options, fit
from runner.errors import ConfigError, WorkdirLost
from runner.processes.lock import FolderLock, wait_for_lock
from runner.training.starts import Start

ROOT = Path(runner.__file__).parents[1]
HOLDER = """
import sys
from pathlib import Path
from runner.processes.lock import FolderLock
with FolderLock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def files_but_for_the_lock(workdir: Path) -> dict[str, bytes]:
    return {name: content for name, content in files_of(workdir).items() if name != "lock"}


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
    """Beside a real run, and as a process of its own."""
    workdir, seconds = tmp_path / "run", []

    def start_another(step: int) -> bool:
        if step == 2:
            before = files_but_for_the_lock(workdir)
            another = subprocess.run(
                [
                    *(sys.executable, "-m", "runner", f"--workdir={workdir}"),
                    *("--fdl_config=experiments/llama_84m", "--fiddler=tiny"),
                ],
                cwd=ROOT,
                env=os.environ | {"PYTHONPATH": str(ROOT)},
                capture_output=True,
                text=True,
            )
            seconds.append((another, files_but_for_the_lock(workdir) == before))
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


def test_the_lock_of_a_dead_process_holds_nobody_up(tmp_path):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
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


def test_a_lock_is_given_back_with_the_folders_made_for_it(tmp_path):
    for _ in range(2):
        held = pytest.raises(ConfigError, match="one run at a time")
        with FolderLock(tmp_path / "a" / "b"), held:
            FolderLock(tmp_path / "a" / "b")
        assert not list(tmp_path.iterdir())
    with pytest.raises(KeyError), FolderLock(tmp_path / "a"):
        (tmp_path / "a" / "kept").touch()
        raise KeyError
    assert os.listdir(tmp_path / "a") == ["kept"]


def test_a_lock_of_another_host_that_is_renewed_is_respected(elsewhere):
    stop = threading.Event()

    def renew() -> None:
        with (elsewhere / "lock").open("r+b") as file:
            content, count = file.read(), 0
            while not stop.is_set():
                count += 1
                os.pwrite(file.fileno(), content + b"\n" * (count % 9), 0)
                os.ftruncate(file.fileno(), len(content) + count % 9)

    owner = threading.Thread(target=renew)
    owner.start()
    try:
        with pytest.raises(ConfigError, match=r"in use by the run of ada \(pid 7 on far\)"):
            FolderLock(elsewhere, abandoned_seconds=5)
    finally:
        stop.set()
        owner.join()
    assert os.listdir(elsewhere) == ["lock"]


def test_a_lock_that_is_renewed_is_kept_for_longer_than_an_abandoned_one(elsewhere, monkeypatch):
    """A start waits for the end of a run elsewhere for three times as long as a dead run's lock
    lasts. The clock goes on by a second at each look; every fifth finds the lock renewed."""
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


def test_a_lock_of_another_host_that_is_not_renewed_is_taken(elsewhere, capsys):
    asleep = os.open(elsewhere / "lock", os.O_RDWR)
    with FolderLock(elsewhere, abandoned_seconds=0.01) as taken:
        os.pwrite(asleep, b"{}", 0)  # as its owner does when it wakes up
        assert f"(pid {os.getpid()} on" in json.loads((elsewhere / "lock").read_text())["user"]
        taken.check()
    os.close(asleep)
    assert "is locked by the run of ada (pid 7 on far" in capsys.readouterr().err


def test_a_start_may_wait_for_the_end_of_another_run(tmp_path):
    held = FolderLock(tmp_path)
    ended = threading.Timer(0.05, held.__exit__)
    ended.start()
    wait_for_lock(tmp_path, seconds=60, abandoned_seconds=0.1)
    ended.join()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("content", [b"", b"\0" * 300, b"[]", b'{"pid": 1}'])
def test_what_a_power_cut_left_of_a_lock_holds_nobody_up(tmp_path, content):
    (tmp_path / "lock").write_bytes(content)
    with FolderLock(tmp_path, abandoned_seconds=float("inf")) as held:
        held.check()


@pytest.mark.parametrize("ended", [False, True])
def test_a_lock_that_another_run_has_taken_over_is_noticed(elsewhere, tmp_path, ended):
    """By an owner that slept, while the other run goes on or after its end."""
    who = "another run may have" if ended else r"ada \(pid 7 on far\) has"
    told = f"^{who} taken over .*mine, since nothing was heard of this process for"
    asleep = FolderLock(tmp_path / "mine", abandoned_seconds=0.0)
    with pytest.raises(WorkdirLost, match=told), asleep as mine:
        mine.check()
        if ended:
            (tmp_path / "mine" / "lock").unlink()
        else:
            (elsewhere / "lock").rename(tmp_path / "mine" / "lock")
        with pytest.raises(WorkdirLost):
            mine.check()
        raise OSError("whatever else goes wrong then")
    assert os.listdir(tmp_path / "mine") == ([] if ended else ["lock"])


@pytest.mark.parametrize(("kernel_locks", "limit"), [(True, 60.0), (True, 0.0), (False, 60.0)])
def test_a_lock_that_was_deleted_is_noticed_beside_the_run_that_it_let_in(
    tmp_path, monkeypatch, kernel_locks, limit
):
    """Where the kernel knows locks, also by a run that was asleep: none waits for that to end."""

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
    """As a run does where there are no locks, when somebody has emptied the file."""
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
        (shutil.rmtree, "run was deleted or moved while this run went on there"),
        (lambda workdir: workdir.rename(workdir.with_name("moved")), "run was deleted or moved"),
    ],
)
def test_what_becomes_of_a_lock_or_its_folder_is_noticed(tmp_path, act, told):
    with pytest.raises(WorkdirLost, match=told), FolderLock(tmp_path / "run") as held:
        act(tmp_path / "run")
        with pytest.raises(WorkdirLost, match=told):
            held.check()


def test_an_emptied_lock_is_still_its_owners(tmp_path):
    with FolderLock(tmp_path) as held:
        (tmp_path / "lock").write_text("")
        held.check()
        with pytest.raises(ConfigError, match="in use by a run that has just begun"):
            FolderLock(tmp_path)


def without_events(files: dict[str, bytes]) -> dict[str, bytes]:
    """All but TensorBoard's: each start has a file of its own there."""
    return {name: files[name] for name in files if not name.startswith("tensorboard/")}


@pytest.mark.slow
def test_a_run_whose_lock_is_deleted_disturbs_the_next_in_nothing(tmp_path):
    """The second begins while the first goes on, and ends before that makes its next step."""
    workdir, seconds = tmp_path / "run", []

    def start_another(step: int) -> bool:
        if step == 2:
            (workdir / "lock").unlink()
            seconds.append(fit(small("steps=3"), workdir))
            seconds.append(files_of(workdir))
        return False

    with pytest.raises(WorkdirLost, match=r"taken over .*lock was deleted"):
        fit(small("steps=4"), workdir, Options(stop=start_another))
    second, left = seconds
    assert [line["step"] for line in second.metrics] == [1, 2, 3]
    assert without_events(files_of(workdir)) == without_events(left)
    (lines,) = (left[name] for name in left if name.startswith("metrics.jsonl."))
    assert [json.loads(line)["step"] for line in lines.splitlines()] == [1]


@pytest.mark.slow
@pytest.mark.parametrize("writes", range(6))
def test_an_owner_that_sleeps_between_two_files_of_a_start_writes_none_after_it(
    elsewhere, tmp_path, writes
):
    """Another owner takes over before each of the checks in turn."""
    workdir, checks, before = tmp_path / "run_of_mine", [], {}

    class Overtaken(FolderLock):
        def check(self) -> None:
            checks.append(1)
            if len(checks) == writes + 1:
                (elsewhere / "lock").rename(workdir / "lock")
                before.update(whole_files(workdir))
            super().check()

    with pytest.raises(WorkdirLost), Overtaken(workdir) as mine:
        Start(small("steps=1"), workdir, None).record(1, mine)
    assert len(checks) > writes
    assert whole_files(workdir) == before


def whole_files(workdir: Path) -> dict[str, bytes]:
    return {
        name: content
        for name, content in files_of(workdir).items()
        if not name.endswith(".unfinished")
    }


def test_a_run_that_was_taken_for_dead_writes_nothing_more(elsewhere, tmp_path):
    workdir, before = tmp_path / "taken", {}

    def take(step: int) -> bool:
        if step == 2:
            (elsewhere / "lock").rename(workdir / "lock")
            before.update(files_of(workdir))
        return False

    with pytest.raises(WorkdirLost, match=r"^ada \(pid 7 on far\) has taken over .*taken, since"):
        fit(small("steps=3"), workdir, Options(stop=take))
    assert without_events(files_of(workdir)) == without_events(before)
