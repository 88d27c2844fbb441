"""Folders of any legal name are used; URLs, links out of a folder and odd files are refused."""

import os
import socket
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
from lmlib.storage.hub_cache import check_within_folder
from lmlib.storage.local_folder import local_folder
from lmlib.storage.unlinked import open_regular, read_regular

STATE = {"weight": jnp.arange(6.0).reshape(3, 2)}
TARGET = {"weight": jax.ShapeDtypeStruct((3, 2), jnp.float32, sharding=STATE["weight"].sharding)}
# Any bytes but / and NUL, often special ones in a shell, a pattern or a URL.
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
def test_a_name_that_looks_like_a_url_is_a_folder(name):
    assert local_folder(name) == Path(name)


def test_a_file_is_read_up_to_a_size(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    with open_regular(tmp_path / "file") as file:
        assert file.read() == b"content"
    assert read_regular(tmp_path / "file", 7) == b"content"
    with pytest.raises(ValueError, match="it has more than 6 bytes"):
        read_regular(tmp_path / "file", 6)
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "none")


@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "socket"])
def test_a_file_that_is_not_regular_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    path = tmp_path / kind
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    else:
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(os.path.relpath(path))  # paths may have a hundred bytes
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises((ValueError, OSError), match=r"not a regular file|No such device"):
        open_regular(path)
    assert len(os.listdir("/proc/self/fd")) == before


CACHED = "cache/models--someone--model/snapshots/a1b2"


@pytest.mark.parametrize(
    ("file", "target", "accepted"),
    [
        ("folder/file", None, True),
        ("folder/file", "other", True),
        ("folder/file", "../folder/within/other", True),
        ("folder/file", "../outside", False),
        ("folder/file", "../folder 2/file", False),
        ("folder/file", "/dev/zero", False),
        ("folder/file", "..", False),
        ("folder/file", ".", False),
        (f"{CACHED}/file", "../../blobs/digest", True),
        (f"{CACHED}/file", "../c3d4/file", True),
        (f"{CACHED}/file", "../../../models--someone--other/blobs/digest", False),
        (f"{CACHED}/file", "../../../../outside", False),
        (f"{CACHED}/file", "../../blobs/to_outside", False),
        # A path that looks like the cache gives access only to its own repository.
        ("folder/snapshots/a1b2/file", "../../blobs/digest", False),
        ("models--a--b/file", "../outside", False),
        ("models--a--b/snapshots/file", "../../outside", False),
    ],
)
def test_a_link_may_not_leave_its_folder(
    tmp_path: Path, file: str, target: str | None, accepted: bool
) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    if target is None:
        path.write_text("")
    else:
        path.symlink_to(target)
    (tmp_path / CACHED).parents[1].joinpath("blobs").mkdir(parents=True)
    (tmp_path / CACHED).parents[1].joinpath("blobs/to_outside").symlink_to("../../../outside")
    (tmp_path / "linked").symlink_to(path.parent)  # the folder itself may be one
    for place in (path, tmp_path / "linked" / path.name):
        if accepted:
            check_within_folder(place)
        else:
            with pytest.raises(
                ValueError, match=r"it is a link to /.*, which is not in its folder"
            ):
                check_within_folder(place)
