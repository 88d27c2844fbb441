"""Runs whose workdir is in a bucket: the same curve, bit for bit, or an error with the reason."""

import contextlib
import itertools
import json
import os
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import jax
import pytest
from buckets.fixtures import folder_in_bucket
from buckets.proxy import Fault, FaultyProxy, Request
from buckets.servers import environment
from forked_processes import ForkedProcess, run_forked
from small_experiment import small
from small_runs import EXPERIMENT as SMALL
from states import assert_same_bits, without_times

from lmlib.checkpoint import Checkpoints
from lmlib.metrics.log import read_metrics
from lmlib.storage.bucket.copies import object_of, start_of
from lmlib.storage.bucket.store import BucketStore, Patience
from lmlib.storage.bucket.url import BucketUrl
from lmlib.storage.local_folder import folder_to_read
from lmlib.storage.stored_json import parse_json
from runner import Options, fit
from runner.errors import ConfigError, StoppedEarly, WorkdirLost
from runner.processes.lock import BucketLock

STEPS = 6
EXPERIMENT = (f"steps={STEPS}", "checkpoints.every=2")
FLAGS = (*SMALL, "--fdl.mesh.fsdp=1", *(f"--fdl.{override}" for override in EXPERIMENT))
LOG = "metrics.jsonl"
LEASE = r"lease(/|%2F)owner.json"  # in a request's path
PASSING = (Fault.REFUSED, Fault.THROTTLED, Fault.UNAVAILABLE, Fault.CUT, Fault.LOST)


