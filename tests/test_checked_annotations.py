"""Tests import lmlib so that its annotations are checked: types, and the shapes of arrays."""

import numpy as np
import pytest
from beartype.roar import BeartypeCallHintParamViolation
from jaxtyping import TypeCheckError

from lmlib.data.batch import Batch
from lmlib.models.parts.rope_scaling import document_lengths
from lmlib.terminal.quantities import bytes_text

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
