"""One run at a time in a workdir: by the kernel's lock, and beyond its reach by the content."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from folder_contents import files_of
from small_experiment import small

import runner
from runner import Options, fit
from runner.command_line.errors import ConfigError, WorkdirTaken
from runner.processes import lock
from runner.processes.lock import WorkdirLock, wait_for_lock

ROOT = Path(runner.__file__).parents[1]
HOLDER = """
import sys
from pathlib import Path
from runner.processes.lock import WorkdirLock
with WorkdirLock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def files_but_for_the_lock(workdir: Path) -> dict[str, bytes]:
    return {name: content for name, content in files_of(workdir).items() if name != "lock"}


@pytest.fixture
def elsewhere(tmp_path):
    """A workdir with the lock of a run on another host."""
    with WorkdirLock(tmp_path / "run"):
        content = json.loads((tmp_path / "run" / "lock").read_text())
    content |= {"user": "ada", "host": "far", "pid": 7, "kernel": "another", "start": "another"}
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
        WorkdirLock(tmp_path)
    holder.kill()
    holder.communicate()
    assert (tmp_path / "lock").exists()
    with WorkdirLock(tmp_path, abandoned_seconds=float("inf")):  # it does not wait
        pass
    assert not list(tmp_path.iterdir())


def test_a_lock_is_given_back_with_the_folders_made_for_it(tmp_path):
    for _ in range(2):
        held = pytest.raises(ConfigError, match="one run at a time")
        with WorkdirLock(tmp_path / "a" / "b"), held:
            WorkdirLock(tmp_path / "a" / "b")
        assert not list(tmp_path.iterdir())
    with pytest.raises(KeyError), WorkdirLock(tmp_path / "a"):
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
        with pytest.raises(ConfigError, match=r"in use by the run of ada \(pid 7 on far, since"):
            WorkdirLock(elsewhere, abandoned_seconds=5)
    finally:
        stop.set()
        owner.join()
    assert os.listdir(elsewhere) == ["lock"]


def test_a_lock_of_another_host_that_is_not_renewed_is_taken(elsewhere, capsys):
    asleep = os.open(elsewhere / "lock", os.O_RDWR)
    with WorkdirLock(elsewhere, abandoned_seconds=0.01) as taken:
        os.pwrite(asleep, b"{}", 0)  # as its owner does when it wakes up
        assert json.loads((elsewhere / "lock").read_text())["pid"] == os.getpid()
        taken.check()
    os.close(asleep)
    assert "is locked by the run of ada (pid 7 on far" in capsys.readouterr().err


def test_a_start_may_wait_for_the_end_of_another_run(tmp_path):
    held = WorkdirLock(tmp_path)
    ended = threading.Timer(0.05, held.__exit__)
    ended.start()
    wait_for_lock(tmp_path, seconds=60, abandoned_seconds=0.1)
    ended.join()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("content", [b"", b"\0" * 300, b"[]", b'{"pid": 1}'])
def test_what_a_power_cut_left_of_a_lock_holds_nobody_up(tmp_path, content):
    (tmp_path / "lock").write_bytes(content)
    with WorkdirLock(tmp_path, abandoned_seconds=float("inf")) as held:
        held.check()


def test_a_lock_that_another_run_has_taken_over_is_noticed(elsewhere, tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "RENEW_SECONDS", 0.0)  # as if this process had slept each time
    taken = pytest.raises(WorkdirTaken, match=r"^ada \(pid 7 on far.* has taken over .*mine, since")
    with taken, WorkdirLock(tmp_path / "mine") as mine:
        mine.check()
        (elsewhere / "lock").rename(tmp_path / "mine" / "lock")
        with pytest.raises(WorkdirTaken):
            mine.check()
        raise OSError("whatever else goes wrong then")
    assert os.listdir(tmp_path / "mine") == ["lock"]


@pytest.mark.slow
def test_a_run_that_was_taken_for_dead_writes_nothing_more(elsewhere, tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "RENEW_SECONDS", 0.0)
    workdir, before = tmp_path / "taken", {}

    def take(step: int) -> bool:
        if step == 2:
            (elsewhere / "lock").rename(workdir / "lock")
            before.update(files_of(workdir))
        return False

    with pytest.raises(WorkdirTaken, match=r"^ada \(pid 7 on far.* has taken over .*taken, since"):
        fit(small("steps=3"), workdir, Options(stop=take))
    after = files_of(workdir)
    events = [name for name in after if name.startswith("tensorboard/")]  # a file of its own
    assert {**after, **dict.fromkeys(events)} == {**before, **dict.fromkeys(events)}
