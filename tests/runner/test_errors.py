"""What errors say to users."""

import errno
import os

import jax
import pytest

from runner.command_line.errors import in_words


def test_what_jax_says_of_its_traceback_is_left_out():
    def refuse(x):
        raise ValueError("heads must divide embed")

    with pytest.raises(ValueError, match="heads must divide") as raised:
        jax.jit(refuse)(1.0)
    raised.value.add_note("and another note stays")
    assert in_words(raised.value) == "heads must divide embed and another note stays"


def test_a_full_disk_is_told_with_what_it_lacks(tmp_path):
    error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), f"{tmp_path}/stacks")
    error.add_note("And a note.")
    told = in_words(error)
    assert told.startswith(f"cannot write {tmp_path}/stacks: the disk is full, ")
    assert told.endswith(" bytes are free: make room there (No space left on device) And a note.")
