"""What errors say to users."""

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
