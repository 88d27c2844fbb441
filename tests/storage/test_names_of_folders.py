"""Folders of any legal name hold checkpoints; URLs are refused."""

import os
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lmlib.checkpoint import Checkpoints
from lmlib.metrics.log import MetricsLog
from lmlib.metrics.tensorboard import TensorBoard
from lmlib.storage.local_folder import local_folder

STATE = {"weight": jnp.arange(6.0).reshape(3, 2)}
TARGET = {"weight": jax.ShapeDtypeStruct((3, 2), jnp.float32, sharding=STATE["weight"].sharding)}
# Any bytes but / and NUL, often those that mean something to a shell, a pattern or a URL.
TELLING = st.lists(st.sampled_from([b"*", b"?", b"[", b"]", b"\\", b"%", b"\xff", b"a", b" "]))
NAMES = (
    (st.binary(min_size=1, max_size=100) | TELLING.map(b"".join))
    .map(lambda name: name.replace(b"/", b"\\").replace(b"\0", b"*")[:100])
    .filter(lambda name: name not in (b"", b".", b".."))
)


@pytest.mark.landing
@settings(max_examples=2)
@given(NAMES)
@example(b"sweep[lr=1e-3]")
@example(b"gs:")
@example(b"back\\slash \xff**")
def test_a_folder_of_any_name_holds_checkpoints(name):
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, os.fsdecode(name))
        with Checkpoints(folder, keep=1) as checkpoints:
            checkpoints.save(1, STATE, {"tokens": 1})
        with Checkpoints(folder, keep=1) as checkpoints:  # as a resumed run does
            assert checkpoints.restore_newest(TARGET).step == 1
            checkpoints.save(2, STATE, {"tokens": 2})
            checkpoints.wait()
            assert checkpoints.steps() == [2]
            state, notes = checkpoints.restore(2, TARGET)
            assert notes == {"tokens": 2}
            assert (state["weight"] == STATE["weight"]).all()
        assert os.listdir(scratch) == [folder.name]


@pytest.mark.parametrize("url", ["az://bucket/run", "gs://B", Path("hdfs://bucket/run")])
def test_a_url_is_refused(url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"not supported here: mount|no bucket can have"):
        Checkpoints(url)
    assert not os.listdir(tmp_path)


def test_a_folder_that_begins_like_a_url_holds_metrics(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with MetricsLog("gs:run", None, sinks=[TensorBoard]) as log:
        log.write(1, {"loss": 3.0})
    assert sorted(os.listdir("gs:run")) == ["metrics.jsonl", "tensorboard"]
    assert len(os.listdir("gs:run/tensorboard")) == 1


@pytest.mark.parametrize("name", ["gs:", "a:b/c", "run:/checkpoints", Path("run:/checkpoints")])
def test_what_only_looks_like_a_url_is_a_folder(name):
    assert local_folder(name) == Path(name)