@pytest.fixture(params=[pytest.param("s3", marks=pytest.mark.slow), "gs"])
def bucket(request, monkeypatch) -> Iterator[tuple[str, FaultyProxy]]:
    with folder_in_bucket(request.param, monkeypatch) as found:
        yield found


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Moves this process to another machine, without local copies."""

    def move(name: str) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / name))

    move("first")
    return move


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> tuple[object, list]:
    workdir = tmp_path_factory.mktemp("undisturbed")
    return fit(small(*EXPERIMENT), workdir).state, curve(workdir)


def curve(workdir):
    return without_times(read_metrics(workdir))


def stopping_after(step: int) -> Options:
    return Options(stop=lambda now: now >= step)


def names_in(url: str) -> set[str]:
    return set(BucketStore(BucketUrl.parsed(url)).list())


@pytest.mark.slow
def test_a_run_resumes_on_another_machine(bucket, machine, undisturbed):
    url, proxy = bucket
    struck: set[str] = set()

    def fault(request: Request) -> Fault | None:
        """Injects each kind of fault, but never twice for the same request."""
        if request.number % 7 or f"{request.method} {request.path}" in struck:
            return None
        struck.add(f"{request.method} {request.path}")
        return PASSING[request.number // 7 % len(PASSING)]

    proxy.fault = fault
    with pytest.raises(StoppedEarly):
        fit(small(*EXPERIMENT), url, stopping_after(3))
    machine("second")
    state = fit(small(*EXPERIMENT), url).state
    assert len(struck) > 10
    assert_same_bits(state, undisturbed[0])
    machine("third")
    assert curve(folder_to_read(url)) == undisturbed[1]
    names = names_in(url)
    own = f"files/{start_of(BucketUrl.parsed(url))}/"  # of the last start: the first's are gone
    assert all(each.startswith(own) for each in names if each.startswith("files/"))
    for each in ("config.json", "metrics.jsonl", "result.json", "report.html"):
        assert own + each in names
    assert not [name for name in names if ".parts/" in name or name.endswith("unfinished")]


@pytest.mark.slow
def test_a_run_killed_anywhere_resumes(bucket, machine, undisturbed, tmp_path):
    """Killed when it sends a request, at several of about 200."""
    url, proxy = bucket
    machine("killed")
    killed = 0
    for strike in (40, 80, 120, 160, 400):
        workdir, output = f"{url}/{strike}", tmp_path / f"{strike}.output"
        arguments = (*FLAGS, f"--workdir={workdir}")
        began = len(proxy.requests)
        with output.open("w") as file:
            run = ForkedProcess("-m", "runner", *arguments, stdout=file, stderr=file)
            reached = threading.Event()
            proxy.fault = lambda request, at=began + strike, reached=reached: (
                reached.set() if request.number == at else None
            )
            while run.poll() is None and not reached.wait(0.005):
                pass
            run.kill()
            run.wait(60)
        proxy.fault = lambda request: None
        state = fit(small(*EXPERIMENT), workdir).state
        assert_same_bits(state, undisturbed[0])
        assert curve(folder_to_read(workdir)) == undisturbed[1], output.read_text()
        if not reached.is_set():
            break
        killed += 1
    assert killed == 4


@pytest.mark.slow
def test_training_continues_after_a_failed_save(bucket, machine, undisturbed):
    """An array of the save at step 4 is refused."""
    url, proxy = bucket
    proxy.fault = lambda request: (
        Fault.FORBIDDEN
        if request.method in ("PUT", "POST")
        and "checkpoints.files" in request.path
        and ("/4-" in request.path or "%2F4-" in request.path)
        else None
    )
    state = fit(small(*EXPERIMENT), url, Options(reports=False)).state
    assert_same_bits(state, undisturbed[0])
    with Checkpoints(f"{url}/checkpoints", read_only=True) as checkpoints:
        assert checkpoints.steps() == [2, 6]
    proxy.fault = lambda request: None
    asked, before = len(proxy.requests), names_in(url)
    ended = run_forked("-m", "runner.checkpoint", "prune", url, "--keep=1")
    assert ended.returncode == 2 and f"{url}/checkpoints is in a bucket" in ended.stderr
    assert len(proxy.requests) > asked and names_in(url) == before


def test_a_second_run_is_refused(bucket, machine):
    url, _ = bucket
    with BucketLock(BucketStore(BucketUrl.parsed(url)), abandoned_seconds=1.0):
        machine("second")
        with pytest.raises(ConfigError, match=f"{url} is in use by the run of") as caught:
            fit(small(*EXPERIMENT), url)
    assert url in str(caught.value)


@pytest.mark.parametrize("how", ["write", "delete"])
def test_no_retry_of_a_cut_off_owner_reaches_the_next(bucket, machine, how):
    """The owner of the lease retries a request while another machine takes the lease over."""
    url, proxy = bucket
    quick = Patience(answer=0.5, first_delay=0.01, longest_delay=0.05, total=60.0)
    of_next = BucketStore(BucketUrl.parsed(url))
    tried, lost = threading.Event(), threading.Event()

    def cut_off(request: Request) -> Fault | None:
        if request.method in ("GET", "HEAD"):
            return None
        if "pointer" in request.path:
            tried.set()
            return Fault.REFUSED
        return None if lost.is_set() else Fault.REFUSED

    of_next.write("pointer", b"of both")
    own = BucketLock(BucketStore(of_next.url), abandoned_seconds=1.0)
    with ThreadPoolExecutor() as pool:
        late = BucketStore(of_next.url, quick, permit=own.check)
        proxy.fault = cut_off
        content = (b"late",) if how == "write" else ()
        sent = pool.submit(getattr(late, how), "pointer", *content)
        assert tried.wait(60)
        with pytest.raises(WorkdirLost, match="another run may have taken over"):
            while True:  # until the lease has ended
                own.check()
        lost.set()
        machine("second")
        with BucketLock(BucketStore(of_next.url), abandoned_seconds=1.0):
            proxy.fault = lambda request: None
            of_next.write("pointer", b"of the next")
            with pytest.raises(WorkdirLost, match="another run may have taken over"):
                sent.result(60)
            assert of_next.read("pointer") == b"of the next"


HOLDER = """
import sys
from lmlib.storage.bucket.store import BucketStore
from lmlib.storage.bucket.url import BucketUrl
from runner.errors import WorkdirLost
from runner.processes.lock import BucketLock

try:
    with BucketLock(BucketStore(BucketUrl.parsed(sys.argv[1])), abandoned_seconds=1.0) as lease:
        print("held", flush=True)
        while True:
            lease.check()
except WorkdirLost as lost:
    print(lost, flush=True)
