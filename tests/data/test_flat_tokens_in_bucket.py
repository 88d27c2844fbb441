"""Flat tokens in a bucket: the batches of those on a disk, and a second epoch without a request."""

import numpy as np
import pytest
from buckets.fixtures import folder_in_bucket
from buckets.proxy import Fault

from lmlib.data.flat_tokens import FlatTokens
from lmlib.data.stored.metadata import DamagedDataError
from lmlib.storage.bucket.chunk_cache import ChunkCache
from lmlib.storage.bucket.failures import BucketError
from lmlib.storage.bucket.store import BucketStore
from lmlib.storage.bucket.url import BucketUrl

ROWS = (2, 7, 3)  # batch size, sequence length, seed


@pytest.fixture(params=[pytest.param("s3", marks=pytest.mark.slow), "gs"])
def bucket(request, monkeypatch, tmp_path, example):
    """The URL of a copy of the example."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with folder_in_bucket(request.param, monkeypatch) as (url, proxy):
        store = BucketStore(BucketUrl.parsed(url))
        for file in (each for each in example.rglob("*") if each.is_file()):
            store.write(file.relative_to(example).as_posix(), file.read_bytes())
        yield url, proxy


def assert_same_batches(one, other, steps):
    for step in range(steps):
        first, second = one.batch(step), other.batch(step)
        for name in ("tokens", "targets", "segment_ids", "positions", "loss_mask"):
            np.testing.assert_array_equal(getattr(first, name), getattr(second, name))


@pytest.mark.slow
def test_batches_are_those_of_a_disk_and_each_chunk_comes_once(bucket, example):
    url, proxy = bucket
    came = len(proxy.requests)
    proxy.fault = lambda request: Fault.UNAVAILABLE if request.number == came + 40 else None
    on_disk = FlatTokens(str(example), "train", *ROWS)
    steps = on_disk.steps_per_epoch
    assert_same_batches(FlatTokens(url, "train", *ROWS), on_disk, steps)
    again = FlatTokens(url, "train", *ROWS)
    came = len(proxy.requests)
    assert_same_batches(again, on_disk, 2 * steps)
    assert len(proxy.requests) == came


@pytest.mark.slow
def test_a_chunk_that_was_damaged_here_is_read_again(bucket, example, tmp_path):
    url, _ = bucket
    on_disk = FlatTokens(str(example), "train", *ROWS)
    assert_same_batches(FlatTokens(url, "train", *ROWS), on_disk, on_disk.steps_per_epoch)
    for file in (tmp_path / "cache").glob("lmlib/buckets/chunks/*"):
        content = bytearray(file.read_bytes())
        content[0] ^= 1
        file.write_bytes(content)
    assert_same_batches(FlatTokens(url, "train", *ROWS), on_disk, on_disk.steps_per_epoch)


@pytest.mark.slow
def test_damage_in_the_bucket_is_no_fault_of_the_network(bucket):
    url, proxy = bucket
    store = BucketStore(BucketUrl.parsed(url))
    file = next(name for name in sorted(store.list()) if "/tokens/c/0" in name)
    content = bytearray(store.read(file))
    content[0] ^= 1
    store.write(file, bytes(content))
    with pytest.raises(DamagedDataError, match=f"{url}/train/.*/tokens cannot be read"):
        FlatTokens(url, "train", *ROWS)
    proxy.fault = lambda request: (
        Fault.FORBIDDEN if "tokens/c/" in request.path.replace("%2F", "/") else None
    )
    with pytest.raises(BucketError, match="permission is denied"):
        FlatTokens(url, "train", *ROWS)


def test_a_cache_that_is_full_keeps_what_it_has(tmp_path):
    chunks = [np.random.default_rng(number).bytes(400_000) for number in range(4)]
    ChunkCache(tmp_path, "array", 400_000).keep(0, chunks[0] + chunks[1])
    full = ChunkCache(tmp_path, "array", 400_000, largest=100_000)
    full.keep(2, chunks[2] + chunks[3])
    assert full.read(0, 800_000) == chunks[0] + chunks[1]
    assert full.read(1, 800_000) == chunks[1]
