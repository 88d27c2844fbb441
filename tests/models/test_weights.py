"""First values: their distribution, and that their bits depend on nothing but key and shape."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmlib.models.attention import Attention
from lmlib.models.decoder import Decoder
from lmlib.models.mlp import GatedMLP
from lmlib.models.norms import RMSNorm
from lmlib.models.weights import bell, fold, ones
from lmlib.parallel.axes import declaration


def test_values_are_bell_shaped_with_the_deviation_asked_for():
    values = np.asarray(bell(jax.random.key(0), (1_000_000,), 0.5), np.float64) / 0.5
    assert abs(values.mean()) < 0.005
    assert values.std() == pytest.approx(1.0, abs=0.005)
    assert np.abs(values).max() <= np.sqrt(12)
    # Of a sum of four uniforms: excess kurtosis -6 / (5 · 4), no skew.
    assert np.mean(values**4) == pytest.approx(3 - 0.3, abs=0.02)
    assert abs(np.mean(values**3)) < 0.01
    shares = np.mean(np.abs(values)[:, None] < [1.0, 2.0], axis=0)
    np.testing.assert_allclose(shares, [0.6694, 0.9575], atol=0.003)  # normal: 0.683, 0.954


def test_the_bits_are_those_of_exact_integers():
    """A change here changes the initial weights of every experiment."""
    key, shape = jax.random.key(7), (5, 3)
    words = np.array([jax.random.bits(half, shape, jnp.uint32) for half in jax.random.split(key)])
    sums = (words.astype(object) % 2**16 + words.astype(object) // 2**16).sum(axis=0)
    exact = (2 * sums - 4 * (2**16 - 1)).astype(np.float32)
    expected = exact * np.float32(0.25 / np.sqrt(16 * (2**32 - 1) / 12))
    np.testing.assert_array_equal(bell(key, shape, 0.25), expected)


def test_scales_follow_axis_names():
    sizes = {"embed": 64, "mlp": 256, "heads": 8, "head_dim": 16, "vocab": 1_000}

    def deviation(owner, field):
        return declaration(owner, field).first.deviation(sizes)

    assert deviation(GatedMLP, "gate") == deviation(GatedMLP, "up") == 64**-0.5
    assert deviation(GatedMLP, "down") == 256**-0.5
    assert deviation(Attention, "query") == deviation(Attention, "key") == 64**-0.5
    assert deviation(Attention, "output") == 128**-0.5
    assert deviation(Decoder, "embedding") == deviation(Decoder, "unembedding") == 64**-0.5
    norm = RMSNorm(embed=64, key=jax.random.key(0))
    assert declaration(norm, "scale").first == ones
    np.testing.assert_array_equal(norm.scale, np.ones(64))


def test_names_give_different_keys():
    key = jax.random.key(0)
    assert not np.array_equal(
        jax.random.key_data(fold(key, "gate")), jax.random.key_data(fold(key, "up"))
    )
