"""What is relied on of Orbax and TensorStore without being their interface, in real saves.

A failure here after an upgrade says which constant of lmlib/checkpoint/orbax_internals.py to adapt.
"""

import asyncio
import inspect
import logging
import os
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest
import tensorstore

from lmlib.checkpoint import Checkpoints, orbax_internals
from lmlib.checkpoint.arrays import STATE, ZARRAY
from lmlib.checkpoint.manifest import MANIFEST
from lmlib.checkpoint.notes import NOTES

NAMES = {"weight", "key"}


def save(directory) -> None:
    with Checkpoints(directory) as checkpoints:
        checkpoints.save(1, {"weight": jnp.ones((4, 2)), "key": jax.random.key(0)}, {"tokens": 1})


def test_the_folder_of_a_step_that_is_being_saved(tmp_path):
    made = []

    def note(event, arguments):
        if event == "os.mkdir":
            parent, name = os.path.split(arguments[0])
            made.append(f"{os.path.realpath(parent)}/{name}")

    sys.addaudithook(note)
    save(tmp_path)
    assert any(path.startswith(f"{tmp_path}/1{orbax_internals.UNFINISHED}-") for path in made)
    assert [entry.name for entry in tmp_path.iterdir()] == ["1"]


def test_the_files_of_a_step(tmp_path):
    save(tmp_path)
    files = {entry.name for entry in (tmp_path / "1").iterdir()}
    assert files == {MANIFEST, STATE, NOTES, *orbax_internals.STEP_FILES}
    entries = (tmp_path / "1" / STATE).iterdir()
    found = {f"{entry.name}{'/' * entry.is_dir()}" for entry in entries}
    assert found - {f"{name}/" for name in NAMES} == set(orbax_internals.STATE_FILES)
    weight = os.listdir(tmp_path / "1" / STATE / "weight")
    assert sorted(weight) == [ZARRAY, "0.0"]


def test_what_is_logged_of_a_save(tmp_path):
    """The lines that the filter drops are still there, and still told by their origin."""
    records: list[logging.LogRecord] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record)

    logger, handler = logging.getLogger("absl"), Keep()
    with Checkpoints(tmp_path) as checkpoints:  # which installs the filter
        filters, level = logger.filters, logger.level
        logger.filters = []
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        checkpoints.save(1, {"weight": jnp.ones(4)}, {})
        checkpoints.wait()
        logger.filters = filters
        logger.removeHandler(handler)
        logger.setLevel(level)
    assert len(records) > 10
    assert any("merge of OCDBT" in record.getMessage() for record in records)
    noise = orbax_internals.OrbaxNoise()
    assert not [record.getMessage() for record in records if noise.filter(record)]


def test_that_orbax_waited_is_for_the_caller_to_say():
    """It warns after a second; what else it warns of is shown."""
    source = inspect.getsourcefile(ocp.CheckpointManager)
    assert source and orbax_internals._WAITED in inspect.getsource(ocp.CheckpointManager)
    for message, shown in ((f"{orbax_internals._WAITED} to complete took 2 s", False), ("", True)):
        record = logging.LogRecord("absl", logging.WARNING, source, 1, message, (), None)
        assert orbax_internals.OrbaxNoise().filter(record) == shown


def test_the_number_of_the_systems_error(tmp_path):
    (tmp_path / "file").write_text("")
    store = {"driver": "file", "path": f"{tmp_path}/file/below/"}
    with pytest.raises(ValueError) as raised:
        tensorstore.KvStore.open(store).result().write("key", b"value").result()
    with pytest.raises(OSError) as expected:
        (tmp_path / "file" / "below").mkdir()
    number = orbax_internals.tensorstore_error_number(str(raised.value))
    assert number == expected.value.errno


def test_errors_of_a_save_that_nobody_waited_for_are_noise(tmp_path):
    (tmp_path / "file").write_text("")
    store = tensorstore.KvStore.open({"driver": "file", "path": f"{tmp_path}/file/"}).result()
    of_tensorstore, other = store.write("key", b"value").exception(), ValueError("another")
    for error, shown in ((of_tensorstore, False), (other, True)):
        told = (type(error), error, None)
        record = logging.LogRecord("asyncio", logging.ERROR, "", 1, "never retrieved", (), told)
        assert orbax_internals.OrbaxNoise().filter(record) == shown
    handler = inspect.getsourcefile(ocp.type_handlers.ArrayHandler)
    assert handler and f"{orbax_internals._OF_A_CHUNK}(" in Path(handler).read_text()


def test_what_a_closed_event_loop_says():
    loop = asyncio.new_event_loop()
    loop.close()
    with pytest.raises(RuntimeError, match=r"^Event loop is closed$"):
        loop.call_soon_threadsafe(print)
