"""Damage to the files of real checkpoints is detected: nothing wrong is ever loaded."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from states import bits, target_of

from lmlib.checkpoint import Checkpoints, DamagedCheckpointError
from lmlib.checkpoint.manifest import (
    MANIFEST,
    SavedFile,
    encode,
    files_below,
    read_manifest,
    write_manifest,
)

pytestmark = pytest.mark.several_devices

NOTES = {"tokens": 123, "data": [{"position": 7}]}
STEP = 5


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Explicit,))


@pytest.fixture(scope="module")
def state(mesh):
    split, whole = NamedSharding(mesh, P("fsdp")), NamedSharding(mesh, P())
    return {
        "weight": jax.device_put(jax.random.normal(jax.random.key(0), (16, 3)), split),
        "scale": jax.device_put(jnp.linspace(0, 1, 3, dtype=jnp.bfloat16), whole),
        "step": jax.device_put(jnp.int32(STEP), whole),
        "key": jax.device_put(jax.random.key(3), whole),
    }


@pytest.fixture(scope="module")
def target(state):
    return target_of(state)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory, state):
    directory = tmp_path_factory.mktemp("pristine")
    with Checkpoints(directory) as checkpoints:
        checkpoints.save(STEP, state, NOTES)
    return directory


@pytest.fixture
def directory(tmp_path, pristine):
    return shutil.copytree(pristine, tmp_path / "checkpoints")


def flip(path: Path) -> None:
    """Changes the lowest bit of the byte in the middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


DAMAGE = {
    "flip": flip,
    "flip in the last byte": lambda path: path.write_bytes(
        path.read_bytes()[:-1] + bytes([path.read_bytes()[-1] ^ 0x80])
    ),
    "zero": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "truncate": lambda path: os.truncate(path, path.stat().st_size - 1),
    "empty": lambda path: os.truncate(path, 0),
    "lengthen": lengthen,
    "delete": Path.unlink,
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_to_any_file_is_noticed_and_named(directory, state, target, kind):
    folder = directory / str(STEP)
    files = sorted(files_below(folder))
    assert len(files) > 15  # so that the loop below is about something
    with Checkpoints(directory, read_only=True) as checkpoints:
        for file in files:
            path = folder / file
            sound = path.read_bytes()
            if not sound.strip(b"\0") and kind == "zero":
                continue  # the file holds only zeros
            DAMAGE[kind](path)
            assert not path.exists() or path.read_bytes() != sound
            with pytest.raises(DamagedCheckpointError) as refused:
                checkpoints.restore(STEP, target)
            assert str(folder) in str(refused.value)
            assert refused.value.file == file
            path.write_bytes(sound)
        restored, notes = checkpoints.restore(STEP, target)  # all put back: sound again
        assert bits(restored) == bits(state)
        assert notes == NOTES


def test_a_run_falls_back_to_the_newest_sound_checkpoint(tmp_path, state, target):
    with Checkpoints(tmp_path) as checkpoints:
        for step in (10, 20, 30):
            checkpoints.save(step, state, {"tokens": step})
    flip(tmp_path / "30/state/weight/0.0")
    (tmp_path / "20/manifest.json").unlink()
    with Checkpoints(tmp_path, read_only=True) as reader:
        assert reader.newest() == 30
        assert reader.newest_sound() == 10
        with pytest.raises(DamagedCheckpointError, match=r"30 is damaged: state/weight/0\.0 has"):
            reader.restore_newest(target, fallback=False)
        assert reader.restore_newest(target).step == 10
        assert reader.steps() == [10, 20, 30]  # a reader changes nothing
    with Checkpoints(tmp_path) as checkpoints:
        found = checkpoints.restore_newest(target)
        assert found.step == 10
        assert found.notes == {"tokens": 10}
        assert bits(found.state) == bits(state)
        assert [error.folder.name for error in found.damaged] == ["30", "20"]
        assert checkpoints.steps() == [10]
        assert (tmp_path / "30.damaged").is_dir()
        checkpoints.save(20, found.state, {"tokens": 20})
        checkpoints.wait()
        assert checkpoints.restore_newest(target).step == 20


def test_no_checkpoint_is_loaded_if_all_are_damaged(directory, target):
    flip(directory / str(STEP) / "state/scale/0")
    with Checkpoints(directory) as checkpoints:
        assert checkpoints.newest_sound() is None
        with pytest.raises(DamagedCheckpointError, match=r"state/scale/0"):
            checkpoints.restore_newest(target)
        assert checkpoints.steps() == [STEP]


def test_without_checkpoints_there_is_nothing_to_restore(tmp_path, target):
    with Checkpoints(tmp_path / "new") as checkpoints:
        assert checkpoints.restore_newest(target) is None
    with Checkpoints(tmp_path / "absent", read_only=True) as reader:
        assert reader.restore_newest(target) is None
    assert not (tmp_path / "absent").exists()


def test_a_checkpoint_under_the_name_of_another_step_is_refused(directory, target):
    (directory / str(STEP)).rename(directory / "6")
    with (
        Checkpoints(directory) as checkpoints,
        pytest.raises(DamagedCheckpointError, match=r"6 is damaged: manifest\.json belongs to ste"),
    ):
        checkpoints.restore(6, target)


# Wrong files with a manifest that fits them, as from an untrusted source.


def change_json(file: str, **changes) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        content = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps(content | changes))

    return change


