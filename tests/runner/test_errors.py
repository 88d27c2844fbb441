"""What errors say to users."""

import errno
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from runner.command_line.command import exit_code, tell
from runner.command_line.exit_status import FAILED
from runner.errors import ConfigError, chosen_sizes, in_words


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


@pytest.mark.parametrize("zeros", [np.zeros, jnp.zeros])
def test_a_lack_of_memory_is_told_in_a_line(zeros, capsys):
    with pytest.raises((MemoryError, RuntimeError)) as raised:  # beyond what can be addressed
        zeros((1 << 57,), "float32")
    tell(raised.value, debug=False)
    told = capsys.readouterr().err
    assert told.startswith("error: out of memory: ") and told.count("\n") == 1
    assert exit_code(raised.value) == FAILED
    tell(raised.value, debug=True)
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (MemoryError(), "error: out of memory (--debug shows where)\n"),
        (RuntimeError("can't start new thread"), "error: can't start new thread: memory, or the "),
    ],
)
def test_a_lack_that_python_hardly_names_is_told(error, told, capsys):
    tell(error, debug=False)
    assert capsys.readouterr().err.startswith(told)


def test_another_error_of_jax_is_no_lack_of_memory(capsys):
    tell(RuntimeError("INTERNAL: something else"), debug=False)
    assert "INTERNAL: something else\n" in capsys.readouterr().err


def test_a_size_that_was_chosen_is_a_mistake():
    with (
        pytest.raises(ConfigError, match=r"^Unable to allocate .* float32: take less$"),
        chosen_sizes("take less"),
    ):
        np.zeros((1 << 57,), "float32")
