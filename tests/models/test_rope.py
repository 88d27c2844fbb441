"""Rotary tables whose frequencies depend on the pair, or on the length of the document."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmlib import Compute, make_mesh, single_document_context
from lmlib.models.families.phi import phi3
from lmlib.models.forward_context import ForwardContext
from lmlib.models.parts.rope import Rotary
from lmlib.models.parts.rope_scaling import LongRope, Yarn, document_lengths, long_rope_amplitude

SHORT, LONG = (1.0, 1.5, 2.0), (1.25, 4.0, 9.0)
SCALING = LongRope(SHORT, LONG, original=5, factor=4.0, amplitude=1.2)
ROTARY = Rotary(6, 100.0, SCALING)


def reference(positions, factors):
    """In float64, from the definition."""
    frequency_D = 100.0 ** (-np.arange(0, 6, 2) / 6) / np.array(factors)
    angle_SD = np.asarray(positions)[:, None] * frequency_D
    return 1.2 * np.cos(angle_SD), 1.2 * np.sin(angle_SD)


def assert_rotations(rotations, row, positions, factors):
    for found, expected in zip(rotations, reference(positions, factors), strict=True):
        np.testing.assert_allclose(found[row, :, 0], expected, atol=1e-6)


def test_yarns_ramp_goes_from_one_whole_pair_to_another():
    """Of 64 pairs with base 10,000 over 4,096 positions, pair 20.94 turns 32 times and pair 45.03
    once: up to 20 they stay, from 46 on they are divided."""
    rotary = Rotary(128, 10_000.0, Yarn(16.0, 10_000.0, 4_096))
    cos, sin = (
        table[0, 0, 0] for table in rotary.rotations(jnp.ones((1, 1), jnp.int32), "float32")
    )
    divided_D = np.clip((np.arange(64) - 20) / (46 - 20), 0, 1)
    expected_D = 10_000.0 ** (-np.arange(64) / 64) * (1 - divided_D + divided_D / 16)
    np.testing.assert_allclose(np.arctan2(sin, cos), expected_D, rtol=1e-5)


def test_a_document_is_turned_as_long_or_as_short_from_its_first_token_on():
    for length, factors in ((5, SHORT), (6, LONG)):
        positions_BS = jnp.arange(length, dtype=jnp.int32)[None]
        assert_rotations(ROTARY.rotations(positions_BS, "float32"), 0, range(length), factors)


@pytest.mark.parametrize(
    "mesh", [{}, pytest.param({"data": 2}, marks=pytest.mark.several_devices)], ids=str
)
def test_documents_of_a_row_are_turned_as_if_each_were_alone(mesh):
    lengths = [3, 7, 5, 6]
    row = np.concatenate([np.arange(length) for length in lengths]).astype(np.int32)
    rows = np.stack([row, np.arange(21, dtype=np.int32)])
    with jax.set_mesh(make_mesh(**mesh)):
        rotations = jax.jit(functools.partial(ROTARY.rotations, dtype="float32"))(rows)
        each = jax.jit(document_lengths)(rows)
    np.testing.assert_array_equal(each, [np.repeat(lengths, lengths), [21] * 21])
    ends = np.cumsum(lengths)
    for start, end in zip([0, *ends], ends, strict=False):
        alone = tuple(table[:, start:end] for table in rotations)
        assert_rotations(alone, 0, range(end - start), LONG if end - start > 5 else SHORT)


def test_of_a_part_of_a_text_the_length_is_told():
    positions_BS = jnp.broadcast_to(jnp.arange(3, 6, dtype=jnp.int32), (2, 3))
    rotations = ROTARY.rotations(positions_BS, "float32", jnp.array([5, 9], jnp.int32))
    assert_rotations(rotations, 0, [3, 4, 5], SHORT)
    assert_rotations(rotations, 1, [3, 4, 5], LONG)


@pytest.mark.slow
def test_a_row_of_packed_documents_has_the_logits_of_each_alone():
    model = phi3(
        16, 16, 1, 2, 8, rope_scaling=LongRope((1.0,) * 4, (8.0,) * 4, 5), key=jax.random.key(0)
    )
    tokens_BS = jnp.asarray(np.random.default_rng(0).integers(0, 16, (1, 12), np.int32))
    positions_BS = jnp.array([[*range(4), *range(8)]], jnp.int32)
    segments_BS = jnp.array([[0] * 4 + [1] * 8], jnp.int32)
    compute = Compute(dtype="float32")
    packed_BSV = model(tokens_BS, ForwardContext(positions_BS, segments_BS, compute))
    alone = [
        model(tokens_BS[:, part], single_document_context(tokens_BS[:, part], compute))
        for part in (slice(4), slice(4, 12))
    ]
    np.testing.assert_allclose(packed_BSV, np.concatenate(alone, axis=1), atol=1e-5)


def test_the_amplitude_is_that_of_the_published_code():
    assert long_rope_amplitude(32.0, 4_096) == pytest.approx(1.1902380714238083)
    assert long_rope_amplitude(1.0, 4_096) == 1.0


def test_factors_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="LongRope has factors for 3 pairs, but 4 pairs"):
        Rotary(8, scaling=SCALING)
    with pytest.raises(ValueError, match="a factor for each pair, got 1 and 2"):
        LongRope((1.0,), (1.0, 2.0), 8)
    with pytest.raises(ValueError, match="short and long must be positive"):
        LongRope((0.0,), (1.0,), 8)
