"""Checkpoints from a stranger, whose digests are right: he made them himself."""

import json
import os
import re
import shutil

import jax.numpy as jnp
import pytest
from folder_contents import files_of
from sentinels import sentinels
from strangers import assert_refused, outcomes, sparse, text

from lmlib.checkpoint import Checkpoints
from lmlib.checkpoint.manifest import MANIFEST, read_manifest, write_manifest

STEP = 5
RESTORE = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import SingleDeviceSharding
from lmlib.checkpoint import Checkpoints

sharding = SingleDeviceSharding(jax.devices()[0])
target = {
    "scale": jax.ShapeDtypeStruct((3,), "float32", sharding=sharding),
    "weight": jax.ShapeDtypeStruct((16, 3), "float32", sharding=sharding),
}
"""
TRY = """
    with Checkpoints(arguments) as checkpoints:
        found = checkpoints.restore_newest(target)
        assert found.step == 5 and found.notes == {"tokens": 1}
        for name, leaf in found.state.items():
            assert isinstance(leaf, jax.Array) and (np.asarray(leaf) == 1).all(), name
        checkpoints.save(6, found.state, found.notes)
"""
DEEP = "[" * 1_000_000


def lists(name, count, before="[", after="[]]"):
    """Many in one, between `before` and `after`."""
    return lambda folder: (folder / name).write_text(before + "[]," * count + after) and None


def link(name):
    def change(folder):
        (folder / name).rename(folder.parents[1] / f"outside {folder.parent.name}")
        (folder / name).symlink_to(folder.parents[1] / f"outside {folder.parent.name}")

    return change


def twice(name, entry):
    """Puts `entry` before the file's content."""

    def change(folder):
        content = (folder / name).read_text()
        (folder / name).write_text(content.replace("{", f"{{{entry}, ", 1))

    return change


STEP_METADATA = "_CHECKPOINT_METADATA"  # written by earlier versions, without a digest

# Nothing of lmlib reads the other files that Orbax writes.
ATTACKS = {
    "a deep tree": text("state/_METADATA", DEEP),
    "a long tree": sparse("state/_METADATA", 200 << 20),
    "a layout by name": text(
        "state/_sharding", '{"d2VpZ2h0": "{\\"sharding_type\\": \\"os.system\\"}"}'
    ),
    "a long step": sparse(STEP_METADATA, 5 << 30),
    "a handler by name": text(
        STEP_METADATA, json.dumps({"item_handlers": {"state": "os.system", "notes": "evil.run"}})
    ),
    "deep notes": text("notes/notes.json", DEEP),
    "notes of lists": lists("notes/notes.json", 30_000_000, '{"a": [', "[]]}"),
    "no notes": text("notes/notes.json", "[]"),
    "notes twice": twice("notes/notes.json", '"tokens": 2'),
    "chunks twice": twice("state/weight/.zarray", '"chunks": [1, 1]'),
    "linked notes": link("notes/notes.json"),
    "linked arrays": link("state/weight"),
}

# After the manifest was written.
LATER = {
    "a long manifest": sparse(MANIFEST, 900 << 20),
    "a manifest of lists": lists(MANIFEST, 30_000_000),
    "a linked manifest": link(MANIFEST),
    "a long array": sparse("state/weight/0.0", 1 << 40),
}
ALL = ATTACKS | LATER


def attacked_folder(folder, sound, name):
    directory = shutil.copytree(sound, folder / name)
    step = directory / str(STEP)
    arrays = read_manifest(step).arrays
    ALL[name](step)
    if name in ATTACKS and "linked" not in name:
        write_manifest(step, STEP, arrays)
    return str(directory)


@pytest.fixture(scope="module")
def restored(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    with Checkpoints(folder / "sound") as checkpoints:
        checkpoints.save(STEP, {"weight": jnp.ones((16, 3)), "scale": jnp.ones(3)}, {"tokens": 1})
    pristine = shutil.copytree(folder / "sound", folder / "pristine")
    cases = {"sound": str(folder / "sound")}
    cases |= {name: attacked_folder(folder, pristine, name) for name in ALL}
    return outcomes(RESTORE, TRY, cases, folder)


@pytest.mark.parametrize("name", sentinels(ALL, lambda name: name != "a deep tree"))
def test_it_is_refused_or_of_no_effect(restored, name):
    assert restored["sound"] == ("opened", "")
    if restored[name] != ("opened", ""):
        assert_refused(restored[name], "DamagedCheckpointError")


@pytest.mark.parametrize("name", ["notes twice", "chunks twice"])
def test_ambiguous_files_are_refused(restored, name):
    assert_refused(restored[name], "DamagedCheckpointError")
    assert re.search(r"it has the name '\w+' twice", restored[name][1])


@pytest.mark.parametrize("name", ["6", "6.damaged", "6.orbax-checkpoint-tmp"])
def test_nothing_is_removed_through_a_link(tmp_path, name):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("precious")
    directory = tmp_path / "checkpoints"
    state = {"weight": jnp.ones(3)}
    with Checkpoints(directory) as checkpoints:
        checkpoints.save(STEP, state, {})
    os.symlink(outside, directory / name)
    found = outcomes(
        RESTORE + 'target = {"weight": jax.ShapeDtypeStruct((3,), "float32", sharding=sharding)}',
        TRY.replace('found.notes == {"tokens": 1}', "True").replace("save(6", "save(7"),
        {name: str(directory)},
        tmp_path,
    )
    assert found[name][0] == "LinkError" if name == "6" else "opened", found
    assert files_of(outside) == {"precious": b"precious"}
