"""Helpers in tests/shared: processes, kept programs, checked annotations, turns."""

import dataclasses
import os
from pathlib import Path

import numpy as np
import pytest
import zstandard
from beartype.roar import BeartypeCallHintParamViolation
from compiled_programs import XLA_FLAGS, tidy
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import TypeCheckError
from turns import left_for_another

from lmlib.data.batch import Batch
from lmlib.models.parts.rope_scaling import document_lengths
from lmlib.terminal.quantities import bytes_text
from runner.jax_settings.xla_flags import keep_cpus_in_order, set_gpu_flags


def kept(folder: Path, size: int, age: int) -> Path:
    entry = folder / f"jit_step-{age}-cache"
    entry.write_bytes(zstandard.compress(os.urandom(size)))
    newest = folder.stat().st_mtime
    os.utime(entry, (newest - age, newest - age))
    return entry


def test_the_oldest_programs_go_first(tmp_path):
    new, old, oldest = (kept(tmp_path, 1000, age) for age in (0, 10, 20))
    tidy(tmp_path, largest=2100)
    assert new.exists() and old.exists() and not oldest.exists()
    tidy(tmp_path, largest=2100)
    assert new.exists() and old.exists()


def test_a_run_adds_no_flag():
    """One more option would make it compile the tests' programs again."""
    environment = {"XLA_FLAGS": XLA_FLAGS}
    set_gpu_flags(environment)
    keep_cpus_in_order(several_processes=True, environment=environment)
    assert environment["XLA_FLAGS"] == XLA_FLAGS


TOKENS_BS = np.zeros((2, 3), np.int32)


def test_a_type_is_checked():
    with pytest.raises(BeartypeCallHintParamViolation, match="size"):
        bytes_text("1 MB")


@pytest.mark.parametrize("positions", [TOKENS_BS[0], TOKENS_BS.astype(np.float32)])
def test_shape_and_dtype_of_an_array_are_checked(positions):
    with pytest.raises(TypeCheckError, match="positions_BS"):
        document_lengths(positions)


def test_shapes_of_fields_are_checked_against_each_other():
    with pytest.raises(TypeCheckError, match="targets"):
        Batch(TOKENS_BS, TOKENS_BS[:1], TOKENS_BS, TOKENS_BS, TOKENS_BS.astype(bool))


@dataclasses.dataclass(frozen=True)
class Case:
    nodeid: str
    slow: bool

    def get_closest_marker(self, name):
        return self.slow and name == "slow"


@pytest.mark.landing
@given(st.sets(st.tuples(st.text(), st.booleans())), st.integers(1, 5), st.integers(0, 3))
def test_a_slow_case_has_one_turn_and_any_other_each(cases, turns, first):
    cases = {Case(*case) for case in cases}
    for case in cases:
        among_all = [case not in left_for_another([*cases], f"{k}/{turns}") for k in range(turns)]
        assert sum(among_all) == (1 if case.slow else turns)
        alone = [case not in left_for_another([case], f"{k}/{turns}") for k in range(turns)]
        assert alone == among_all
        assert left_for_another([case], f"{first + turns}/{turns}") == left_for_another(
            [case], f"{first}/{turns}"
        )


@pytest.mark.parametrize("turn", ["3", "1/0", "a/3", "1/3/5", "-1/3"])
def test_invalid_turns_are_refused(turn):
    with pytest.raises(pytest.UsageError, match=f"--turn={turn}: it is K/N"):
        left_for_another([], turn)
