"""A run in a bucket, taken over while the network holds the requests of its owner.

The first owner is a separate process behind its own proxy. The server refuses its late and repeated
requests, or they change nothing of the next owner's. The owner of checkpoints holds no lease.
"""

import itertools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import jax
import pytest
from buckets.fixtures import folder_in_bucket
from buckets.owner import state
from buckets.proxy import Fault, FaultyProxy, Request
from buckets.servers import environment
from forked_processes import ForkedProcess
from states import target_of

from lmlib.checkpoint import Checkpoints
from lmlib.storage.bucket.copies import start_of
from lmlib.storage.bucket.store import BucketStore
from lmlib.storage.bucket.url import BucketUrl
from lmlib.storage.local_folder import folder_to_read
from lmlib.storage.stored_json import parse_json
from runner.processes.workdir import opened

pytestmark = pytest.mark.landing
INDEX = "checkpoints/steps.json"
# Writes and deletions of the first owner's act, in order: four files of arrays, notes, the
# manifest, steps.json with the step, steps.json without the one before, and that one's six files.
ARRAYS, NOTES, MANIFEST, ADDED, REMOVED, DELETED = 0, 4, 5, 6, 7, 8


@pytest.fixture(params=[pytest.param("s3", marks=pytest.mark.slow), "gs"])
def bucket(request, monkeypatch, tmp_path) -> Iterator[tuple[str, str, FaultyProxy]]:
    """A folder's URL and scheme, and the proxy of the first owner."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with (
        folder_in_bucket(request.param, monkeypatch) as (url, proxy),
        FaultyProxy(proxy.port) as of_first,
    ):
        yield url, request.param, of_first


class First:
    """The first owner, which is ready to act."""

    def __init__(
        self, bucket: tuple[str, str, FaultyProxy], program: list[str], errors: IO[str], cache: Path
    ):
        _, scheme, self.proxy = bucket
        ours, theirs = os.pipe()
        self._said = os.fdopen(ours)
        given, self._line = os.pipe()
        self.process = ForkedProcess(
            *program,
            stdin=given,
            stdout=theirs,
            stderr=errors,
            environment=environment(scheme, self.proxy.port) | {"XDG_CACHE_HOME": str(cache)},
        )
        os.close(theirs)
        os.close(given)
        assert self._said.readline() == "ready\n"

    def act(self, strike: int, is_stopped: bool = False) -> None:
        """Lets it act until its changing request number `strike` arrives.

        The network then holds this request and all that follow, and refuses reads; or this request
        is answered and the process is stopped.
        """
        numbers, struck = itertools.count(), threading.Event()

        def fault(request: Request) -> Fault | None:
            if request.method in ("GET", "HEAD"):
                return Fault.REFUSED if struck.is_set() and not is_stopped else None
            before_strike = "lease" not in request.path and next(numbers) < strike
            if before_strike or (is_stopped and ("lease" in request.path or struck.is_set())):
                return None
            if is_stopped:
                os.kill(self.process.pid, signal.SIGSTOP)
            struck.set()
            return None if is_stopped else Fault.HELD

        self.proxy.fault = fault
        os.write(self._line, b"\n")
        assert struck.wait(60)

    def comes_back(self) -> list[str]:
        """Releases its requests; the lines that it writes about its act, and a save after it."""
        self.proxy.release()
        self.proxy.fault = lambda request: None
        self.proxy.release()
        assert self.process.wait(60) == 0
        return self._said.read().splitlines()


@pytest.fixture
def first(bucket, tmp_path) -> Iterator[Callable[..., First]]:
    started: list[First] = []
    with (tmp_path / "errors").open("w") as errors:

        def start(how: str, *program: str) -> First:
            program = program or ("-m", "buckets.owner", f"{bucket[0]}/checkpoints", how)
            started.append(First(bucket, [*program], errors, tmp_path / "cache_of_first"))
            return started[-1]

        yield start
        for each in started:
            each.process.kill()


def contents(url: str) -> dict[str, bytes]:
    store = BucketStore(BucketUrl.parsed(url))
    return {name: store.read(name) for name in store.list()}


def folders_of(found: dict[str, bytes]) -> tuple[set[str], set[str]]:
    """The folders that hold files, and the folders that steps.json names."""
    there = {name.split("/")[1] for name in found if name.startswith("checkpoints.files/")}
    return there, {step["folder"] for step in parse_json(found[INDEX])["steps"].values()}


def check_undisturbed(url: str, before: dict[str, bytes], steps: dict[int, float]) -> None:
    """Checks that nothing in `before` changed, and that the next owner removes the rest."""
    after = contents(url)
    _, named = folders_of(before)
    own = {name for name in before if name == INDEX or name.split("/")[1] in named}
    assert {name: after.get(name) for name in own} == {name: before[name] for name in own}
    assert folders_of(after)[1] == named
    with Checkpoints(f"{url}/checkpoints") as checkpoints:
        assert checkpoints.steps() == sorted(steps)
        for step, value in steps.items():
            restored, _ = checkpoints.restore(step, target_of(state(0.0)))
            assert jax.device_get(restored["matrix"]).tolist() == [[value] * 6] * 4
            checkpoints.verify(step)
    there, named = folders_of(contents(url))
    assert there == named


def steps_of(url: str) -> list[int]:
    with Checkpoints(f"{url}/checkpoints") as checkpoints:  # takes over: they stay as they are
        return checkpoints.steps()


def saved_by_the_next(url: str, step: int, **settings: int) -> None:
    with Checkpoints(f"{url}/checkpoints", **settings) as checkpoints:
        checkpoints.save(step, state(step + 0.5), {"by": "the next"})


def is_taken_over(line: str) -> bool:
    return "cannot write" in line and "another process has begun to write there" in line


@pytest.mark.parametrize("is_stopped", [False, True])
@pytest.mark.parametrize(
    "strike",
    [
        *(ARRAYS, ARRAYS + 2, NOTES, MANIFEST, ADDED),
        *(REMOVED, DELETED, DELETED + 1, DELETED + 3, DELETED + 5),
    ],
)
def test_an_interrupted_save_disturbs_nothing_of_the_next_owner(bucket, first, strike, is_stopped):
    """The network holds its requests, or the process is stopped. The next owner saves this step,
    unless it is already there, and another one."""
    url = bucket[0]
    interrupted = first("save")
    interrupted.act(strike, is_stopped)
    steps = {step: float(step) for step in steps_of(url)}
    for step in sorted({4, 6} - steps.keys()):
        saved_by_the_next(url, step)
        steps[step] = step + 0.5
    before = contents(url)
    if is_stopped:
        os.kill(interrupted.process.pid, signal.SIGCONT)
    assert is_taken_over(interrupted.comes_back()[-1])
    check_undisturbed(url, before, steps)


@pytest.mark.parametrize("how", ["rank", "set aside"])
@pytest.mark.parametrize("of_next", range(5))
def test_late_changes_of_a_step_do_not_change_the_next_owners(bucket, first, how, of_next):
    """The next opens, saves, ranks or removes the same step; or is followed by another."""
    url, steps = bucket[0], {2: 2.0}
    cut_off = first(how)
    cut_off.act(0)
    with Checkpoints(f"{url}/checkpoints", keep=1 if of_next == 3 else 3) as checkpoints:
        if of_next in (1, 3):
            checkpoints.save(4, state(4.5), {})
            checkpoints.wait()
            steps = {2: 2.0, 4: 4.5} if of_next == 1 else {4: 4.5}
        if of_next == 2:
            checkpoints.rank(2, 0.25)
    if of_next == 4:
        saved_by_the_next(url, 6)
        steps = {2: 2.0, 6: 6.5}
    before = contents(url)
    assert all(map(is_taken_over, cut_off.comes_back()))
    check_undisturbed(url, before, steps)


@pytest.mark.parametrize("order", range(5))
def test_delayed_requests_of_a_save_do_not_disturb_the_next_saves(bucket, first, order):
    """The requests arrive before, during or after the next owner's two saves."""
    url, has = bucket[0], 4 if order == 4 else 2
    cut_off = first("save")
    cut_off.act((ARRAYS, MANIFEST, ADDED, ADDED, DELETED)[order])
    for turn, step in enumerate((6, 8)):
        with Checkpoints(f"{url}/checkpoints") as checkpoints:
            checkpoints.save(step, state(step + 0.5), {})
            if turn == order % 2:
                cut_off.proxy.release()
            checkpoints.wait()
    before = contents(url)
    assert is_taken_over(cut_off.comes_back()[-1])
    check_undisturbed(url, before, {has: float(has), 6: 6.5, 8: 8.5})


