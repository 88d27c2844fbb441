"""Checkpoints in buckets: whole or absent, verified, on any mesh, with any fault of the network."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from buckets.fixtures import folder_in_bucket
from buckets.proxy import Fault, FaultyProxy
from states import bits, target_of

from lmlib.checkpoint import Checkpoints, DamagedCheckpointError
from lmlib.checkpoint.in_bucket import uploads
from lmlib.storage.bucket.store import BucketStore
from lmlib.storage.bucket.url import BucketUrl


@pytest.fixture(params=[pytest.param("s3", marks=pytest.mark.slow), "gs"])
def bucket(request, monkeypatch, tmp_path) -> Iterator[tuple[str, FaultyProxy]]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with folder_in_bucket(request.param, monkeypatch) as found:
        yield found


def mesh(*sizes: int) -> jax.sharding.Mesh:
    axes = ("a", "b")[: len(sizes)]
    explicit = (jax.sharding.AxisType.Explicit,) * len(sizes)
    return jax.make_mesh(sizes, axes, axis_types=explicit)


def state_on(mesh_: jax.sharding.Mesh, seed: int = 0):
    """Arrays of several kinds: split along one axis, along both, held by all, and a key."""
    spec, random = jax.sharding.PartitionSpec, np.random.default_rng(seed)
    arrays = {
        "matrix": (random.normal(size=(16, 24)).astype(np.float32), spec("a", "b")),
        "rows": (random.normal(size=(8, 3)).astype(jnp.bfloat16), spec("a")),
        "everywhere": (random.integers(0, 99, (5,)).astype(np.int32), spec()),
        "scalar": (np.float32(random.normal()), spec()),
    }
    placed = {
        name: jax.device_put(value, jax.sharding.NamedSharding(mesh_, where))
        for name, (value, where) in arrays.items()
    }
    key = jax.device_put(jax.random.key(seed), jax.sharding.NamedSharding(mesh_, spec()))
    return placed | {"key": key}


@pytest.mark.slow
def test_a_state_is_saved_and_restored_on_another_mesh(bucket, monkeypatch):
    monkeypatch.setattr(uploads, "CHUNK_BYTES", 256)  # several chunks of a shard
    state = state_on(mesh(4, 2))
    with Checkpoints(f"{bucket[0]}/checkpoints") as checkpoints:
        checkpoints.save(1, state, {"tokens": 7})
    for other in (mesh(4, 2), mesh(2, 1)):
        with Checkpoints(f"{bucket[0]}/checkpoints", read_only=True) as checkpoints:
            assert checkpoints.steps() == [1]
            assert checkpoints.verify(1).step == 1
            target = target_of(state_on(other, seed=1))
            restored, notes = checkpoints.restore(1, target)
            assert notes == {"tokens": 7}
            assert bits(restored) == bits(state)
            assert restored["matrix"].sharding == target["matrix"].sharding


@pytest.mark.slow
def test_older_ones_go_and_the_ranked_stays(bucket):
    url, state = f"{bucket[0]}/checkpoints", state_on(mesh(2, 1))
    with Checkpoints(url, keep=1, keep_best=1) as checkpoints:
        for step, metric in ((1, 3.0), (2, 1.0), (3, 2.0)):
            checkpoints.save(step, state, {})
            checkpoints.rank(step, metric)
    with Checkpoints(url, keep=1, keep_best=1) as checkpoints:
        checkpoints.save(4, state, {})
        checkpoints.wait()
        assert checkpoints.steps() == [2, 4]
    left = BucketStore(BucketUrl.parsed(f"{bucket[0]}/checkpoints.files")).list()
    assert {name.partition("-")[0] for name in left} == {"2", "4"}


@pytest.mark.slow
def test_a_save_that_is_cut_off_leaves_the_one_before(bucket):
    url, proxy = bucket
    state, later = state_on(mesh(2, 1)), state_on(mesh(2, 1), seed=1)
    with Checkpoints(f"{url}/checkpoints") as checkpoints:
        checkpoints.save(1, state, {})
    came = len(proxy.requests)
    with Checkpoints(f"{url}/whole") as checkpoints:
        checkpoints.save(2, later, {})
    of_a_save = len(proxy.requests) - came
    for strike in range(0, of_a_save, 3):
        came = len(proxy.requests)
        proxy.fault = lambda request, at=came + strike: (
            Fault.FORBIDDEN if request.number >= at else None
        )
        with pytest.raises(OSError, match="permission is denied") as caught:  # noqa: SIM117
            with Checkpoints(f"{url}/checkpoints") as checkpoints:
                checkpoints.save(2, later, {})
        assert url in str(caught.value)
        proxy.fault = lambda request: None
        with Checkpoints(f"{url}/checkpoints", read_only=True) as checkpoints:
            found = checkpoints.restore_newest(target_of(state))
            assert found.step in (1, 2)
            assert bits(found.state) == bits({1: state, 2: later}[found.step])
            if found.step == 2:  # what failed came after the manifest
                return


@pytest.mark.slow
def test_damage_is_noticed_and_set_aside(bucket):
    url, state = bucket[0], state_on(mesh(2, 1))
    with Checkpoints(f"{url}/checkpoints") as checkpoints:
        checkpoints.save(1, state, {})
        checkpoints.save(2, state_on(mesh(2, 1), seed=1), {})
    arrays = BucketStore(BucketUrl.parsed(f"{url}/checkpoints.files"))
    chunk = next(n for n in sorted(arrays.list()) if n.startswith("2-") and "/matrix/0" in n)
    content = bytearray(arrays.read(chunk))
    content[3] ^= 1
    arrays.write(chunk, bytes(content))
    with Checkpoints(f"{url}/checkpoints") as checkpoints:
        with pytest.raises(DamagedCheckpointError, match=f"{url}/checkpoints/2 is damaged"):
            checkpoints.verify(2)
        found = checkpoints.restore_newest(target_of(state))
        assert found.step == 1 and bits(found.state) == bits(state)
        checkpoints.save(2, state, {})
    with Checkpoints(f"{url}/checkpoints") as checkpoints:
        checkpoints.verify(2)
        assert checkpoints.steps() == [1, 2]
        assert arrays.read(chunk) == content  # the copy stays


@pytest.mark.parametrize(
    "index, told",
    [
        (None, "steps.json: it is gone, and only it leads to the checkpoints in .*files: put it"),
        (b'{"steps": {"1": {"folder": "../other", "metric": null}}}', "steps.json: it is damaged"),
        (b'{"steps": {"1": {"folder": "1-a-0", "metric": "low"}}}', "steps.json: it is damaged"),
        (b'{"steps": {"/1": {"folder": "1-a-0", "metric": null}}}', "steps.json: it is damaged"),
    ],
)
def test_without_a_sound_list_of_steps_no_checkpoint_is_deleted(bucket, index, told):
    url = f"{bucket[0]}/checkpoints"
    with Checkpoints(url) as checkpoints:
        checkpoints.save(1, state_on(mesh(2, 1)), {})
    small = BucketStore(BucketUrl.parsed(url))
    files = BucketStore(BucketUrl.parsed(f"{url}.files"))
    before, written = files.list(), small.read("steps.json")
    small.delete("steps.json")
    if index is not None:
        small.write("steps.json", index)
    with pytest.raises(OSError, match=told):
        Checkpoints(url)
    assert files.list() == before
    small.write("steps.json", written)
    with Checkpoints(url) as checkpoints:
        assert checkpoints.verify(1).step == 1