"""


@pytest.mark.landing
@pytest.mark.parametrize("order", range(5))
def test_a_delayed_renewal_and_a_takeover_leave_one_owner(bucket, machine, tmp_path, order):
    """It arrives before or while the next run looks, or after its takeover, renewal or end."""
    url, proxy = bucket
    store, scheme = BucketStore(BucketUrl.parsed(url)), url.partition(":")[0]
    ours, theirs = os.pipe()
    held, looks = threading.Event(), itertools.count()

    def hold(request: Request) -> Fault | None:
        if request.method in ("GET", "HEAD"):
            return Fault.REFUSED if held.is_set() else None
        held.set()
        return Fault.HELD

    def release_while_the_next_looks(request: Request) -> None:
        if order == 1 and request.method == "GET" and next(looks) == 1:
            of_first.release()

    with FaultyProxy(proxy.port) as of_first, os.fdopen(ours) as said:
        place = environment(scheme, of_first.port) | {"XDG_CACHE_HOME": str(tmp_path / "other")}
        first = ForkedProcess("-c", HOLDER, url, stdout=theirs, stderr=2, environment=place)
        os.close(theirs)
        assert said.readline() == "held\n"
        of_first.fault = hold
        assert held.wait(60)
        if order == 0:
            of_first.release()
        proxy.fault = release_while_the_next_looks
        refused = 0
        while True:
            try:
                lease = BucketLock(store, abandoned_seconds=1.0)
                break
            except ConfigError:  # it was renewed meanwhile
                refused += 1
        with lease:
            if order == 2:
                of_first.release()
            renewed = store.read("lease/owner.json")
            while order == 3 and store.read("lease/owner.json") == renewed:
                pass
            if order == 3:
                of_first.release()
            assert f"(pid {os.getpid()} on" in parse_json(store.read("lease/owner.json"))["user"]
            lease.check()
        if order == 4:
            of_first.release()
        assert refused == (order == 1)
        assert parse_json(store.read("lease/owner.json"))["ended"] is True
        of_first.fault = lambda request: None
        assert re.search("has taken over|may have taken over", said.readline())
        assert first.wait(60) == 0
    assert parse_json(store.read("lease/owner.json"))["ended"] is True


@pytest.mark.landing
def test_the_next_owner_resumes_from_the_last_files_of_the_previous(bucket, machine):
    """The previous owner writes its last lines while another machine waits."""
    url, proxy = bucket
    with pytest.raises(StoppedEarly):
        fit(small(*EXPERIMENT), url, stopping_after(3))
    lines = [json.loads(line) for line in (folder_to_read(url) / LOG).read_text().splitlines()]
    last = "".join(json.dumps(line | {"by_its_owner": 1}) + "\n" for line in lines)
    store, seen = BucketStore(BucketUrl.parsed(url)), threading.Event()
    with contextlib.ExitStack() as held:
        owner = held.enter_context(BucketLock(store))
        proxy.fault = lambda request: (
            seen.set() if request.method == "GET" and re.search(LEASE, request.path) else None
        )

        def end() -> None:
            seen.wait(60)
            store.write(object_of(LOG, owner.files), last.encode())
            held.close()

        threading.Thread(target=end).start()
        machine("second")
        fit(small(*EXPERIMENT), url)
    found = curve(folder_to_read(url))
    assert [line.get("by_its_owner") for line in found] == [1, 1, 1, None, None, None]


def test_a_refusal_by_the_bucket_is_one_sentence(bucket, machine):
    url, proxy = bucket
    proxy.fault = lambda request: Fault.FORBIDDEN
    with pytest.raises(ConfigError, match="permission is denied") as caught:
        fit(small(*EXPERIMENT), url)
    assert url in str(caught.value) and "secret" not in str(caught.value)


@pytest.mark.slow
def test_initial_weights_may_be_in_a_bucket(bucket, machine, tmp_path):
    url, _ = bucket
    first = fit(small(*EXPERIMENT), f"{url}/first").state
    cfg = small("steps=1", "optimizer.peak_lr=1e-30")
    second = fit(cfg, tmp_path / "second", Options(init_from=f"{url}/first@{STEPS}")).state
    for one, other in zip(jax.tree.leaves(first.model), jax.tree.leaves(second.model), strict=True):
        assert (one == other).all()