# Changes, adds and deletes small files of a run, and tells what came of it.
OWNER_OF_FILES = """
import sys
from runner.errors import WorkdirLost
from runner.processes.workdir import opened

def write(folder, files):
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)

try:
    with opened(sys.argv[1], print, abandoned_seconds=1.0) as place:
        files = dict.fromkeys(["config.json", "hlo/program.txt", "report.html"], "first")
        write(place.folder, {**files, "metrics.jsonl": "1\\n2\\n"})
        place.sync()
        print("ready", flush=True)
        sys.stdin.readline()
        (place.folder / "report.html").unlink()
        late = dict.fromkeys(["config.json", "hlo/program.txt", "result.json"], "late")
        write(place.folder, late)
        with (place.folder / "metrics.jsonl").open("a") as file:
            file.write("3\\n")
        place.sync()
except (OSError, WorkdirLost) as error:
    print(error)
"""
CHANGES = 5  # four writes and a deletion


@pytest.mark.parametrize("is_stopped", [False, True])
@pytest.mark.parametrize("strike", [0, 2, CHANGES - 1])
def test_late_changes_of_small_files_change_none_of_the_next_owner(
    bucket, first, is_stopped, strike
):
    """The next changes some of the files before the late requests come, some after, some never."""
    url = bucket[0]
    cut_off = first("", "-c", OWNER_OF_FILES, url)
    cut_off.act(strike, is_stopped)
    with opened(url, print, abandoned_seconds=1.0) as place:
        lines = (place.folder / "metrics.jsonl").read_text()
        assert lines in ("1\n2\n", "1\n2\n3\n")  # what had come until then
        (place.folder / "config.json").write_text("next")
        (place.folder / "hlo").mkdir()
        (place.folder / "hlo/program.txt").write_text("next")
        place.sync()
        before = contents(url)
        if is_stopped:
            os.kill(cut_off.process.pid, signal.SIGCONT)
        assert "taken over" in cut_off.comes_back()[-1]
        start = start_of(BucketUrl.parsed(url))
        of_the_start = (f"files/{start}/", f"hlo/{start}/")
        own, after = (
            {name: content for name, content in found.items() if name.startswith(of_the_start)}
            for found in (before, contents(url))
        )
        assert len(own) >= 4 and after == own
        with (place.folder / "metrics.jsonl").open("a") as file:
            file.write("4\n")
    copy = folder_to_read(url)
    assert (copy / "config.json").read_text() == "next"
    assert (copy / "metrics.jsonl").read_text() == f"{lines}4\n"
    with opened(url, print):  # removes the files of other starts
        own = f"files/{start_of(BucketUrl.parsed(url))}/"
        assert all(name.startswith(own) for name in contents(url) if name.startswith("files/"))
