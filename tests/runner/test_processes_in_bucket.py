"""Runs of several processes, each on a machine of its own, whose workdir is in a bucket."""

import os
import signal
import time

import pytest
from buckets.fixtures import folder_in_bucket
from several_processes import SECONDS, SeveralProcesses, assert_same_curve

from lmlib.checkpoint import Checkpoints
from lmlib.storage.bucket.copies import file_of
from lmlib.storage.bucket.store import BucketStore
from lmlib.storage.bucket.url import BucketUrl
from lmlib.storage.local_folder import folder_to_read
from runner.command_line.exit_status import MISTAKE

pytestmark = pytest.mark.slow


@pytest.fixture(params=["s3", "gs"])
def url(request, monkeypatch):
    with folder_in_bucket(request.param, monkeypatch) as (found, _):
        yield found


def begun(url, folder, count, **settings):
    """A start in which each process has copies of its own of all that is in the bucket."""
    machines = {
        process: {"XDG_CACHE_HOME": str(folder / f"machine_{process}")} for process in range(count)
    }
    return SeveralProcesses(count, url, folder / "outputs", environments=machines, **settings)


def wait_for(url, step, run):
    deadline = time.monotonic() + SECONDS
    with Checkpoints(f"{url}/checkpoints", read_only=True) as checkpoints:
        while step not in checkpoints.steps():
            assert time.monotonic() < deadline, run.everything()


def test_a_lost_machine_costs_no_step_of_the_curve(url, tmp_path, monkeypatch):
    store = BucketStore(BucketUrl.parsed(url))
    first = begun(url, tmp_path / "first", 2)
    wait_for(url, 10, first)
    os.kill(first.running[1].pid, signal.SIGKILL)
    codes = first.exit_codes()
    assert codes[0] == 3 and "because process 1 ended or stopped answering" in first.output(0)

    begun(url, tmp_path / "second", 2).finished()
    SeveralProcesses(1, tmp_path / "alone", tmp_path / "of_alone").finished()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "reader"))
    assert_same_curve(folder_to_read(url), tmp_path / "alone")

    logs = {file_of(name).rpartition("/") for name in store.list("logs")}
    assert sorted(name for *_, name in logs) == sorted(
        f"process_{process:05}.log" for process in (0, 1) * 2
    )


def test_two_workdirs_are_refused(url, tmp_path):
    run = begun(url, tmp_path / "run", 2, own={1: [f"--workdir={url}_other"]})
    assert run.exit_codes() == [MISTAKE, MISTAKE], run.everything()
    assert "error: the workdir of process 1 is another than that of process 0" in run.output(0)
    assert not BucketStore(BucketUrl.parsed(url)).list("checkpoints")