def add(file: str) -> Callable[[Path], None]:
    return lambda folder: (folder / file).write_bytes(b"{}")


def nest(folder: Path) -> None:
    (folder / "notes/notes.json").write_text("[" * 100_000)


@pytest.mark.parametrize(
    ("tamper", "message"),
    [
        (change_json("state/weight/.zarray", shape=[1 << 40, 3]), r"says float32\[1099511627776"),
        (change_json("state/weight/.zarray", shape=[8, 6]), r"says float32\[8, 6\]"),
        (change_json("state/weight/.zarray", dtype="<f8"), "says float64"),
        (change_json("state/weight/.zarray", dtype="|O"), "says object"),
        (change_json("state/weight/.zarray", chunks=[1 << 40, 3]), "no uncompressed chunks"),
        (change_json("state/weight/.zarray", chunks=[0, 0]), "no uncompressed chunks"),
        (change_json("state/weight/.zarray", chunks=[1, 1]), "asks for 48 chunks"),
        (change_json("state/weight/.zarray", compressor={"id": "zlib"}), "no uncompressed chunks"),
        (change_json("state/weight/.zarray", order="F"), "no uncompressed chunks"),
        (change_json("state/weight/.zarray", chunks="x"), "cannot be read"),
        (lambda folder: (folder / "state/weight/3.0").unlink(), "is no chunk of 24 bytes"),
        (lambda folder: lengthen(folder / "state/weight/3.0"), "is no chunk of 24 bytes"),
        (add("state/manifest.ocdbt"), "belongs to no array"),
        (add("state/weight/zarr.json"), "belongs to no array"),
        (nest, "it is nested too deeply"),
    ],
)
def test_files_that_do_not_fit_the_arrays_are_refused(directory, target, tamper, message):
    folder = directory / str(STEP)
    arrays = read_manifest(folder).arrays
    tamper(folder)
    write_manifest(folder, STEP, arrays)
    with (
        Checkpoints(directory, read_only=True) as checkpoints,
        pytest.raises(DamagedCheckpointError, match=message),
    ):
        checkpoints.restore(STEP, target)


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", "state/../../secret"])
def test_the_manifest_names_no_file_outside(directory, target, name):
    folder = directory / str(STEP)
    (directory / "secret").write_bytes(b"secret")
    sound = read_manifest(folder)
    sound.files[name] = SavedFile(6, "0" * 32)
    (folder / MANIFEST).write_bytes(encode(sound))
    with (
        Checkpoints(directory, read_only=True) as checkpoints,
        pytest.raises(DamagedCheckpointError) as refused,
    ):
        checkpoints.restore(STEP, target)
    assert refused.value.file == name
    assert "is missing" in str(refused.value)


@pytest.mark.parametrize(
    "dtype", [jnp.float16, jnp.bool_, jnp.int4, jnp.uint8, jnp.float8_e4m3fn, jnp.complex64]
)
def test_arrays_of_every_kind_come_back(tmp_path, mesh, dtype):
    array = jax.device_put(jnp.ones((8, 3), dtype), NamedSharding(mesh, P("fsdp")))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"array": array}, {})
        checkpoints.wait()
        wanted = jax.ShapeDtypeStruct(array.shape, dtype, sharding=array.sharding)
        restored, _ = checkpoints.restore(1, {"array": wanted})
    assert bits(restored) == bits({"array": array})


def test_deleted_files_that_nfs_keeps_are_not_damage(directory, target, state):
    folder = directory / str(STEP)
    for place in (folder, folder / "state", folder / "state" / "weight"):
        (place / ".nfs000000000123abcd00000001").write_bytes(b"of another file")
    with Checkpoints(directory, read_only=True) as checkpoints:
        checkpoints.verify(STEP)
        restored, _ = checkpoints.restore(STEP, target)
        assert bits(restored["weight"]) == bits(state["weight"])
        (folder / ".nfsstray").touch()
        with pytest.raises(DamagedCheckpointError, match="not in the manifest"):
            checkpoints.verify(STEP)
