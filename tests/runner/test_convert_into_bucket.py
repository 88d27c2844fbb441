"""Folders of Hugging Face's that `runner.convert` makes in a bucket are those that it makes on a
disk; a bucket that fails leaves none that anybody could take for whole."""

import re

import pytest
from buckets.fixtures import SCHEMES, folder_in_bucket
from buckets.proxy import Fault
from folder_contents import files_of
from forked_processes import run_forked
from hugging_face_families import GOLDEN

from lmlib.storage.bucket.store import BucketStore
from lmlib.storage.bucket.url import BucketUrl
from lmlib.storage.local_folder import copies_folder

pytestmark = pytest.mark.slow


@pytest.fixture(params=SCHEMES)
def bucket(request, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with folder_in_bucket(request.param, monkeypatch) as found:
        yield found


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run's folder with Llama's golden weights."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    done = convert(GOLDEN / "llama", folder)
    assert done.returncode == 0, done.stderr
    return folder


def convert(source, to, *flags):
    return run_forked("-m", "runner.convert", f"--from={source}", f"--to={to}", *flags)


def test_it_is_the_folder_that_a_disk_gets(bucket, run, tmp_path):
    url, _ = bucket
    flags = ("--largest_file=0.00002", "--dtype=float32")  # some files of tensors
    for to in (tmp_path / "out", f"{url}/out"):
        done = convert(run, to, *flags)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(f"{to} holds step 0 of ")
    expected = files_of(tmp_path / "out")
    store = BucketStore(BucketUrl.parsed(f"{url}/out"))
    assert {name: store.read(name) for name in store.list()} == {
        str(name): content for name, content in expected.items()
    }
    assert len(expected) > 4
    assert not [each for each in copies_folder().rglob("*.safetensors")]
    again = convert(run, f"{url}/out")
    assert again.returncode == 2
    assert f"--to={url}/out is not empty: give a new folder" in again.stderr


def test_it_is_read_from_there(bucket, run, tmp_path):
    url, _ = bucket
    assert convert(run, f"{url}/out").returncode == 0
    back = convert(f"{url}/out", tmp_path / "back")
    assert back.returncode == 0, back.stderr
    out = convert(tmp_path / "back", tmp_path / "again")
    assert out.returncode == 0, out.stderr
    store = BucketStore(BucketUrl.parsed(f"{url}/out"))
    again = (tmp_path / "again/model.safetensors").read_bytes()
    assert store.read("model.safetensors") == again


def test_a_run_s_folder_is_made_on_a_disk(bucket):
    url, _ = bucket
    done = convert(GOLDEN / "llama", f"{url}/run")
    assert done.returncode == 2
    assert f"--to={url}/run: a run's folder is made on a disk" in done.stderr
    assert not BucketStore(BucketUrl.parsed(f"{url}/run")).list()


def test_a_refusal_is_told_and_leaves_no_folder_that_looks_whole(bucket, run):
    url, proxy = bucket
    proxy.fault = lambda request: (
        Fault.FORBIDDEN
        if request.method in ("PUT", "POST") and re.search(r"(/|%2F)config\.json", request.path)
        else None
    )
    done = convert(run, f"{url}/out")
    assert done.returncode == 2, done.stderr
    assert f"cannot write {url}/out/config.json: " in done.stderr.splitlines()[-1]
    proxy.fault = lambda request: None
    assert "config.json" not in BucketStore(BucketUrl.parsed(f"{url}/out")).list()
    assert not [each for each in copies_folder().rglob("*.safetensors")]
    read = run_forked("-m", "runner.generate", f"--from={url}/out", "--tokens=1", "--max_tokens=2")
    assert read.returncode == 2, read.stderr
