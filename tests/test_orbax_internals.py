"""Real saves show the details of Orbax and TensorStore that lmlib relies on without a promise.

A failure here after an upgrade says which constant of `lmlib/checkpoint` to adapt.
"""

import logging
import os

import jax
import jax.numpy as jnp
import pytest
import tensorstore

from lmlib.checkpoint import Checkpoints, on_disk
from lmlib.checkpoint.arrays import STATE, STATE_FILES, ZARRAY
from lmlib.checkpoint.failures import tensorstore_error_number

NAMES = {"weight", "key"}


def test_the_files_of_a_step_and_what_is_logged_of_its_save(tmp_path):
    """All lines that a save logs come from Orbax's files, by which the filter drops them."""
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
        state = {"weight": jnp.ones((4, 2)), "key": jax.random.key(0)}
        checkpoints.save(1, state, {"tokens": 1})
        checkpoints.wait()
        logger.filters = filters
        logger.removeHandler(handler)
        logger.setLevel(level)
    assert len(records) > 10
    noise = on_disk.OrbaxNoise()
    assert not [record.getMessage() for record in records if noise.filter(record)]

    assert os.listdir(tmp_path) == ["1"]
    assert set(os.listdir(tmp_path / "1")) == {"manifest.json", STATE, "notes"}
    entries = (tmp_path / "1" / STATE).iterdir()
    found = {f"{entry.name}{'/' * entry.is_dir()}" for entry in entries}
    assert found - {f"{name}/" for name in NAMES} <= set(STATE_FILES)
    assert sorted(os.listdir(tmp_path / "1" / STATE / "weight")) == [ZARRAY, "0.0"]


def test_the_number_of_the_systems_error(tmp_path):
    (tmp_path / "file").write_text("")
    store = {"driver": "file", "path": f"{tmp_path}/file/below/"}
    with pytest.raises(ValueError) as raised:
        tensorstore.KvStore.open(store).result().write("key", b"value").result()
    with pytest.raises(OSError) as expected:
        (tmp_path / "file" / "below").mkdir()
    assert tensorstore_error_number(str(raised.value)) == expected.value.errno
